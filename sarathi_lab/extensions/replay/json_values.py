"""Values of JSON, whose types are asked where they are read."""

from __future__ import annotations

import math
from numbers import Real


def number_of(value: object) -> float:
    """Read a number, which may be text; NaN for what is none."""
    if not isinstance(value, str | Real):  # of tables, too, whose numbers are numpy's
        return math.nan
    try:
        return float(value)
    except ValueError:
        return math.nan


def numbers_of(values: object) -> tuple[float, ...]:
    """Read a list of numbers, NaN for others; nothing of what is no list."""
    if not isinstance(values, list):
        return ()
    return tuple(number_of(value) for value in values)


def list_of(value: object) -> list[object]:
    """Return a list, nothing for what is missing. Raises TypeError for what is none."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} is no list")
    return value


def count_of(value: object) -> int:
    """Read a whole number from 0 on; 0 for what is none."""
    number = number_of(value)
    if not 0 <= number < math.inf:
        return 0
    return int(number)
