"""The one exception that means "the user can fix this"; `run.py` prints it as one line and exits with 2."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the input: the message names the value, the reason and the fix, in one line."""


def require_int(name: str, value: object, minimum: int, fix: str) -> int:
    """Return `value` if it is an integer of at least `minimum`, else raise `UserError`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name}={value} is not a whole number; {fix}")
    if value < minimum:
        raise UserError(f"{name}={value} is below {minimum}; {fix}")
    return value


def require_number(name: str, value: object, *, above: float, fix: str) -> float:
    """Return `value` as a float if it is a finite number greater than `above`, else raise `UserError`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name}={value} is not a number; {fix}")
    if not above < value < float("inf"):
        raise UserError(f"{name}={value} must be a finite number above {above:g}; {fix}")
    return float(value)
