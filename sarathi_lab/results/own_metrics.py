"""A user's metrics: functions of their modules, each of one quantity that has its name."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeGuard

import numpy as np

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import imported
from sarathi_lab.results.metrics import COMPARED, RunTables
from sarathi_lab.results.table import HEADINGS

EXAMPLE = "[my_metrics.longest_prompt]"
# Columns of tables of runs that are neither quantities nor settings.
LABELS = ("name", "path", "sweep", "is_baseline", "baselines", "schedule")
SHOWN = 80  # characters of a value that is no number


def own_metrics(
    dotted_names: object, settings: Collection[str]
) -> dict[str, Callable[..., object]]:
    """Import the functions of the setting `metrics`, by the names of their quantities.

    Args:
        dotted_names: As module.function.
        settings: Names of a run's settings, which tables of runs have beside the quantities.

    Raises:
        UserError: for what is no list, can't be imported, or has the name of another quantity or
            of a setting.
    """
    if not _is_list(dotted_names):
        raise UserError(f"metrics={dotted_names} is not a list; write 'metrics={EXAMPLE}'")
    metrics: dict[str, Callable[..., object]] = {}
    for dotted in dotted_names:
        function = imported(str(dotted), f"metrics: {dotted}", "a function as module.function")
        name = str(dotted).rpartition(".")[2]
        if name in HEADINGS or name in COMPARED or name in metrics:
            raise UserError(f"metrics: {dotted} has the name of another quantity; rename it")
        if name in settings or name in LABELS:
            raise UserError(f"metrics: {dotted} has the name of a setting or a label; rename it")
        metrics[name] = function
    return metrics


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def own_quantities(
    metrics: Mapping[str, Callable[..., object]], run: RunTables, quantities: Collection[str]
) -> dict[str, float]:
    """Return a user's quantities by name, without those that are not finite.

    Args:
        metrics: Functions by the names of their quantities.
        run: What they are called with.
        quantities: Names of the run's other quantities.

    Raises:
        RunError: if a function fails, returns anything but a number, or has the name of one of
            the run's other quantities, some of which only the run decides.
    """
    own: dict[str, float] = {}
    for name, function in metrics.items():
        if name in quantities:
            raise RunError(f"metrics: {name} has the name of another quantity; rename it")
        try:
            value = function(run)
        except Exception as error:  # any of a user's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"metrics: {name} failed ({reason}); mend the function") from error
        if not isinstance(value, int | float | np.number):
            shown = textwrap.shorten(repr(value), SHOWN, placeholder="...")
            raise RunError(f"metrics: {name} returned {shown}; return a number")
        own[name] = float(value)
    return {name: value for name, value in own.items() if np.isfinite(value)}
