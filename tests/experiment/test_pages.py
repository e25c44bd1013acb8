"""Intervals that experiments' pages quote are those of their records.

VALUE (LOW to HIGH) in brackets is an interval; any other range stands without brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sarathi_lab.config.csv_files import csv_files
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results import load

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SARATHI = EXPERIMENTS / "sarathi" / "README.md"  # a section a figure, whose records are apart
NUMBER = r"-?[\d,]*\.?\d+"
INTERVAL = re.compile(rf"\(({NUMBER})(?: %)? to ({NUMBER})(?: %)?[;)]")
# How far before its interval a value stands.
REACH = 60
# Columns of a value and of its ends, in any table.
COLUMNS = (("y", "low", "high"), ("value", "low", "high"), ("value", "q20", "q80"))


def pages() -> Iterator[tuple[Path, Path, str]]:
    """Yield each page, and each section of the paper's figures: name, folder of records, text.

    The name of a folder's first page is that of the folder.
    """
    for page in sorted(EXPERIMENTS.rglob("*.md")):
        text = page.read_text()
        # The first page is written from the records (test_claims).
        if page.parent == EXPERIMENTS:
            continue
        if page != SARATHI:
            name = page.parent if page.name == "README.md" else page.with_suffix("")
            yield name.relative_to(EXPERIMENTS), page.parent, text
            continue
        for section in text.split("\n## ")[1:]:
            name, _, body = section.partition("\n")
            folder = page.parent / name
            yield folder.relative_to(EXPERIMENTS), folder, body


QUOTING = {str(name): (folder, text) for name, folder, text in pages() if INTERVAL.search(text)}


def gains_of_p_pas(folder: Path) -> Iterator[np.ndarray]:
    """Yield the latency of P-PAS over that of each fixed budget, as measured by others."""
    logs = pd.read_csv(EXPERIMENTS / "lab" / "rankings" / "logs.csv.gz")
    logs = logs[logs.model == "llama3.2-3b"]
    seeds = logs.pivot_table("latency", ["phases", "seed"], ["policy", "budget"])
    for budget in (2048, 16384):
        ratio = seeds["p_pas", 16384] / seeds["vllm_v1", budget]
        yield ratio.groupby("phases").agg(["median", "min", "max"]).to_numpy()


def gains_of_riding_limit(folder: Path) -> Iterator[np.ndarray]:
    """Yield what riding_limit has over the other rules, at their best budgets."""
    runs = pd.read_csv(folder / "results" / "rtx-pro-6000-held-out.csv")
    seeds = runs.set_index(["workload", "seed", "policy"]).unstack("policy")
    for quantity in ("throughput", "ttft_p50", "tbt_p99"):
        for policy in ("sarathi_serve", "vllm_v1"):
            ratio = seeds[quantity, "riding_limit"] / seeds[quantity, policy]
            yield ratio.groupby("workload").agg(["median", "min", "max"]).to_numpy()
    runs = pd.read_csv(folder / "results" / "a100.csv.gz").query("role == 'best' and calls == 1")
    means = runs.groupby(["workload", "policy", "budget"]).goodput_strict.mean()
    best = means.groupby(["workload", "policy"]).idxmax()
    runs = runs.set_index(["workload", "policy", "budget"]).loc[best]
    seeds = runs.pivot_table("goodput_strict", ["workload", "seed"], "policy")
    ratio = seeds.riding_limit / seeds.sarathi_serve
    yield ratio.groupby("workload").agg(["mean", "min", "max"]).to_numpy()


# Pages with the range of seeds of runs that are recorded without intervals.
BY_SEED = {
    "after_sarathi/p_pas_gain": gains_of_p_pas,
    "lab/riding_limit": gains_of_riding_limit,
}


@pytest.mark.parametrize("name", QUOTING)
def test_intervals_on_a_page_are_those_of_its_records(name):
    folder, text = QUOTING[name]
    recorded = np.concatenate([np.empty((0, 3)), *recorded_intervals(folder)])
    if name in BY_SEED:
        recorded = np.concatenate([recorded, *BY_SEED[name](folder)])
    unknown = []
    for match in INTERVAL.finditer(text):
        before = text[max(0, match.start() - REACH) : match.start()]
        values = re.findall(NUMBER, before)
        if not any(is_recorded((value, match[1], match[2]), recorded) for value in values):
            unknown.append(before[-30:] + match[0])
    assert unknown == []


@pytest.mark.parametrize("name", [name for name in CATALOG if CATALOG[name].is_in_rounds])
def test_a_page_says_whether_its_intervals_are_of_seeds_alone(name):
    folder = EXPERIMENTS / load.group_of(name) / name
    text = (folder / "README.md").read_text()
    for path in csv_files(folder, f"results/simulated-*/{name}.csv"):
        has_draws = "draws" in pd.read_csv(path, nrows=0)
        assert ("of the seeds alone" in text) != has_draws
        assert "[the cost model's error]" in text


def recorded_intervals(folder: Path) -> Iterator[np.ndarray]:
    """Yield the values with their ends in each table of a folder, an array of three columns."""
    for path in csv_files(folder, "**/*.csv"):
        table = pd.read_csv(path)
        for columns in COLUMNS:
            if set(columns) <= set(table):
                yield table[list(columns)].apply(pd.to_numeric, errors="coerce").to_numpy()


def is_recorded(quoted: tuple[str, str, str], recorded: np.ndarray) -> bool:
    """Whether a row of records is, rounded to the quoted digits, a value with its two ends."""
    texts = [text.replace(",", "") for text in quoted]
    numbers = np.array([float(text) for text in texts])
    decimals = [len(text.partition(".")[2]) for text in texts]
    # Half of the last digit, and what a sum in binary adds.
    tolerance = 0.51 * 10.0 ** -np.array(decimals)
    return any((np.abs(form - numbers) <= tolerance).all(axis=1).any() for form in forms(recorded))


def forms(recorded: np.ndarray) -> Iterator[np.ndarray]:
    """Yield what pages make of recorded values: other units, reciprocals, and percent."""
    for factor in (1, 100, 1e3, 1e6):
        yield recorded * factor
    value, low, high = recorded.T
    with np.errstate(divide="ignore"):
        yield np.column_stack([1 / value, 1 / high, 1 / low])
    yield 100 * (1 - np.column_stack([value, high, low]))
    yield 100 * (recorded - 1)
