"""The picture of a board: goodput by policy, a panel for each server and objective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd

from sarathi_lab.extensions.leaderboard.runs import BEST, CONTEST, DEFAULT
from sarathi_lab.extensions.leaderboard.verdicts import gpu, is_first

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sarathi_lab.results.plots.plot import Look

LARGE, SMALL = 6.0, 3.0  # points: a marker of group 1, and of the others


def draw(board: pd.DataFrame) -> Figure:
    """Draw the goodput of each policy on one workload at both kinds of budget."""
    from sarathi_lab.results.plots import style  # matplotlib takes a second
    from sarathi_lab.results.plots.plot import Grid, plot

    contests = {}
    for number, (_, rows) in enumerate(board.groupby([*CONTEST, "objective"], sort=False)):
        contests[number] = rows
    num_columns = min(2, len(contests))
    num_rows = math.ceil(len(contests) / num_columns)
    height = 1.2 + num_rows * (0.8 + 0.16 * board.policy.nunique())
    grid = Grid(list(contests), num_columns, (style.WIDTH, height))
    looks = _looks()
    marks = [_marks(rows, looks).assign(panel=number) for number, rows in contests.items()]
    figure, axes = plot(pd.concat(marks), x="value", y="at", grid=grid)
    for number, rows in contests.items():
        _label(axes[number], rows)
    style.legend_below(figure, [look.key() for look in looks.values()])
    return style.finished(figure, f"{board.workload.iloc[0]}: requests within the objective")


def _looks() -> dict[tuple[str, bool], Look]:
    """Return the looks by kind of budget, and whether a policy is in group 1."""
    from sarathi_lab.results.plots.plot import Look

    looks = {}
    for is_large, group, size in ((True, "group 1", LARGE), (False, "other groups", SMALL)):
        default = Look(f"default budget, {group}", "C0", "", "o", size, is_hollow=True)
        looks[DEFAULT, is_large] = default
        looks[BEST, is_large] = Look(f"best budget of the grid, {group}", "C1", "", "D", size)
    return looks


def _heights(rows: pd.DataFrame) -> dict[str, int]:
    """Return the height of each policy: the best at default budgets is on top."""
    policies = list(dict.fromkeys(rows.policy))
    policies.reverse()
    return {policy: height for height, policy in enumerate(policies)}


def _marks(rows: pd.DataFrame, looks: dict[tuple[str, bool], Look]) -> pd.DataFrame:
    """Return a marker for each policy and kind of budget."""
    marks = []
    for budget in (DEFAULT, BEST):
        table = rows[rows["at"] == budget]
        marks_of_budget = [looks[budget, bool(is_large)] for is_large in is_first(table)]
        heights = table.policy.map(_heights(rows))
        marks.append(pd.DataFrame({"value": table.goodput, "at": heights, "look": marks_of_budget}))
    return pd.concat(marks)


def _label(ax: Axes, rows: pd.DataFrame) -> None:
    """Name the panel and its policies, and join the markers of each by a line."""
    policies = list(_heights(rows))
    goodputs = rows.pivot(index="policy", columns="at", values="goodput").reindex(policies)
    ax.hlines(range(len(policies)), goodputs[DEFAULT], goodputs[BEST], color="0.7", lw=1)
    ax.set_yticks(range(len(policies)), policies)
    ax.tick_params(axis="y", labelsize=7)
    first = rows.iloc[0]
    ax.set_title(f"{first.model}, {gpu(first)}, {first.objective}", fontsize=9)
    largest = rows.goodput.max() or 1.0
    limits = {"xlim": (0, 1.05 * largest), "ylim": (-1, len(policies))}
    ax.set(**limits, xlabel="goodput [requests/s]")
