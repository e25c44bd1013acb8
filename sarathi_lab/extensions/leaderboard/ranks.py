"""Ranks of policies from their runs on the same requests."""

from __future__ import annotations

import pandas as pd

from sarathi_lab.results.intervals import ends_of_median
from sarathi_lab.results.sweep_analysis import group_keys, medians
from sarathi_lab.results.table import COLUMNS, SIMULATED, UNITS

GOODPUT = "goodput_"  # and the objective
FAIRNESS = "slowdown_long_to_short"
DIFFERENCE = 0.01  # share of the goodput up to which two policies are alike
PLACE = ["workload", "model", "device"]  # of a ranking
LABELS = [*PLACE, "policy", "seed", "requests", "rate", "chunk", "schedule", "git_commit"]
QUANTITIES = ["ttft_p99", "tbt_p99", FAIRNESS, "throughput", "joules_per_token"]


def goodputs(runs: pd.DataFrame) -> list[str]:
    """Return the columns of goodput, an objective each."""
    return [str(name) for name in runs if str(name).startswith(GOODPUT)]


def kept(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the labels and quantities of runs that rankings read."""
    return runs[[name for name in [*LABELS, *goodputs(runs), *QUANTITIES] if name in runs]]


def beside(runs: pd.DataFrame, recorded: pd.DataFrame) -> pd.DataFrame:
    """Return `runs` and those recorded on the same requests of policies that they do not have,
    beside which they are marked as new (`is_new`).
    """
    requests, policy = [*PLACE, "seed", "requests"], [*PLACE, "policy"]
    is_same = group_keys(recorded, requests).isin(group_keys(runs, requests))
    is_other = ~group_keys(recorded, policy).isin(group_keys(runs, policy))
    others = recorded[is_same & is_other]
    parts = [others.assign(is_new=False), runs.assign(is_new=len(others) > 0)]
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def ranks(runs: pd.DataFrame, quantity: str) -> pd.Series:
    """Return the rank of each policy in one place: 1 and the number of policies that are better.

    One is better if its `quantity` is larger by more than `DIFFERENCE` with all of the interval of
    the differences on the same requests; equal ranks are ties.
    """
    table = runs.pivot_table(index="seed", columns="policy", values=quantity, sort=False)

    def is_better(one: pd.Series, other: pd.Series) -> bool:
        differences = (one - (1 + DIFFERENCE) * other).dropna()
        return len(differences) > 0 and ends_of_median([*differences], is_series=False).low > 0

    better = {
        name: sum(is_better(table[one], table[name]) for one in table) for name in map(str, table)
    }
    return 1 + pd.Series(better)


def board(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the long table of one workload's runs: the median of each quantity of each policy and
    place with its interval over the seeds, and the `rank` by it of goodputs; best policies first.
    """
    names = [name for name in [*goodputs(runs), *QUANTITIES] if name in runs]
    runs = runs.assign(executor=SIMULATED)
    table = medians(runs, [*PLACE, "policy", "is_new"], *names)
    table["rank"] = float("nan")
    for place, group in runs.groupby(PLACE):
        is_here = (table[PLACE] == place).all(axis="columns")
        for name in goodputs(runs):
            is_one = is_here & (table["quantity"] == name)
            table.loc[is_one, "rank"] = table[is_one].policy.map(ranks(group, name))
    first = table[table["quantity"] == names[0]].assign(first=table["rank"], better=-table.value)
    one = [*PLACE, "policy"]
    table = table.merge(first[[*one, "first", "better"]], on=one, how="left")
    table = table.sort_values([*PLACE, "first", "better"], kind="stable", ignore_index=True)
    return table.assign(
        case=table.policy + ", " + table.model,
        unit=table["quantity"].map(UNITS).fillna("requests/s"),
        level=SIMULATED,
        seed=" ".join(map(str, sorted(runs.seed.unique()))),
        commit=" ".join(sorted(map(str, runs.git_commit.dropna().unique()))),
    )[[*COLUMNS, "workload", "model", "policy", "is_new", "rank"]]
