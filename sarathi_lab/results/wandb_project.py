"""Runs of a project on W&B's server, read as folders of runs are."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.load import merge_settings, new_name
from sarathi_lab.results.tracking import OPTION
from sarathi_lab.results.wandb_writer import WANDB

RATIO = "_vs_"  # in the names of ratios, which stay the run's
Row = tuple[dict[str, object], dict[str, float]]  # settings and quantities


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
    baselines: dict[tuple[str, str], Row] = {}  # by group and folder
    for run in runs:
        group = _group(run)
        settings = _settings(run)
        quantities = _quantities(run)
        folders: dict[str, str] = run.config.get("baselines", {})
        columns = _take_baselines(quantities, folders)
        for name, folder in folders.items():
            # Of the runs of a sweep several are held against one baseline.
            is_listed = (group, name) in tracked or (group, folder) in baselines
            if columns[name] and not is_listed:
                settings_of_baseline = _settings_of_baseline(settings, run.config, name)
                baselines[group, folder] = (settings_of_baseline, columns[name])
        rows.append((settings, quantities))
    return [*rows, *baselines.values()]


class ServerRun(Protocol):
    """What is read of a run on W&B's server; its own type has no types."""

    name: str
    group: str | None
    config: Mapping[str, Any]
    summary: Mapping[str, object]


def _served_runs(project: str) -> list[ServerRun]:
    import wandb

    runs = []
    try:
        # Reading them is what asks the server.
        for run in wandb.Api().runs(project):
            if "throughput" in run.summary:
                runs.append(run)
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: of a project not there
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"W&B gives no runs of {project} ({reason}); check the name (it is no folder either) "
            f"and `{shlex.join(WANDB)} login`"
        ) from None
    if not runs:
        raise UserError(f"{project} holds no run that served requests; name another")
    return runs


def _group(run: ServerRun) -> str:
    return run.group or ""


def _settings(run: ServerRun) -> dict[str, object]:
    """Return the settings of a run on the server, as they are typed."""
    labels: dict[str, Any] = {"name": run.name}
    for name, value in run.config.items():
        if not name.startswith("_"):  # W&B's
            labels[name] = value
    stated = labels.pop("settings", {})
    settings = {}
    for name, value in merge_settings(labels, stated).items():
        settings[name.removesuffix(f".{OPTION}")] = value
    return settings


def _quantities(run: ServerRun) -> dict[str, float]:
    """Return the quantities of a run on the server in SI units.

    Its summary has further columns: names that begin with "_" are W&B's own, and names that begin
    with "ms/" repeat a quantity in milliseconds.
    """
    quantities = {}
    for name, value in run.summary.items():
        is_quantity = not name.startswith(("_", "ms/"))
        if is_quantity and isinstance(value, int | float):
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
    columns: dict[str, dict[str, float]] = {}
    for baseline in longest_first:
        columns[baseline] = {}
    for name in list(quantities):
        if RATIO in name:
            continue
        for baseline, of_baseline in columns.items():
            ending = f"_{baseline}"
            if name.endswith(ending):
                plain_name = name.removesuffix(ending)
                of_baseline[plain_name] = quantities.pop(name)
                break
    return columns


def _settings_of_baseline(
    settings: Mapping[str, object], config: Mapping[str, Any], baseline: str
) -> dict[str, object]:
    """Return the settings of a baseline: mostly those of the run held against it."""
    shared = {}
    for name, value in settings.items():
        if not name.startswith(("policy.", "baselines.", "baseline_chunks.")):
            shared[name] = value
    chunks = config.get("baseline_chunks", {})
    labels = {
        "name": f"baseline {baseline}",
        "policy": baseline,
        "is_baseline": True,
        "chunk": chunks.get(baseline),
    }
    return shared | labels
