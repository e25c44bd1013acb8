"""The style that all pictures share: colours, panels, axis names, legends."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import cycle
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
from sarathi_lab.results.table import UNITS, heading

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
SHORT_NAMES = {"pd_ratio": "P:D", "seq_len": "P + D", "num_requests": "requests counted"}
# Each policy has the colour of its place here; the first ones are easiest to distinguish.
FIRST = (
    *("sarathi", "orca", "sarathi_serve", "prefill_first"),
    *("vllm_v1", "sglang", "splitfuse", "request_level"),
)
OPTIONS = sorted(path.stem for path in CONF.glob("policy/*.yaml"))
POLICIES = tuple(dict.fromkeys([*FIRST, *OPTIONS]))  # each once
MARKERS = tuple("os^DvPXp<>")  # of series, which are distinct without colour, too
LINES: Mapping[str, Any] = {"measured": "-", "simulated": (0, (5, 1.5)), "analytic": (0, (1, 1))}
COLOURS = (  # seaborn's palette for the colour-blind
    *("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc"),
    *("#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"),
)
RAINBOWS = [plt.get_cmap(name)(np.arange(20)) for name in ("tab20b", "tab20c")]
MORE = np.concatenate(RAINBOWS)
DARKER = 0.8 * MORE[:, :3]  # the palest vanish on white
PALETTE = (*COLOURS, *map(to_hex, DARKER))
BASELINES = {"baseline": "request_level"}  # the paper's word
PALEST = 0.55  # share of white, or of black, in the last shade of a colour
NUMBER = re.compile(r"(?:C ?= ?)?([\d.]+)")
WIDTH = 9.6  # inches of the widest picture; a page shows it at some 830 pixels
# Inches.
LETTER = 0.07  # width of a letter of labels and legends
KEY = 0.62  # width of a legend's key, with the space around it
LINE = 0.19  # height of a line of a legend
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
    _, _, name = setting.rpartition(".")
    in_words = name.replace("_", " ")
    return SHORT_NAMES.get(name, in_words)


def axis_name(name: str) -> str:
    """Return the label of an axis of a setting, or of a quantity in its SI unit."""
    if name in AXIS_NAMES:
        return AXIS_NAMES[name]
    if name not in UNITS:
        return short_name(name)
    label, _, _ = heading(name).partition(" [")
    unit = UNITS[name]
    if not unit:
        return label
    return f"{label} [{unit}]"


def marker(i: int) -> str:
    """Return the marker of the `i`-th series."""
    return MARKERS[i % len(MARKERS)]


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name: a policy's everywhere, in shades for several names with it
    ("sarathi, chunk 256"); numbers from dark to light; for others the free ones of `COLOURS`.
    """
    numbers = []
    names_of: dict[str | None, list[str]] = {}  # by policy
    for name in names:
        policy = _policy_in(name)
        names_of.setdefault(policy, []).append(name)
        if number := NUMBER.fullmatch(name):
            numbers.append(float(number[1]))
    if len(numbers) == len(names):
        return _colours_of_numbers(names, numbers)
    others = names_of.pop(None, [])
    colour_of: dict[str, str] = {}
    for policy, same in names_of.items():
        place = POLICIES.index(str(policy))
        shades = _shades(PALETTE[place], len(same))
        # The policy's name alone has its own colour, names with settings have paler ones.
        shortest_first = sorted(same, key=len)
        colour_of |= zip(shortest_first, shades, strict=True)
    used = set(colour_of.values())
    free = []
    for colour in COLOURS:
        if colour not in used:
            free.append(colour)
    in_turn = cycle(free or COLOURS)
    colour_of |= zip(others, in_turn, strict=False)
    return {name: colour_of[name] for name in names}


def _colours_of_numbers(names: Sequence[str], numbers: Sequence[float]) -> dict[str, str]:
    """Return colours from dark to light by the rank of each name's number."""
    order = np.argsort(numbers)
    ranks = np.argsort(order)
    last = max(1, len(numbers) - 1)
    viridis = plt.get_cmap("viridis")
    shades = {}
    for name, rank in zip(names, ranks, strict=True):
        share = rank / last
        shade = viridis(0.85 * share)  # beyond, yellow is pale on white
        shades[name] = to_hex(shade)
    return shades


@cache
def _policy_in(name: str) -> str | None:
    """Return the policy that a name is or contains, the longest one."""
    if name in POLICIES:
        return name
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower())
    longest_first = sorted(POLICIES, key=len, reverse=True)
    for policy in [*longest_first, *BASELINES]:
        if re.search(rf"(?<![a-z0-9]){policy}(?![a-z])", plain):
            return BASELINES.get(policy, policy)
    return None


def _shades(colour: str, number: int) -> list[str]:
    """Return a colour in so many shades, from itself to a pale one."""
    rgb = np.array(to_rgb(colour))
    shades = []
    for share in np.linspace(0, PALEST, number):
        to_white = 1 - rgb
        shade = rgb + share * to_white
        shades.append(to_hex(shade))
    return shades


def tick_in_steps(axis: Axis) -> None:
    """Label a logarithmic axis at some steps of every decade, and evenly below a decade."""
    low, high = axis.get_view_interval()
    ratio = high / low
    if ratio < 10:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3))
    elif ratio < 500:
        axis.set_major_locator(LogLocator(subs=(1, 3)))
    else:
        axis.set_major_locator(LogLocator())
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def scale_x(ax: Axes, places: NDArray[np.float64], *, is_log: bool) -> None:
    """Scale the x axis for sorted numbers, each labelled where all labels have room."""
    at = places
    if is_log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        at = np.log(places)
    labels = [f"{x:g}" for x in places]
    letters = max(map(len, labels))
    range_of_places = max(np.ptp(at), 1e-9)
    inches_of_unit = inches_wide(ax) / range_of_places
    inches_apart = inches_of_unit * np.diff(at)
    is_apart = inches_apart >= LETTER * letters
    has_room = is_apart.all()
    if has_room and len(places) <= MOST_TICKS:
        ax.set_xticks(places, labels)
    elif not is_log:
        ax.xaxis.set_major_locator(MaxNLocator(4))


def legend_below(figure: Figure, keys: Sequence[Artist], title: str = "") -> None:
    """Add one legend below all panels, as wide as they are; the figure grows by its lines."""
    if not keys:
        return
    lines = []
    for key in keys:
        name = str(key.get_label())
        label = textwrap.fill(name, LONGEST_KEY)
        key.set_label(label)
        lines += label.split("\n")
    letters = max(map(len, lines))
    width_of_key = KEY + LETTER * letters
    num_fitting = int(figure.get_figwidth() / width_of_key)
    columns = max(1, min(num_fitting, len(keys)))
    num_lines = math.ceil(len(lines) / columns)
    num_lines += len(title.splitlines())
    height = figure.get_figheight() + LINE * num_lines
    figure.set_figheight(height)
    figure.legend(
        handles=list(keys),
        loc="outside lower center",
        ncols=columns,
        title=title,
    )


def finished(figure: Figure, title: str = "") -> Figure:
    """Close the figure, which a notebook would draw twice otherwise, and return it."""
    if title:
        letters = int(10 * figure.get_figwidth())
        lines = []
        for line in title.split("\n"):
            wrapped = textwrap.fill(line, letters, break_on_hyphens=False)
            lines.append(wrapped)
        figure.suptitle("\n".join(lines))
    plt.close(figure)
    return figure
