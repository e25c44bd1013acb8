"""Reads runs back from W&B: offline ones from their file, by W&B's own command, online ones from the server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from sarathi_lab.errors import UserError

PREFIX = "iterations/"  # of the history's columns, see `tracking`
TIMEOUT = 120  # seconds
MOST_ROWS = 2000  # of an online history, as many as are logged


class WandbRecord(NamedTuple):
    """What W&B holds of one run: its logged `config` and `summary`, and a row of `history` per logged iteration."""

    name: str
    source: str
    config: dict[str, Any]
    summary: dict[str, Any]
    history: pd.DataFrame


def read_offline(path: Path) -> WandbRecord:
    """A run from its `.wandb` file. Raises UserError for one that W&B can't read."""
    records = [json.loads(line) for line in _inspect(path).splitlines()]
    runs = [record["run"] for record in records if record["type"] == "run"]
    if not runs:
        raise UserError(f"{path} holds no run; it was cut off before W&B wrote anything, so leave it out")
    summary: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            summary |= record["summary"].get("update", {})
    rows = [record["history"].get("item", {}) for record in records if record["type"] == "history"]
    config = runs[-1].get("config", {}).get("update", {})
    name = runs[-1].get("display_name") or runs[-1]["run_id"]
    return WandbRecord(name, str(path), _public(config), _public(summary), _iterations(rows))


def read_online(where: str) -> list[WandbRecord]:
    """The runs of "entity/project", or the one of "entity/project/run". UserError if the server does not give them."""
    import wandb

    try:
        api = wandb.Api()
        runs = [api.run(where)] if where.count("/") == 2 else list(api.runs(where))
        return [_online(run) for run in runs]
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: what the Api says of a project that is not there
        reason = str(error).partition("\n")[0]
        raise UserError(f"W&B gives no runs of {where} ({reason}); check the path and `wandb login`") from None


def _online(run: Any) -> WandbRecord:
    history = run.history(samples=MOST_ROWS, pandas=False)
    config, summary = _public(dict(run.config)), _public(dict(run.summary.items()))
    return WandbRecord(run.name, "/".join(run.path), config, summary, _iterations(history))


def _inspect(path: Path) -> str:
    """The records of a file, one in JSON a line, by `wandb leet inspect`."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(f"W&B can't read {path} ({reason[0]}); name a .wandb file, or a folder that holds some")
    return done.stdout


def _public(names: dict[str, Any]) -> dict[str, Any]:
    """Without what W&B keeps for itself."""
    return {name: value for name, value in names.items() if not name.startswith("_")}


def _iterations(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The rows of iterations alone, under their columns' names; tables and pictures have steps of their own."""
    table = pd.DataFrame([row for row in rows if "iteration" in row])
    columns = [column for column in table.columns if column == "iteration" or column.startswith(PREFIX)]
    return table[columns].rename(columns=lambda column: column.removeprefix(PREFIX))
