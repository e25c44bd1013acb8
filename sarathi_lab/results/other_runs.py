"""What a sweep's conclusion says of the runs beside the best: which are equal, which are behind."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

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
    for run in runs.to_dict("records"):
        words = [str(run["policy"])]
        for name in settings:
            value = analysis.text(run[name])
            if name != "policy" and value != "-":
                words.append(f"{name}={value}")
        names.append(" ".join(words))
    return pd.Series(names, runs.index)


def equal_runs(runs: pd.DataFrame) -> list[str]:
    """Name runs of different settings that agree in all digits of every quantity, in a sentence for
    each set of them: what sets them apart had no effect.
    """
    quantities = [name for name in HEADINGS if name in runs and runs[name].notna().any()]
    distinct = analysis.without_repeated(runs.reset_index(drop=True), quantities)
    work = [name for name in analysis.same_work(distinct) if name not in analysis.SAMPLES]
    settings = [name for name in analysis.varied(distinct) if name not in work]
    names = run_names(distinct, settings)
    works = analysis.group_keys(distinct, work)
    keys = [works.rename("work"), names.rename("name")]
    medians = distinct[quantities].astype(float).groupby(keys, sort=False).median().reset_index()
    # Names of equal runs, and on how many workloads they are equal.
    num_works: dict[tuple[str, ...], int] = {}
    for _, of_work in medians.groupby("work", sort=False):
        names_by_digits: dict[tuple[str, ...], list[str]] = {}
        for row in of_work.to_dict("records"):
            values = [row[quantity] for quantity in quantities]
            num_known = sum(not math.isnan(value) for value in values)
            if num_known >= FEWEST_QUANTITIES:
                digits = tuple(format(value, DIGITS) for value in values)
                names_by_digits.setdefault(digits, []).append(row["name"])
        for equal_names in names_by_digits.values():
            if len(equal_names) > 1:
                key = tuple(equal_names)
                num_works[key] = num_works.get(key, 0) + 1
    sentences = []
    for equal, number in list(num_works.items())[:MOST_SETS]:
        where = ""
        if number < works.nunique():
            where = f" on {number} of {works.nunique()} workloads"
        sentences.append(f"Equal in every quantity{where}: {_listed(equal)}.")
    num_more = len(num_works) - MOST_SETS
    if num_more > 0:
        sentences.append(f"So are {counted(num_more, 'more set')} of runs.")
    return sentences


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
    others = swept[(swept.policy != base) & ~swept.index.isin(list(best))]
    compared = ["throughput"] if "throughput" in names else list(names)
    ratios = [f"{name}_vs_{base}" for name in compared if f"{name}_vs_{base}" in others]
    if others.empty or not ratios:
        return []
    behind = []
    run_name = run_names(others, settings)
    for name, group in others.groupby(run_name, sort=False):
        medians = analysis.medians(group, ["policy"], *ratios, level=noise)
        worst = _worst_difference(medians)
        if worst:
            behind.append(f"{name} ({worst})")
    if not behind:
        return []
    what = "tokens/s" if compared == ["throughput"] else "waits, and better in none"
    return [f"Worse than {base} in {what}: {_listed(behind)}."]


def _worst_difference(medians: pd.DataFrame) -> str:
    """Return the largest of the differences in words; "" if there is none, or one for the better.

    Args:
        medians: Of ratios (`sweep_analysis.medians`).
    """
    largest = 1.0
    in_words = ""
    for row in medians.to_dict("records"):
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
        return f"{', '.join(names[:MOST_RUNS])} and {num_more} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"
