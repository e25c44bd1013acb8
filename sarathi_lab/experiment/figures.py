"""Points of the paper's figures, recorded points, and errors beside the paper."""

from __future__ import annotations

import pandas as pd

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.experiment.registry import FIGURES, KEYS, PAPERS, ErrorRow
from sarathi_lab.results import load

COLUMNS = ["figure", *KEYS, "y", "unit", "source", "device", "uncertainty"]
# What was simulated, in columns of its own; empty for the paper's points and a device's.
LABELS = ["hardware", "level", "model", "method"]
ERRORS = ["row", "device", "points", "mean", "largest", "stated"]
ERRORS += ["aim_mean", "aim_largest", "verdict"]
SIMULATED = EXPERIMENTS / "sarathi" / "paper" / "results" / "simulated.csv"


def paper(name: str) -> pd.DataFrame:
    """Return the paper's points of a figure in `COLUMNS` and `LABELS`."""
    points = FIGURES[name].paper_points().astype({"x": float})[[*KEYS, "y", "unit"]]
    table = points.assign(figure=name, source="paper", device="paper", uncertainty=0.0)
    return table.assign(**dict.fromkeys(LABELS, ""))[[*COLUMNS, *LABELS]]


def points_of(*names: str) -> pd.DataFrame:
    """Return the points of figures (none named: all the paper's), as in `figure.parquet`; measured
    ones have `low` and `high`. Raises UserError for an unknown name.
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
    """Return the points of a figure that devices measured."""
    table = load.load(name)
    table = table[~table.is_simulated].copy()
    text = ["panel", "series", "model"]
    table[text] = table[text].fillna("").astype(str)
    table["device"] = (table.device + ", " + table.model).str.removesuffix(", ")
    found = table.assign(source="measured", uncertainty=float("nan"))
    found = found.assign(**dict.fromkeys(["hardware", "level", "method"], ""))
    return found[[*COLUMNS, *LABELS, "low", "high"]]


def recorded_points(name: str) -> pd.DataFrame:
    """Return the recorded points of a figure, simulated or measured (`source`)."""
    table = load.load(name)
    source = table.is_simulated.map({True: "simulated", False: "measured"})
    is_said = "series" in table and table.model.equals(table.series)
    device = table.device if is_said else table.device + ", " + table.model.astype(str)
    return table.assign(source=source, device=device)


def serving_points(name: str) -> pd.DataFrame:
    """Return the recorded points of an experiment under load, and the paper's if there are any."""
    if name not in FIGURES or not FIGURES[name].is_in_rounds:
        known = ", ".join(one for one, figure in FIGURES.items() if figure.is_in_rounds)
        raise UserError(f"{name} is no experiment of serving; use one of {known}")
    points = recorded_points(name)
    # Reading leaves columns out that are empty everywhere, as where no objective is.
    points = points.assign(source="recorded", slo=points.get("slo", ""))
    papers = EXPERIMENTS / load.group_of(name) / name / "paper.csv"
    if not papers.is_file():
        return points
    own = pd.read_csv(papers).assign(source="paper", hardware=FIGURES[name].papers[0].hardware)
    return pd.concat([points, own], ignore_index=True)


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Return predicted points beside the paper's y (`paper`), and their relative, signed `error`.

    Points that the paper does not show are left out, as are GPUs that it did not use.
    """
    own = points[points.source == "paper"].rename(columns={"y": "paper"})
    predicted = points[points.source == "simulated"]
    papers = {(name, on.hardware) for name in PAPERS for on in FIGURES[name].papers}
    is_papers = [pair in papers for pair in zip(predicted.figure, predicted.hardware, strict=True)]
    both = predicted[is_papers].merge(own[["figure", *KEYS, "paper"]], on=["figure", *KEYS])
    return both.assign(error=both.y / both.paper - 1)


def error_table(points: pd.DataFrame) -> pd.DataFrame:
    """Return a row per declared error row and device: mean and largest absolute error.

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
