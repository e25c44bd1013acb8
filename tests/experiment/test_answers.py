"""Every number of the page of answers is one that its experiments recorded."""

from __future__ import annotations

import re

import pandas as pd

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
    for counts, name in zip(shown, ("h200-nemotron-h-56b", "b200-qwen3-next-80b-a3b"), strict=True):
        cells = pd.read_csv(EXPERIMENTS / "lab/crossover/results" / f"{name}.csv")
        cells = cells[cells.baseline == "request_level"]
        gains = round(100 * cells.gain.max()), round(100 * cells.gain.min())
        assert counts == (
            str(sum(cells.outcome == "gains")),
            str(len(cells)),
            *(f"{gain:+d}" for gain in gains),
        )


def is_rounded(shown: str, value: float) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.51 * 10**-digits
