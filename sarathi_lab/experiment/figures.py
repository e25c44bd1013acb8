"""The registry of figures and experiments: importing this module fills it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.experiment import decodes, iterations, pipeline, reread, serving, throughput
from sarathi_lab.experiment.registry import FIGURES, KEYS, Figure
from sarathi_lab.results import load

__all__ = ["FIGURES", "PAPERS", "Figure", "paper", "points_of", "require", "serving_points"]

COLUMNS = ["figure", *KEYS, "y", "unit", "source", "device", "uncertainty"]
# What was simulated, in columns of its own; empty for the paper's points and a device's.
LABELS = ["hardware", "level", "model", "method"]
_ = (decodes, iterations, pipeline, reread, serving, throughput)
PAPERS = tuple(sorted(name for name, figure in FIGURES.items() if figure.has_paper))
SERVING = tuple(name for name, figure in FIGURES.items() if figure.kind == "rounds")
SIMULATED = EXPERIMENTS / "sarathi" / "paper" / "results" / "simulated.csv"


def require(name: str, setting: str = "figure") -> Figure:
    """A figure by its name. Raises UserError for an unknown one."""
    require_one_of(setting, name, FIGURES)
    return FIGURES[name]


def paper(name: str) -> pd.DataFrame:
    """The paper's own points of a figure in `COLUMNS` and `LABELS`."""
    points = FIGURES[name].paper_points().astype({"x": float})[[*KEYS, "y", "unit"]]
    table = points.assign(figure=name, source="paper", device="paper", uncertainty=0.0)
    return table.assign(**dict.fromkeys(LABELS, ""))[[*COLUMNS, *LABELS]]


def points_of(*names: str) -> pd.DataFrame:
    """The points of figures (of all the paper's without names): the paper's, simulated and
    measured, as in `figure.parquet`.

    Measured ones have `low` and `high`, their interval. Raises UserError for an unknown name.
    """
    for name in names:
        require_one_of("figure", name, PAPERS)
    chosen: Sequence[str] = names or PAPERS
    simulated = pd.read_csv(SIMULATED, keep_default_na=False, dtype={"series": str})
    known = load.recorded()
    tables = [*map(paper, chosen), simulated[simulated.figure.isin(chosen)]]
    tables += [_measured(name) for name in chosen if name in known]
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def _measured(name: str) -> pd.DataFrame:
    """The recorded points of a figure by devices; what a device's own simulation gave is left to
    the paper's scale.
    """
    table = load.load(name)
    table = table[~table.is_simulated]
    model = table.model.fillna("").astype(str)
    text = {column: table[column].fillna("").astype(str) for column in ("panel", "series")}
    device = (table.device + ", " + model).str.removesuffix(", ")
    found = table.assign(
        **text, device=device, model=model, source="measured", uncertainty=float("nan")
    )
    found = found.assign(**dict.fromkeys(["hardware", "level", "method"], ""))
    return found[[*COLUMNS, *LABELS, "low", "high"]]


def serving_points(name: str) -> pd.DataFrame:
    """The recorded points of an experiment of serving, and the paper's where its folder has them
    (`plots.serving`).
    """
    if name not in SERVING:
        raise UserError(f"{name} is no experiment of serving; use one of {', '.join(SERVING)}")
    table = load.load(name)
    device = table.device + ", " + table.model.astype(str)
    # Reading leaves columns out that are empty everywhere, as where no objective is.
    points = table.assign(device=device, source="recorded", slo=table.get("slo", ""))
    papers = EXPERIMENTS / load.group_of(name) / name / "paper.csv"
    if not papers.is_file():
        return points
    own = pd.read_csv(papers).assign(source="paper")
    return pd.concat([points, own], ignore_index=True)
