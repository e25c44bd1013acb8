"""Any runs side by side, from local folders, W&B offline files and W&B online."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.columns import HEADINGS
from sarathi_lab.results.load import (
    WandbRecord,
    find_runs,
    load_iterations,
    load_summary,
    read_offline,
    read_online,
)

# Of a run's own, so that two runs always differ in them.
OWN = ("started_at", "name", "path", "sweep", "status", "predicted_roofline", "cautions")
READERS = 4
SERVED = "throughput"  # in the summary of every run that served requests
NO_SETTINGS = ("output", "baselines", "tracking.", "hydra.", "_wandb.")


@dataclass(frozen=True)
class ComparedRun:
    """`settings` has flat names, `summary` those of METRICS.md, `iterations` what is kept."""

    name: str
    source: str
    settings: Mapping[str, object]
    summary: Mapping[str, float]
    iterations: pd.DataFrame


def load(*places: str | Path) -> list[ComparedRun]:
    """The runs at `places`, in that order; equal names are numbered.

    A place is a folder (of a run, or of many), a `.wandb` file or a folder of such, or
    "entity/project" or "entity/project/run" on W&B's server. Raises UserError for a place without
    runs.
    """
    found = [run for place in places for run in _load(place)]
    names = [run.name for run in found]
    return [replace(run, name=_numbered(run.name, names, i)) for i, run in enumerate(found)]


def differing_settings(runs: Sequence[ComparedRun]) -> pd.DataFrame:
    """A row per setting in which the runs differ, a column per run; what a run does not have is
    "-".
    """
    table = pd.DataFrame({run.name: pd.Series(run.settings, dtype=object) for run in runs})
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    shown = table.reindex(names).map(_shown).rename_axis("setting")
    return shown[shown.nunique(axis=1) > 1]


def compared_metrics(runs: Sequence[ComparedRun], reference: str | None = None) -> pd.DataFrame:
    """A row per quantity that people compare and a run has: each run's value, and its ratio to the
    `reference`.

    Columns are (run, "value") and (run, "ratio"); values in the units of the row's heading. The
    reference is the first run unless named. Raises UserError for a name that no run has.
    """
    by_name = {run.name: run.summary for run in runs}
    reference = runs[0].name if reference is None else reference
    if reference not in by_name:
        raise UserError(
            f"reference={reference} is not among the runs; use one of {', '.join(by_name)}"
        )
    rows = {}
    for name, (words, factor, _) in HEADINGS.items():
        if any(name in summary for summary in by_name.values()):
            values = [summary.get(name, math.nan) for summary in by_name.values()]
            base = by_name[reference].get(name, math.nan) or math.nan
            rows[words] = [part for value in values for part in (factor * value, value / base)]
    columns = pd.MultiIndex.from_product([list(by_name), ["value", "ratio"]], names=["run", ""])
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("metric")


def _load(place: str | Path) -> Iterator[ComparedRun]:
    path = Path(place)
    if path.exists():
        folders = list(find_runs(path))
        files = [path] if path.suffix == ".wandb" else sorted(path.rglob("*.wandb"))
        if folders:
            return map(_local, folders)
        if files:
            with ThreadPoolExecutor(READERS) as pool:  # each waits for a process of its own
                return _served(list(pool.map(read_offline, files)), place)
        raise UserError(
            f"{place} holds no finished run and no .wandb file; name a folder such as outputs"
        )
    if str(place).count("/") in (1, 2) and not str(place).startswith((".", "/", "~")):
        return _served(read_online(str(place)), place)
    raise UserError(
        f"{place} is not there; name a folder, a .wandb file, or entity/project/run on W&B"
    )


def _local(folder: Path) -> ComparedRun:
    try:
        labels = json.loads((folder / "run.json").read_text())
        config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        summary = load_summary(folder)
        iterations = load_iterations(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} can't be read ({type(error).__name__}); leave it out or run it again"
        ) from None
    assert isinstance(config, dict)
    return ComparedRun(labels["name"], str(folder), _settings(config, labels), summary, iterations)


def _served(records: Iterable[WandbRecord], place: str | Path) -> Iterator[ComparedRun]:
    """Those that served requests: a sweep's own table, for one, is a run to W&B, too."""
    runs = [_from_wandb(record) for record in records if SERVED in record.summary]
    if not runs:
        raise UserError(f"{place} holds no run that served requests; name another")
    return iter(runs)


def _from_wandb(record: WandbRecord) -> ComparedRun:
    """The labels stand beside the settings in the config."""
    labels = {name: value for name, value in record.config.items() if name != "settings"}
    settings = _settings(record.config.get("settings", {}), labels)
    numbers = {n: float(v) for n, v in record.summary.items() if isinstance(v, int | float)}
    return ComparedRun(record.name, record.source, settings, numbers, record.history)


def _settings(config: Mapping[Any, Any], labels: Mapping[str, Any]) -> dict[str, object]:
    """Both in flat names; the labels win, for they say what the settings were resolved to."""
    return _flat(config) | _flat(labels)


def _flat(config: Mapping[Any, Any], prefix: str = "") -> dict[str, object]:
    """Nested settings as `group.name`, what differs between any two runs left out."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        name = f"{prefix}{key}".removesuffix("._target_")
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        elif name not in OWN and not name.startswith(NO_SETTINGS):
            flat[name] = value
    return flat


def _shown(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"  # W&B gives whole numbers back without a point
    return str(value).removeprefix("sarathi_lab.")


def _numbered(name: str, names: Sequence[str], i: int) -> str:
    return f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
