"""Lines by a numeric setting, and points in rows by a named one, a panel for each quantity.

A series has the colour of its `hue`: of the swept value, or of the policy where it has none.
Baselines are dashed (in rows: squares), all else is solid. Series that are equal to the last digit
are drawn once under all their names.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.axes import Scale, scale_of, set_quantity_axis, set_setting_axis
from sarathi_lab.results.plots.choice import MANY_NAMES, PlotAxes
from sarathi_lab.results.plots.series import (
    BASELINE,
    Look,
    Series,
    centres_of,
    equal_everywhere,
    equal_names_once,
    has_row_each,
    height_of,
    joint_name,
    looks_of,
    names_in_rows,
    points_of,
    with_places,
    with_series,
)
from sarathi_lab.results.sweep_analysis import is_numeric, text, values_of

OF_SEVERAL = "0.3"  # grey of a line that stands for several colours
COLUMNS = {1: 1, 2: 2, 4: 2}  # of panels, of so many quantities; else three
WIDTHS = {1: 5.2, 2: 8.4}  # inches of one and two columns; more have the page's width
PANEL = 2.6  # inches, height of a panel
ROW = 0.21  # inches, height of a name
LABEL = 26  # letters of an axis label's line
UNSTEADY = "x"
UNSTEADY_WORDS = "not steady: waits depend on the length of the run"
BAND = 0.12  # opacity of the interval of a line across


@dataclass(frozen=True)
class Panel:
    """What an axes shows: `names` in rows from below, if any; `has_swept_hue` where colours are of
    a setting other than the policy.
    """

    quantity: str
    heading: str
    scale: Scale
    names: Sequence[str]
    has_swept_hue: bool


def draw_lines(
    rows: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str], notes: Sequence[Artist]
) -> Figure:
    """Draw medians (`sweeps.long_rows`): one panel for each quantity and value of `axes.col`.

    `notes` are further keys of the legend.
    """
    names: list[str] = []
    if not is_numeric(rows, axes.x):
        settings = [axes.hue, axes.col, *axes.others, "policy"]
        keys = [key for key in dict.fromkeys(settings) if key not in (None, axes.x)]
        every_name = names_in_rows(rows, axes.x, axes.bound if axes.x == "policy" else ())
        rows = equal_names_once(rows, every_name, list(map(str, keys)))
        names = _names_from_below(rows, axes, quantities[0])
    rows = with_places(with_series(rows, axes), axes, names)
    looks = looks_of(rows, axes, is_in_rows=bool(names))
    facets = values_of(rows, axes.col) if axes.col else [""]
    num_columns = _num_columns(len(quantities), facets, names)
    num_in_row = 1 if has_row_each(axes) else len(looks)
    figure, grid = _grid(len(quantities), facets, num_columns, names, num_in_row)
    places = list(product(quantities, facets))
    for ax in grid[len(places) :]:
        ax.remove()
    series_of = {place: _of_panel(rows, axes, *place) for place in places}
    equal = equal_everywhere(list(series_of.values()))
    joint_looks = {}
    for series, same in equal.items():
        name = " = ".join(looks[one].name for one in same)
        joint_looks[series] = replace(looks[series], name=name)
    panels = {quantity: _panel_of(rows, axes, quantity, names) for quantity in quantities}
    for (quantity, facet), ax in zip(places, grid, strict=False):
        panel = panels[quantity]
        every = series_of[quantity, facet]
        once = {series: every[series] for series in equal if series in every}
        note = _draw_panel(ax, once, joint_looks, panel)
        _label(ax, rows, axes, panel)
        is_titled = axes.col is not None and quantity == quantities[0]
        title = f"{style.short_name(str(axes.col))} = {facet}" if is_titled else ""
        ax.set_title("\n".join(filter(None, [title, note])), fontsize=9)
        if axes.col:
            ax.label_outer()
        elif names and ax not in grid[::num_columns]:
            ax.tick_params(labelleft=False)
    explained = [] if has_row_each(axes) or len(looks) == 1 else _legend(looks, equal, axes, names)
    style.legend_below(figure, [*explained, *notes])
    return figure


def _names_from_below(rows: pd.DataFrame, axes: PlotAxes, quantity: str) -> list[str]:
    """Return the names in rows from below: of policies the best by `quantity` on top."""
    names = list(dict.fromkeys(rows["name"]))
    if not has_row_each(axes):
        return names[::-1]
    shown = rows[rows["quantity"] == quantity]
    values = shown.groupby("name")["value"].median().reindex(names)
    is_less_better = bool(shown["is_less_better"].iloc[0])
    return list(values.sort_values(ascending=not is_less_better, kind="stable").index)


def _num_columns(num_quantities: int, facets: Sequence[str], names: Sequence[str]) -> int:
    """Return as many panels beside each other as leave no place empty."""
    if len(facets) > 1:
        return len(facets)
    if len(names) > MANY_NAMES:
        return num_quantities
    return COLUMNS.get(num_quantities, 3)


def _grid(
    num_quantities: int,
    facets: Sequence[str],
    num_columns: int,
    names: Sequence[str],
    num_in_row: int,
) -> tuple[Figure, list[Axes]]:
    num_rows = math.ceil(num_quantities * len(facets) / num_columns)
    num_lines = sum(map(height_of, names)) * max(1.0, 0.5 * num_in_row)
    height = max(PANEL, 0.9 + ROW * num_lines)
    width = WIDTHS.get(num_columns, style.WIDTH)
    if names and num_columns < 3:
        lines = "\n".join(names).split("\n")
        width += style.LETTER * max(map(len, lines))
    size = min(style.WIDTH, width), height * num_rows + 0.5
    shared: dict[str, Any] = {}
    if len(facets) > 1:
        shared["sharey"] = "row"
        shared["sharex"] = "row" if names else False
    return style.panels(num_rows, num_columns, size, **shared)


def _panel_of(rows: pd.DataFrame, axes: PlotAxes, quantity: str, names: Sequence[str]) -> Panel:
    shown = rows[rows["quantity"] == quantity]
    has_swept_hue = axes.hue not in (None, "policy")
    scale = scale_of(shown, quantity)
    return Panel(quantity, str(shown["heading"].iloc[0]), scale, names, has_swept_hue)


def _of_panel(
    rows: pd.DataFrame, axes: PlotAxes, quantity: str, facet: str
) -> dict[Series, pd.DataFrame]:
    """Return the points of one panel by series, along the setting."""
    shown = rows[(rows["quantity"] == quantity) & rows["value"].notna()]
    if axes.col:
        values = shown[axes.col].map(text)
        shown = shown[values.isin([facet, "-"])]  # a run without the setting is in every panel
    shown = shown.sort_values("at", kind="stable")
    groups = shown.groupby("series", sort=False)
    return {points["series"].iloc[0]: points for _, points in groups}


# -- panels ----------------------------------------------------------------------------------------


def _draw_panel(
    ax: Axes, series_of: Mapping[Series, pd.DataFrame], looks: Mapping[Series, Look], panel: Panel
) -> str:
    """Draw the series of a panel, equal ones once; returns the note that names these."""
    if not series_of:
        ax.text(0.5, 0.5, "below the noise", ha="center", transform=ax.transAxes)
        return ""
    if panel.names:
        for series, points in series_of.items():
            _draw_points(ax, points, looks[series], is_in_rows=True)
        return ""
    others = dict(series_of)
    # The policy that ratios are to is one line at 1, also where other settings vary.
    base = [series for series, points in series_of.items() if _is_base(series, points, panel)]
    if base:
        look = _joint_look(base, looks, panel)
        ax.axhline(1.0, color=look.colour, ls=look.dash)
        others = {series: points for series, points in others.items() if series not in base}
    groups: dict[Hashable, list[Series]] = {}
    for series, points in others.items():
        groups.setdefault(points_of(points), []).append(series)
    notes = []
    for equal in groups.values():
        look = _joint_look(equal, looks, panel)
        _draw_points(ax, others[equal[0]], look, is_in_rows=False)
        notes.append(joint_name(equal, others, looks))
    width = int(style.inches_wide(ax) / style.LETTER)
    lines = [textwrap.fill(note, width, break_on_hyphens=False) for note in notes if note]
    return "\n".join(lines)


def _is_base(series: Series, points: pd.DataFrame, panel: Panel) -> bool:
    base = panel.quantity.partition("_vs_")[2]
    return series.policy == base and bool((points["value"] == 1).all())


def _joint_look(equal: Sequence[Series], looks: Mapping[Series, Look], panel: Panel) -> Look:
    """Return the look of the first of equal series, grey where they have several colours."""
    look = looks[equal[0]]
    has_hues = len({series.hue for series in equal}) > 1
    return replace(look, colour=OF_SEVERAL) if has_hues and panel.has_swept_hue else look


def _draw_points(ax: Axes, rows: pd.DataFrame, look: Look, *, is_in_rows: bool) -> None:
    """Draw points with their intervals, and what has no place along x as lines across."""
    is_across = rows["at"].isna()
    crossed: dict[str, Any] = {"color": "black", "marker": UNSTEADY, "ls": "", "zorder": 5}
    for _, row in rows[is_across].iterrows():
        ax.axhline(row["value"], color=look.colour, ls=look.dash)
        if row["is_unsteady"]:
            ax.plot([0.97], [row["value"]], transform=ax.get_yaxis_transform(), **crossed)
        if row["num_samples"] > 1:
            ax.axhspan(row["low"], row["high"], color=look.colour, alpha=BAND, lw=0)
    points = rows[~is_across]
    if points.empty:
        return
    at, value, low, high = points[["at", "value", "low", "high"]].to_numpy(float).T
    bars: dict[str, Any] = {}
    is_median = points["num_samples"].to_numpy() > 1
    if is_median.any():
        lengths = np.clip([value - low, high - value], 0.0, None)
        bars["xerr" if is_in_rows else "yerr"] = np.where(is_median, lengths, math.nan)
    marker = look.marker
    if not marker and len(points) == 1:
        marker = "o"  # a line of one point cannot be seen
    x, y = (value, at) if is_in_rows else (at, value)
    dash = "" if is_in_rows else look.dash
    ax.errorbar(x, y, color=look.colour, ls=dash, marker=marker, capsize=2, zorder=3, **bars)
    is_unsteady = points["is_unsteady"].to_numpy(bool)
    if is_unsteady.any():
        ax.plot(x[is_unsteady], y[is_unsteady], **crossed)
    is_open = ~points["is_decided"].to_numpy(bool)
    if is_open.any():
        hollow: dict[str, Any] = {"color": look.colour, "markerfacecolor": "w", "zorder": 4}
        ax.plot(x[is_open], y[is_open], marker or "o", **hollow)


def _label(ax: Axes, rows: pd.DataFrame, axes: PlotAxes, panel: Panel) -> None:
    """Scale and label both axes."""
    label = ", ".join(filter(None, [panel.heading, panel.scale.note]))
    set_quantity_axis(ax, panel.scale, along_x=bool(panel.names))
    if not panel.names:
        values = np.sort(rows["at"].dropna().unique())
        setting = set_setting_axis(ax, values, axes.x)
        ax.set(xlabel=textwrap.fill(setting, LABEL), ylabel=textwrap.fill(label, LABEL))
        return
    centres = centres_of(panel.names)
    ax.set_yticks(centres, panel.names)
    top = centres[-1] + height_of(panel.names[-1]) / 2
    room = int(style.inches_wide(ax) / style.LETTER)
    ax.set(ylim=(-0.6, top + 0.1), xlabel=textwrap.fill(label, room))


# -- legend ----------------------------------------------------------------------------------------


def _legend(
    looks: Mapping[Series, Look],
    equal: Mapping[Series, Sequence[Series]],
    axes: PlotAxes,
    names: Sequence[str],
) -> list[Artist]:
    """Explain colours, dashes and markers, each once."""
    has_others = len({series.other for series in looks}) > 1
    keys: dict[str, Artist] = {}
    for series, same in equal.items():
        look = looks[series]
        if has_others and not names:
            look = replace(look, marker="")  # explained by itself, below
        if series.is_baseline and series.hue and axes.hue != "policy":
            look = replace(look, colour="black")  # it has all colours
            label = ", ".join(filter(None, [series.policy, series.bound])) + BASELINE
        elif has_others:
            label = _in_legend(series, looks[series].name.removesuffix(f", {series.other}"))
        else:
            label = " = ".join(_in_legend(one, looks[one].name) for one in same)
        keys.setdefault(label, _key(look, label, dash="" if names else look.dash))
    for series, look in looks.items():
        if has_others and series.other and not series.is_baseline:
            black = replace(look, colour="black")
            keys.setdefault(series.other, _key(black, series.other, dash=""))
    return list(keys.values())


def _key(look: Look, label: str, *, dash: Any) -> Line2D:
    return Line2D([], [], color=look.colour, ls=dash, marker=look.marker, label=label)


def _in_legend(series: Series, name: str) -> str:
    return f"{name}{BASELINE}" if series.is_baseline else name
