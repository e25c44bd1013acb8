"""Fields of a dataclass with rules for their values, which `check_fields` checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, field, fields, is_dataclass
from functools import partial
from typing import Any

from sarathi_lab.config import errors


def checked(
    check: Callable[..., object],
    default: Any = MISSING,
    *,
    name: str | None = None,
    optional: bool = False,
    **rules: object,
) -> Any:
    """A field whose value passes `check`, which is handed the `rules`; or is None, if that is the
    default, or with `optional`. Messages name it `name`, else by the field's name.
    """
    data = {"check": partial(check, **rules), "name": name, "optional": optional or default is None}
    return field(default=default, metadata=data)


whole = partial(checked, errors.require_int)  # from `minimum` to `maximum`
number = partial(checked, errors.require_number)  # finite, above `above`, from `minimum`
share = partial(checked, errors.require_share)  # a number from 0 to 1
text = partial(checked, errors.require_text)  # that is not blank
flag = partial(checked, errors.require_bool)
one_of = partial(checked, errors.require_one_of)  # of the names `valid`
instance = partial(checked, errors.require_instance)  # of the class `kind`
listed = partial(checked, errors.require_list)  # each value of which passes `each`


def check_fields(settings: object, prefix: str = "") -> None:
    """Raise UserError for the first field of `settings` that does not hold what it may.

    Messages name a field by its `name`, else by `prefix` and its name. What is no
    dataclass, or has other fields, is not looked at.
    """
    if not is_dataclass(settings):
        return
    for setting in fields(settings):
        rules = setting.metadata
        if "check" not in rules:
            continue
        value = _value_of(settings, setting.name)
        if value is None and rules["optional"]:
            continue
        check = rules["check"]
        check(rules["name"] or f"{prefix}{setting.name}", value)


def refuse_unread(settings: object, names: Iterable[str], reason: str, prefix: str = "") -> None:
    """Raise UserError for the first of the fields `names` that is not at its default, as nothing
    reads it; `reason` ends the sentence.
    """
    for name in names:
        value = _value_of(settings, name)
        # A dataclass keeps the default of a field as an attribute of the class.
        settings_class = type(settings)
        default = getattr(settings_class, name, None)
        if value != default:
            setting = f"{prefix}{name}={value}"
            raise errors.UserError(f"{setting} has no effect{reason}")


def require_order(settings: object, low: str, high: str, reason: str, prefix: str = "") -> None:
    """Raise UserError if the field `low` exceeds the field `high`; `reason` ends the sentence."""
    value = _value_of(settings, low)
    limit = _value_of(settings, high)
    if value is None or value <= limit:
        return
    setting = f"{prefix}{low}={value}"
    highest = f"{prefix}{high}={limit}"
    raise errors.UserError(f"{setting} exceeds {highest}{reason}")


def _value_of(settings: object, name: str) -> Any:
    """Return the value of a field, whose type is the field's."""
    return getattr(settings, name)
