"""A client's file as its readers take it.

`fields.csv` says where each kind of file has which quantity: keys of nested objects joined by dots,
or the heading of a column. Of several rows for a quantity, one for each of the format's versions,
the first that a file has counts. A row with a unit is a time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sarathi_lab.config.paths import json_object
from sarathi_lab.extensions.replay.json_values import number_of
from sarathi_lab.extensions.replay.server_arguments import Statement, as_object, read_arguments
from sarathi_lab.workload.text_files import read_text

# An object of JSON; what its values are is asked where they are read (`number_of` and others).
Object = Mapping[str, object]
MILLISECOND = 1e-3
NANOSECOND = 1e-9
# Seconds of the units that files state of times.
TIME_UNITS = dict.fromkeys(("s", "sec", "seconds"), 1.0)
TIME_UNITS |= dict.fromkeys(("ms", "milliseconds"), MILLISECOND)
TIME_UNITS |= dict.fromkeys(("us", "microseconds"), 1e-6)
TIME_UNITS |= dict.fromkeys(("ns", "nanoseconds"), NANOSECOND)


@dataclass(frozen=True)
class Content:
    """A file's text and its objects of JSON, none in other files.

    Attributes:
        path: The file.
        text: Its text.
        objects: One, those of a list, or those of its lines.
        damaged: Lines that are no object, with the reason.
    """

    path: Path
    text: str
    objects: Sequence[Object]
    damaged: Sequence[str] = ()

    @property
    def first(self) -> Object:
        """The first object; an empty one in other files."""
        return next(iter(self.objects), {})

    def server(self, model: object) -> list[Statement]:
        """Return what is recorded of a server of which a client names the model only."""
        return [read_arguments("vllm", {"model": model}, str(self.path))]

    def beside(self, name: str) -> Object:
        """Read the object in another file of the same folder; an empty one if it is not there."""
        neighbour = self.path.with_name(name)
        if neighbour == self.path or not neighbour.is_file():
            return {}
        remedy = "correct it, or move it away"
        return json_object(read_text(neighbour, str(neighbour), remedy), str(neighbour), remedy)


class Field(NamedTuple):
    """A row of `fields.csv`."""

    file: str
    quantity: str
    path: str
    unit: str

    def read(self, content: Object) -> object:
        """Return the value, a time in seconds; None where it is missing. Raises ValueError for a
        stated unit that is none of a time.
        """
        value = value_at(content, self.path)
        if value in (None, ""):  # as an empty cell of CSV is
            return None
        if not self.unit:
            return value
        return stated_unit(content, self.path, TIME_UNITS[self.unit]) * number_of(value)


@cache
def fields_of(file: str) -> list[Field]:
    """Return where a kind of file has its quantities."""
    fields = []
    with Path(__file__).with_name("fields.csv").open(newline="") as table:
        for row in csv.DictReader(table):
            field = Field(**row)
            if field.file == file:
                fields.append(field)
    return fields


def value_at(content: Object, path: str) -> object:
    """Return the value at a path, keys joined by a dot; None where one is missing."""
    value: object = content
    for key in path.split("."):
        value = as_object(value).get(key)
    return value


def stated_unit(content: Object, path: str, default: float) -> float:
    """Return the seconds of the unit that an object states beside the time at a path, such as
    {"avg": 1.37, "unit": "sec"}; `default` where it states none. Raises ValueError for another.
    """
    beside, _, _ = path.rpartition(".")
    unit = as_object(value_at(content, beside)).get("unit")
    if unit is None:
        return default
    if unit not in TIME_UNITS:
        raise ValueError(f"{beside} is in {unit}, not in one of {', '.join(TIME_UNITS)}")
    return TIME_UNITS[str(unit)]


def stated_values(content: Object, file: str) -> dict[str, object]:
    """Return the quantities of a kind of file; None for those that are missing."""
    values = dict[str, object]()
    for field in fields_of(file):
        if values.get(field.quantity) is None:
            values[field.quantity] = field.read(content)
    return values


def stated_numbers(content: Object, file: str) -> dict[str, float]:
    """Return the numbers of a kind of file, without missing ones."""
    numbers = dict[str, float]()
    for quantity, value in stated_values(content, file).items():
        number = number_of(value)
        if not math.isnan(number):
            numbers[quantity] = number
    return numbers
