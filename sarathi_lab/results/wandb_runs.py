"""Runs of W&B's offline files and of its server, with the names that run folders use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.load import joined, new_name
from sarathi_lab.results.tracking import fetch_runs

READERS = 4
TIMEOUT = 120  # seconds for reading one
PREFIX = "iterations/"  # of the history's columns, see `tracking`
MOST_ROWS = 2000  # of an online history, as many as are logged
SERVED = "throughput"  # in the summary of every run that served requests


@dataclass(frozen=True)
class WandbRun:
    """A run: `settings` has flat names, `summary` those of METRICS.md; `iterations` a part."""

    name: str
    source: str
    settings: Mapping[str, object]
    summary: Mapping[str, float]
    iterations: pd.DataFrame


def load(place: str | Path) -> list[WandbRun]:
    """Return the runs at `place`: a `.wandb` file or a folder of such, or "entity/project" or
    "entity/project/run" on W&B's server. Raises UserError for a place without runs.
    """
    path = Path(place)
    if path.exists():
        files = [path] if path.suffix == ".wandb" else sorted(path.rglob("*.wandb"))
        if not files:
            raise UserError(
                f"{place} holds no finished run and no .wandb file; name a folder such as outputs"
            )
        with ThreadPoolExecutor(READERS) as pool:  # each waits for a process
            runs = list(pool.map(_offline, files))
    elif str(place).count("/") in (1, 2) and not str(place).startswith((".", "/", "~")):
        runs = []
        for run in fetch_runs(str(place)):
            rows = run.history(samples=MOST_ROWS, pandas=False)
            where = "/".join(run.path)
            runs.append(_from_wandb(run.name, where, run.config, run.summary, rows))
    else:
        raise UserError(
            f"{place} is not there; name a folder, a .wandb file, or entity/project/run on W&B"
        )
    # A sweep's table is a run in W&B, too.
    served = [run for run in runs if SERVED in run.summary]
    if not served:
        raise UserError(f"{place} holds no run that served requests; name another")
    return served


def _offline(path: Path) -> WandbRun:
    """Read a run from its `.wandb` file by `wandb leet inspect`, a JSON record a line."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
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


def _from_wandb(
    name: str,
    source: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> WandbRun:
    """Convert a run, without W&B's internal keys; of `rows` those of iterations are kept."""
    labels = {key: config[key] for key in config if key != "settings" and not key.startswith("_")}
    numbers = {
        new_name(key): float(value)
        for key, value in summary.items()
        if isinstance(value, int | float) and not key.startswith("_")
    }
    table = pd.DataFrame([row for row in rows if "iteration" in row])
    columns = [key for key in map(str, table) if key == "iteration" or key.startswith(PREFIX)]
    history = table[columns].rename(columns=lambda key: new_name(key.removeprefix(PREFIX)))
    return WandbRun(name, source, joined(labels, config.get("settings", {})), numbers, history)
