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

# Points of a marker.
LARGE = 6.0  # of group 1
SMALL = 3.0  # of other groups


def draw(board: pd.DataFrame) -> Figure:
    """Draw the goodput of each policy on one workload at both kinds of budget."""
    from sarathi_lab.results.plots import style  # matplotlib takes a second
    from sarathi_lab.results.plots.plot import PanelLayout, plot

    looks = _looks()
    contests = {}  # by the number of the panel
    marks = []
    by_contest = board.groupby([*CONTEST, "objective"], sort=False)
    for number, (_, rows) in enumerate(by_contest):
        contests[number] = rows
        of_panel = _marks(rows, looks)
        marks.append(of_panel.assign(panel=number))
    num_columns = min(2, len(contests))
    num_rows = math.ceil(len(contests) / num_columns)
    # Inches: a line of text for each policy, and room for title and axis.
    panel_height = 0.8 + 0.16 * board.policy.nunique()
    size = (style.WIDTH, 1.2 + num_rows * panel_height)
    grid = PanelLayout(list(contests), num_columns, size)
    figure, axes = plot(pd.concat(marks), x="value", y="at", grid=grid)
    for number, rows in contests.items():
        _label(axes[number], rows)
    keys = [look.key() for look in looks.values()]
    style.legend_below(figure, keys)
    workload = board.workload.iloc[0]
    return style.finished(figure, f"{workload}: requests within the objective")


def _looks() -> dict[tuple[str, bool], Look]:
    """Return the looks by kind of budget, and whether a policy is in group 1."""
    from sarathi_lab.results.plots.plot import Look

    looks = {}
    for is_first_group, group, size in (
        (True, "group 1", LARGE),
        (False, "other groups", SMALL),
    ):
        looks[DEFAULT, is_first_group] = Look(
            f"default budget, {group}",
            colour="C0",
            dash="",
            marker="o",
            size=size,
            is_hollow=True,
        )
        looks[BEST, is_first_group] = Look(
            f"best budget of the grid, {group}",
            colour="C1",
            dash="",
            marker="D",
            size=size,
        )
    return looks


def _heights(rows: pd.DataFrame) -> dict[str, int]:
    """Return the height of each policy: the best at default budgets is on top."""
    policies = list(dict.fromkeys(rows.policy))
    policies.reverse()
    return {policy: height for height, policy in enumerate(policies)}


def _marks(rows: pd.DataFrame, looks: dict[tuple[str, bool], Look]) -> pd.DataFrame:
    """Return a marker for each policy and kind of budget."""
    heights = _heights(rows)
    marks = []
    for budget in (DEFAULT, BEST):
        table = rows[rows["at"] == budget]
        look_of_row = []
        for is_first_group in is_first(table):
            look_of_row.append(looks[budget, bool(is_first_group)])
        of_budget = pd.DataFrame(
            {
                "value": table.goodput,
                "at": table.policy.map(heights),
                "look": look_of_row,
            }
        )
        marks.append(of_budget)
    return pd.concat(marks)


def _label(ax: Axes, rows: pd.DataFrame) -> None:
    """Name the panel and its policies, and join the markers of each by a line."""
    policies = list(_heights(rows))
    heights = range(len(policies))
    goodputs = rows.pivot(index="policy", columns="at", values="goodput")
    goodputs = goodputs.reindex(policies)
    ax.hlines(heights, goodputs[DEFAULT], goodputs[BEST], color="0.7", lw=1)
    ax.set_yticks(heights, policies)
    ax.tick_params(axis="y", labelsize=7)
    contest = rows.iloc[0]  # as every row
    title = f"{contest.model}, {gpu(contest)}, {contest.objective}"
    ax.set_title(title, fontsize=9)
    largest = rows.goodput.max() or 1.0
    ax.set_xlim(0, 1.05 * largest)
    ax.set_ylim(-1, len(policies))
    ax.set_xlabel("goodput [requests/s]")
