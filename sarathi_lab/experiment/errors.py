"""How far predictions are from the paper's points, and the errors that the lab aims for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.experiment.figures import PARTS
from sarathi_lab.experiment.paper_points import KEYS


@dataclass(frozen=True)
class Aim:
    """The error to stay within: mean and, unless None, largest absolute relative error of a row's
    points.
    """

    mean: float
    largest: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of the error table: some points of a figure, and the aim at each level (None: no aim is
    set).
    """

    name: str
    figure: str
    profiled: Aim | None = None
    analytic: Aim | None = None
    where: Callable[[pd.DataFrame], pd.Series] = lambda points: points.x.notna()

    def aim(self, device: str) -> Aim | None:
        """The aim for a device by the level in its name."""
        return self.profiled if ", profiled" in device else self.analytic


def _is_even_tile(points: pd.DataFrame) -> pd.Series:
    return (points.x - 1) // 128 % 2 == 1


def _is_completion_ratio(points: pd.DataFrame) -> pd.Series:
    return (points.panel == "ratios") & points.series.str.startswith("completion")


def _is_total(points: pd.DataFrame) -> pd.Series:
    return points.series.str.endswith("total")


ROWS = (
    Row("Fig 3, time per token", "fig03"),
    Row("Fig 4a, single layer", "fig04", where=lambda points: points.unit == "tokens/ms"),
    Row("Fig 4b, arithmetic intensity", "fig04", where=lambda points: points.unit == "FLOP/B"),
    Row("Fig 7, iteration time", "fig07", None, Aim(0.08, 0.20), _is_total),
    # The analytic model is fitted to the others: odd tiles of 128 tokens
    # (experiments/lab/cost_model/fit.py).
    Row(
        "Fig 7, even tiles",
        "fig07",
        None,
        Aim(0.08, 0.20),
        lambda points: _is_total(points) & _is_even_tile(points),
    ),
    Row("Fig 7, by operation", "fig07", None, None, lambda points: ~_is_total(points)),
    Row("Fig 8, decode speed-up", "fig08", Aim(0.04, 0.12), Aim(0.10, 0.20)),
    Row("Fig 9, P:D", "fig09", Aim(0.01, 0.04), Aim(0.04, 0.10)),
    Row("Fig 10, totals", "fig10", Aim(0.02, 0.08), Aim(0.06, 0.15), _is_total),
    Row("Fig 10, by operation", "fig10", None, None, lambda points: ~_is_total(points)),
    Row("Fig 11, Orca", "fig11", Aim(0.01, 0.04), Aim(0.04, 0.10)),
    Row(
        "Fig 12, bubble ratio",
        "fig12",
        None,
        Aim(0.15),
        lambda points: points.series.str.startswith("bubbles"),
    ),
    Row("Fig 12, completion ratios", "fig12", None, Aim(0.07, 0.07), _is_completion_ratio),
    Row(
        "Fig 12a, bubbles", "fig12", where=lambda points: (points.panel == "a") & (points.x >= 0.01)
    ),
    # The first batch fills until about there.
    Row(
        "Fig 12b, completion",
        "fig12",
        where=lambda points: (points.panel == "b") & (points.x >= 500),
    ),
    Row(
        "Fig 13a, attention",
        "fig13",
        Aim(0.15, 0.40),
        Aim(0.15, 0.40),
        lambda points: points.panel == "a_attn",
    ),
    Row(
        "Fig 13b, prefill",
        "fig13",
        Aim(0.15, 0.40),
        Aim(0.15, 0.40),
        lambda points: points.panel == "b_prefill",
    ),
    Row(
        "Fig 13c, end to end",
        "fig13",
        Aim(0.04, 0.10),
        Aim(0.08, 0.20),
        lambda points: points.panel == "c_overall",
    ),
    Row("Table 2", "table2", Aim(0.04, 0.12), Aim(0.10, 0.20)),
    Row(
        "Table 4, 13B",
        "table4",
        Aim(0.04, 0.12),
        Aim(0.10, 0.20),
        lambda points: points.panel == "13b",
    ),
    Row(
        "Table 4, 33B, throughput",
        "table4",
        None,
        Aim(0.05),
        lambda points: (points.panel == "33b") & (points.series == "throughput_gain"),
    ),
    Row(
        "Table 4, 33B, speed-up",
        "table4",
        None,
        Aim(0.20),
        lambda points: (points.panel == "33b") & (points.series == "decode_speedup"),
    ),
)


GIVEN = ("fig03", "fig07")  # what the profile of the A6000 is made from
PARTLY_FITTED = (
    ("Fig 7, iteration time", "analytic"),  # odd tiles of 128 tokens
    (
        "Fig 12, bubble ratio",
        "a100_fig12",
    ),  # two of three completion times, hence one of three ratios
    ("Fig 12, completion ratios", "a100_fig12"),
)
# The GPUs that the paper used for each figure, as devices are called.
PAPERS = {(part.figure, f"simulated {part.hardware}") for part in PARTS}


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Predicted points beside the paper's: `figure.parquet`'s columns, the paper's y as `paper`,
    and `error`.

    `error` is relative and signed. Left out are predicted points that the paper does not show, and
    other GPUs than its own: they need not agree.
    """
    own = points[points.source == "paper"].rename(columns={"y": "paper"})[
        ["figure", *KEYS, "paper"]
    ]
    predicted = points[points.source != "paper"]
    gpus = predicted.device.str.split(",").str[0]
    is_papers = [pair in PAPERS for pair in zip(predicted.figure, gpus, strict=True)]
    both = predicted[is_papers].merge(own, on=["figure", *KEYS])
    return both.assign(error=both.y / both.paper - 1)


def error_table(points: pd.DataFrame) -> pd.DataFrame:
    """One row per row of `ROWS` and device: number of points, mean and largest absolute relative
    error, the aim.

    `stated` is the mean error that the cost model itself expects. `verdict` is "met", "missed", or
    "-" without an aim; "given" where the points are what the profile was made from, "formula" where
    nothing is predicted; "partly fitted" where constants of the hardware file are fitted to some of
    them.
    """
    compared = compare(points)
    rows = []
    for row in ROWS:
        of_figure = compared[compared.figure == row.figure]
        chosen = of_figure[row.where(of_figure)] if len(of_figure) else of_figure
        for device, group in chosen.groupby("device", sort=False):
            errors, aim = group.error.abs(), row.aim(str(device))
            verdict = _verdict(row, str(device), errors, aim)
            found = (
                row.name,
                str(device),
                len(group),
                errors.mean(),
                errors.max(),
                group.uncertainty.mean(),
            )
            rows.append((*found, aim.mean if aim else None, aim.largest if aim else None, verdict))
    columns = [
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
    return pd.DataFrame(rows, columns=columns)


def _verdict(row: Row, device: str, errors: pd.Series, aim: Aim | None) -> str:
    if row.figure in GIVEN and ", profiled" in device:
        return "given"
    if row.name.startswith("Fig 4b"):
        return "formula"
    if aim is None:
        return "-"
    is_met = errors.mean() <= aim.mean and (aim.largest is None or errors.max() <= aim.largest)
    is_fitted = any(row.name == name and level in device for name, level in PARTLY_FITTED)
    return ("met" if is_met else "missed") + (", partly fitted" if is_fitted else "")
