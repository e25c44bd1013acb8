"""Fields of a dataclass that say what they may hold; `check_fields` tells the user what they hold
instead.
"""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, field, fields, is_dataclass
from functools import partial
from typing import Any

from sarathi_lab.config.errors import (
    MOST,
    UserError,
    require_bool,
    require_int,
    require_list,
    require_number,
    require_one_of,
    require_text,
)

Check = Callable[[str, Any], object]


def whole(
    default: Any = MISSING,
    *,
    minimum: int,
    fix: str,
    maximum: int = MOST,
    name: str | None = None,
    optional: bool = False,
) -> Any:
    """A whole number from `minimum` to `maximum`; or None if that is the default, or with
    `optional`.
    """
    check = partial(require_int, minimum=minimum, maximum=maximum, fix=fix)
    return _field(default, check, name, optional)


def number(
    default: Any = MISSING,
    *,
    fix: str,
    above: float | None = None,
    minimum: float | None = None,
    name: str | None = None,
) -> Any:
    """A finite number, or None if that is the default."""
    return _field(default, partial(require_number, above=above, minimum=minimum, fix=fix), name)


def share(default: float, *, fix: str) -> Any:
    """A number from 0 to 1."""

    def check(name: str, value: Any) -> None:
        if require_number(name, value, minimum=0, fix=fix) > 1:
            raise UserError(f"{name}={value} is above 1; {fix}")

    return _field(default, check)


def text(default: Any = MISSING, *, fix: str) -> Any:
    """Text that is not blank; or None if that is the default."""
    return _field(default, partial(require_text, fix=fix))


def flag(default: bool) -> Any:
    return _field(default, require_bool)


def one_of(default: Any = MISSING, *, valid: Iterable[str]) -> Any:
    """One of a few names."""
    return _field(default, partial(require_one_of, valid=valid))


def listed(default: Any = MISSING, *, each: Check, complaint: str, **rest: Any) -> Any:
    """A list, each value of which passes (`require_list`); or None if that is the default."""
    return _field(default, partial(require_list, complaint=complaint, each=each, **rest))


def check_fields(settings: Any, prefix: str = "") -> None:
    """Raise UserError for the first field of `settings` that does not hold what it may.

    The user knows a field by the `name` it was given, else by its own behind `prefix`. What is no
    dataclass, or has other fields, is not looked at.
    """
    for one in fields(settings) if is_dataclass(settings) else ():
        value = getattr(settings, one.name)
        if "check" in one.metadata and not (value is None and one.metadata["optional"]):
            one.metadata["check"](one.metadata["name"] or prefix + one.name, value)


def refuse_unread(settings: Any, names: Iterable[str], why: str, prefix: str = "") -> None:
    """Raise UserError for the first of the fields `names` that is not at its default, as nothing
    reads it; `why` ends the sentence.
    """
    for name in names:
        if (value := getattr(settings, name)) != getattr(type(settings), name, None):
            raise UserError(f"{prefix}{name}={value} has no effect{why}")


def require_order(settings: Any, low: str, high: str, why: str, prefix: str = "") -> None:
    """Raise UserError if the field `low` exceeds the field `high`; `why` ends the sentence."""
    value, limit = getattr(settings, low), getattr(settings, high)
    if value is not None and value > limit:
        raise UserError(f"{prefix}{low}={value} exceeds {prefix}{high}={limit}{why}")


def _field(default: Any, check: Check, name: str | None = None, optional: bool = False) -> Any:
    metadata = {"check": check, "name": name, "optional": optional or default is None}
    return field(default=default, metadata=metadata)
