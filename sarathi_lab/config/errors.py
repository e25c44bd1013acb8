"""The exception that means "the user can fix this", which commands print as one line, exiting with
2; and the checks that raise it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class UserError(Exception):
    """A mistake in the input: the message names the value, the reason and the fix, in one line."""


class RunError(UserError):
    """Stops one run, not the sweep that it belongs to: what was recorded so far is kept."""


def require_bool(name: str, value: object, fix: str = "use one of them") -> bool:
    """Return `value` if it is true or false, else raise `UserError`."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={value} is neither true nor false; {fix}")
    return value


def require_int(
    name: str, value: object, minimum: int, fix: str, maximum: int | None = None
) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`, else raise `UserError`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name}={value} is not a whole number; {fix}")
    if value < minimum:
        raise UserError(f"{name}={value} is below {minimum}; {fix}")
    if maximum is not None and value > maximum:
        raise UserError(f"{name}={value} is above {maximum}; {fix}")
    return value


def require_number(
    name: str, value: object, *, fix: str, above: float | None = None, minimum: float | None = None
) -> float:
    """Return `value` as a float if it is finite, above `above`, from `minimum`; else UserError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name}={value} is not a number; {fix}")
    if above is not None and not above < value <= sys.float_info.max:
        raise UserError(f"{name}={value} must be a finite number above {above:g}; {fix}")
    if minimum is not None and not minimum <= value <= sys.float_info.max:
        raise UserError(f"{name}={value} must be a finite number from {minimum:g}; {fix}")
    return float(value)


def require_one_of(name: str, value: object, valid: Iterable[str]) -> None:
    """Raise `UserError` unless `value` is one of `valid`."""
    if value not in (options := tuple(valid)):
        raise UserError(f"{name}={value} is unknown; use one of {', '.join(options)}")


def require_list(
    name: str,
    values: Any,
    complaint: str,
    each: Callable[[str, Any], object],
    *,
    twice: str = "",
    may_be_empty: bool = False,
) -> None:
    """Raise `UserError` unless `values` is a list, each value of which passes, none of them `twice`
    if there are words for that.
    """
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not (values or may_be_empty):
        raise UserError(f"{name}={values} {complaint}")
    for value in values:
        each(name, value)
    if twice and len(set(values)) < len(values):
        raise UserError(f"{name}={list(values)} {twice}")


EXIT_FAILED = 1  # by what no user can mend
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def exit_code(command: Callable[[], int], kept: str) -> int:
    """What `command` returns; 2 for a user's mistake, 130 for Ctrl-C, which says what is `kept`."""
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"interrupted: {kept}", file=sys.stderr)
        return EXIT_INTERRUPTED
