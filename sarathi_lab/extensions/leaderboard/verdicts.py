"""The verdicts of a board on policies, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import pandas as pd

from sarathi_lab.config.console import amount
from sarathi_lab.extensions.leaderboard.board import RANKING
from sarathi_lab.extensions.leaderboard.comparison import FEWEST_SEEDS
from sarathi_lab.extensions.leaderboard.runs import (
    BEST,
    CONTEST,
    DEFAULT,
    FAIRNESS,
    QUANTITIES,
)
from sarathi_lab.results.result import DisplayTable
from sarathi_lab.results.table import Row, factor

HEADINGS = {
    "ttft_p99": "TTFT P99 [ms]",
    "tbt_p99": "TBT P99 [ms]",
    FAIRNESS: "slowdown, long / short",
    "throughput": "tokens/s",
}


def of_sweep(ranked: pd.DataFrame) -> DisplayTable:
    """Return the verdict on each new policy by contest, objective and kind of budget; where no
    policy is new, the first group of each.
    """
    new = ranked[ranked.is_new]
    if new.empty:
        return first_groups(ranked)
    rows = [_verdict_row(row) for row in new.to_dict("records")]
    title = "goodput [requests/s] beside the recorded policies"
    alike: list[str] = []
    for name in ("policy", "workload", "GPU", "seeds"):
        values = {row[name] for row in rows}
        if len(values) == 1:  # which needs no column, as a terminal has 80
            alike += values
            for row in rows:
                del row[name]
    if alike:
        title = f"{', '.join(alike)}: {title}"
    return DisplayTable(
        rows,
        left=["workload", "GPU", "objective", "policy", "budget", "verdict"],
        title=title,
    )


def _verdict_row(row: Row) -> dict[str, str]:
    if row["seeds"] < FEWEST_SEEDS:
        others = "-"
    else:
        others = f"{row['num_better']} / {row['num_alike']} / {row['num_worse']}"
    budget = "none"
    if not pd.isna(row["budget"]):
        budget = f"{row['budget']:,.0f} ({row['at']})"
    return {
        "workload": row["workload"],
        "GPU": gpu(row),
        "objective": row["objective"],
        "policy": row["policy"],
        "budget": budget,
        "verdict": verdict(row),
        "better /\nalike /\nworse": others,
        "seeds": f"{row['seeds']:.0f} seed{'s' * (row['seeds'] != 1)}",
    }


def verdict(row: Row) -> str:
    """Describe the group of a policy, or what is undecided, with its goodput and the best one."""
    goodputs = f"{row['goodput']:.2f} against {row['best_goodput']:.2f}"
    if row["seeds"] == 1:
        return f"not decided: {goodputs} with 1 seed"
    if row["seeds"] < FEWEST_SEEDS:
        return f"not decided: {goodputs} with {row['seeds']} seeds"
    if row["is_open"]:
        resolution = percent(row["resolution"])
        return (
            f"not decided (group {group(row)}): {goodputs}, distinguished from {resolution} below"
        )
    return f"group {group(row)}: {goodputs}"


def group(row: Row) -> str:
    """Return the group of a policy as tables have it; "-" where its seeds are too few."""
    if pd.isna(row["group"]):
        return "-"
    number = f"{row['group']:.0f}"
    if row["is_open"]:
        return f"{number}+"  # or a later one
    return number


def is_first(ranked: pd.DataFrame) -> pd.Series:
    """Return which policies are in group 1, not in one below."""
    return (ranked.group == 1) & ~ranked.is_open.astype(bool)


def first_groups(ranked: pd.DataFrame) -> DisplayTable:
    """Return the best of each contest, how many are not distinguished from it, and for how many
    more the seeds do not decide.
    """
    rows = []
    for ranking in rankings(ranked):
        best = ranking.iloc[0]
        num_first = is_first(ranking).sum()
        members = f"{num_first} of {len(ranking)}"
        # In the first group, and yet it may be worse: more seeds would tell.
        num_open = ((ranking.group == 1) & ranking.is_open.astype(bool)).sum()
        if num_open:
            members += f", {num_open} open"
        rows.append(
            {
                "workload": best.workload,
                "GPU": gpu(best),
                "objective": best.objective,
                "budgets": best["at"],
                "best": f"{best.policy} ({amount(best.goodput)})",
                "group 1": members,
                "groups": f"{ranking.group.max():.0f}",
                "resolution": percent(resolution(ranking)),
                "seeds": str(best.seeds),
            }
        )
    return DisplayTable(
        rows,
        left=["workload", "GPU", "objective", "budgets", "best"],
        title="Policies not distinguished from the best by goodput (open: the seeds do not decide)",
    )


def memberships(ranked: pd.DataFrame, objective: str) -> DisplayTable:
    """Return by policy in how many contests it is in group 1, at both kinds of budget."""
    judged = ranked[ranked.objective == objective]
    num_contests = len(judged[CONTEST].drop_duplicates())
    rows = []
    for policy, table in judged.groupby("policy", sort=False):
        row: dict[str, object] = {"policy": str(policy)}
        for at in (DEFAULT, BEST):
            at_budget = table[table["at"] == at]
            groups = [group(in_contest) for in_contest in at_budget.to_dict("records")]
            row[f"in group 1, {at}"] = int(is_first(at_budget).sum())
            row[f"median below the best, {at}"] = percent(at_budget.below_best.median())
            row[f"groups, {at}"] = " ".join(groups)
        rows.append(row)
    rows.sort(key=itemgetter("in group 1, default", "in group 1, best"), reverse=True)
    return DisplayTable(
        rows,
        left=["policy", "groups, default", "groups, best"],
        title=f"{objective}: contests of {num_contests} in which a policy is in group 1",
    )


def of_contest(ranked: pd.DataFrame) -> DisplayTable:
    """Return the table of one contest by one objective, a row a policy."""
    at_default = ranked[ranked["at"] == DEFAULT]
    at_best = ranked[ranked["at"] == BEST].set_index("policy")
    shown = [name for name in QUANTITIES if name in ranked]
    lines = []
    for row in at_default.to_dict("records"):
        policy = row["policy"]
        # A row of `loc` lacks the index, which is the policy.
        best_row = {"policy": policy, **at_best.loc[policy]}
        line = {"policy": policy}
        if row["is_new"]:
            line["policy"] = f"{policy} (yours)"
        line |= _cells(row, DEFAULT) | _cells(best_row, BEST)
        for name in shown:
            line[HEADINGS[name]] = _number(row[name] * factor(name))
        lines.append(line)
    first = ranked.iloc[0]
    default = percent(resolution(at_default))
    best = percent(resolution(at_best.reset_index()))
    title = (
        f"{first.model} on {gpu(first)}, {first.objective}: resolution {default} below the best "
        f"at default budgets, {best} at the best"
    )
    return DisplayTable(lines, left=["policy"], title=title)


def _cells(row: Row, at: str) -> dict[str, str]:
    """Return the cells of one kind of budget."""
    smallest = "-"
    if row["policy"] != row["best"]:
        smallest = percent(row["resolution"])
    budget = "-"
    if not pd.isna(row["budget"]):
        budget = f"{row['budget']:,.0f}"
    return {
        f"group, {at}": group(row),
        f"budget, {at}": budget,
        f"goodput, {at}": _number(row["goodput"]),
        f"below the best, {at}": percent(row["below_best"]),
        f"resolution, {at}": smallest,
    }


def rankings(ranked: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the rows of each contest, objective and kind of budget."""
    for _, ranking in ranked.groupby(RANKING, sort=False):
        yield ranking


def resolution(ranking: pd.DataFrame) -> float:
    """Return how far below the best a policy is distinguished from it, the median over policies."""
    others = ranking[ranking.policy != ranking.best]
    return float(others.resolution.median())  # NaN where there are no others


def gpu(row: Row | pd.Series) -> str:
    """Return the name of a simulated device."""
    return str(row["device"]).removeprefix("simulated ")


def percent(share: float) -> str:
    """Format a share; "-" for none."""
    if pd.isna(share):
        return "-"
    return f"{100 * share:.0f} %"


def _number(value: float) -> str:
    if pd.isna(value):
        return "-"
    return amount(value)
