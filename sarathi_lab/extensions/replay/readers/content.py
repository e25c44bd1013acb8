"""A client's file as its readers take it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sarathi_lab.config.paths import json_object
from sarathi_lab.extensions.replay.json_values import number_of
from sarathi_lab.extensions.replay.server_arguments import Statement, as_object, read_arguments
from sarathi_lab.workload.text_files import read_text

# An object of JSON; what its values are is asked where they are read (`number_of` and others).
Object = Mapping[str, object]


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


def nested(content: Object, *keys: str) -> object:
    """Return the value below several keys; None where one is missing."""
    value: object = content
    for key in keys:
        value = as_object(value).get(key)
    return value


def stated_numbers(
    content: Object, names: Mapping[str, str], factor: float = 1.0, statistic: str = ""
) -> dict[str, float]:
    """Return numbers of `content`, or those in its objects under `statistic`, times `factor`, by
    other names.
    """
    numbers = dict[str, float]()
    for key, name in names.items():
        keys = (key, statistic) if statistic else (key,)
        number = factor * number_of(nested(content, *keys))
        if not math.isnan(number):
            numbers[name] = number
    return numbers
