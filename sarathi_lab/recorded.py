"""The recorded results of the repository: `experiments/<experiment>/results/<device>/<experiment>.csv`.

A device is a folder's name: "cpu", "nvidia-h200", or "simulated-..." for what only a cost model says. Tables of
measured points have the columns `COLUMNS`; recorded sweeps have those of `sweep.csv` (METRICS.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from sarathi_lab.errors import UserError
from sarathi_lab.paths import EXPERIMENTS, make_folder

SIMULATED = "simulated-"
# A point: where it is in its figure, the median, the interval around it (see `intervals`), and of how many pairs.
# Without a y, `reason` says why there is none. `low` and `high` of a simulated point are the cost model's own error.
POINT = ["figure", "panel", "series", "x", "y", "low", "high", "num_pairs", "unit", "reason"]
COLUMNS = [*POINT, "model", "dtype", "device_name"]
CAMPAIGN = "paper"  # the experiment whose folders hold the figures that `make campaign` measured


def load(experiment: str, root: Path = EXPERIMENTS) -> pd.DataFrame:
    """All recorded rows of `experiment`, such as "fig09" or "orca": `device` and `is_simulated`, then its own columns.

    A campaign's points of a figure are among them. Raises UserError if nothing is recorded.
    """
    tables = [_read(path) for path in _files(experiment, root)]
    tables += [rows for path in _campaign_files(root) if len(rows := _campaign_points(path, experiment))]
    if not tables:
        known = ", ".join(recorded(root)) or "none"
        raise UserError(f"experiment {experiment} has no recorded results; use one of {known}")
    return pd.concat([table.dropna(axis="columns", how="all") for table in tables], ignore_index=True).pipe(_completed)


def recorded(root: Path = EXPERIMENTS) -> list[str]:
    """The experiments that have recorded results, in the order of their names."""
    names = {path.parents[2].name for path in root.glob("*/results/*/*.csv") if path.stem == path.parents[2].name}
    figures = {str(name) for path in _campaign_files(root) for name in pd.read_csv(path).figure.unique()}
    return sorted(names | figures)


def path_of(experiment: str, device: str, root: Path = EXPERIMENTS) -> Path:
    """Where the results of an experiment on a device belong."""
    return root / experiment / "results" / device / f"{experiment}.csv"


def save(table: pd.DataFrame, experiment: str, device: str, root: Path = EXPERIMENTS) -> Path:
    """Record a table, in place of the one that was there; returns its path."""
    path = path_of(experiment, device, root)
    make_folder(path.parent, "task.record")
    table.to_csv(path, index=False, float_format="%.6g")
    return path


def _files(experiment: str, root: Path) -> Iterator[Path]:
    return iter(sorted((root / experiment / "results").glob(f"*/{experiment}.csv")))


def _campaign_files(root: Path) -> Iterator[Path]:
    return iter(sorted((root / CAMPAIGN / "results").glob("*/*-points.csv")))


def _read(path: Path) -> pd.DataFrame:
    table = pd.read_csv(path).rename(columns={"device": "device_name"})
    if {"quantity", "value", "q20", "q80"} <= set(table.columns):
        table = _from_campaign(table, path.stem)
    return _labelled(table, path.parent.name)


def _labelled(table: pd.DataFrame, device: str) -> pd.DataFrame:
    first = pd.DataFrame({"device": device, "is_simulated": device.startswith(SIMULATED)}, index=table.index)
    return pd.concat([first, table], axis="columns")


def _completed(table: pd.DataFrame) -> pd.DataFrame:
    """Points have all columns, also those that are empty everywhere."""
    missing = [name for name in COLUMNS if name not in table] if "figure" in table else []
    return table.assign(**dict.fromkeys(missing)).assign(is_simulated=table.is_simulated.astype(bool))


def _campaign_points(path: Path, figure: str) -> pd.DataFrame:
    """A campaign's points of `figure`; their intervals are the spread of its repetitions."""
    table = pd.read_csv(path)
    table = table[table.figure == figure].rename(columns={"device": "device_name"})
    low, high = table.y * (1 - table.uncertainty), table.y * (1 + table.uncertainty)
    model = path.stem.removesuffix("-points")
    return _labelled(table.assign(low=low, high=high, model=model).drop(columns="source"), path.parent.name)


def _from_campaign(table: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """A campaign's table of a quantity by prompt and chunk, as points."""
    names = {"quantity": "panel", "prompt_len": "series", "chunk": "x", "value": "y", "q20": "low", "q80": "high"}
    return table.rename(columns={**names, "repetitions": "num_pairs"}).assign(figure=experiment)
