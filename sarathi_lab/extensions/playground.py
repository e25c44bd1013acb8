"""The picture of a playground: batches over time, and latencies.

It is drawn at every move of a slider, so only the data of its axes, lines and areas change, which
is ten times faster than a new layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from sarathi_lab.results.plots.style import colours, use_style
from sarathi_lab.results.serving_metrics import waits

SIZE = (11.0, 4.4)  # inches
DPI = 80  # pixels an inch
PLACES = {"left": 0.065, "right": 0.985, "top": 0.93, "bottom": 0.12, "hspace": 0.35}
BOTTOM = 0.8  # tokens, below which the axis ends
FEWEST = 1e-3  # share of gaps, below which the axis ends
# Dark and light, distinct without colour; hatches do not work on bars of a few pixels.
PREFILL: dict[str, Any] = {"facecolor": "#31688e", "edgecolor": "black", "linewidth": 0.15}
DECODE: dict[str, Any] = {**PREFILL, "facecolor": "#fde725"}
KINDS = {"prompt tokens": PREFILL, "decodes": DECODE}
TOKENS = ["num_prefill_tokens", "num_decode_tokens"]  # as `KINDS` has them
Tables = Mapping[str, pd.DataFrame]  # by policy
Times = Mapping[str, NDArray[np.float64]]  # by policy
NONE = ("", pd.DataFrame(0, index=[0], columns=["start", "end", *TOKENS]))  # of no policy


class Picture:
    """Batches of up to two policies at the left, their times to first and between tokens at the
    right.
    """

    def __init__(self) -> None:
        use_style()
        self.figure = Figure(SIZE, DPI)
        # Places in place of a layout, which would be computed anew at every move.
        grid = {**PLACES, "width_ratios": (2.2, 1), "wspace": 0.16}
        axes = self.figure.subplots(2, 2, gridspec_kw=grid)
        self._batches = axes[:, 0]
        self._ttft, self._tbt = axes[:, 1]
        self._prepare_batches()
        self._prepare_times()
        for ax in axes.flat:
            ax.xaxis.set_major_locator(MaxNLocator(5))
        for ax in (*self._batches, self._tbt):
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter("{x:g}")  # powers take three times as long to typeset

    def _prepare_batches(self) -> None:
        """Draw an area for each kind of tokens, whose data `show` replaces."""
        for ax in self._batches:
            ax.set_yscale("log")
            ax.set_ylabel("tokens of each kind")
            ax.grid(axis="x", visible=False)
            for name, style in KINDS.items():
                colour = style["facecolor"]
                ax.stairs(
                    [1],
                    edges=[0, 1],
                    baseline=BOTTOM,
                    fill=True,
                    color=colour,
                    label=name,
                )
        first, last = self._batches
        first.legend(loc="upper right", ncols=2)
        last.set_xlabel("time [s]")

    def _prepare_times(self) -> None:
        """Draw a line for each policy, whose data `show` replaces."""
        for ax in (self._ttft, self._tbt):
            for dashes in ("-", "--"):
                ax.plot([], [], linestyle=dashes, drawstyle="steps-post")
        self._ttft.set_xlabel("time to first token [s]")
        self._ttft.set_ylabel("share of requests")
        self._ttft.set_ylim(0, 1.02)
        self._tbt.set_xlabel("time between tokens [ms]")
        self._tbt.set_ylabel("share of longer gaps")
        self._tbt.set_yscale("log")
        self._tbt.set_ylim(FEWEST, 1)

    def show(self, iterations: Tables, requests: Tables) -> None:
        """Draw the iterations and requests (the ledger's tables) of one or two policies by name."""
        all_iterations = pd.concat(iterations.values())
        duration = all_iterations.end.max()
        most_tokens = all_iterations[TOKENS].to_numpy().max()
        top = 3 * most_tokens  # with room for the legend
        # Of one policy the second panel is empty.
        panels = [*iterations.items(), NONE]
        for ax, (name, table) in zip(self._batches, panels, strict=False):
            ax.set_xlim(0, duration)
            ax.set_ylim(BOTTOM, top)
            _show_batches(ax, name, table)
        first_tokens = {}  # seconds
        gaps = {}  # milliseconds
        for name, table in requests.items():
            times = waits(table)
            first_tokens[name] = times["ttft"]
            gaps[name] = 1e3 * times["tbt"]
        _show_shares(self._ttft, first_tokens)
        _show_shares(self._tbt, gaps, is_above=True)
        policies = list(requests)
        lines = self._ttft.get_lines()
        self._ttft.legend(lines[: len(policies)], policies, loc="lower right")

    def png(self) -> bytes:
        file = BytesIO()
        self.figure.savefig(file, dpi=DPI, pil_kwargs={"compress_level": 1})
        return file.getvalue()


def _show_batches(ax: Axes, name: str, table: pd.DataFrame) -> None:
    """Draw bars as wide as iterations: decodes before prompt tokens, each from the axis, as a sum
    cannot be read on a logarithmic one.
    """
    ax.set_title(name, loc="left")
    edges = table[["start", "end"]].to_numpy().ravel()  # gaps included
    area: Any
    for area, kind in zip(ax.patches, TOKENS, strict=True):
        heights = np.zeros(len(edges))  # of iterations and, in between, of gaps
        heights[::2] = table[kind]
        heights = np.maximum(heights, BOTTOM)
        area.set_data(heights[:-1], edges, BOTTOM)


def _show_shares(ax: Axes, times: Times, *, is_above: bool = False) -> None:
    """Draw the share of times up to each by policy, or above it."""
    lines = ax.get_lines()
    colour_of = colours(list(times))
    for line, policy in zip(lines, times, strict=False):
        line.set_color(colour_of[policy])
    longest = 0.0
    no_times = np.empty(0)  # of a second policy, where there is none
    for line, seconds in zip(lines, [*times.values(), no_times], strict=False):
        number = len(seconds)
        shares = np.arange(1, number + 1) / max(1, number)
        if is_above:
            shares = 1 - shares
        line.set_data(np.sort(seconds), shares)
        longest = max(longest, seconds.max(initial=0))
    if longest == 0:
        longest = 1.0  # an axis needs a length
    ax.set_xlim(0, 1.03 * longest)
