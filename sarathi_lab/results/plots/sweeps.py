"""The picture of a sweep by what it varied, and that of the iterations of runs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWNBASE, CARETUPBASE, MarkerStyle
from matplotlib.ticker import MaxNLocator, NullLocator

from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.conclusion import arrive_over_time
from sarathi_lab.results.intervals import level_of
from sarathi_lab.results.plots import style
from sarathi_lab.results.sweep_analysis import is_numeric, text, values_of
from sarathi_lab.results.table import display_unit, less_is_better

QUANTITIES = ["capacity", "throughput", "tbt_p99", "throughput_vs_{}", "ttft_p50"]
QUANTITIES += ["decode_time_alone", "decode_time_marginal", "kv_reread_factor"]
# Where requests arrive over time; both in the order in which panels are kept.
OVER_TIME = ["capacity", "slo_attainment", "tbt_p99", "ttft_p50", "goodput", "throughput"]
MOST_PANELS, MOST_ROWS = 7, 3  # of quantities: without facets, with them
MOST_FACETS = 6
LEAST_RANGE = 0.25  # of the largest value, of a linear axis: noise shall not look like a trend
MANY = 8  # names in rows from which all panels share them
WIDE_RANGE = 20  # largest over smallest from which an axis is logarithmic
GEOMETRIC = 1.5  # ratio of neighbours on x from which their axis is logarithmic
VALUES = ["value", "low", "high"]
FIXED = ("batch", "pd_ratio", "seq_len", "chunk", "num_requests")  # sizes that the title names


@dataclass(frozen=True)
class SweepAxes:
    """Settings on the axes of a sweep's picture; `others` vary, too, and have series."""

    x: str
    hue: str | None
    facet: str | None
    others: tuple[str, ...]


def choose_axes(
    runs: pd.DataFrame, *, x: str | None = None, hue: str | None = None, facet: str | None = None
) -> SweepAxes:
    """Choose what is not named: x is the setting with the most numbers, else with the most values;
    hue is the policy, else the next; then facet. Raises UserError for an unknown name.
    """
    x, hue, facet = (analysis.find_column(runs, one) if one else None for one in (x, hue, facet))
    varied = analysis.varied(runs)
    if runs.policy.nunique() > 1:  # baselines included
        varied = list(dict.fromkeys(["policy", *varied]))
    left = [one for one in varied if one not in (x, hue, facet)]
    if x is None:
        swept = analysis.without_baselines(runs)
        numbers = [one for one in left if is_numeric(swept, one)]
        x = max(numbers or left or ["policy"], key=lambda one: swept[one].nunique())
        left = [one for one in left if one != x]
    hue = hue or (left.pop(0) if left else None)
    if facet is None and left and len(values_of(runs, left[0])) <= MOST_FACETS:
        facet = left.pop(0)
    return SweepAxes(x, hue, facet, tuple(left))


def draw_sweep(
    runs: pd.DataFrame,
    *,
    x: str | None = None,
    hue: str | None = None,
    facet: str | None = None,
    y: str | Sequence[str] | None = None,
) -> Figure:
    """Draw a sweep by what it varied, a panel for each quantity of `y` and value of `facet`.

    `runs` has a row per run (`load_runs`). A name may leave out its group, as `rate` for
    `workload.rate`. Numbers are at their places on a linear or logarithmic axis, names in rows.
    Points are medians over seeds and repetitions with their intervals, ratios that are not decided
    hollow; a run without the setting on x is a line across. Raises UserError for an unknown name.
    """
    runs = runs.reset_index(drop=True)  # rows of concatenated tables may share a label
    runs.attrs.clear()  # which each step would copy
    runs = analysis.with_short_devices(runs)
    base = analysis.reference(runs)
    named = [y] if isinstance(y, str) else list(y or [])
    for ratio in (f"throughput_vs_{base}", *named):
        quantity, is_ratio, to = ratio.partition("_vs_")
        runs = analysis.relative(runs, quantity, to) if is_ratio else runs
    axes = choose_axes(runs, x=x, hue=hue, facet=facet)
    num_names = 0 if is_numeric(runs, axes.x) else len(values_of(runs, axes.x))
    most = MOST_ROWS if axes.facet else 4 if num_names > MANY else MOST_PANELS
    names = [analysis.find_column(runs, name) for name in named] or _quantities(runs, base, most)
    runs = analysis.without_repeated(runs, names)
    listed = _in_rows(runs, axes, names[0]) if num_names else []
    rows = _rows(runs, axes, names, listed)
    facets = values_of(runs, axes.facet) if axes.facet else ["-"]
    figure, grid = _grid(runs, axes, len(names), len(facets), num_names)
    panels_of = dict(zip(product(names, facets), grid, strict=False))
    known = rows.dropna(subset=["value"]).sort_values("at", kind="stable")
    in_panel = {
        (name, value): known[(known["quantity"] == name) & known["facet"].isin([value, "-"])]
        for name, value in panels_of
    }
    for (name, value), ax in panels_of.items():
        panel = in_panel[name, value]
        for _, line in panel.groupby("series", sort=False):
            _draw_series(ax, line, is_listed=bool(listed), has_label=axes.hue is not None)
        if "_vs_" in name:
            (ax.axvline if listed else ax.axhline)(1.0, color="black", ls=":", lw=1.0)
    for (name, value), ax in panels_of.items():  # once all is drawn: facets share their limits
        _set_axes(ax, rows[rows["quantity"] == name], axes.x, listed)
        if axes.facet and name == names[0]:
            ax.set_title(f"{style.short_name(axes.facet)} = {value}")
        if axes.facet:
            ax.label_outer()
        if not listed:
            _mark_clipped(ax, in_panel[name, value])
    for ax in grid[len(panels_of) :]:
        ax.set_axis_off()
    style.legend_below(figure, style.keys_of(grid))
    return style.finished(figure, _title(runs, names))


def policies(runs: pd.DataFrame) -> Figure:
    """Draw latency and throughput of policies, the shortest gaps between tokens on top."""
    return draw_sweep(runs, x="policy", y=["tbt_p99", "ttft_p50", "ttft_p99", "throughput"])


def _rows(
    runs: pd.DataFrame, axes: SweepAxes, names: Sequence[str], listed: Sequence[str]
) -> pd.DataFrame:
    """Return the medians of all quantities in their displayed unit, with that `heading`, the value
    of the `facet`, the place `at` which they are drawn, the `series` (settings other than x) with
    its colour and marker.
    """
    hue, executor = axes.hue or axes.x, ["executor"] * ("executor" in runs)
    settings = [axes.x, hue, axes.facet, *axes.others, "policy", *executor]
    rows = analysis.medians(runs, list(dict.fromkeys(filter(None, settings))), *names)
    units = {name: display_unit(name, float(runs[name].max())) for name in names}
    rows[VALUES] = rows[VALUES].mul([units[name][0] for name in rows["quantity"]], axis=0)
    # A difference of times that may be equal.
    rows.loc[(rows["quantity"] == "decode_time_marginal") & (rows["value"] <= 0), VALUES] = math.nan
    colour = style.colours(values_of(runs, hue))
    is_in_series = axes.hue or listed
    named = [hue, *axes.others] if is_in_series else []
    series = [_label(row, named) for _, row in rows.iterrows()]
    order = list(dict.fromkeys(series))
    at = rows[axes.x]
    if listed:
        shifts = [0.6 * ((order.index(one) + 0.5) / len(order) - 0.5) for one in series]
        at = at.map(text).map(listed.index) + (shifts if axes.hue else 0.0)
    return rows.assign(
        at=at.astype(float),
        heading=[f"{units[name][1]} {_arrow(name)}" for name in rows["quantity"]],
        facet=rows[axes.facet].map(text) if axes.facet else "-",
        series=series,
        colour=rows[hue].map(text).map(colour).fillna("C0") if is_in_series else "C0",
        marker=[style.marker(order.index(one)) if axes.hue else style.marker(0) for one in series],
    )


def _arrow(quantity: str) -> str:
    return f"({'↓' if less_is_better(quantity) else '↑'}\N{NO-BREAK SPACE}better)"


def _label(row: Any, names: Sequence[str]) -> str:
    values = {name: value for name in names if (value := text(row[name])) != "-"}
    plain = ("policy", *analysis.IDENTITY)
    words = {name: "" if name in plain else f"{style.short_name(name)} " for name in values}
    return ", ".join(words[name] + value for name, value in values.items())


def _in_rows(runs: pd.DataFrame, axes: SweepAxes, quantity: str) -> list[str]:
    """Return the names in rows from below: of policies the best by `quantity` on top."""
    names = list(dict.fromkeys(runs[axes.x].map(text)))
    if axes.x != "policy" or axes.hue is not None:
        return names[::-1]
    values = runs.groupby("policy")[quantity].median().reindex(names)
    return list(values.sort_values(ascending=not less_is_better(quantity), kind="stable").index)


def _grid(
    runs: pd.DataFrame, axes: SweepAxes, num_quantities: int, num_facets: int, num_names: int
) -> tuple[Figure, list[Axes]]:
    """Create the axes; `num_names` are in rows, 0 for numbers along x."""
    columns = num_facets
    if not axes.facet:
        most = num_quantities if num_names > MANY else 3 if num_quantities > 4 else 2
        columns = min(num_quantities, most)
    rows = math.ceil(num_quantities * num_facets / columns)
    lines = 0.5 * len(values_of(runs, axes.hue)) if axes.hue else 1.0  # of text that a name needs
    height = max(2.6, 0.9 + 0.21 * num_names * max(1.0, lines))
    width = 1.2 * (num_names > 0) + (3.0 if columns > 2 else 4.2) * columns
    size = min(style.WIDTH, max(4.6, width)), height * rows + 0.5
    is_shared = axes.facet or num_names > MANY
    shared: dict[str, Any] = {"sharey": "row" if is_shared else False}
    if axes.facet and num_names:
        shared["sharex"] = "row"
    return style.panels(rows, columns, size, **shared)


def _quantities(runs: pd.DataFrame, base: str | None, most: int) -> list[str]:
    """Return the quantities that runs have and in which they differ."""
    chosen = OVER_TIME if arrive_over_time(runs) else QUANTITIES
    names = [name.format(base) for name in chosen]
    known = [name for name in names if name in runs and runs[name].notna().any()]
    differing = [name for name in known if runs[name].max() - runs[name].min() > 0]
    return (differing or known)[:most]


def _draw_series(ax: Axes, rows: pd.DataFrame, *, is_listed: bool, has_label: bool) -> None:
    """Draw a series with its intervals, and what has no place on x as lines across."""
    first, is_across = rows.iloc[0], rows["at"].isna()
    kind = "simulated" if first.get("executor") == "simulated" else "measured"
    look: dict[str, Any] = {"color": first["colour"], "ls": "" if is_listed else style.LINES[kind]}
    look["label"] = first["series"] if has_label else None
    for _, row in rows[is_across].iterrows():
        ax.axhline(row["value"], **look)
        if row["num_samples"] > 1:
            ax.axhspan(row["low"], row["high"], color=look["color"], alpha=0.12, lw=0)
    points = rows[~is_across]
    if points.empty:
        return
    at, value, low, high = points[["at", *VALUES]].to_numpy(float).T
    if (is_median := points["num_samples"].to_numpy() > 1).any():
        lengths = np.clip([value - low, high - value], 0.0, None)
        look["xerr" if is_listed else "yerr"] = np.where(is_median, lengths, math.nan)
    x, y = (value, at) if is_listed else (at, value)
    ax.errorbar(x, y, marker=first["marker"], capsize=2, zorder=3, **look)
    is_open = ~points["is_decided"].to_numpy(bool)
    if is_open.any():
        hollow = {"color": first["colour"], "markerfacecolor": "w"}
        ax.plot(x[is_open], y[is_open], first["marker"], zorder=4, **hollow)


def _set_axes(ax: Axes, rows: pd.DataFrame, x: str, listed: Sequence[str]) -> None:
    """Scale and label both axes by the medians of all facets."""
    axis, heading = "x" if listed else "y", rows["heading"].iloc[0]
    low, high = rows["value"].min(), rows["value"].max()
    if math.isnan(low):
        ax.text(0.5, 0.5, "below the noise", ha="center", transform=ax.transAxes)
    elif low > 0 and high / low > WIDE_RANGE:
        ax.set(**{f"{axis}scale": "log"})
        style.tick_in_steps(ax.xaxis if listed else ax.yaxis)
    else:
        _set_linear_limits(ax, axis, low, high)
    if listed:
        ax.set_yticks(range(len(listed)), listed)
        room = int(ax.get_window_extent().width / style.plt.rcParams["figure.dpi"] / style.LETTER)
        ax.set(ylim=(-0.6, len(listed) - 0.4), xlabel=textwrap.fill(heading, room))
        if ax.get_xscale() == "linear":
            ax.xaxis.set_major_locator(MaxNLocator(3))
        return
    values = np.sort(rows["at"].dropna().unique())
    is_geometric = len(values) > 2 and values[0] > 0
    is_geometric &= (values[1:] / values[:-1]).min(initial=math.inf) > GEOMETRIC
    style.scale_x(ax, values, is_log=is_geometric)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.margins(x=0.08)
    label = style.AXIS_NAMES.get(x, style.short_name(x))
    ax.set(xlabel=textwrap.fill(label, 26), ylabel=textwrap.fill(heading, 26))


def _set_linear_limits(ax: Axes, axis: str, low: float, high: float) -> None:
    """Start at zero where values differ by more than 2, else show `LEAST_RANGE` of the largest."""
    start, end = ax.get_xlim() if axis == "x" else ax.get_ylim()
    missing = LEAST_RANGE * high - (end - start)
    if low >= 0 and high > 2 * low:
        start = 0.0
    elif missing > 0:
        start, end = start - missing / 2, end + missing / 2
    ax.set(**{f"{axis}lim": (start, end)})


def _mark_clipped(ax: Axes, rows: pd.DataFrame) -> None:
    """Put an arrow at the edge of the axis that an interval crosses."""
    start, end = ax.get_ylim()
    rows = rows[rows["num_samples"] > 1]
    for edge, shape, beyond in (
        (start, CARETDOWNBASE, rows[rows["low"] < start]),
        (end, CARETUPBASE, rows[rows["high"] > end]),
    ):
        look: dict[str, Any] = {"c": beyond["colour"], "clip_on": False, "zorder": 5}
        ax.scatter(beyond["at"], [edge] * len(beyond), marker=MarkerStyle(shape), **look)


def _title(runs: pd.DataFrame, names: Sequence[str]) -> str:
    """Name model, device and shared sizes, and explain points, intervals and hollow markers."""
    swept = analysis.without_baselines(runs)
    known = {
        name: " or ".join(sorted({text(value) for value in swept[name]}))
        for name in ("model", "dtype", "device")
        if name in swept and swept[name].nunique() <= 2
    }
    title = ", ".join(words for name, words in known.items() if name != "device")
    title = " on ".join(filter(None, [title, known.get("device")]))
    fixed = {name: values_of(swept, name) for name in FIXED if name in swept}
    sizes = [f"{style.short_name(name)} {one[0]}" for name, one in fixed.items() if len(one) == 1]
    title += "\n" * bool(sizes) + ", ".join(sizes)
    over = [name for name in analysis.SAMPLES if name in swept and swept[name].nunique() > 1]
    if over:
        table = analysis.medians(swept, ["policy", *analysis.varied(swept)], "throughput")
        number = int(table["num_samples"].min())
        samples = " and ".join(f"{name}s" for name in over)
        title += f"\nmedians of {number} {samples} with their {level_of(number):.0%} interval"
    level = analysis.noise(runs)
    if any("_vs_" in name for name in names) and level > 1:
        title += "; hollow: difference from 1 within the noise "
        title += f"(equal work differed by up to {level:.2f} times)"
    return title
