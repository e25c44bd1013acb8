"""What all pictures share: the look, panels, axes' names, and how a picture is handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

AXIS_NAMES = {
    "chunk": "chunk size [tokens]",
    "pd_ratio": "P:D, prompt tokens per output token",
    "seq_len": "sequence length P + D [tokens]",
    "batch": "batch size",
    "threads": "threads of the CPU",
}
# The policies that most pictures have; others take the colours that are left.
POLICIES = {"sarathi": 0, "orca": 1, "request_level": 7, "sarathi_serve": 2, "prefill_first": 3}
POLICIES |= {"vllm_v1": 4, "sglang": 5, "splitfuse": 6, "trtllm": 8, "tgi": 9}
MARKERS = tuple("os^DvPX*<>")  # by series, so that print without colour tells them apart

COLOURS = (  # seaborn's, that people who are colour-blind tell apart
    *("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc"),
    *("#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"),
)
# seaborn's look as matplotlib ships it: every sweep ends in a picture, and importing seaborn itself
# takes two seconds. Markers keep their edges: the paper's points are hollow.
STYLES: tuple[str | dict[str, Any], ...] = (
    "seaborn-v0_8-whitegrid",
    "seaborn-v0_8-paper",
    {"axes.prop_cycle": plt.cycler(color=COLOURS), "lines.markeredgewidth": 1.0},
)


def use_style() -> None:
    """The lab's look: colour-blind safe, grid behind, readable in print."""
    plt.style.use(list(STYLES))


def panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` (inches) in the lab's look, and its axes, row by row."""
    use_style()
    figure, axes = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **options
    )
    return figure, list(axes.flat)


def marker(i: int) -> str:
    """That of the `i`-th series."""
    return MARKERS[i % len(MARKERS)]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: a policy has the same in all pictures."""
    free = [i for i in range(len(COLOURS)) if i not in {POLICIES.get(name) for name in names}]
    free, taken = free or list(range(len(COLOURS))), dict[str, str]()
    for name in names:
        place = POLICIES.get(name)
        taken[name] = COLOURS[free[len(taken) % len(free)] if place is None else place]
    return taken


def tick_in_steps(axis: Axis) -> None:
    """Name 1, 2 and 5 of every decade on a logarithmic axis, or 1 where there are many decades."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 500 * low else (1.0,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def finished(figure: Figure, title: str = "") -> Figure:
    """The figure, closed: callers hold it, and a notebook would draw an open one once more."""
    if title:
        figure.suptitle(title)
    plt.close(figure)
    return figure
