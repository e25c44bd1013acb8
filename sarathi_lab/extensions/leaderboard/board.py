"""From runs to the board: the group of each policy in each contest, by objective, at its default
budget and at its best; and the runs of a sweep beside recorded ones.
"""

from __future__ import annotations

import math
from itertools import product

import pandas as pd

from sarathi_lab.extensions.leaderboard.comparison import OF_GROUPS, standings
from sarathi_lab.extensions.leaderboard.runs import (
    BEST,
    CONTEST,
    DEFAULT,
    GOODPUT,
    LABELS,
    QUANTITIES,
    SELECTION,
    best_budgets,
    in_recorded_digits,
)
from sarathi_lab.results.sweep_analysis import group_keys
from sarathi_lab.results.table import COLUMNS, SIMULATED

RANKING = [*CONTEST, "objective", "at"]  # `at`: the default or the best budget
BUDGETS = (DEFAULT, BEST)
# Columns of groups.csv beside those of the lab's long table.
OF_BOARD = [
    "workload",
    "model",
    "objective",
    "at",
    "policy",
    "budget",
    *OF_GROUPS,
]


def objectives(runs: pd.DataFrame) -> list[str]:
    """Return the objectives that runs are judged by."""
    goodputs = runs.filter(regex=f"^{GOODPUT}")
    return list(goodputs.columns.str.removeprefix(GOODPUT))


def as_recorded(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of runs that a leaderboard reads, with the digits that it records."""
    goodputs = runs.filter(regex=f"^{GOODPUT}").columns
    quantities = runs.columns.intersection(QUANTITIES)  # of which some workloads lack some
    numbers = [*goodputs, *sorted(quantities, key=QUANTITIES.index)]
    table = runs[[*LABELS, *numbers]].copy()
    for name in numbers:
        table[name] = table[name].map(in_recorded_digits)
    return table


def beside(runs: pd.DataFrame, recorded: pd.DataFrame) -> pd.DataFrame:
    """Return `runs` and those recorded in the same contests on the same requests, of policies that
    `runs` lack. In contests with others, `runs` are marked as new (`is_new`).
    """
    has_same_requests = _are_in(recorded, runs, [*CONTEST, "seed", "requests"])
    is_in_contest = _are_in(recorded, recorded[has_same_requests], CONTEST)
    is_of_runs = _are_in(recorded, runs, [*CONTEST, "policy"])
    others = recorded[is_in_contest & ~is_of_runs]
    if others.empty:
        return runs.assign(is_new=False)
    has_others = _are_in(runs, others, CONTEST)
    tables = [
        others.assign(is_new=False),
        runs.assign(is_new=has_others),
    ]
    return pd.concat(tables, ignore_index=True)


def _are_in(rows: pd.DataFrame, table: pd.DataFrame, columns: list[str]) -> pd.Series:
    """Return which rows have values of `columns` that some row of `table` has, too."""
    return group_keys(rows, columns).isin(group_keys(table, columns))


def compared(runs: pd.DataFrame, objective: str, at: str) -> pd.DataFrame:
    """Return the runs by which policies are compared `at` their default or best budget; those of a
    policy without a budget, or with a stated one, are the same for both.
    """
    if at == DEFAULT:
        return runs[runs.role == DEFAULT]
    policies = [*CONTEST, "policy"]
    best = best_budgets(runs, f"{GOODPUT}{objective}")
    evaluated = runs[runs.role != SELECTION]
    with_best = evaluated.join(best.rename("best_budget"), on=policies)
    is_best = with_best.budget == with_best.best_budget
    has_no_choice = with_best.best_budget.isna()
    is_chosen = is_best | (has_no_choice & (with_best.role == DEFAULT))
    chosen = evaluated[is_chosen]
    # A budget may be both the default and the best.
    return chosen.drop_duplicates([*policies, "seed"])


def board(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each policy by contest, objective and kind of budget (`RANKING`): its
    `budget`, the columns of `standings`, and the medians of `QUANTITIES` over the seeds.
    """
    tables = []
    for objective, at in product(objectives(runs), BUDGETS):
        quantity = f"{GOODPUT}{objective}"
        # Other contests are judged by other objectives.
        judged = runs.dropna(subset=[quantity])
        rows = compared(judged, objective, at)
        for contest, group in rows.groupby(CONTEST, sort=False):
            labels = dict(zip(CONTEST, map(str, contest), strict=True))
            ranking = _ranking(group, quantity)
            tables.append(ranking.assign(**labels, objective=objective, at=at))
    return pd.concat(tables, ignore_index=True)


def _ranking(runs: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Return the rows of one contest, objective and kind of budget, the best policy first."""
    goodputs = runs.pivot_table(
        index="seed",
        columns="policy",
        values=quantity,
        sort=False,
    )
    by_policy = runs.groupby("policy", sort=False)
    labels = by_policy[["budget", "rate", "is_new"]].first()
    quantities = runs.columns.intersection(QUANTITIES, sort=False)
    medians = by_policy[list(quantities)].median()
    ranked = standings(goodputs).join(labels).join(medians)
    return ranked.reset_index()


def long_table(ranked: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `board` as the lab's long table, a goodput each."""
    commits = runs.git_commit.dropna().astype(str)
    table = ranked.rename(columns={"goodput": "value"})
    table["case"] = table.policy + ", " + table["at"] + " budget, " + table.workload
    table["quantity"] = GOODPUT + table.objective
    table["low"] = math.nan
    table["high"] = math.nan
    table["unit"] = "requests/s"
    table["level"] = SIMULATED
    table["seed"] = table.seeds.astype(str) + " seeds"
    table["commit"] = " ".join(sorted(commits.unique()))
    return table[[*COLUMNS, *OF_BOARD]]
