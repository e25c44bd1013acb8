"""What a sweep's conclusion says of the runs beside the best: which are equal, which are behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from sarathi_lab.config.console import counted
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.table import HEADINGS, heading, less_is_better

DIGITS = ".9g"  # to which quantities of equal runs agree
FEWEST_QUANTITIES = 3  # that runs have in common, so that it says something that they are equal
MOST_SETS = 3  # of equal runs in sentences
MOST_RUNS = 4  # in a sentence
# Ratios so near to 1 are printed as 1.00 and mean nothing to anybody who serves models.
LEAST_DIFFERENCE = 0.005


def run_names(runs: pd.DataFrame, settings: Sequence[str]) -> pd.Series:
    """Return the policy of each run and those of the `settings` that it has, as people name it."""
    names = []
    columns = [name for name in settings if name != "policy"]
    for run in runs[["policy", *columns]].to_dict("records"):
        policy_and_settings = [str(run["policy"])]
        for name in columns:
            value = analysis.text(run[name])
            if value != "-":
                policy_and_settings.append(f"{name}={value}")
        names.append(" ".join(policy_and_settings))
    return pd.Series(names, runs.index)


def equal_runs(runs: pd.DataFrame) -> list[str]:
    """Name runs of different settings that agree in all digits of every quantity, in a sentence for
    each set of them: what sets them apart had no effect.
    """
    quantities = []
    for name in HEADINGS:
        if name in runs and runs[name].notna().any():
            quantities.append(name)
    numbered = runs.reset_index(drop=True)
    distinct = analysis.without_repeated(numbered, quantities)
    same_work = analysis.same_work(distinct)
    settings_of_work = [name for name in same_work if name not in analysis.SAMPLES]
    settings = [name for name in analysis.varied(distinct) if name not in settings_of_work]
    works = analysis.group_keys(distinct, settings_of_work)
    names = run_names(distinct, settings)
    values = distinct[quantities].astype(float)
    num_equal: Counter[tuple[str, ...]] = Counter()  # workloads, by the names that are equal there
    for _, values_of_work in values.groupby(works, sort=False):
        medians = values_of_work.groupby(names, sort=False).median()
        equal_names = _equal_names(medians)
        num_equal.update(equal_names)
    return _sentences_on_equal(num_equal, num_works=works.nunique())


def _sentences_on_equal(num_equal: Counter[tuple[str, ...]], num_works: int) -> list[str]:
    """State each of the first sets of equal runs, with the workloads on which they are equal if
    these are not all.
    """
    sentences = []
    for equal, number in list(num_equal.items())[:MOST_SETS]:
        workloads = ""
        if number < num_works:
            workloads = f" on {number} of {num_works} workloads"
        sentences.append(f"Equal in every quantity{workloads}: {_listed(equal)}.")
    num_more = len(num_equal) - MOST_SETS
    if num_more > 0:
        sentences.append(f"And {counted(num_more, 'further set')} of runs.")
    return sentences


def _equal_names(medians: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return the names (the index) of rows that agree in all digits of every quantity."""
    has_enough = medians.notna().sum(axis="columns") >= FEWEST_QUANTITIES
    comparable = medians[has_enough]
    names_by_digits = defaultdict(list)
    for name, *values in comparable.itertuples(name=None):
        digits = " ".join(format(value, DIGITS) for value in values)
        names_by_digits[digits].append(str(name))
    equal_names = []
    for names in names_by_digits.values():
        if len(names) > 1:
            equal_names.append(tuple(names))
    return equal_names


def runs_behind(
    runs: pd.DataFrame,
    base: str,
    names: Sequence[str],
    settings: Sequence[str],
    *,
    noise: float,
    best: Collection[object],
) -> list[str]:
    """Name the runs that are worse than those of the policy `base`, in one sentence.

    Args:
        runs: All of a sweep, with the ratios to `base`.
        base: The policy to compare with.
        names: What is compared: the tokens/s alone where they are among it, else waits, of which
            some are worse and none better.
        settings: What runs differ in, the policy first.
        noise: See `sweep_analysis.noise`.
        best: The indices of the runs that have their own sentences.
    """
    swept = analysis.without_baselines(runs)
    is_base = swept.policy == base
    is_best = swept.index.isin(list(best))
    others = swept[~is_base & ~is_best]
    compared = list(names)
    if "throughput" in names:
        compared = ["throughput"]
    candidates = [f"{name}_vs_{base}" for name in compared]
    ratios = [ratio for ratio in candidates if ratio in others]
    if others.empty or not ratios:
        return []
    behind = []
    named = others.assign(run_of_sweep=run_names(others, settings))
    medians = analysis.medians(named, ["policy", "run_of_sweep"], *ratios, level=noise)
    for name, of_run in medians.groupby("run_of_sweep", sort=False):
        worst = _worst_difference(of_run.to_dict("records"))
        if worst:
            behind.append(f"{name} ({worst})")
    if not behind:
        return []
    compared_in_words = "waits, and better in none"
    if compared == ["throughput"]:
        compared_in_words = "tokens/s"
    return [f"Worse than {base} in {compared_in_words}: {_listed(behind)}."]


def _worst_difference(medians: Sequence[Mapping[Hashable, Any]]) -> str:
    """Return the largest of the differences in words; "" if there is none, or one for the better.

    Args:
        medians: Rows of `sweep_analysis.medians`, of ratios.
    """
    largest = 1.0
    in_words = ""
    for row in medians:
        quantity, _, _ = row["quantity"].partition("_vs_")
        ratio = row["value"]
        if not row["is_decided"] or abs(ratio - 1) < LEAST_DIFFERENCE:
            continue
        loss = ratio if less_is_better(quantity) else 1 / ratio
        if loss < 1:
            return ""
        if loss > largest:
            largest = loss
            in_words = f"{ratio:.2f} times"
            if quantity != "throughput":
                label, _, _ = heading(quantity).partition(" [")
                in_words = f"{label} {in_words}"
    return in_words


def _listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence, the first ones of many."""
    if len(names) == 1:
        return names[0]
    num_more = len(names) - MOST_RUNS
    if num_more > 1:
        first = ", ".join(names[:MOST_RUNS])
        return f"{first} and {num_more} more"
    all_but_last = ", ".join(names[:-1])
    return f"{all_but_last} and {names[-1]}"
