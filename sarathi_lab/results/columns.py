"""How people see quantities: heading with unit, factor from the SI value, number format. They are
listed in headings.csv, in the order in which tables show them.
"""

from __future__ import annotations

import csv
from pathlib import Path

with Path(__file__).with_name("headings.csv").open(newline="") as file:
    HEADINGS: dict[str, tuple[str, float, str]] = {
        row["name"]: (row["heading"], float(row["factor"]), row["format"])
        for row in csv.DictReader(file)
    }
MILLISECONDS = 1e3  # the factor of times that people read in milliseconds


def heading(name: str) -> str:
    """Heading of a quantity, of its ratio to a baseline ("throughput_vs_orca"), or the name."""
    quantity, is_ratio, baseline = name.partition("_vs_")
    words = HEADINGS.get(quantity, (quantity, 1, ""))[0]
    return f"{words.split(' [')[0]} / {baseline}" if is_ratio else words


def factor(name: str) -> float:
    """What a stored SI value is multiplied by to be shown; 1 for ratios to a baseline."""
    return HEADINGS.get(name, (name, 1, ""))[1]
