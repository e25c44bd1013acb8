"""The style that all pictures share: colours, panels, axis names, legends."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from sarathi_lab.config.paths import CONF

AXIS_NAMES = {
    "chunk": "chunk size [tokens]",
    "pd_ratio": "P:D, prompt tokens per output token",
    "seq_len": "sequence length P + D [tokens]",
    "workload.prompt_len": "prompt [tokens]",
    "workload.output_len": "output [tokens]",
    "batch": "batch size",
    "threads": "threads of the CPU",
    "workload.rate": "request rate [1/s]",
    "workload.num_requests": "requests",
    "cache.num_blocks": "blocks of the KV cache",
    "executor.pipeline_parallel": "pipeline stages",
    "executor.tensor_parallel": "tensor-parallel devices",
}
SHORT_NAMES = {"pd_ratio": "P:D", "seq_len": "P + D", "num_requests": "requests"}
# Each policy has the colour of its place here; the first ones are easiest to distinguish.
FIRST = (
    *("sarathi", "orca", "sarathi_serve", "prefill_first"),
    *("vllm_v1", "sglang", "splitfuse", "request_level"),
)
POLICIES = tuple(dict.fromkeys([*FIRST, *sorted(path.stem for path in CONF.glob("policy/*.yaml"))]))
MARKERS = tuple("os^DvPXp<>")  # of series, which are distinct without colour, too
LINES: Mapping[str, Any] = {"measured": "-", "simulated": (0, (5, 1.5)), "analytic": (0, (1, 1))}
COLOURS = (  # seaborn's palette for the colour-blind
    *("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc"),
    *("#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"),
)
MORE = np.concatenate([plt.get_cmap(name)(np.arange(20)) for name in ("tab20b", "tab20c")])
PALETTE = (*COLOURS, *map(to_hex, 0.8 * MORE[:, :3]))  # darker: the palest vanish on white
BASELINES = {"baseline": "request_level"}  # the paper's word
PALEST = 0.55  # share of white, or of black, in the last shade of a colour
NUMBER = re.compile(r"(?:C ?= ?)?([\d.]+)")
WIDTH = 9.6  # inches of the widest picture; a page shows it at some 830 pixels
LETTER, KEY, LINE = 0.07, 0.62, 0.19  # inches of a legend's letter, key and line
LONGEST_KEY = 44  # letters of a line in a legend
MOST_TICKS = 9  # places along x that are each labelled
# seaborn's style as matplotlib ships it: every sweep ends in a picture, and importing seaborn takes
# longer than drawing. Markers keep their edges: the paper's points are hollow.
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
    """Switch matplotlib to the lab's style."""
    plt.style.use(list(STYLES))


def panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure of `size` (inches) and its axes, row by row."""
    use_style()
    figure, axes = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **options
    )
    for ax in axes.flat:
        ax.spines[:].set_in_layout(False)  # saves placing ticks for the layout
    return figure, list(axes.flat)


def inches_wide(ax: Axes) -> float:
    """Return the width of an axes before it is laid out."""
    return float(ax.get_window_extent().width / plt.rcParams["figure.dpi"])


def short_name(setting: str) -> str:
    """Return what titles and legends call a setting, without its group."""
    name = setting.rpartition(".")[2]
    return SHORT_NAMES.get(name, name.replace("_", " "))


def marker(i: int) -> str:
    """Return the marker of the `i`-th series."""
    return MARKERS[i % len(MARKERS)]


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name: a policy's everywhere, in shades for several names with it
    ("sarathi, chunk 256"); numbers from dark to light; for others the free ones of `COLOURS`.
    """
    numbers = [float(found[1]) for name in names if (found := NUMBER.fullmatch(name))]
    if names and len(numbers) == len(names):
        ranks = np.argsort(np.argsort(numbers)) / max(1, len(names) - 1)
        return dict(zip(names, map(to_hex, plt.get_cmap("viridis")(0.85 * ranks)), strict=True))
    policies = {name: policy for name in names if (policy := _policy_in(name))}
    known: dict[str, str] = {}
    for policy in dict.fromkeys(policies.values()):
        same = sorted((one for one in names if policies.get(one) == policy), key=len)
        known |= zip(same, _shades(PALETTE[POLICIES.index(policy)], len(same)), strict=True)
    others = [name for name in names if name not in known]
    used = {PALETTE[POLICIES.index(policy)] for policy in policies.values()}
    free = [one for one in COLOURS if one not in used] or list(COLOURS)
    known |= {name: free[i % len(free)] for i, name in enumerate(others)}
    return {name: known[name] for name in names}


@cache
def _policy_in(name: str) -> str | None:
    """Return the policy that a name is or contains, the longest one."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower())
    if name in POLICIES:
        return name
    words = [*sorted(POLICIES, key=len, reverse=True), *BASELINES]
    found = (one for one in words if re.search(rf"(?<![a-z0-9]){one}(?![a-z])", plain))
    return next((BASELINES.get(one, one) for one in found), None)


def _shades(colour: str, number: int) -> list[str]:
    rgb = np.array(to_rgb(colour))
    end = np.full(3, float(rgb.mean() < 0.6))  # white, or black for a pale colour
    return [to_hex(rgb + share * (end - rgb)) for share in np.linspace(0, PALEST, number)]


def tick_in_steps(axis: Axis) -> None:
    """Label a logarithmic axis at some steps of every decade, and evenly below a factor of 3."""
    low, high = axis.get_view_interval()
    subs = {5: (1, 1.5, 2, 3, 4, 5, 7), 10: (1, 2, 3, 5, 7), 50: (1, 2, 5), 500: (1, 3)}
    chosen = next((subs[most] for most in subs if high / low < most), (1,))
    steps = MaxNLocator(4, steps=[1, 2, 5, 10], min_n_ticks=3)
    axis.set_major_locator(LogLocator(subs=chosen) if high / low > 3 else steps)
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def scale_x(ax: Axes, places: NDArray[np.float64], *, is_log: bool) -> None:
    """Scale the x axis for sorted numbers, each labelled where all labels have room."""
    if is_log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
    at, labels = np.log(places) if is_log else places, [f"{x:g}" for x in places]
    room = LETTER / inches_wide(ax) * max(map(len, labels)) * np.ptp(at)
    if len(places) <= MOST_TICKS and (len(places) == 1 or np.diff(at).min() >= room):
        ax.set_xticks(places, labels)
    elif not is_log:
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=bool((places == places.round()).all())))


def legend_below(figure: Figure, keys: Iterable[Artist], title: str = "") -> None:
    """Add one legend below all panels, as wide as they are; the figure grows by its lines."""
    if keys := list(keys):
        for key in keys:
            key.set_label(textwrap.fill(str(key.get_label()), LONGEST_KEY))
        labels = [str(key.get_label()).split("\n") for key in keys]
        letters = max(len(line) for lines in labels for line in lines)
        columns = int(figure.get_figwidth() / (KEY + LETTER * letters))
        columns = max(1, min(columns, len(keys)))
        num_lines = -(-sum(map(len, labels)) // columns) + len(title.splitlines())
        figure.set_figheight(figure.get_figheight() + LINE * num_lines)
        figure.legend(handles=keys, loc="outside lower center", ncols=columns, title=title)


def keys_of(axes: Iterable[Axes]) -> list[Artist]:
    """Return the labelled artists of all axes, one for each label."""
    keys: dict[str, Artist] = {}
    for ax in axes:
        for key, label in zip(*ax.get_legend_handles_labels(), strict=True):
            keys.setdefault(label, key)
    return list(keys.values())


def finished(figure: Figure, title: str = "") -> Figure:
    """Close the figure, which a notebook would draw twice otherwise, and return it."""
    if title:
        width = int(10 * figure.get_figwidth())  # characters
        lines = [textwrap.fill(one, width, break_on_hyphens=False) for one in title.split("\n")]
        figure.suptitle("\n".join(lines))
    plt.close(figure)
    return figure
