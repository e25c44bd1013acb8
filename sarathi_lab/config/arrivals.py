"""Which arrivals a workload's settings imply where it does not name their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

ArrivalKind = Literal["closed", "poisson", "gamma", "users"]

# The kind that each setting implies. An earlier one counts: `cv` is stated with a `rate`.
IMPLIED_BY: dict[str, ArrivalKind] = {
    "users": "users",
    "think_time": "users",
    "cv": "gamma",
    "rate": "poisson",
}


def implied_arrivals(settings: Mapping[str, object]) -> tuple[ArrivalKind, str | None]:
    """Return the kind of arrivals that a workload's `settings` imply.

    Returns:
        The kind, and the name of the setting that implies it; "closed" and None where none does.
    """
    for name, kind in IMPLIED_BY.items():
        if settings.get(name) is not None:
            return kind, name
    return "closed", None
