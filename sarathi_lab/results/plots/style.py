"""What all pictures share: the look, panels, axes' names, and how a picture is handed over."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

AXIS_NAMES = {
    "chunk": "chunk size [tokens]",
    "pd_ratio": "P:D, prompt tokens per output token",
    "seq_len": "sequence length P + D [tokens]",
    "batch": "batch size",
    "threads": "threads of the CPU",
    "workload.rate": "request rate [1/s]",
    "workload.num_requests": "requests",
    "cache.num_blocks": "blocks of the KV cache",
    "executor.pipeline_parallel": "pipeline stages",
    "executor.tensor_parallel": "tensor-parallel devices",
}
# All policies of the lab, each with the colour of its place in `PALETTE`.
POLICIES = (
    *("sarathi", "orca", "sarathi_serve", "prefill_first", "vllm_v1", "sglang", "splitfuse"),
    *("request_level", "trtllm", "tgi", "ascend", "ascend_dynamic", "ascend_v0_9", "chunked_only"),
    *("fastdeploy", "hybrid_only", "lightllm", "llama_cpp", "lmdeploy", "lmdeploy_pytorch"),
    *("nano_vllm", "openvino", "p_pas", "sarathi_serve_dynamic", "transformers_fifo"),
    *("transformers_prefill_first", "vllm_v0_chunked"),
    *("slo_budget", "niyama", "sliding_serve", "lprs", "chunk_beside_decodes", "dynamic_chunks"),
    *("highest_response_ratio", "shortest_remaining", "lars", "preflow", "short_request_first"),
    *("reserve_for_short", "layered_prefill"),
)
MARKERS = tuple("os^DvPX*<>")  # by device or series, so that print without colour tells them apart
# By source; what is simulated has others where it is shown at more than one level.
LINES: Mapping[str, Any] = {"measured": "-", "simulated": (0, (5, 1.5)), "analytic": (0, (1, 1))}

COLOURS = (  # seaborn's, that people who are colour-blind tell apart
    *("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc"),
    *("#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"),
)
MORE = (plt.get_cmap(name)(np.arange(20)) for name in ("tab20b", "tab20c"))
PALETTE = (*COLOURS, *(to_hex(colour) for colours in MORE for colour in colours))
WIDTH = 9.6  # inches of the widest picture; a page shows it at some 830 pixels
# seaborn's look as matplotlib ships it: every sweep ends in a picture, and importing seaborn itself
# takes two seconds. Markers keep their edges: the paper's points are hollow.
STYLES: tuple[str | dict[str, Any], ...] = (
    "seaborn-v0_8-whitegrid",
    "seaborn-v0_8-paper",
    {
        "axes.prop_cycle": plt.cycler(color=COLOURS),
        "lines.markeredgewidth": 1.0,
        **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 10),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 9),
        **dict.fromkeys(("legend.fontsize", "legend.title_fontsize"), 9),
        "figure.titlesize": 11,
        "figure.titleweight": "bold",
    },
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
    for ax in axes.flat:
        ax.spines[:].set_in_layout(False)  # they end where axes do; to say so takes placing ticks
    return figure, list(axes.flat)


def marker(i: int) -> str:
    """That of the `i`-th series."""
    return MARKERS[i % len(MARKERS)]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: a policy of the lab has the same in all pictures, other names those
    of `COLOURS` that no policy among them has.
    """
    known = {name: PALETTE[POLICIES.index(name)] for name in names if name in POLICIES}
    others = [name for name in names if name not in known]
    free = [one for one in COLOURS if one not in known.values()] or list(COLOURS)
    return known | {name: free[i % len(free)] for i, name in enumerate(others)}


def shades(colour: str, number: int) -> list[str]:
    """`number` shades of a colour, from dark to light, the colour itself for one."""
    if number == 1:
        return [colour]
    ramp = LinearSegmentedColormap.from_list(colour, ["black", colour, "white"])
    return [to_hex(ramp(at)) for at in np.linspace(0.35, 0.7, number)]


def tick_in_steps(axis: Axis) -> None:
    """Name 1, 2 and 5 of every decade on a logarithmic axis, more within one, 1 and 3 from two
    decades on, or 1 alone where there are many; equal steps where it is as good as linear.
    """
    low, high = axis.get_view_interval()
    wide = high / low
    subs: tuple[float, ...] = (1.0, 2.0, 5.0) if wide < 50 else (1.0, 3.0) if wide < 500 else (1.0,)
    subs = (1.0, 2.0, 3.0, 5.0, 7.0) if wide < 10 else subs
    subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if wide < 5 else subs
    steps = MaxNLocator(4, steps=[1, 2, 5, 10], min_n_ticks=3)
    axis.set_major_locator(LogLocator(subs=subs) if wide > 3 else steps)
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())  # of no size and without names, but each is laid out


def finished(figure: Figure, title: str = "") -> Figure:
    """The figure, closed: callers hold it, and a notebook would draw an open one once more."""
    if title:
        width = int(10 * figure.get_figwidth())  # characters
        lines = [textwrap.fill(one, width, break_on_hyphens=False) for one in title.split("\n")]
        figure.suptitle("\n".join(lines))
    plt.close(figure)
    return figure
