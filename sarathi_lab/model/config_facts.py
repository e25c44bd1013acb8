"""Fields of a published model's config.json, with their types checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.spec import MAX_LAYERS

MISSPELT = 0.9  # how alike two names are where one is taken for a misspelling of the other
Config = Mapping[str, object]
AGAIN = (
    "fetch the file again, or write its sizes to FOLDER/model/NAME.yaml and add "
    "--config-dir FOLDER model=NAME"
)
# Kinds of layers, in the words of the files.
FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"
MAMBA = "mamba"
CONV = "conv"
WITHOUT_CONTEXT = (LINEAR, MAMBA, CONV)
FFN_LAYERS = "num_ffn_layers"  # no field of a file: by `of_blocks`
HEADS = ("num_attention_heads", "n_head", "num_heads")
WIDTHS = ("hidden_size", "n_embd", "n_embed")


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of a file is a number; true, an integer in Python, is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value of a file is a list; a text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def are_alike(values: Sequence[object]) -> bool:
    """Return whether there are values, which are all equal."""
    return len(values) > 0 and values.count(values[0]) == len(values)


class Facts:
    """The fields of a config.json, with their types checked. Raises UserError, naming the field."""

    def __init__(self, config: Config, fix: str = AGAIN) -> None:
        """Read `config`; errors end with `fix`."""
        self._config = config
        self._fix = fix

    @property
    def is_empty(self) -> bool:
        return not self._config

    @property
    def has_objects(self) -> bool:
        """Whether a field is an object itself."""
        return any(isinstance(value, Mapping) for value in self._config.values())

    def has(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        return self._config.get(name) is not None

    def first(self, *names: str) -> str | None:
        """Return the first of `names` that the file has."""
        return next((name for name in names if self.has(name)), None)

    def size(self, *names: str) -> int:
        """Return the first of the fields `names`. Raises UserError for none, or no whole number."""
        name = self.first(*names)
        if name is None:
            meant = self._misspelt(names[0])
            raise UserError(
                f"{names[0]} is missing, which the size follows from{meant}; {self._fix}"
            )
        return self.count(name)

    def _misspelt(self, name: str) -> str:
        """Return the field of the file that may be meant for `name`, in words; "" for none."""
        close = difflib.get_close_matches(name, self._config, n=1, cutoff=MISSPELT)
        if not close:
            return ""
        return f" (it has {close[0]}: did you mean {name}?)"

    def size_or(self, default: int, *names: str) -> int:
        """Return the first of the fields `names`, or `default` where the file has none of them."""
        name = self.first(*names)
        if name is None:
            return default
        return self.count(name)

    def count(self, name: str, default: int = 0) -> int:
        """Return a whole number from 0, or `default` for a field that is not there."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, list) and are_alike(value):
            value = value[0]  # of each layer
        if not is_number(value) or not isinstance(value, int) or value < 0:
            raise UserError(f"{name}={value!r} is not a whole number from 0; {self._fix}")
        return value

    def num_layers(self) -> int:
        """Return the number of layers, few enough to list them."""
        number = self.size("num_hidden_layers", "n_layer")
        if number > MAX_LAYERS:
            raise UserError(f"num_hidden_layers={number} exceeds {MAX_LAYERS}; {self._fix}")
        return number

    def period(self, name: str, default: int = 1) -> int:
        """Return after how many layers something comes again, or `default` for a field that is not
        there.
        """
        layers = self.count(name, default)
        if layers == 0:
            raise UserError(f"{name}=0 is not a whole number from 1; {self._fix}")
        return layers

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"{name}={value!r} is not true or false; {self._fix}")
        return value

    def text(self, name: str) -> str:
        return str(self._config.get(name, ""))

    def names(self, name: str) -> list[str] | None:
        """Return a list of a name for each layer; None if it is not there."""
        value = self._config.get(name)
        if value is None:
            return None
        num_layers = self.num_layers()
        if not is_list(value) or len(value) != num_layers:
            raise UserError(
                f"{name} does not name each of num_hidden_layers={num_layers} layers; {self._fix}"
            )
        return [str(of_layer) for of_layer in value]

    def texts(self, name: str) -> list[str]:
        """Return a list of names, of any length."""
        value = self._config.get(name)
        if not is_list(value):
            raise UserError(f"{name}={value!r} is not a list of names; {self._fix}")
        return [str(entry) for entry in value]

    def numbers(self, name: str) -> list[int] | None:
        """Return a list of whole numbers; None if it is not there."""
        value = self._config.get(name)
        if value is None:
            return None
        if not is_list(value):
            raise UserError(f"{name}={value!r} is not a list of numbers; {self._fix}")
        numbers = []
        for number in value:
            if not isinstance(number, int):
                raise UserError(f"{name} has {number!r}, which is no whole number; {self._fix}")
            numbers.append(number)
        return numbers

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0, or `default` for a field that is not there. Raises UserError
        where there is neither.
        """
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"{name} is missing; {self._fix}")
        if not is_number(value) or not value > 0:  # NaN is above nothing
            raise UserError(f"{name}={value!r} is not a number above 0; {self._fix}")
        return value

    def optional_size(self, name: str, default: int) -> int | None:
        """Return a size that may be null, or `default` for a field that is not there."""
        # Null means none, a missing field the architecture's default.
        if name in self._config and self._config[name] is None:
            return None
        return self.size(name) if self.has(name) else default

    def object(self, name: str) -> Facts:
        """Return the facts of an object; of none for a field that is not there."""
        value = self._config.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise UserError(f"{name}={value!r} is not an object; {self._fix}")
        return Facts(value, self._fix)

    def object_of_layers(self, name: str) -> Facts:
        """Return the facts that an object has for some layers, all of which must have the same."""
        value = self._config.get(name) or {}
        if not isinstance(value, Mapping):
            raise UserError(f"{name}={value!r} is not an object; {self._fix}")
        of_layers = list(value.values())
        if not of_layers:
            return Facts({}, self._fix)
        # The formulas have one size for all layers of a kind.
        if not are_alike(of_layers) or not isinstance(of_layers[0], Mapping):
            raise UserError(f"{name} gives layers different sizes, which has no formula")
        return Facts(of_layers[0], self._fix)

    def objects(self, name: str) -> list[Config]:
        """Return a list of objects."""
        value = self._config.get(name)
        if not is_list(value):
            raise UserError(f"{name}={value!r} is not a list of objects; {self._fix}")
        objects = []
        for entry in value:
            if not isinstance(entry, Mapping):
                raise UserError(f"{name} has {entry!r}, which is no object; {self._fix}")
            objects.append(entry)
        return objects
