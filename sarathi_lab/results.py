"""Finds and loads what runs left behind, and the paper's points to hold beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from sarathi_lab.errors import UserError
from sarathi_lab.paths import EXPERIMENTS

POINTS = "figure.parquet"  # the figures of the paper, recomputed: see `paper.task`
LABELS = "run.json"  # written last, so its presence says that the run is complete


def find_runs(*roots: Path) -> Iterator[Path]:
    """Folders of finished runs below `roots`, baselines included, in the order of their names (jobs 2 before 10)."""
    found = {path.parent for root in roots for path in Path(root).rglob(LABELS)}
    visible = (path for path in found if not any(part.startswith(".") for part in path.parts[-2:]))
    return iter(sorted(visible, key=_natural_order))


def load_runs(*roots: Path) -> pd.DataFrame:
    """One row per finished run below `roots`: its labels, its summary, its folder (`path`) and its sweep's (`sweep`).

    A name that a run lacks is NaN. Folders whose files can't be read are left out and listed in `attrs["skipped"]`.
    """
    rows, skipped = [], []
    for path in find_runs(*roots):
        try:
            labels = json.loads((path / LABELS).read_text())
            summary = json.loads((path / "summary.json").read_text())
        except (OSError, ValueError):
            skipped.append(str(path))
            continue
        rows.append({**labels, **summary, "path": str(path), "sweep": str(_sweep_of(path))})
    runs = pd.DataFrame(rows)
    runs.attrs["skipped"] = skipped
    return runs


def load_iterations(path: Path | str) -> pd.DataFrame:
    """One row per iteration of the run in `path`; columns as in METRICS.md."""
    return pd.read_parquet(Path(path) / "iterations.parquet")


def load_requests(path: Path | str) -> pd.DataFrame:
    """One row per request of the run in `path`."""
    return pd.read_parquet(Path(path) / "requests.parquet")


def load_paper(figure: str) -> pd.DataFrame:
    """The paper's points of a figure or table, such as "fig09" or "table2"; see `experiments/paper/README.md`."""
    path = EXPERIMENTS / "paper" / f"{figure}.csv"
    if not path.is_file():
        known = ", ".join(sorted(option.stem for option in path.parent.glob("*.csv")))
        raise UserError(f"figure {figure} is not there; use one of {known}")
    return pd.read_csv(path)


def _sweep_of(run: Path) -> Path:
    """The folder that a run shares with its baselines; a single run's is its own: a day's are no sweep."""
    if run.parent.name == "baselines":
        return run.parent.parent
    return run.parent if run.name.isdecimal() else run  # Hydra calls the jobs of a sweep by their numbers


def _natural_order(path: Path) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in path.parts)
