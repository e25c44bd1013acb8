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
from matplotlib.patches import StepPatch
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from sarathi_lab.results.plots.style import COLOURS, use_style
from sarathi_lab.results.serving_metrics import waits

SIZE, DPI = (11.0, 4.4), 80  # inches, and pixels an inch
PLACES = {"left": 0.065, "right": 0.985, "top": 0.93, "bottom": 0.12, "hspace": 0.35}
BOTTOM = 0.8  # tokens, below which the axis ends
FEWEST = 1e-3  # share of gaps, below which the axis ends
# Dark and light, distinct without colour; hatches do not work on bars of a few pixels.
PREFILL: dict[str, Any] = {"facecolor": "#31688e", "edgecolor": "black", "linewidth": 0.15}
DECODE: dict[str, Any] = {**PREFILL, "facecolor": "#fde725"}
KINDS = {"prompt tokens": PREFILL, "decodes": DECODE}


class Picture:
    """Batches of up to two policies at the left, their times to first and between tokens at the
    right.
    """

    def __init__(self) -> None:
        use_style()
        self.figure = Figure(SIZE, DPI)
        grid = {**PLACES, "width_ratios": (2.2, 1), "wspace": 0.16}
        axes = self.figure.subplots(2, 2, gridspec_kw=grid)
        self._batches = [_Batches(ax) for ax in axes[:, 0]]
        axes[1, 0].set_xlabel("time [s]")
        axes[0, 0].legend(loc="upper right", ncols=2)
        self._ttft = _Curves(axes[0, 1], "time to first token [s]", "share of requests")
        self._tbt = _Curves(axes[1, 1], "time between tokens [ms]", "share of longer gaps")
        axes[1, 1].set(yscale="log", ylim=(FEWEST, 1))
        for ax in axes.flat:
            ax.xaxis.set_major_locator(MaxNLocator(5))
        for ax in (axes[0, 0], axes[1, 0], axes[1, 1]):
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter("{x:g}")  # powers take three times as long to typeset

    def show(
        self, iterations: Mapping[str, pd.DataFrame], requests: Mapping[str, pd.DataFrame]
    ) -> None:
        """Draw the iterations and requests (the ledger's tables) of one or two policies by name."""
        tables = iterations.values()
        longest = max(float(table.end.max()) for table in tables)
        most = max(float((one.num_prefill_tokens + one.num_decode_tokens).max()) for one in tables)
        for batches, name in zip(self._batches, [*iterations, None], strict=False):
            batches.show(name, iterations.get(name or ""), longest, most)
        times = {name: waits(table) for name, table in requests.items()}
        self._ttft.show({name: own["ttft"] for name, own in times.items()})
        gaps = {name: 1e3 * own["tbt"] for name, own in times.items()}
        self._tbt.show(gaps, complementary=True)

    def png(self) -> bytes:
        file = BytesIO()
        self.figure.savefig(file, dpi=DPI, pil_kwargs={"compress_level": 1})
        return file.getvalue()


class _Batches:
    """Bars as wide as iterations: decodes below, prompt tokens on top."""

    def __init__(self, ax: Axes) -> None:
        self._ax = ax
        ax.set(yscale="log", ylabel="tokens in the batch")
        ax.grid(axis="x", visible=False)
        self._areas = [
            ax.stairs([1], [0, 1], baseline=BOTTOM, fill=True, color=style["facecolor"], label=name)
            for name, style in KINDS.items()
        ]

    def show(
        self, name: str | None, table: pd.DataFrame | None, longest: float, most: float
    ) -> None:
        self._ax.set_title(name or "", loc="left")
        self._ax.set(xlim=(0, longest), ylim=(BOTTOM, 3 * most))
        if table is None:
            for area in self._areas:
                area.set_data([0], [0, 1])
            return
        decodes = table.num_decode_tokens.to_numpy(dtype=float)
        both = decodes + table.num_prefill_tokens.to_numpy()
        edges = table[["start", "end"]].to_numpy().ravel()  # gaps included
        for area, tokens in zip(self._areas, (both, decodes), strict=True):
            _set(area, tokens, edges)


def _set(area: StepPatch, tokens: NDArray[np.float64], edges: NDArray[np.float64]) -> None:
    heights = np.column_stack((tokens, np.zeros(len(tokens)))).ravel()[:-1]
    area.set_data(np.maximum(heights, BOTTOM), edges, BOTTOM)


class _Curves:
    """The distribution of a time under two policies."""

    def __init__(self, ax: Axes, xlabel: str, ylabel: str) -> None:
        self._ax = ax
        ax.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.02))
        self._lines = [
            ax.plot([], [], color=colour, linestyle=dashes, drawstyle="steps-post")[0]
            for colour, dashes in zip(COLOURS, ("-", "--"), strict=False)
        ]

    def show(
        self, times: Mapping[str, NDArray[np.float64]], *, complementary: bool = False
    ) -> None:
        """Draw times by policy [any number]; `complementary`: the share above, not below."""
        shown = [*times.items(), ("", np.empty(0))]
        for line, (name, own) in zip(self._lines, shown, strict=False):
            shares = np.arange(1, len(own) + 1) / max(1, len(own))
            line.set_data(np.sort(own), 1 - shares if complementary else shares)
            line.set_label(name)
        self._ax.set_xlim(0, 1.03 * max(own.max(initial=0) for own in times.values()) or 1)
        if not complementary:
            self._ax.legend(
                [line for line in self._lines if line.get_label()], list(times), loc="lower right"
            )
