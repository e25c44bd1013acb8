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

# By kind of budget: marker, colour of the edge and of the face, and words.
LOOKS = {
    DEFAULT: ("o", "C0", "none", "default budget"),
    BEST: ("D", "C1", "C1", "best budget of the grid"),
}
LARGE, SMALL = 6, 3  # points: a marker of group 1, and of the others


def draw(board: pd.DataFrame) -> Figure:
    """Draw the goodput of each policy on one workload at both kinds of budget."""
    from sarathi_lab.results.plots import style  # matplotlib takes a second

    contests = [rows for _, rows in board.groupby([*CONTEST, "objective"], sort=False)]
    num_columns = min(2, len(contests))
    num_rows = math.ceil(len(contests) / num_columns)
    height = 1.2 + num_rows * (0.8 + 0.16 * board.policy.nunique())
    figure, axes = style.panels(num_rows, num_columns, (style.WIDTH, height))
    for unused in axes[len(contests) :]:
        unused.remove()
    axes = axes[: len(contests)]
    for ax, rows in zip(axes, contests, strict=True):
        first = rows.iloc[0]
        _draw_contest(ax, rows)
        ax.set_title(f"{first.model}, {gpu(first)}, {first.objective}", fontsize=9)
    style.legend_below(figure, style.keys_of(axes))
    return style.finished(figure, f"{board.workload.iloc[0]}: requests within the objective")


def _draw_contest(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw a line of markers for each policy, the best at default budgets on top."""
    policies = list(dict.fromkeys(rows.policy))
    policies.reverse()
    height_of = {policy: height for height, policy in enumerate(policies)}
    goodputs = rows.pivot(index="policy", columns="at", values="goodput").reindex(policies)
    ax.hlines(range(len(policies)), goodputs[DEFAULT], goodputs[BEST], color="0.7", lw=1)
    for at, (marker, edge, face, words) in LOOKS.items():
        table = rows[rows["at"] == at]
        heights = table.policy.map(height_of)
        is_large = is_first(table)
        for is_shown, size, label in (
            (is_large, LARGE, f"{words}, group 1"),
            (~is_large, SMALL, f"{words}, other groups"),
        ):
            ax.plot(
                table.goodput[is_shown],
                heights[is_shown],
                marker,
                ms=size,
                mec=edge,
                mfc=face,
                label=label,
            )
    ax.set_yticks(range(len(policies)), policies)
    ax.tick_params(axis="y", labelsize=7)
    largest = rows.goodput.max() or 1.0
    ax.set(
        xlim=(0, 1.05 * largest),
        ylim=(-1, len(policies)),
        xlabel="goodput [requests/s]",
    )
