"""The registry of figures, filled by importing this; their points, and errors beside the paper."""

from __future__ import annotations

import pandas as pd

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.experiment import (
    adaptive_budgets,
    clusters,
    decodes,
    energy,
    expert_reload,
    iterations,
    long_prompts,
    pipeline,
    real_pipeline,
    sarathi_serve,
    speculation,
    throughput,
)
from sarathi_lab.experiment.registry import FIGURES, KEYS, ErrorRow, Figure
from sarathi_lab.results import load

__all__ = ["FIGURES", "PAPERS", "Figure", "paper", "points_of", "serving_points"]

COLUMNS = ["figure", *KEYS, "y", "unit", "source", "device", "uncertainty"]
# What was simulated, in columns of its own; empty for the paper's points and a device's.
LABELS = ["hardware", "level", "model", "method"]
ERRORS = ["row", "device", "points", "mean", "largest", "stated"]
ERRORS += ["aim_mean", "aim_largest", "verdict"]
_ = (
    *(adaptive_budgets, clusters, decodes, energy, expert_reload, iterations, long_prompts),
    *(pipeline, real_pipeline, sarathi_serve, speculation, throughput),
)
PAPERS = tuple(sorted(name for name, figure in FIGURES.items() if figure.has_paper))
SERVING = tuple(name for name, figure in FIGURES.items() if figure.kind == "rounds")
SIMULATED = EXPERIMENTS / "sarathi" / "paper" / "results" / "simulated.csv"


def paper(name: str) -> pd.DataFrame:
    """The paper's own points of a figure in `COLUMNS` and `LABELS`."""
    points = FIGURES[name].paper_points().astype({"x": float})[[*KEYS, "y", "unit"]]
    table = points.assign(figure=name, source="paper", device="paper", uncertainty=0.0)
    return table.assign(**dict.fromkeys(LABELS, ""))[[*COLUMNS, *LABELS]]


def points_of(*names: str) -> pd.DataFrame:
    """The points of figures (None: all the paper's), as in `figure.parquet`; measured ones have
    `low` and `high`. Raises UserError for an unknown name.
    """
    for name in names:
        require_one_of("figure", name, PAPERS)
    chosen = names or PAPERS
    simulated = pd.read_csv(SIMULATED, keep_default_na=False, dtype={"series": str})
    known = load.recorded()
    tables = [*map(paper, chosen), simulated[simulated.figure.isin(chosen)]]
    tables += [_measured(name) for name in chosen if name in known]
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def _measured(name: str) -> pd.DataFrame:
    """The recorded points of a figure by devices, without what a device's own simulation gave."""
    table = load.load(name)
    table = table[~table.is_simulated].copy()
    text = ["panel", "series", "model"]
    table[text] = table[text].fillna("").astype(str)
    table["device"] = (table.device + ", " + table.model).str.removesuffix(", ")
    found = table.assign(source="measured", uncertainty=float("nan"))
    found = found.assign(**dict.fromkeys(["hardware", "level", "method"], ""))
    return found[[*COLUMNS, *LABELS, "low", "high"]]


def recorded_points(name: str) -> pd.DataFrame:
    """All that is recorded of a figure, simulated or measured (`source`), by device and model."""
    table = load.load(name)
    source = table.is_simulated.map({True: "simulated", False: "measured"})
    is_said = "series" in table and table.model.equals(table.series)
    device = table.device if is_said else table.device + ", " + table.model.astype(str)
    return table.assign(source=source, device=device)


def serving_points(name: str) -> pd.DataFrame:
    """The recorded points of an experiment of serving, and the paper's where it has some."""
    if name not in SERVING:
        raise UserError(f"{name} is no experiment of serving; use one of {', '.join(SERVING)}")
    points = recorded_points(name)
    # Reading leaves columns out that are empty everywhere, as where no objective is.
    points = points.assign(source="recorded", slo=points.get("slo", ""))
    papers = EXPERIMENTS / load.group_of(name) / name / "paper.csv"
    if not papers.is_file():
        return points
    own = pd.read_csv(papers).assign(source="paper", hardware=FIGURES[name].papers[0].hardware)
    return pd.concat([points, own], ignore_index=True)


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Predicted points beside the paper's y (`paper`), and their relative, signed `error`.

    Left out is what the paper does not show, and other GPUs than its own: they need not agree.
    """
    own = points[points.source == "paper"].rename(columns={"y": "paper"})
    predicted = points[points.source == "simulated"]
    papers = {(name, on.hardware) for name in PAPERS for on in FIGURES[name].papers}
    is_papers = [pair in papers for pair in zip(predicted.figure, predicted.hardware, strict=True)]
    both = predicted[is_papers].merge(own[["figure", *KEYS, "paper"]], on=["figure", *KEYS])
    return both.assign(error=both.y / both.paper - 1)


def error_table(points: pd.DataFrame) -> pd.DataFrame:
    """A row per row of errors that figures declare and device: mean and largest absolute error.

    `stated` is the mean error that the cost model itself expects. `verdict` is "met", "missed", or
    "-" without an aim; "given" where the profile was made from some of the points, "formula" where
    nothing is predicted; "partly fitted" where constants are fitted to, or chosen by, some of them.
    """
    compared = compare(points)
    rows = [
        (row.name, str(device), *_judged(row, group))
        for name in PAPERS
        for row in FIGURES[name].errors
        if len(of_figure := compared[compared.figure == name])
        for device, group in of_figure.query(row.where).groupby("device", sort=False)
    ]
    return pd.DataFrame(rows, columns=ERRORS)


def _judged(row: ErrorRow, group: pd.DataFrame) -> tuple[object, ...]:
    errors, level = group.error.abs(), str(group.level.iloc[0])
    mean, largest = errors.mean(), errors.max()
    aim_mean, aim_largest = row.aims.get(level, (None, None))
    verdict = "-"
    if row.given == level:
        verdict = "given"
    elif row.is_formula:
        verdict = "formula"
    elif aim_mean is not None:
        is_met = mean <= aim_mean and (aim_largest is None or largest <= aim_largest)
        verdict = "met" if is_met else "missed"
    if row.fitted in (level, group.hardware.iloc[0]) and not row.is_formula:
        verdict = f"{verdict}, partly fitted".removeprefix("-, ")
    return len(group), mean, largest, group.uncertainty.mean(), aim_mean, aim_largest, verdict
