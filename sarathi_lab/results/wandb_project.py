"""Runs of a project on W&B's server, read as folders of runs are."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.load import merge_settings, new_name
from sarathi_lab.results.tracking import OPTION
from sarathi_lab.results.wandb_writer import WANDB

Row = tuple[dict[str, Any], dict[str, float]]  # settings and quantities


def fetch_runs(project: str) -> list[Row]:
    """Return settings and quantities of each run that served on W&B's server, and of the baselines
    that they name, once each. Raises UserError if there is none.
    """
    import wandb

    try:
        runs = [run for run in wandb.Api().runs(project) if "throughput" in run.summary]
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: of a project not there
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"W&B gives no runs of {project} ({reason}); check the name (it is no folder either) "
            f"and `{shlex.join(WANDB)} login`"
        ) from None
    if not runs:
        raise UserError(f"{project} holds no run that served requests; name another")
    # Measured baselines are runs themselves, in the groups of the runs held against them.
    baseline_runs = [run for run in runs if run.config.get("is_baseline")]
    tracked = {(_group(run), run.config["policy"]) for run in baseline_runs}
    rows: list[Row] = []
    baselines: dict[tuple[str, str], Row] = {}
    for run in runs:
        settings, quantities = _settings(run), _quantities(run)
        for name, place in run.config.get("baselines", {}).items():
            of_baseline = _take_baseline(quantities, name)
            if of_baseline and (_group(run), name) not in tracked:
                row = (_settings_of_baseline(settings, run.config, name), of_baseline)
                baselines.setdefault((_group(run), place), row)
        rows.append((settings, quantities))
    return [*rows, *baselines.values()]


def _group(run: Any) -> str:
    return getattr(run, "group", None) or ""


def _settings(run: Any) -> dict[str, Any]:
    """Return the settings of a run on the server, as they are typed."""
    labels = {name: value for name, value in run.config.items() if not name.startswith("_")}
    stated = labels.pop("settings", {})
    settings = merge_settings({"name": run.name, **labels}, stated)
    return {name.removesuffix(f".{OPTION}"): value for name, value in settings.items()}


def _quantities(run: Any) -> dict[str, float]:
    """Return the summary of a run on the server, without what W&B adds and milliseconds."""
    return {
        new_name(name): float(value)
        for name, value in run.summary.items()
        if isinstance(value, int | float) and not name.startswith(("_", "ms/"))
    }


def _take_baseline(quantities: dict[str, float], baseline: str) -> dict[str, float]:
    """Move a baseline's columns out of a run's quantities; return them by their plain names."""
    ending, ratio = f"_{baseline}", f"_vs_{baseline}"
    columns = [name for name in quantities if name.endswith(ending) and not name.endswith(ratio)]
    return {name.removesuffix(ending): quantities.pop(name) for name in columns}


def _settings_of_baseline(
    settings: Mapping[str, Any], config: Mapping[str, Any], baseline: str
) -> dict[str, Any]:
    """Return the settings of a baseline: mostly those of the run held against it."""
    shared = {
        name: value
        for name, value in settings.items()
        if not name.startswith(("policy.", "baselines.", "baseline_chunks."))
    }
    labels = {"name": f"baseline {baseline}", "policy": baseline, "is_baseline": True}
    labels["chunk"] = config.get("baseline_chunks", {}).get(baseline)
    return shared | labels
