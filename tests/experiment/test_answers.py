"""Every number of the page of answers is one that its experiments recorded."""

from __future__ import annotations

import re

from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.results import load

PAGE = (EXPERIMENTS / "ANSWERS.md").read_text()


def test_every_interval_is_recorded():
    """As "0.57 (0.56 to 0.59)", with as many digits as are shown."""
    for question in PAGE.split("\n## ")[1:-1]:
        tables = [load.load(name) for name in set(re.findall(r"experiment=(\w+)", question))]
        rows = [(row.y, row.low, row.high) for table in tables for row in table.itertuples()]
        shown = re.findall(r"([\d.]+)(?:\*\*)? \(([\d.]+) to ([\d.]+)\)", question)
        assert shown, question.splitlines()[0]
        for numbers in shown:
            assert any(all(map(is_rounded, numbers, row)) for row in rows), (numbers, question[:60])


def test_the_map_of_models_counts_as_recorded():
    shown = re.findall(r"(\d+) of (\d+)(?:\*\*)? \(([+-]\d+) % to ([+-]\d+) %\)", PAGE)
    assert len(shown) == 2
    cells = load.load("crossover")
    cells = cells[~cells.panel.str.endswith("over Orca")]
    for counts, model in zip(shown, ("nemotron-h-56b", "qwen3-next-80b-a3b"), strict=True):
        ratios = cells.y[cells.model == model]
        gains = round(100 * (ratios.max() - 1)), round(100 * (ratios.min() - 1))
        assert counts == (
            str(sum(ratios > 1.02)),
            str(len(ratios)),
            *(f"{gain:+d}" for gain in gains),
        )


def is_rounded(shown: str, value: float) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.51 * 10**-digits
