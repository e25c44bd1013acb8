"""Numbers that pages quote are those of their records: intervals with the rows and columns of the
tables that they stand in, and what front pages take from other pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from quoted import INTERVAL, Records, mixed_tables, quoted_in, read, rows_with_ends

from sarathi_lab.config.csv_files import csv_files
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results import load

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
SARATHI = EXPERIMENTS / "sarathi" / "README.md"  # a section a figure, whose records are apart
LINK = re.compile(r"\]\(([^)#\s]*\.md)(?:#([\w-]+))?\)")
PARAGRAPH_END = re.compile(r"\n\n|\n(?=[-|])")
# A number by itself: no part of a name, a version or a path.
PLAIN_NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w/])")
FRONT_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "explanation").glob("*.md"))]
# Seconds and requests a second of the benchmark of P-PAS, as its logs have them.
LOW_LOAD = "10:0.2,10:0.4,10:0.2,10:0.4,10:0.2"
HIGH_LOAD = "10:0.2,10:1.0,10:0.2,10:1.0,10:0.2"
COUNTED = {"86"}  # rows of the tables that a front page links, which the pages do not count


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


QUOTING = {}
for name, folder, text in pages():
    if any(True for _ in quoted_in(text)):
        QUOTING[str(name)] = (folder, text)


def gains_of_p_pas(folder: Path) -> Iterator[pd.DataFrame]:
    """Yield the latency of P-PAS over that of each fixed budget, as measured by others."""
    logs = pd.read_csv(EXPERIMENTS / "lab" / "rankings" / "logs.csv.gz")
    logs = logs[logs.model == "llama3.2-3b"]
    seeds = logs.pivot_table("latency", ["phases", "seed"], ["policy", "budget"])
    for budget in (2048, 16384):
        ratio = seeds["p_pas", 16384] / seeds["vllm_v1", budget]
        gains = over_seeds(ratio, "phases", "median")
        loads = gains.phases.map({LOW_LOAD: "low load", HIGH_LOAD: "high load"})
        # As the experiment names what it simulates.
        yield gains.assign(quantity="mean latency, " + loads + f" / vllm_v1 {budget}")


def gains_of_riding_limit(folder: Path) -> Iterator[pd.DataFrame]:
    """Yield what riding_limit has over the other rules, at their best budgets."""
    runs = pd.read_csv(folder / "results" / "rtx-pro-6000-held-out.csv")
    seeds = runs.set_index(["workload", "seed", "policy"]).unstack("policy")
    for quantity in ("throughput", "ttft_p50", "tbt_p99"):
        for policy in ("sarathi_serve", "vllm_v1"):
            ratio = seeds[quantity, "riding_limit"] / seeds[quantity, policy]
            gains = over_seeds(ratio, "workload", "median")
            yield gains.assign(numerator=quantity, policy=policy)
    runs = pd.read_csv(folder / "results" / "a100.csv.gz").query("role == 'best' and calls == 1")
    means = runs.groupby(["workload", "policy", "budget"]).goodput_strict.mean()
    best = means.groupby(["workload", "policy"]).idxmax()
    runs = runs.set_index(["workload", "policy", "budget"]).loc[best]
    seeds = runs.pivot_table("goodput_strict", ["workload", "seed"], "policy")
    ratio = seeds.riding_limit / seeds.sarathi_serve
    yield over_seeds(ratio, "workload", "mean").assign(numerator="goodput_strict")


def shares_of_rankings(folder: Path) -> Iterator[pd.DataFrame]:
    """Yield the shares of called pairs that are right, and what the simulator's choices cost beside
    P-PAS.
    """
    scores = pd.read_csv(folder / "results" / "scores.csv")
    share = scores.called_right / scores.called
    ends = {"value": share, "low": scores.share_low, "high": scores.share_high}
    labels = scores[["prediction", "gpu", "model"]]
    yield labels.assign(unit="share", sign="", **ends)
    columns = {"value": "beside_p_pas", "low": "beside_p_pas_low", "high": "beside_p_pas_high"}
    points = {name: 100 * scores[column] for name, column in columns.items()}
    yield labels.assign(unit="points", sign="", **points).dropna()


def fig08_of_kernels(folder: Path) -> Iterator[pd.DataFrame]:
    """Yield the decode speed-ups of SARATHI's definition by the same tables of kernels."""
    for path in csv_files(EXPERIMENTS / "sarathi" / "fig08", "results/kernels-*/*.csv"):
        yield read(path).assign(file=str(path))


def over_seeds(ratio: pd.Series, by: str, middle: str) -> pd.DataFrame:
    """Return the middle of the seeds' ratios with the least and the largest."""
    ends = ratio.groupby(by).agg(value=middle, low="min", high="max")
    return ends.reset_index().assign(unit="ratio", sign="")


# Pages with intervals of runs that are recorded without them, or by another experiment.
FURTHER = {
    "after_sarathi/p_pas_gain": gains_of_p_pas,
    "lab/piggyback_boundary": fig08_of_kernels,
    "lab/rankings": shares_of_rankings,
    "lab/riding_limit": gains_of_riding_limit,
}


def records_of(folder: Path) -> Records:
    """Return the values with their ends in all tables of a folder."""
    tables = []
    for path in csv_files(folder, "**/*.csv"):
        tables.append(read(path).assign(file=str(path)))
    name = str(folder.relative_to(EXPERIMENTS))
    if name in FURTHER:
        tables += FURTHER[name](folder)
    return Records(pd.concat(rows_with_ends(tables), ignore_index=True))


@pytest.mark.parametrize("name", QUOTING)
def test_intervals_on_a_page_are_those_of_its_records(name):
    folder, text = QUOTING[name]
    records = records_of(folder)
    quoted = list(quoted_in(text))
    assert [str(interval) for interval in quoted if not records.of(interval)] == []
    assert mixed_tables(quoted, records) == []


@pytest.mark.parametrize("page", FRONT_PAGES, ids=lambda page: page.stem)
def test_a_front_page_has_the_numbers_of_the_pages_that_it_links(page):
    for paragraph in PARAGRAPH_END.split(page.read_text()):
        folders = []
        texts = []
        for path, section in LINK.findall(paragraph):
            linked = (page.parent / path).resolve()
            if linked.parent != EXPERIMENTS and linked.is_relative_to(EXPERIMENTS):
                folders.append(folder_of(linked, section))
                texts.append(text_of(linked, section))
        # A command is the source of what stands beside it.
        if not texts or "`python" in paragraph:
            continue
        shown = numbers_in(INTERVAL.sub("", paragraph))
        assert shown <= numbers_in(" ".join(texts)) | COUNTED, paragraph
        recorded = set()
        quoted = list(quoted_in(paragraph))
        if quoted:
            for folder in folders:
                records = records_of(folder)
                recorded |= {interval for interval in quoted if records.of(interval)}
        assert [str(interval) for interval in quoted if interval not in recorded] == []


def folder_of(page: Path, section: str) -> Path:
    return page.parent / section if page == SARATHI else page.parent


def text_of(page: Path, section: str) -> str:
    text = page.read_text()
    if page == SARATHI and section:
        return text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return text


def numbers_in(text: str) -> set[str]:
    """The numbers of a text, without code and links."""
    sentences = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    return {number.replace(",", "") for number in PLAIN_NUMBER.findall(sentences)}


def test_a_bound_is_no_value():
    table = pd.DataFrame(
        {"y": [None, 4.5], "low": 0.0, "high": [6.0, 6.0], "reason": ["< 4.5", None]}
    )
    records = Records(next(rows_with_ends([table])))
    bound, value, inside = quoted_in("| < 4.5 (0 to 6.0) | 4.5 (0 to 6.0) | and (4.5, 0 to 6.0) |")
    assert [records.of(interval) for interval in (bound, value, inside)] == [{0}, {1}, {1}]


def test_a_number_of_another_row_stands_out():
    table = pd.DataFrame(
        {
            "y": [1.0, 2.0, 3.0, 4.0],
            "low": [0.5, 1.5, 2.5, 3.5],
            "high": [1.5, 2.5, 3.5, 4.5],
            "series": ["orca", "orca", "sarathi", "sarathi"],
            "dataset": ["chat", "code", "chat", "code"],
        }
    )
    records = Records(next(rows_with_ends([table])))
    rows = ["| 1 (0.5 to 1.5) | 2 (1.5 to 2.5) |", "| 3 (2.5 to 3.5) | 4 (3.5 to 4.5) |"]
    assert mixed_tables(quoted_in("\n".join(rows)), records) == []
    swapped = "| 2 (1.5 to 2.5) | 3 (2.5 to 3.5) |"
    assert mixed_tables(quoted_in("\n".join([rows[0], swapped])), records) != []


@pytest.mark.parametrize("name", [name for name in CATALOG if CATALOG[name].is_in_rounds])
def test_a_page_says_whether_its_intervals_are_of_seeds_alone(name):
    folder = EXPERIMENTS / load.group_of(name) / name
    text = (folder / "README.md").read_text()
    for path in csv_files(folder, f"results/simulated-*/{name}.csv"):
        has_draws = "draws" in pd.read_csv(path, nrows=0)
        assert ("of the seeds alone" in text) != has_draws
        assert "[the cost model's error]" in text
