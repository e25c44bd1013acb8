"""Fields of a published model's config.json, with their types checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Self, TypeGuard

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.spec import MAX_LAYERS

LONGEST_VALUE = 80  # characters of a value in a message
MISSPELT = 0.9  # how alike two names are where one is taken for a misspelling of the other
Config = Mapping[str, object]
FULL = "full_attention"  # what a layer has
AGAIN = (
    "fetch the file again, or write its sizes to FOLDER/model/NAME.yaml and add "
    "--config-dir FOLDER model=NAME"
)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of a file is a number; true, an integer in Python, is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value of a file is a list; a text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def value_at(config: Config, path: str) -> object:
    """Return a field, or with dots in `path` one of an object in it; None if it is not there."""
    value: object = config
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


class Facts:
    """The fields of a config.json, with their types checked. Raises UserError, naming the field."""

    def __init__(
        self, config: Config, fix: str = AGAIN, names_in_file: Mapping[str, str] | None = None
    ) -> None:
        """Read `config`; errors end with `fix`, and call fields by their `names_in_file`, where
        these are others.
        """
        self._config = config
        self._fix = fix
        self._names_in_file = names_in_file or {}

    @classmethod
    def renamed(cls, config: Config, names: Mapping[str, Sequence[str]]) -> Self:
        """Read `config` by the keys of `names`, each with its other names in files."""
        fields = dict(config)
        names_in_file = dict[str, str]()
        for name, others in names.items():
            for other in others:
                value = value_at(config, other)
                if value is not None and fields.get(name) is None:
                    fields[name] = value
                    names_in_file[name] = other
        return cls(fields, AGAIN, names_in_file)

    def updated(self, fields: Config) -> Facts:
        """Return the same with other `fields`."""
        return Facts({**self._config, **fields}, self._fix, self._names_in_file)

    def has(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        return value_at(self._config, name) is not None

    def size(self, *names: str) -> int:
        """Return the first of the fields `names`, from 1. Raises UserError for none."""
        for name in names:
            if self.has(name):
                return self.count(name, minimum=1)
        meant = ""
        close = difflib.get_close_matches(names[0], self._config, n=1, cutoff=MISSPELT)
        if close:
            meant = f" (it has {close[0]}: did you mean {names[0]}?)"
        raise UserError(f"{names[0]} is missing, which the size follows from{meant}; {self._fix}")

    def count(self, name: str, default: int = 0, *, minimum: int = 0) -> int:
        """Return a whole number from `minimum`, or `default` for a field that is not there."""
        value = value_at(self._config, name)
        if value is None:
            return default
        if is_list(value) and value:
            first = value[0]
            if all(of_layer == first for of_layer in value):
                value = first  # of each layer
        if not is_number(value) or not isinstance(value, int) or value < minimum:
            raise self._refusal(name, f"not a whole number from {minimum}")
        return value

    def num_layers(self) -> int:
        """Return the number of layers, few enough to list them."""
        number = self.size("num_hidden_layers")
        if number > MAX_LAYERS:
            raise UserError(f"num_hidden_layers={number} exceeds {MAX_LAYERS}; {self._fix}")
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        value = value_at(self._config, name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refusal(name, "not true or false")
        return value

    def has_list(self, name: str) -> bool:
        return is_list(value_at(self._config, name))

    def text(self, name: str) -> str:
        value = value_at(self._config, name)
        return "" if value is None else str(value)

    def of_layers(self, name: str) -> list[str] | None:
        """Return a word for each layer, of a list or the letters of a text; None if it is not
        there.
        """
        value = value_at(self._config, name)
        if value is None:
            return None
        num_layers = self.num_layers()
        # Files may list layers that draft behind the last.
        if not isinstance(value, Sequence) or len(value) < num_layers:
            raise self._refusal(name, f"no list of num_hidden_layers={num_layers} layers")
        return [str(of_layer) for of_layer in value[:num_layers]]

    def list_of(self, name: str) -> list[object]:
        """Return a list of anything."""
        value = value_at(self._config, name)
        if not is_list(value):
            raise self._refusal(name, "not a list")
        return list(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0, or `default` for a field that is not there. Raises UserError
        where there is neither.
        """
        value = value_at(self._config, name)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"{name} is missing; {self._fix}")
        if not is_number(value) or not value > 0:  # NaN is above nothing
            raise self._refusal(name, "not a number above 0")
        return value

    def object(self, name: str) -> Config:
        """Return an object; an empty one for a field that is not there."""
        value = value_at(self._config, name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._refusal(name, "not an object")
        return value

    def _refusal(self, name: str, complaint: str) -> UserError:
        """Make the error of a field's value."""
        stated = self._names_in_file.get(name, name)
        value = value_at(self._config, name)
        shown = repr(value)[:LONGEST_VALUE]
        setting = f"{stated}={shown}"
        return UserError(f"{setting} is {complaint}; {self._fix}")
