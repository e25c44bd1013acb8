"""Longer runs of what would be advised, as waits that grow show in a long run only."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from sarathi_lab.experiment.advise import choose, marked
from sarathi_lab.extensions.advise.options import PolicyRuns


def rows_of(table: pd.DataFrame, label: str) -> pd.DataFrame:
    """Return the rows of a policy, the best of them marked."""
    return marked(table[table["policy"] == label])


def confirmed(compared: Mapping[str, PolicyRuns]) -> pd.DataFrame:
    """Return the rows of all policies. The advised one, and the best of each policy within the
    objective, were confirmed by longer runs.
    """
    tables = [runs.table for runs in compared.values()]
    table = pd.concat(tables, ignore_index=True)
    table = marked(table).assign(is_confirmed=False)
    row = _to_confirm(table, compared)
    while row is not None:
        _confirm(row, table, compared[row["policy"]])
        table = marked(table)
        row = _to_confirm(table, compared)
    return table


def _confirm(row: pd.Series, table: pd.DataFrame, runs: PolicyRuns) -> None:
    """Write what a longer run gives into a row of `table`. If it does not keep up, it is
    overloaded, and so are the rows of its policy that serve no more.
    """
    longer = runs.longer(row)
    for name, value in longer.items():
        table.loc[row.name, name] = value
    table.loc[row.name, "is_confirmed"] = True
    if longer["is_steady"]:
        return
    is_same_policy = table["policy"] == row["policy"]
    serves_no_more = table["throughput"] <= row["throughput"]
    is_overloaded = is_same_policy & serves_no_more
    table.loc[is_overloaded, ["is_steady", "slo_met"]] = False


def _to_confirm(table: pd.DataFrame, compared: Mapping[str, PolicyRuns]) -> pd.Series | None:
    """Return a row that would be advised, or get flags, and was not confirmed; None if all were.

    Of a policy that does not meet the objective, a run within all bounds that did not look steady
    is tried longer, too: filling and draining are a large part of a short run.
    """
    if "slo_met" not in table:
        return None
    chosen = []
    best = choose(table)
    if best["is_steady"]:
        chosen.append(best)
    for label in compared:
        rows = rows_of(table, label)
        best_of_policy = choose(rows)
        if best_of_policy["slo_met"]:
            chosen.append(best_of_policy)
        else:
            chosen += _within_bounds(rows)
    for row in chosen:
        has_longer = compared[row["policy"]].has_longer
        if has_longer and not row["is_confirmed"]:
            return row
    return None


def _within_bounds(table: pd.DataFrame) -> list[pd.Series]:
    """Return the row of a policy that serves most within all bounds, unless one was confirmed."""
    is_within = (table["bounds_missed"] == 0) & ~table["is_steady"].astype(bool)
    if table["is_confirmed"].any() or not is_within.any():
        return []
    rows = table[is_within]
    serves_most = int(rows.throughput.to_numpy().argmax())
    return [rows.iloc[serves_most]]
