"""A user's metrics: functions of their modules, each of one quantity that has its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import numpy as np

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import imported
from sarathi_lab.results.metrics import RunTables
from sarathi_lab.results.table import HEADINGS

EXAMPLE = "[my_metrics.longest_prompt]"


def own_metrics(dotted_names: object) -> dict[str, Callable[..., object]]:
    """Import the functions of the setting `metrics`, by the names of their quantities.

    Raises:
        UserError: for what is no list, can't be imported, or has the name of another quantity.
    """
    if not _is_list(dotted_names):
        raise UserError(f"metrics={dotted_names} is not a list; write 'metrics={EXAMPLE}'")
    metrics: dict[str, Callable[..., object]] = {}
    for dotted in dotted_names:
        function = imported(str(dotted), f"metrics: {dotted}", "a function as module.function")
        name = str(dotted).rpartition(".")[2]
        if name in HEADINGS or name in metrics:
            raise UserError(f"metrics: {dotted} has the name of another quantity; rename it")
        metrics[name] = function
    return metrics


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def own_quantities(
    metrics: Mapping[str, Callable[..., object]], run: RunTables
) -> dict[str, float]:
    """Return a user's quantities by name, without those that are NaN.

    Raises:
        RunError: if a function fails, or returns anything but a number.
    """
    quantities = {}
    for name, function in metrics.items():
        try:
            value = function(run)
        except Exception as error:  # any of a user's code
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"metrics: {name} failed ({reason}); mend the function") from error
        if not isinstance(value, int | float | np.number):
            raise RunError(f"metrics: {name} returned {value!r}; return a number")
        quantities[name] = float(value)
    return {name: value for name, value in quantities.items() if np.isfinite(value)}
