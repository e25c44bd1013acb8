"""Pictures of runs: a sweep (`draw_sweep`), and runs side by side. No measuring, no file access."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results import sweep_analysis
from sarathi_lab.results.plots.style import WIDTH, finished, marker, panels
from sarathi_lab.results.plots.sweep_panel import (
    Axis,
    SweepPanel,
    is_numeric,
    short_name,
    values_of,
)
from sarathi_lab.results.sweep_analysis import text

LINES = ("-", "--", "-.", ":")
# Column of the iterations, factor and y label.
CURVES = (
    ("num_prefill_tokens", 1.0, "prompt tokens"),
    ("num_decode_tokens", 1.0, "decodes"),
    ("busy", 1e3, "iteration time [ms]"),
    ("num_waiting", 1.0, "requests waiting"),
)
NUM_MARKERS = 10
LABEL_WIDTH = 52  # characters
QUANTITIES = ["capacity", "throughput", "throughput_vs_{}", "slo_attainment", "ttft_p50"]
QUANTITIES += ["tbt_p99", "decode_time_marginal", "kv_reread_factor"]
MOST_PANELS, MOST_ROWS = 6, 3  # of quantities: without facets, with them
MOST_FACETS = 6


def draw_sweep(
    runs: pd.DataFrame,
    *,
    x: str | None = None,
    hue: str | None = None,
    facet: str | None = None,
    y: str | Sequence[str] | None = None,
) -> Figure:
    """A sweep by what it varied, a panel a quantity of `y` and a value of `facet`.

    `runs` has a row a run and flat columns (`swept`). Settings are chosen from those that vary
    unless named; a name may leave out its group, as `rate` for `workload.rate`. Numbers are at
    their places on a linear or logarithmic axis, names in rows. Points are medians over seeds and
    repetitions with their intervals; a run without the setting on the x axis is a line across.
    Raises UserError for a name that the runs don't have.
    """
    runs = runs.reset_index(drop=True)  # of tables put together rows may share a label
    base = sweep_analysis.reference(runs)
    named = [y] if isinstance(y, str) else list(y or [])
    for ratio in (f"throughput_vs_{base}", *named):
        quantity, is_ratio, to = ratio.partition("_vs_")
        runs = sweep_analysis.relative(runs, quantity, to) if is_ratio else runs
    axis = choose_axes(runs, x=x, hue=hue, facet=facet)
    facets = values_of(runs, axis.facet) if axis.facet else [None]
    names = [sweep_analysis.find_column(runs, name) for name in named]
    is_listed = not is_numeric(runs, axis.x)
    number = len(values_of(runs, axis.x)) if is_listed else 0
    most = MOST_ROWS if axis.facet else 4 if number > 8 else MOST_PANELS
    names = names or _quantities(runs, base, most)
    runs = sweep_analysis.without_repeated(runs, names)
    if axis.facet:
        columns = len(facets)
    else:
        columns = len(names) if number > 8 else min(len(names), 3 if len(names) > 4 else 2)
    rows = math.ceil(len(names) * len(facets) / columns)
    beside = 0.5 * len(values_of(runs, axis.hue)) if axis.hue else 1.0  # rows of text a name needs
    height = max(2.6, 0.9 + 0.21 * number * max(1.0, beside))
    size = (
        min(WIDTH, max(4.6, 1.2 * is_listed + (3.0 if columns > 2 else 4.2) * columns)),
        height * rows + 0.9,
    )
    figure, axes = panels(rows, columns, size, sharey="row" if is_listed and number > 8 else False)
    own = runs[axis.facet] if axis.facet else pd.Series(None, runs.index)
    free = iter(axes)
    for name in names:
        row = [SweepPanel(next(free), runs, axis, name, is_listed, names[0]) for _ in facets]
        drawn = []
        for panel, value in zip(row, facets, strict=True):
            if value is not None and name == names[0]:
                panel.ax.set_title(f"{short_name(str(axis.facet))} = {value}")
            # what is without the setting: in all panels
            drawn.append(panel.draw(runs[own.isna() | (own.map(text) == value)]))
        for panel in row:
            panel.name_axes(pd.concat(drawn))
    for ax in free:
        ax.set_axis_off()
    return _described(figure, axes, runs, names)


def choose_axes(
    runs: pd.DataFrame, *, x: str | None = None, hue: str | None = None, facet: str | None = None
) -> Axis:
    """What is on which axis: on x the setting with the most numbers, else with the most values; the
    policy, baselines included, or else the next by colour; then a panel a value. Raises UserError
    for a name that the runs don't have.
    """
    x, hue, facet = (
        sweep_analysis.find_column(runs, one) if one else None for one in (x, hue, facet)
    )
    varying = sweep_analysis.varied(runs)
    if "policy" not in varying and runs.policy.nunique() > 1:
        varying.insert(0, "policy")
    left = [one for one in varying if one not in (x, hue, facet)]
    if x is None:
        own = sweep_analysis.without_baselines(runs)
        numbers = [one for one in left if is_numeric(own, one)]
        x = max(numbers or left or ["policy"], key=lambda one: own[one].nunique())
    left = [one for one in left if one != x]
    hue = hue or (left.pop(0) if left else None)
    if facet is None and left and len(values_of(runs, left[0])) <= MOST_FACETS:
        facet = left.pop(0)
    return Axis(x, hue, facet, tuple(one for one in left if one not in (hue, facet)))


def _quantities(runs: pd.DataFrame, base: str | None, most: int) -> list[str]:
    """Those that runs have and that tell them apart."""
    names = [name.format(base) for name in QUANTITIES]
    known = [name for name in names if name in runs and runs[name].notna().any()]
    telling = [name for name in known if runs[name].max() - runs[name].min() > 0]
    return (telling or known)[:most]


def _described(
    figure: Figure, axes: Sequence[Axes], runs: pd.DataFrame, names: Sequence[str]
) -> Figure:
    """Which model and device, what points and bars are, and one legend for all panels."""
    own = sweep_analysis.without_baselines(runs)
    parts = [
        sorted({text(value) for value in own[name]})
        for name in ("model", "dtype", "device")
        if name in own
    ]
    said = [" or ".join(one) for one in parts if len(one) <= 2]
    title = ", ".join(said[:-1]) + f" on {said[-1]}" if len(said) > 1 else " ".join(said)
    if note := sampling(runs):
        title += f"\n{note}"
    if any("_vs_" in name for name in names) and (level := sweep_analysis.noise(runs)) > 1:
        title += f"; hollow: not told apart from 1 (equal work differed by up to {level:.2f} times)"
    base = sweep_analysis.reference(runs)
    if base is not None and sweep_analysis.replays_differ(runs, base).any():
        title += f"\nCUDA graphs had different shares in the iterations of {base} and of others"
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        ncols = min(4, len(handles))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=ncols)
    return finished(figure, title)


def sampling(runs: pd.DataFrame) -> str:
    """What a point and its bar are; nothing where every point is one run."""
    own = sweep_analysis.without_baselines(runs)
    over = [name for name in sweep_analysis.SAMPLES if name in own and own[name].nunique() > 1]
    if not over:
        return ""
    table = sweep_analysis.medians(own, ["policy", *sweep_analysis.varied(own)], "throughput")
    number, confidence = int(table["num_samples"].min()), table["confidence"].min()
    words = " and ".join(f"{name}s" for name in over)
    return f"medians of {number} {words} with their {confidence:.0%} interval"


def curves(runs: Mapping[str, pd.DataFrame], x: str = "iteration") -> Figure:
    """What each run's iterations (tables by its name) held and took, against `x`: "iteration", or
    "end" for the time.
    """
    shown = [curve for curve in CURVES if any(curve[0] in table for table in runs.values())]
    figure, axes = panels(len(shown), 1, (9, 1.9 * len(shown) + 0.8), sharex=True)
    for ax, (column, scale, words) in zip(axes, shown, strict=True):
        for i, (name, table) in enumerate(runs.items()):
            if column in table and x in table:
                ax.plot(
                    table[x],
                    scale * table[column],
                    label=name,
                    linestyle=LINES[i % len(LINES)],
                    marker=marker(i),
                    markersize=4,
                    markevery=max(1, len(table) // NUM_MARKERS),
                    color=f"C{i}",  # the same in all axes, whichever columns the runs before have
                    # an iteration lasts until its end
                    drawstyle="steps-pre" if x == "end" else "default",
                )
        ax.set_ylabel(words)
    axes[-1].set_xlabel("time [s]" if x == "end" else x)
    # Below all, wrapped: a single run is called by all its settings.
    handles, labels = axes[0].get_legend_handles_labels()
    wrapped = [textwrap.fill(label, LABEL_WIDTH, break_on_hyphens=False) for label in labels]
    figure.legend(handles, wrapped, loc="outside lower center", ncols=2)
    return finished(figure)
