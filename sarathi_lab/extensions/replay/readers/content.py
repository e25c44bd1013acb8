"""A client's file as its readers take it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """Where a client's format has a value.

    Attributes:
        paths: One for each of the format's versions; the first that a file has counts. Keys of
            nested objects are joined by a dot.
        unit: Seconds of a time's unit, where the file states none beside it; 1 also of values that
            are no times, which are not changed.
    """

    paths: Sequence[str]
    unit: float = 1.0

    def read(self, content: Object) -> object:
        """Return the value in seconds, or as it is; None or NaN where it is missing. Raises
        ValueError for a stated unit that is none of a time.
        """
        stated = None
        path = ""
        for path in self.paths:
            stated = value_at(content, path)
            if stated not in (None, ""):  # as an empty cell of CSV is
                break
        if self.unit == 1.0:
            return stated
        return stated_unit(content, path, self.unit) * number_of(stated)


def field(*paths: str, unit: float = 1.0) -> Field:
    """Make a `Field`."""
    return Field(paths, unit)


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


def stated_values(content: Object, fields: Mapping[str, Field]) -> dict[str, object]:
    """Return the values of a format's fields by their names."""
    return {name: field.read(content) for name, field in fields.items()}


def stated_numbers(content: Object, fields: Mapping[str, Field]) -> dict[str, float]:
    """Return the numbers of a format's fields by their names, without missing ones."""
    numbers = dict[str, float]()
    for name, value in stated_values(content, fields).items():
        number = number_of(value)
        if not math.isnan(number):
            numbers[name] = number
    return numbers
