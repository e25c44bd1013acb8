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

SIZE, DPI = (11.0, 4.4), 80  # inches, and pixels an inch
PLACES = {"left": 0.065, "right": 0.985, "top": 0.93, "bottom": 0.12, "hspace": 0.35}
BOTTOM = 0.8  # tokens, below which the axis ends
FEWEST = 1e-3  # share of gaps, below which the axis ends
# Dark and light, distinct without colour; hatches do not work on bars of a few pixels.
PREFILL: dict[str, Any] = {"facecolor": "#31688e", "edgecolor": "black", "linewidth": 0.15}
DECODE: dict[str, Any] = {**PREFILL, "facecolor": "#fde725"}
KINDS = {"prompt tokens": PREFILL, "decodes": DECODE}
COLUMNS = ["start", "end", "num_decode_tokens", "num_prefill_tokens"]
NONE = ("", pd.DataFrame([[0, 0, 0, 0]], columns=COLUMNS))


class Picture:
    """Batches of up to two policies at the left, their times to first and between tokens at the
    right.
    """

    def __init__(self) -> None:
        use_style()
        self.figure = Figure(SIZE, DPI)
        grid = {**PLACES, "width_ratios": (2.2, 1), "wspace": 0.16}
        axes = self.figure.subplots(2, 2, gridspec_kw=grid)
        self._batches, (self._ttft, self._tbt) = axes[:, 0], axes[:, 1]
        for ax in self._batches:
            ax.set(yscale="log", ylabel="tokens of each kind")
            ax.grid(axis="x", visible=False)
            for name, style in KINDS.items():
                bars = {"baseline": BOTTOM, "fill": True, "color": style["facecolor"]}
                ax.stairs([1], [0, 1], **bars, label=name)
        axes[0, 0].legend(loc="upper right", ncols=2)
        axes[1, 0].set_xlabel("time [s]")
        for ax in (self._ttft, self._tbt):
            for dashes in ("-", "--"):
                ax.plot([], [], linestyle=dashes, drawstyle="steps-post")
        self._ttft.set(xlabel="time to first token [s]", ylabel="share of requests", ylim=(0, 1.02))
        self._tbt.set(xlabel="time between tokens [ms]", ylabel="share of longer gaps")
        self._tbt.set(yscale="log", ylim=(FEWEST, 1))
        for ax in axes.flat:
            ax.xaxis.set_major_locator(MaxNLocator(5))
        for ax in (*self._batches, self._tbt):
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter("{x:g}")  # powers take three times as long to typeset

    def show(
        self, iterations: Mapping[str, pd.DataFrame], requests: Mapping[str, pd.DataFrame]
    ) -> None:
        """Draw the iterations and requests (the ledger's tables) of one or two policies by name."""
        tables = iterations.values()
        longest = max(float(table.end.max()) for table in tables)
        most = max(int(one[COLUMNS[2:]].to_numpy().max()) for one in tables)
        for ax in self._batches:
            ax.set(xlim=(0, longest), ylim=(BOTTOM, 3 * most))
        for ax, (name, table) in zip(self._batches, [*iterations.items(), NONE], strict=False):
            _show_batches(ax, name, table)
        times = {name: waits(table) for name, table in requests.items()}
        _show_shares(self._ttft, {name: waited["ttft"] for name, waited in times.items()})
        self._ttft.legend(self._ttft.get_lines()[: len(times)], list(times), loc="lower right")
        gaps = {name: 1e3 * waited["tbt"] for name, waited in times.items()}
        _show_shares(self._tbt, gaps, is_above=True)

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
    kinds = table[["num_prefill_tokens", "num_decode_tokens"]].to_numpy(dtype=float).T
    for area, tokens in zip(ax.patches, kinds, strict=True):
        heights = np.column_stack((tokens, np.zeros(len(tokens)))).ravel()[:-1]
        area.set_data(np.maximum(heights, BOTTOM), edges, BOTTOM)


def _show_shares(
    ax: Axes, times: Mapping[str, NDArray[np.float64]], *, is_above: bool = False
) -> None:
    """Draw the share of times up to each by policy, or above it."""
    for line, colour in zip(ax.get_lines(), colours(list(times)).values(), strict=False):
        line.set_color(colour)
    for line, seconds in zip(ax.get_lines(), [*times.values(), np.empty(0)], strict=False):
        shares = np.arange(1, len(seconds) + 1) / max(1, len(seconds))
        line.set_data(np.sort(seconds), 1 - shares if is_above else shares)
    ax.set_xlim(0, 1.03 * max(seconds.max(initial=0) for seconds in times.values()) or 1)
