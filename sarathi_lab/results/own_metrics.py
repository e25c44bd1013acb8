"""A user's metrics: functions of their modules, each of one quantity that has its name."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeGuard

import numpy as np

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import imported
from sarathi_lab.results.metrics import COMPARED, RunTables
from sarathi_lab.results.table import HEADINGS, Quantities, Runs

Metric = Callable[..., object]  # a user's function of `RunTables`
EXAMPLE = "[my_metrics.longest_prompt]"
# Columns of tables of runs that are neither quantities nor settings.
LABELS = (
    "name",
    "path",
    "sweep",
    "is_baseline",
    "baselines",
    "schedule",
)
SHOWN = 80  # characters of a value that is no number


def own_metrics(
    dotted_names: object,
    settings: Collection[str],
) -> dict[str, Metric]:
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
    metrics: dict[str, Metric] = {}
    for dotted in dotted_names:
        setting = f"metrics: {dotted}"
        function = imported(str(dotted), setting, "a function as module.function")
        name = str(dotted).rpartition(".")[2]
        quantities = {*HEADINGS, *COMPARED, *metrics}
        if name in quantities:
            raise UserError(f"{setting} has the name of another quantity; rename it")
        # A table of runs has one column of each name.
        if name in settings or name in LABELS:
            raise UserError(f"{setting} has the name of a setting or a label; rename it")
        metrics[name] = function
    return metrics


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def names_of_own(runs: Runs) -> list[str]:
    """Return the names of a user's quantities in a table of runs, by their setting `metrics`."""
    if "metrics" not in runs:
        return []
    names: dict[str, None] = {}
    settings = runs["metrics"].dropna().astype(str)
    for setting in settings.unique():
        for dotted_name in setting.strip("[]").split(","):
            _, _, name = dotted_name.rpartition(".")
            names[name] = None
    return [name for name in names if name in runs]


def own_quantities(
    metrics: Mapping[str, Metric],
    run: RunTables,
    quantities: Collection[str],
) -> tuple[Quantities, RunError | None]:
    """Compute a user's quantities.

    A function that fails costs its own quantity, not the run that it was called for.

    Args:
        metrics: Functions by the names of their quantities.
        run: What they are called with.
        quantities: Names of the run's other quantities.

    Returns:
        The finite values by name, and the error of the first function that fails, that returns
        anything but a number, or that has the name of one of the run's other quantities, some of
        which only the run decides; None without one.
    """
    own: Quantities = {}
    first_error: RunError | None = None
    for name, function in metrics.items():
        try:
            if name in quantities:
                raise RunError(f"metrics: {name} has the name of another quantity; rename it")
            value = value_of(name, function, run)
        except RunError as error:
            # The others are computed, too, or one mistake would cost all of them.
            first_error = first_error or error
            continue
        if np.isfinite(value):
            own[name] = value
    return own, first_error


def value_of(name: str, function: Metric, run: RunTables) -> float:
    """Compute a user's quantity. Raises RunError for a function that fails, with its error as the
    cause, or that returns anything but a number.
    """
    try:
        value = function(run)
    except Exception as error:  # any of a user's code
        message = f"{type(error).__name__}: {error}"
        reason = " ".join(message.split())  # in one line
        raise RunError(f"metrics: {name} failed ({reason}); mend the function") from error
    if not isinstance(value, int | float | np.number):
        shown = textwrap.shorten(repr(value), SHOWN, placeholder="...")
        raise RunError(f"metrics: {name} returned {shown}; return a number")
    return float(value)
