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

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.axes import Scale, scale_of, set_quantity_axis, set_setting_axis
from sarathi_lab.results.plots.choice import MANY_NAMES, PlotAxes
from sarathi_lab.results.plots.plot import Look, PanelLayout, column_of, plot, styled
from sarathi_lab.results.plots.series import (
    BASELINE,
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
Panel = tuple[str, str]  # a quantity, and a value of the setting with panels ("" without one)
PointsBySeries = Mapping[Series, pd.DataFrame]


@dataclass(frozen=True)
class _Drawing:
    """What the panels of a picture share.

    `names` are those in rows from below, if any; `has_swept_hue` where colours are of a setting
    other than the policy.
    """

    axes: PlotAxes
    names: Sequence[str]
    looks: Mapping[Series, Look]
    scales: Mapping[str, Scale]  # by quantity
    headings: Mapping[str, str]
    has_swept_hue: bool


@dataclass(frozen=True)
class _Line:
    """Points that are drawn by one look, and the joint `name` of several series, if any."""

    points: pd.DataFrame
    look: Look
    name: str = ""


def draw_lines(
    rows: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str], notes: Sequence[Artist]
) -> Figure:
    """Draw medians (`sweeps.long_rows`): one panel for each quantity and value of `axes.col`.

    `notes` are further keys of the legend.
    """
    names: list[str] = []
    if not is_numeric(rows, axes.x):
        rows = _with_names(rows, axes)
        names = _names_from_below(rows, axes, quantities[0])
    rows = with_places(with_series(rows, axes), axes, names)
    looks = looks_of(rows, axes, is_in_rows=bool(names))
    facets = values_of(rows, axes.col) if axes.col else [""]
    series_of: dict[Panel, PointsBySeries] = {}
    for quantity, facet in product(quantities, facets):
        series_of[quantity, facet] = _series_of_panel(rows, axes, quantity, facet)
    equal = equal_everywhere(list(series_of.values()))
    drawing = _drawing_of(rows, axes, names, quantities, _joint_looks(equal, looks))
    grid = _grid(list(series_of), drawing, num_in_row=1 if has_row_each(axes) else len(looks))
    lines_of: dict[Panel, list[_Line]] = {}
    tables = []
    for panel, points_of_series in series_of.items():
        lines = _lines_of_panel(_only(points_of_series, equal), panel, drawing)
        lines_of[panel] = lines
        for line in lines:
            of_panel = column_of([panel] * len(line.points), line.points)
            tables.append(styled(line.points.assign(panel=of_panel), line.look))
    marks = pd.concat(tables) if tables else rows.iloc[:0].assign(panel="", look="")
    if names:
        figure, axes_of = plot(marks, x="value", y="at", grid=grid)
    else:
        figure, axes_of = plot(marks, x="at", y="value", grid=grid)
    width = style.inches_wide(next(iter(axes_of.values())))
    along = np.sort(rows["at"].dropna().unique())
    for panel, lines in lines_of.items():
        ax = axes_of[panel]
        ax.set_title(_title(panel, lines, drawing, width), fontsize=9)
        if not lines:
            ax.text(0.5, 0.5, "below the noise", ha="center", transform=ax.transAxes)
        _label(ax, panel, along, drawing, width)
        if axes.col:
            ax.label_outer()
        elif names and ax not in figure.axes[:: grid.columns]:
            ax.tick_params(labelleft=False)
    explained: list[Artist] = []
    if len(looks) > 1 and not has_row_each(axes):
        explained = _legend(looks, equal, drawing)
    style.legend_below(figure, [*explained, *notes])
    return figure


def _with_names(rows: pd.DataFrame, axes: PlotAxes) -> pd.DataFrame:
    """Add the `name` of each row's place, a joint one for places that are equal."""
    settings = filter(None, [axes.hue, axes.col, *axes.others, "policy"])
    keys = [key for key in dict.fromkeys(settings) if key != axes.x]
    bound = axes.bound if axes.x == "policy" else ()
    names = names_in_rows(rows, axes.x, bound)
    return equal_names_once(rows, names, keys)


def _names_from_below(rows: pd.DataFrame, axes: PlotAxes, quantity: str) -> list[str]:
    """Return the names in rows from below: of policies the best by `quantity` on top."""
    names = list(dict.fromkeys(rows["name"]))
    if not has_row_each(axes):
        return names[::-1]
    shown = rows[rows["quantity"] == quantity]
    values = shown.groupby("name")["value"].median().reindex(names)
    is_less_better = bool(shown["is_less_better"].iloc[0])
    return list(values.sort_values(ascending=not is_less_better, kind="stable").index)


def _series_of_panel(
    rows: pd.DataFrame, axes: PlotAxes, quantity: str, facet: str
) -> PointsBySeries:
    """Return the points of one panel by series, along the setting."""
    shown = rows[rows["quantity"] == quantity].dropna(subset="value")
    if axes.col:
        values = shown[axes.col].map(text)
        shown = shown[values.isin([facet, "-"])]  # a run without the setting is in every panel
    shown = shown.sort_values("at", kind="stable")
    groups = shown.groupby("series", sort=False)
    return {points["series"].iloc[0]: points for _, points in groups}


def _only(points_of_series: PointsBySeries, equal: Mapping[Series, object]) -> PointsBySeries:
    """Return the points of the series that are drawn for all that equal them, in that order."""
    return {series: points_of_series[series] for series in equal if series in points_of_series}


def _joint_looks(
    equal: Mapping[Series, Sequence[Series]], looks: Mapping[Series, Look]
) -> dict[Series, Look]:
    """Return the looks of the series that are drawn, with the names of all that equal them."""
    joint = {}
    for series, same in equal.items():
        names = [looks[equal_series].name for equal_series in same]
        joint[series] = replace(looks[series], name=" = ".join(names))
    return joint


def _drawing_of(
    rows: pd.DataFrame,
    axes: PlotAxes,
    names: Sequence[str],
    quantities: Sequence[str],
    looks: Mapping[Series, Look],
) -> _Drawing:
    scales = {}
    headings = {}
    for quantity in quantities:
        shown = rows[rows["quantity"] == quantity]
        scales[quantity] = scale_of(shown, quantity)
        headings[quantity] = str(shown["heading"].iloc[0])
    has_swept_hue = axes.hue not in (None, "policy")
    return _Drawing(axes, names, looks, scales, headings, has_swept_hue)


def _grid(panels: Sequence[Panel], drawing: _Drawing, *, num_in_row: int) -> PanelLayout:
    """Place as many panels beside each other as leave no place empty.

    `num_in_row` is the number of series that a name in rows has.
    """
    names = drawing.names
    num_facets = len({facet for _, facet in panels})
    num_quantities = len(panels) // num_facets
    columns = COLUMNS.get(num_quantities, 3)
    if num_facets > 1:
        columns = num_facets
    elif len(names) > MANY_NAMES:
        columns = num_quantities
    num_lines = sum(map(height_of, names)) * max(1.0, 0.5 * num_in_row)
    height = max(PANEL, 0.9 + ROW * num_lines)  # of a panel
    num_rows = math.ceil(len(panels) / columns)
    width = WIDTHS.get(columns, style.WIDTH)
    if names and columns < 3:
        lines = "\n".join(names).split("\n")
        width += style.LETTER * max(map(len, lines))
    size = (min(style.WIDTH, width), height * num_rows + 0.5)
    if num_facets == 1:
        return PanelLayout(panels, columns, size)
    shared_x = "row" if names else False
    return PanelLayout(panels, columns, size, {"sharey": "row", "sharex": shared_x})


# -- panels ----------------------------------------------------------------------------------------


def _lines_of_panel(
    points_of_series: PointsBySeries, panel: Panel, drawing: _Drawing
) -> list[_Line]:
    """Return what is drawn in a panel: in rows all series, of lines equal ones once."""
    if drawing.names:
        return [_Line(points, drawing.looks[series]) for series, points in points_of_series.items()]
    quantity, _ = panel
    policy = quantity.partition("_vs_")[2]
    base = []  # the series that ratios are to
    groups: dict[Hashable, list[Series]] = {}
    for series, points in points_of_series.items():
        if series.policy == policy and bool((points["value"] == 1).all()):
            base.append(series)
        else:
            groups.setdefault(points_of(points), []).append(series)
    lines = []
    if base:
        # One line at 1, also where other settings vary.
        first = points_of_series[base[0]].iloc[:1]
        look = replace(_look_of_equal(base, drawing), marker="")
        lines.append(_Line(first.assign(at=math.nan, is_unsteady=False), look))
    others = [series for series in points_of_series if series not in base]
    for equal in groups.values():
        name = joint_name(equal, others, drawing.looks)
        points = points_of_series[equal[0]]
        lines.append(_Line(points, _look_of_equal(equal, drawing), name))
    return lines


def _look_of_equal(equal: Sequence[Series], drawing: _Drawing) -> Look:
    """Return the look of the first of equal series, grey where they have several colours."""
    look = drawing.looks[equal[0]]
    has_hues = len({series.hue for series in equal}) > 1
    if has_hues and drawing.has_swept_hue:
        return replace(look, colour=OF_SEVERAL)
    return look


def _title(panel: Panel, lines: Sequence[_Line], drawing: _Drawing, width: float) -> str:
    """Return what a panel of this width (inches) shows, and what is equal in it."""
    quantity, facet = panel
    letters = int(width / style.LETTER)
    titles = []
    is_in_first_row = quantity == next(iter(drawing.scales))
    if drawing.axes.col is not None and is_in_first_row:
        titles.append(f"{style.short_name(drawing.axes.col)} = {facet}")
    for line in lines:
        if line.name:
            titles.append(textwrap.fill(line.name, letters, break_on_hyphens=False))
    return "\n".join(titles)


def _label(
    ax: Axes, panel: Panel, along: NDArray[np.float64], drawing: _Drawing, width: float
) -> None:
    """Scale and label both axes of a panel of this width (inches); `along` are the settings."""
    quantity, _ = panel
    names = drawing.names
    scale = drawing.scales[quantity]
    label = ", ".join(filter(None, [drawing.headings[quantity], scale.note]))
    set_quantity_axis(ax, scale, along_x=bool(names))
    if not names:
        setting = set_setting_axis(ax, along, drawing.axes.x)
        ax.set(xlabel=textwrap.fill(setting, LABEL), ylabel=textwrap.fill(label, LABEL))
        return
    centres = centres_of(names)
    ax.set_yticks(centres, names)
    top = centres[-1] + height_of(names[-1]) / 2
    letters = int(width / style.LETTER)
    ax.set(ylim=(-0.6, top + 0.1), xlabel=textwrap.fill(label, letters))


# -- legend ----------------------------------------------------------------------------------------


def _legend(
    looks: Mapping[Series, Look], equal: Mapping[Series, Sequence[Series]], drawing: _Drawing
) -> list[Artist]:
    """Explain colours, dashes and markers, each once."""
    has_others = len({series.other for series in looks}) > 1
    explained: dict[str, Look] = {}
    for series, same in equal.items():
        look = looks[series]
        if has_others and not drawing.names:
            look = replace(look, marker="")  # explained by itself, below
        if series.is_baseline and series.hue and drawing.axes.hue != "policy":
            look = replace(look, colour="black")  # it has all colours
            label = ", ".join(filter(None, [series.policy, series.bound])) + BASELINE
        elif has_others:
            label = _in_legend(series, looks[series].name.removesuffix(f", {series.other}"))
        else:
            label = " = ".join(_in_legend(named, looks[named].name) for named in same)
        explained.setdefault(label, replace(look, name=label))
    for series, look in looks.items():
        if has_others and series.other and not series.is_baseline:
            marker = replace(look, name=series.other, colour="black", dash="")
            explained.setdefault(series.other, marker)
    return [look.key() for look in explained.values()]


def _in_legend(series: Series, name: str) -> str:
    return f"{name}{BASELINE}" if series.is_baseline else name
