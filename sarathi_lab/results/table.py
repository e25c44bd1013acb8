"""The long table of results: a row per case and quantity, in SI units.

`COLUMNS` come first; the settings of the case may follow by the names that they are typed by.

| column | meaning |
| --- | --- |
| case | identifier of what was run, unique within its table |
| quantity | name as in metrics.md |
| value, low, high | SI value and the ends of its interval, NaN without one |
| unit | SI unit of the value |
| device | name of the device |
| level | how it came about: "measured", "simulated" ("profiled", "analytic") or "paper" |
| seed | of the workload, empty where there is none |
| commit | of the program, "" outside git |

A run keeps its rows in `results.parquet`, beside the wide tables of its iterations and requests.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

COLUMNS = ["case", "quantity", "value", "low", "high", "unit", "device", "level", "seed", "commit"]
CASE = ("panel", "dataset", "slo", "series", "x")  # columns of points that name theirs
RESULTS = "results.parquet"
MEASURED, SIMULATED, PAPER = "measured", "simulated", "paper"
COMPOSED = "measured_kernels"  # of kernels that others measured
MILLISECONDS = 1e3  # factor of times that are displayed in milliseconds
LONG = 10.0  # seconds from which they are displayed in seconds

# Display of quantities, in the order of tables: heading with unit, factor from SI, format.
with Path(__file__).with_name("headings.csv").open(newline="") as file:
    ROWS = list(csv.DictReader(file))
HEADINGS: dict[str, tuple[str, float, str]] = {}
UNITS: dict[str, str] = {}
for row in ROWS:
    HEADINGS[row["name"]] = (row["heading"], float(row["factor"]), row["format"])
    UNITS[row["name"]] = row["unit"]


def heading(name: str) -> str:
    """Return the heading of a quantity or of its ratio to a baseline; unknown names stay."""
    quantity, is_ratio, baseline = name.partition("_vs_")
    label, _, _ = HEADINGS.get(quantity, (quantity, 1, ""))
    if is_ratio:
        return f"{label.partition(' [')[0]} / {baseline}"
    return label


def factor(name: str) -> float:
    """Return the factor from SI to the displayed value; 1 for ratios to a baseline."""
    return HEADINGS.get(name, (name, 1, ""))[1]


def less_is_better(name: str) -> bool:
    """Return whether less of a quantity is better: times, and the cache read more than once."""
    return UNITS.get(name) in ("s", "s/token") or name == "kv_reread_factor"


def display_unit(name: str, largest: float) -> tuple[float, str]:
    """Return factor and heading of values up to `largest` [SI]: long times in seconds."""
    if factor(name) == MILLISECONDS and largest >= LONG:
        return 1.0, heading(name).replace("[ms", "[s")
    return factor(name), heading(name)


def rows_of_run(quantities: Mapping[str, float], labels: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of a run from its quantities and its labels (run.json)."""
    table = pd.DataFrame(list(quantities.items()), columns=["quantity", "value"])
    return table.astype({"quantity": str, "value": float}).assign(
        case=str(labels.get("name", "")),
        low=float("nan"),
        high=float("nan"),
        unit=table["quantity"].map(UNITS).fillna(""),
        device=str(labels.get("device", "")),
        level=SIMULATED if labels.get("executor") == SIMULATED else MEASURED,
        seed=labels.get("seed"),
        commit=labels.get("git_commit") or "",
    )[COLUMNS]


def rows_of_points(points: pd.DataFrame) -> pd.DataFrame:
    """Return recorded points (`load.POINT`) as rows; other columns, such as x, are settings."""
    none = pd.Series("", points.index)
    source = points.get("source", none).replace({"recorded": MEASURED, "": MEASURED})
    level = points.get("level", none).fillna("")
    figure = points.get("figure", none)
    name_of_device = points.get("device_name", none)
    table = points.rename(columns={"y": "value"}).assign(
        case=_cases_of(points),
        quantity=points.get("quantity", figure),
        level=level.where(level != "", source),
        device=points.get("device", name_of_device),
        commit="",
    )
    columns = dict.fromkeys([*COLUMNS, *table])
    return table.reindex(columns=list(columns))


def _cases_of(points: pd.DataFrame) -> list[str]:
    """Return what each point is of: its place in its figure, in words."""
    names = [name for name in CASE if name in points]
    cases = []
    for values in points[names].itertuples(index=False):
        texts = []
        for value in values:
            texts.append(f"{value:g}" if isinstance(value, float) else str(value))
        cases.append(", ".join(filter(None, texts)))
    return cases
