"""Runs of a project on W&B's server, read as folders of runs are."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.load import merge_settings, new_name
from sarathi_lab.results.tracking import OPTION
from sarathi_lab.results.wandb_writer import WANDB

RATIO = "_vs_"  # in the names of ratios, which stay the run's
Row = tuple[dict[str, Any], dict[str, float]]  # settings and quantities


def fetch_runs(project: str) -> list[Row]:
    """Return settings and quantities of each run that served on W&B's server, and of the baselines
    that they name, once each. Raises UserError if there is none.
    """
    runs = _served_runs(project)
    # Measured baselines are runs themselves, in the groups of the runs held against them.
    tracked = set()
    for run in runs:
        if run.config.get("is_baseline"):
            tracked.add((_group(run), run.config["policy"]))
    rows: list[Row] = []
    baselines: dict[tuple[str, str], Row] = {}
    for run in runs:
        settings = _settings(run)
        quantities = _quantities(run)
        names_and_folders = run.config.get("baselines", {})
        columns = _take_baselines(quantities, names_and_folders)
        for name, folder in names_and_folders.items():
            of_baseline = columns[name]
            is_known = (_group(run), name) in tracked or (_group(run), folder) in baselines
            if of_baseline and not is_known:
                row = (_settings_of_baseline(settings, run.config, name), of_baseline)
                baselines[_group(run), folder] = row
        rows.append((settings, quantities))
    return [*rows, *baselines.values()]


def _served_runs(project: str) -> list[Any]:
    import wandb

    try:
        # Reading them is what asks the server.
        runs = [run for run in wandb.Api().runs(project) if "throughput" in run.summary]
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: of a project not there
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"W&B gives no runs of {project} ({reason}); check the name (it is no folder either) "
            f"and `{shlex.join(WANDB)} login`"
        ) from None
    if not runs:
        raise UserError(f"{project} holds no run that served requests; name another")
    return runs


def _group(run: Any) -> str:
    return getattr(run, "group", None) or ""


def _settings(run: Any) -> dict[str, Any]:
    """Return the settings of a run on the server, as they are typed."""
    labels = {"name": run.name}
    for name, value in run.config.items():
        if not name.startswith("_"):  # W&B's
            labels[name] = value
    stated = labels.pop("settings", {})
    settings = merge_settings(labels, stated)
    return {name.removesuffix(f".{OPTION}"): value for name, value in settings.items()}


def _quantities(run: Any) -> dict[str, float]:
    """Return the summary of a run on the server, without what W&B adds and milliseconds."""
    quantities = {}
    for name, value in run.summary.items():
        is_number = isinstance(value, int | float)
        if is_number and not name.startswith(("_", "ms/")):
            quantities[new_name(name)] = float(value)
    return quantities


def _take_baselines(
    quantities: dict[str, float], baselines: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Move the columns of baselines out of a run's quantities.

    Args:
        quantities: A run's, of which columns such as "throughput_orca" are removed.
        baselines: The names of the baselines.

    Returns:
        The quantities of each baseline, by their plain names.
    """
    # One name may end with another: "throughput_transformers_prefill_first" is not prefill_first's.
    longest_first = sorted(baselines, key=len, reverse=True)
    columns: dict[str, dict[str, float]] = {baseline: {} for baseline in longest_first}
    for name in list(quantities):
        if RATIO in name:
            continue
        for baseline in longest_first:
            if name.endswith(f"_{baseline}"):
                columns[baseline][name.removesuffix(f"_{baseline}")] = quantities.pop(name)
                break
    return columns


def _settings_of_baseline(
    settings: Mapping[str, Any], config: Mapping[str, Any], baseline: str
) -> dict[str, Any]:
    """Return the settings of a baseline: mostly those of the run held against it."""
    shared = {}
    for name, value in settings.items():
        if not name.startswith(("policy.", "baselines.", "baseline_chunks.")):
            shared[name] = value
    labels = {"name": f"baseline {baseline}", "policy": baseline, "is_baseline": True}
    labels["chunk"] = config.get("baseline_chunks", {}).get(baseline)
    return shared | labels
