"""Every number of the page of answers is one that its experiments recorded."""

from __future__ import annotations

import re
from collections import Counter

from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.results import load
from sarathi_lab.results.intervals import GAIN, LOSS, effect

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


def test_the_map_of_models_counts_what_recorded_intervals_show():
    shown = re.findall(r"(\d+) of (\d+)(?:\*\*)? \(([+-]\d+) % to ([+-]\d+) %; (\d+) lose\)", PAGE)
    assert len(shown) == 2
    cells = load.load("crossover")
    cells = cells[~cells.panel.str.endswith("over Orca")]
    for numbers, model in zip(shown, ("yi-34b", "qwen3-next-80b-a3b"), strict=True):
        of_model = cells[cells.model == model]
        effects = Counter(map(effect, of_model.low, of_model.high))
        gains = 100 * (of_model.y - 1)
        most = f"{gains.max():+.0f}"
        least = f"{gains.min():+.0f}"
        counted = str(effects[GAIN]), str(len(of_model)), most, least, str(effects[LOSS])
        assert numbers == counted


def is_rounded(shown: str, value: float) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.51 * 10**-digits
