"""Any runs side by side, from local folders, W&B offline files and W&B online."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.columns import HEADINGS
from sarathi_lab.results.load import find_runs, load_iterations, load_summary, new_name, read_object
from sarathi_lab.results.tracking import fetch_runs

# Of a run's own, so that two runs always differ in them.
OWN = (
    *("started_at", "name", "path", "sweep", "status", "predicted_roofline", "cautions"),
    *("schedule", "repetition"),
)
READERS = 4
TIMEOUT = 120  # seconds for reading one
PREFIX = "iterations/"  # of the history's columns, see `tracking`
MOST_ROWS = 2000  # of an online history, as many as are logged
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
    """A row per setting in which the runs differ, a column per run; "-" where it has none."""
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


def _load(place: str | Path) -> list[ComparedRun]:
    path = Path(place)
    if path.exists():
        if folders := find_runs(path):
            return [_local(folder) for folder in folders]
        files = [path] if path.suffix == ".wandb" else sorted(path.rglob("*.wandb"))
        if not files:
            raise UserError(
                f"{place} holds no finished run and no .wandb file; name a folder such as outputs"
            )
        with ThreadPoolExecutor(READERS) as pool:  # each waits for a process of its own
            runs = list(pool.map(_offline, files))
    elif str(place).count("/") in (1, 2) and not str(place).startswith((".", "/", "~")):
        runs = [_online(run) for run in fetch_runs(str(place))]
    else:
        raise UserError(
            f"{place} is not there; name a folder, a .wandb file, or entity/project/run on W&B"
        )
    # A sweep's own table, for one, is a run to W&B, too.
    served = [run for run in runs if SERVED in run.summary]
    if not served:
        raise UserError(f"{place} holds no run that served requests; name another")
    return served


def _local(folder: Path) -> ComparedRun:
    try:
        labels = read_object(folder / "run.json")
        config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        summary = load_summary(folder)
        iterations = load_iterations(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} can't be read ({type(error).__name__}); leave it out or run it again"
        ) from None
    assert isinstance(config, dict)
    return ComparedRun(labels["name"], str(folder), _settings(config, labels), summary, iterations)


def _offline(path: Path) -> ComparedRun:
    """A run from its `.wandb` file, by W&B's own reader: a record in JSON a line."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(
            f"W&B can't read {path} ({reason[0]}); name a .wandb file, or a folder that holds some"
        )
    found = defaultdict(list)
    for record in map(json.loads, done.stdout.splitlines()):
        found[record["type"]].append(record[record["type"]])
    if not found["run"]:
        raise UserError(
            f"{path} holds no run; it was cut off before W&B wrote anything, so leave it out"
        )
    run = found["run"][-1]
    updates = [part.get("update", {}) for part in found["summary"]]
    return _from_wandb(
        name=run.get("display_name") or run["run_id"],
        source=str(path),
        config=run.get("config", {}).get("update", {}),
        summary={name: value for update in updates for name, value in update.items()},
        rows=[row.get("item", {}) for row in found["history"]],
    )


def _online(run: Any) -> ComparedRun:
    rows = run.history(samples=MOST_ROWS, pandas=False)
    return _from_wandb(run.name, "/".join(run.path), run.config, run.summary, rows)


def _from_wandb(
    name: str,
    source: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> ComparedRun:
    """Without what W&B keeps for itself. The labels stand beside the settings in `config`; of
    `rows` those of iterations count: tables and pictures have steps of their own.
    """
    labels = {key: config[key] for key in config if key != "settings" and not key.startswith("_")}
    settings = _settings(config.get("settings", {}), labels)
    numbers = {
        new_name(key): float(value)
        for key, value in summary.items()
        if isinstance(value, int | float) and not key.startswith("_")
    }
    table = pd.DataFrame([row for row in rows if "iteration" in row])
    columns = [key for key in map(str, table) if key == "iteration" or key.startswith(PREFIX)]
    history = table[columns].rename(columns=lambda key: new_name(key.removeprefix(PREFIX)))
    return ComparedRun(name, source, settings, numbers, history)


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
