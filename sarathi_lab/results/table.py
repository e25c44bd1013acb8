"""The long table of results: a row per case and quantity, in SI units.

`COLUMNS` come first; the settings of the case may follow by the names that they are typed by.

| column | meaning |
| --- | --- |
| case | identifier of what was run, unique within its table |
| quantity | name as in metrics.md |
| value, low, high | SI value and the ends of its interval, NaN without one |
| unit | SI unit of the value |
| device | name of the device |
| level | how it came about: "measured" or "simulated" |
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

# A row of a table by its columns, as `to_dict("records")` has it: text, numbers, NaN for nothing.
Row = Mapping[Any, Any]
Quantities = dict[str, float]  # of a run, in SI units, by the names of metrics.md
Summary = Mapping[str, float]  # the same where it is only read
Runs = pd.DataFrame  # a row a run: settings and quantities by their names
Requests = pd.DataFrame  # a row a request: the ledger's REQUEST_COLUMNS
Iterations = pd.DataFrame  # a row an iteration: the ledger's, with columns as in metrics.md
COLUMNS = [
    "case",
    "quantity",
    "value",
    "low",
    "high",
    "unit",
    "device",
    "level",
    "seed",
    "commit",
]
RESULTS = "results.parquet"
# Levels of runs, and sources of experiments' points.
MEASURED = "measured"
SIMULATED = "simulated"
PAPER = "paper"
MILLISECONDS = 1e3  # factor of times that are displayed in milliseconds
LONG = 10.0  # seconds from which they are displayed in seconds

# Display of quantities, in the order of tables: heading with unit, factor from SI, format.
_path = Path(__file__).with_name("headings.csv")
with _path.open(newline="") as file:
    ROWS = list(csv.DictReader(file))
Display = tuple[str, float, str]
HEADINGS: dict[str, Display] = {}
UNITS: dict[str, str] = {}
for row in ROWS:
    name = row["name"]
    HEADINGS[name] = (
        row["heading"],
        float(row["factor"]),
        row["format"],
    )
    UNITS[name] = row["unit"]


def heading(name: str) -> str:
    """Return the heading of a quantity or of its ratio to a baseline; unknown names stay."""
    quantity, is_ratio, baseline = name.partition("_vs_")
    label = quantity
    if quantity in HEADINGS:
        label, _, _ = HEADINGS[quantity]
    if not is_ratio:
        return label
    without_unit, _, _ = label.partition(" [")
    return f"{without_unit} / {baseline}"


def factor(name: str) -> float:
    """Return the factor from SI to the displayed value; 1 for ratios to a baseline."""
    if name not in HEADINGS:
        return 1
    _, scale, _ = HEADINGS[name]
    return scale


def less_is_better(name: str) -> bool:
    """Return whether less of a quantity is better: times, and the cache read more than once."""
    is_time = UNITS.get(name) in ("s", "s/token")
    return is_time or name == "kv_reread_factor"


def is_share(name: str) -> bool:
    """Return whether a quantity is a share, which is displayed in percent."""
    if name not in HEADINGS:
        return False
    _, _, number_format = HEADINGS[name]
    return number_format.endswith("%")


def display_unit(name: str, largest: float) -> tuple[float, str]:
    """Return factor and heading of values up to `largest` [SI]: long times in seconds."""
    scale = factor(name)
    label = heading(name)
    if scale == MILLISECONDS and largest >= LONG:
        scale = 1.0
        label = label.replace("[ms", "[s")
    return scale, label


def rows_of_run(quantities: Summary, labels: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of a run from its quantities and its labels (run.json)."""
    # Without types a run that has no quantities would have columns of objects.
    table = pd.DataFrame(
        {
            "quantity": pd.Series(list(quantities), dtype=str),
            "value": pd.Series(list(quantities.values()), dtype=float),
        }
    )
    level = MEASURED
    if labels.get("executor") == SIMULATED:
        level = SIMULATED
    rows = table.assign(
        case=str(labels.get("name", "")),
        low=float("nan"),
        high=float("nan"),
        unit=table["quantity"].map(UNITS).fillna(""),
        device=str(labels.get("device", "")),
        level=level,
        seed=labels.get("seed"),
        commit=labels.get("git_commit") or "",
    )
    return rows[COLUMNS]
