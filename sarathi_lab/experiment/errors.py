"""How far predictions are from the paper's points, and the errors that the lab aims for."""

from __future__ import annotations

import pandas as pd

from sarathi_lab.experiment.figures import FIGURES, PAPERS
from sarathi_lab.experiment.registry import KEYS, Aim, ErrorRow

COLUMNS = [
    "row",
    "device",
    "points",
    "mean",
    "largest",
    "stated",
    "aim_mean",
    "aim_largest",
    "verdict",
]


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Predicted points beside the paper's: `figure.parquet`'s columns, the paper's y as `paper`,
    and `error`.

    `error` is relative and signed. Left out are predicted points that the paper does not show, and
    other GPUs than its own: they need not agree.
    """
    own = points[points.source == "paper"].rename(columns={"y": "paper"})
    predicted = points[points.source == "simulated"]
    papers = {(name, on.hardware) for name in PAPERS for on in FIGURES[name].papers}
    is_papers = [pair in papers for pair in zip(predicted.figure, predicted.hardware, strict=True)]
    both = predicted[is_papers].merge(own[["figure", *KEYS, "paper"]], on=["figure", *KEYS])
    return both.assign(error=both.y / both.paper - 1)


def error_table(points: pd.DataFrame) -> pd.DataFrame:
    """One row per row of errors that figures declare and device: number of points, mean and largest
    absolute relative error, the aim.

    `stated` is the mean error that the cost model itself expects. `verdict` is "met", "missed", or
    "-" without an aim; "given" where the points are what the profile was made from, "formula" where
    nothing is predicted; "partly fitted" where constants of the hardware file are fitted to some of
    them.
    """
    compared = compare(points)
    rows = []
    for name in PAPERS:
        of_figure = compared[compared.figure == name]
        for row in FIGURES[name].errors:
            chosen = of_figure.query(row.where) if len(of_figure) else of_figure
            for device, group in chosen.groupby("device", sort=False):
                rows.append((row.name, str(device), *_judged(row, group)))
    return pd.DataFrame(rows, columns=COLUMNS)


def _judged(row: ErrorRow, group: pd.DataFrame) -> tuple[object, ...]:
    errors, level = group.error.abs(), str(group.level.iloc[0])
    aim = row.profiled if level == "profiled" else row.analytic
    verdict = _verdict(row, level, errors, aim)
    if verdict in ("met", "missed") and row.fitted in (level, group.hardware.iloc[0]):
        verdict += ", partly fitted"
    bounds = (aim.mean, aim.largest) if aim else (None, None)
    stated = group.uncertainty.mean()
    return len(group), errors.mean(), errors.max(), stated, *bounds, verdict


def _verdict(row: ErrorRow, level: str, errors: pd.Series, aim: Aim | None) -> str:
    if row.given == level:
        return "given"
    if row.is_formula:
        return "formula"
    if aim is None:
        return "-"
    is_met = errors.mean() <= aim.mean and (aim.largest is None or errors.max() <= aim.largest)
    return "met" if is_met else "missed"
