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
    contests = board.groupby([*CONTEST, "objective"], sort=False)
    in_panels = board.assign(panel=contests.ngroup())
    marks = _marks(in_panels, looks)
    panels = list(marks.panel.unique())
    num_columns = min(2, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    # Inches: a line of text for each policy, and room for title and axis.
    height_of_policies = 0.16 * board.policy.nunique()
    panel_height = 0.8 + height_of_policies
    height = 1.2 + num_rows * panel_height
    grid = PanelLayout(panels, num_columns, size=(style.WIDTH, height))
    figure, axes = plot(marks, x="goodput", y="height", grid=grid)
    for panel, rows in marks.groupby("panel", sort=False):
        ax = axes[panel]
        _label(ax, rows)
    keys = [look.key() for look in looks.values()]
    style.legend_below(figure, keys)
    workload = board.workload.iloc[0]
    title = f"{workload}: requests within the objective"
    return style.finished(figure, title)


def _looks() -> dict[tuple[str, bool], Look]:
    """Return the looks by kind of budget, and whether a policy is in group 1."""
    from sarathi_lab.results.plots.plot import Look

    looks = {}
    for is_first_group, group, size in (
        (True, "group 1", LARGE),
        (False, "other groups", SMALL),
    ):
        default = f"default budget, {group}"
        best = f"best budget of the grid, {group}"
        looks[DEFAULT, is_first_group] = Look(
            default,
            colour="C0",
            dash="",
            marker="o",
            size=size,
            is_hollow=True,
        )
        looks[BEST, is_first_group] = Look(
            best,
            colour="C1",
            dash="",
            marker="D",
            size=size,
        )
    return looks


def _marks(board: pd.DataFrame, looks: dict[tuple[str, bool], Look]) -> pd.DataFrame:
    """Return the look and height of each row: the best at default budgets is on top."""
    marks = []
    for _, rows in board.groupby("panel", sort=False):
        rank, policies = rows.policy.factorize()
        top = len(policies) - 1
        with_height = rows.assign(height=top - rank)
        for budget in (DEFAULT, BEST):
            is_of_budget = with_height["at"] == budget
            of_budget = with_height[is_of_budget]
            look_of_row = []
            for is_leading in is_first(of_budget):
                look = looks[budget, bool(is_leading)]
                look_of_row.append(look)
            column = pd.Series(look_of_row, of_budget.index, dtype=object)
            marks.append(of_budget.assign(look=column))
    table = pd.concat(marks)
    # Intervals are in the tables.
    return table.drop(columns=["low", "high"], errors="ignore")


def _label(ax: Axes, rows: pd.DataFrame) -> None:
    """Name the panel and its policies, and join the markers of each by a line."""
    names = rows.groupby("height").policy.first()
    goodputs = rows.groupby("height").goodput
    lowest = goodputs.min()
    highest = goodputs.max()
    ax.hlines(names.index, lowest, highest, color="0.7", lw=1)
    ax.set_yticks(names.index, names, fontsize=7)
    ax.set_ylim(-1, len(names))
    contest = rows.iloc[0]  # as every row
    title = f"{contest.model}, {gpu(contest)}, {contest.objective}"
    ax.set_title(title, fontsize=9)
    largest = rows.goodput.max() or 1.0
    ax.set_xlim(0, 1.05 * largest)
    ax.set_xlabel("goodput [requests/s]")
