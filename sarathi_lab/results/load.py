"""Finds and loads what runs left behind, and the paper's points to hold beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import EXPERIMENTS, make_folder
from sarathi_lab.results.tracking import fetch_runs

POINTS = "figure.parquet"  # the figures of the paper, recomputed: see `paper.task`
LABELS = "run.json"  # written last, so its presence says that the run is complete
RENAMED = {"floor": "roofline", "ceiling": "peak"}  # words in the names of older files


def find_runs(*roots: Path) -> Iterator[Path]:
    """Folders of finished runs below `roots`, baselines included, in natural order."""
    found = {path.parent for root in roots for path in Path(root).rglob(LABELS)}
    visible = (path for path in found if not any(part.startswith(".") for part in path.parts[-2:]))
    return iter(sorted(visible, key=_natural_order))


def load_runs(*roots: Path) -> pd.DataFrame:
    """One row per finished run below `roots`: its labels, its summary, its folder (`path`) and its
    sweep's (`sweep`).

    A name that a run lacks is NaN. Folders whose files can't be read are left out and listed in
    `attrs["skipped"]`.
    """
    rows, skipped = [], []
    for path in find_runs(*roots):
        try:
            labels = json.loads((path / LABELS).read_text())
            row = {**labels, **load_summary(path), "path": str(path), "sweep": str(_sweep_of(path))}
        except (OSError, ValueError):
            skipped.append(str(path))
        else:
            rows.append(row)
    runs = pd.DataFrame(rows)
    runs.attrs["skipped"] = skipped
    return runs


def load_summary(path: Path | str) -> dict[str, float]:
    """The summary of the run in `path`."""
    return renamed(json.loads((Path(path) / "summary.json").read_text()))


def load_iterations(path: Path | str) -> pd.DataFrame:
    """One row per iteration of the run in `path`; columns as in METRICS.md."""
    return pd.read_parquet(Path(path) / "iterations.parquet").rename(columns=new_name)


def load_requests(path: Path | str) -> pd.DataFrame:
    """One row per request of the run in `path`."""
    return pd.read_parquet(Path(path) / "requests.parquet")


def new_name(name: str) -> str:
    """What a quantity of an older file is called now."""
    return "_".join(RENAMED.get(word, word) for word in str(name).split("_"))


def renamed(names: Mapping[str, Any]) -> dict[str, Any]:
    """The same under the names that are used now."""
    return {new_name(name): value for name, value in names.items()}


def load_paper(figure: str) -> pd.DataFrame:
    """The paper's points of a figure or table, such as "fig09" or "table2"; see
    `experiments/sarathi/paper/README.md`.
    """
    path = EXPERIMENTS / "sarathi" / "paper" / f"{figure}.csv"
    if not path.is_file():
        known = ", ".join(sorted(option.stem for option in path.parent.glob("*.csv")))
        raise UserError(f"figure {figure} is not there; use one of {known}")
    return pd.read_csv(path)


def _sweep_of(run: Path) -> Path:
    """The folder that a run shares with its baselines; a single run's is its own."""
    if run.parent.name == "baselines":
        return run.parent.parent
    return (
        run.parent if run.name.isdecimal() else run
    )  # Hydra calls the jobs of a sweep by their numbers


def _natural_order(path: Path) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in path.parts)


SIMULATED = "simulated-"
# A point: where it is in its figure, the median, the interval around it (see `intervals`), and of
# how many pairs. Without a y, `reason` says why there is none. `low` and `high` of a simulated
# point are the cost model's own error.
POINT = ["figure", "panel", "series", "x", "y", "low", "high", "num_pairs", "unit", "reason"]
COLUMNS = [*POINT, "model", "dtype", "device_name"]


def load(experiment: str, root: Path = EXPERIMENTS) -> pd.DataFrame:
    """All recorded rows of `experiment`, such as "fig09" or "orca": `device` and `is_simulated`,
    then its own columns.

    Raises UserError if nothing is recorded.
    """
    tables = [_read(path) for path in _files(experiment, root)]
    if not tables:
        known = ", ".join(recorded(root)) or "none"
        raise UserError(f"experiment {experiment} has no recorded results; use one of {known}")
    return pd.concat(
        [table.dropna(axis="columns", how="all") for table in tables], ignore_index=True
    ).pipe(_completed)


def recorded(root: Path = EXPERIMENTS) -> list[str]:
    """The experiments that have recorded results, in the order of their names."""
    names = {
        path.parents[2].name
        for path in root.glob("*/*/results/*/*.csv")
        if path.stem == path.parents[2].name
    }
    return sorted(names)


def path_of(experiment: str, device: str, root: Path = EXPERIMENTS) -> Path:
    """Where the results of an experiment on a device belong."""
    return root / group_of(experiment) / experiment / "results" / device / f"{experiment}.csv"


def group_of(experiment: str) -> str:
    """The folder of `experiments/` that has the experiment; `lab` for one that is not there."""
    return next((path.parent.name for path in EXPERIMENTS.glob(f"*/{experiment}")), "lab")


def save(
    table: pd.DataFrame,
    experiment: str,
    device: str,
    root: Path = EXPERIMENTS,
    stem: str | None = None,
) -> Path:
    """Record a table, in place of the one that was there; returns its path. `stem` names a further
    table of the experiment.
    """
    path = path_of(experiment, device, root)
    path = path if stem is None else path.with_stem(stem)
    make_folder(path.parent, "task.record")
    table.to_csv(path, index=False, float_format="%.6g")
    return path


def _files(experiment: str, root: Path) -> Iterator[Path]:
    return iter(sorted(root.glob(f"*/{experiment}/results/*/{experiment}.csv")))


def _read(path: Path) -> pd.DataFrame:
    table = pd.read_csv(path).rename(columns={"device": "device_name"})
    return _labelled(table, path.parent.name)


def _labelled(table: pd.DataFrame, device: str) -> pd.DataFrame:
    first = pd.DataFrame(
        {"device": device, "is_simulated": device.startswith(SIMULATED)}, index=table.index
    )
    return pd.concat([first, table], axis="columns")


def _completed(table: pd.DataFrame) -> pd.DataFrame:
    """Points have all columns, also those that are empty everywhere."""
    missing = [name for name in COLUMNS if name not in table] if "figure" in table else []
    return table.assign(**dict.fromkeys(missing)).assign(
        is_simulated=table.is_simulated.astype(bool)
    )


PREFIX = "iterations/"  # of the history's columns, see `tracking`
TIMEOUT = 120  # seconds
MOST_ROWS = 2000  # of an online history, as many as are logged


class WandbRecord(NamedTuple):
    """What W&B holds of one run; `history` has a row per logged iteration."""

    name: str
    source: str
    config: dict[str, Any]
    summary: dict[str, Any]
    history: pd.DataFrame


def read_offline(path: Path) -> WandbRecord:
    """A run from its `.wandb` file. Raises UserError for one that W&B can't read."""
    found: dict[str, list[dict[str, Any]]] = {"run": [], "summary": [], "history": []}
    for line in _inspect(path).splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record[record["type"]])
    if not found["run"]:
        raise UserError(
            f"{path} holds no run; it was cut off before W&B wrote anything, so leave it out"
        )
    run = found["run"][-1]
    summary: dict[str, Any] = {}
    for part in found["summary"]:
        summary |= part.get("update", {})
    rows = [row.get("item", {}) for row in found["history"]]
    name, config = run.get("display_name") or run["run_id"], run.get("config", {})
    return _record(name, str(path), config.get("update", {}), summary, rows)


def read_online(where: str) -> list[WandbRecord]:
    """The runs of "entity/project", or the one of "entity/project/run". UserError if the server
    does not give them.
    """
    return [
        _record(
            run.name,
            "/".join(run.path),
            dict(run.config),
            dict(run.summary.items()),
            run.history(samples=MOST_ROWS, pandas=False),
        )
        for run in fetch_runs(where)
    ]


def _inspect(path: Path) -> str:
    """The records of a file, one in JSON a line, by `wandb leet inspect`."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(
            f"W&B can't read {path} ({reason[0]}); name a .wandb file, or a folder that holds some"
        )
    return done.stdout


def _record(
    name: str,
    source: str,
    config: dict[str, Any],
    summary: dict[str, Any],
    rows: Sequence[dict[str, Any]],
) -> WandbRecord:
    """Without what W&B keeps for itself; of `rows` those of iterations, under their columns' names:
    tables and pictures have steps of their own.
    """
    table = pd.DataFrame([row for row in rows if "iteration" in row])
    columns = [name for name in map(str, table) if name == "iteration" or name.startswith(PREFIX)]
    history = table[columns].rename(columns=lambda name: new_name(name.removeprefix(PREFIX)))
    config, summary = (
        {name: value for name, value in names.items() if not name.startswith("_")}
        for names in (config, renamed(summary))
    )
    return WandbRecord(name, source, config, summary, history)
