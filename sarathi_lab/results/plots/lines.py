"""Lines by a numeric setting, and points in rows by a named one, a panel for each quantity.

A series has the colour of its `hue`: of the swept value, or of the policy where it has none.
Baselines are dashed (in rows: squares), all else is solid. Series that are equal to the last digit
are drawn once under all their names.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    MISSING,
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
    rows = with_series(rows, axes)
    rows = with_places(rows, axes, names)
    looks = looks_of(rows, axes, is_in_rows=bool(names))
    points_of_panel = _points_of_panels(rows, axes, quantities)
    equal = equal_everywhere(list(points_of_panel.values()))
    joint_looks = _joint_looks(equal, looks)
    drawing = _drawing_of(rows, axes, names, quantities, joint_looks)
    lines_of_panel: dict[Panel, list[_Line]] = {}
    for panel, points_of_series in points_of_panel.items():
        first_of_equal = _only(points_of_series, equal)
        lines_of_panel[panel] = _lines_of_panel(first_of_equal, panel, drawing)

    panels = list(points_of_panel)
    num_in_row = 1 if has_row_each(axes) else len(looks)
    grid = _grid(panels, drawing, num_in_row=num_in_row)
    marks = _marks(lines_of_panel)
    if names:
        figure, axes_of = plot(marks, x="value", y="at", grid=grid)
    else:
        figure, axes_of = plot(marks, x="at", y="value", grid=grid)

    in_first_column = figure.axes[:: grid.columns]
    width = style.inches_wide(figure.axes[0])
    along = np.sort(rows["at"].dropna().unique())
    for panel, lines in lines_of_panel.items():
        ax = axes_of[panel]
        title = _title(panel, lines, drawing, width)
        ax.set_title(title, fontsize=9)
        if not lines:
            ax.text(0.5, 0.5, "below the noise", ha="center", transform=ax.transAxes)
        _label(ax, panel, along, drawing, width)
        if axes.col:
            ax.label_outer()
        elif names and ax not in in_first_column:
            ax.tick_params(labelleft=False)

    keys: list[Artist] = []
    if len(looks) > 1 and not has_row_each(axes):  # else the names are in rows
        keys = _legend(looks, equal, drawing)
    style.legend_below(figure, [*keys, *notes])
    return figure


def _with_names(rows: pd.DataFrame, axes: PlotAxes) -> pd.DataFrame:
    """Add the `name` of each row's place, a joint one for places that are equal."""
    compared: list[str] = []
    for setting in (axes.hue, axes.col, *axes.others, "policy"):
        if setting is None or setting == axes.x or setting in compared:
            continue
        compared.append(setting)
    bound: Sequence[str] = ()
    if axes.x == "policy":
        bound = axes.bound
    names = names_in_rows(rows, axes.x, bound)
    return equal_names_once(rows, names, compared)


def _names_from_below(rows: pd.DataFrame, axes: PlotAxes, quantity: str) -> list[str]:
    """Return the names in rows from below: of policies the best by `quantity` on top."""
    names = list(rows["name"].unique())
    if not has_row_each(axes):
        return names[::-1]  # the first on top
    shown = rows[rows["quantity"] == quantity]
    medians = shown.groupby("name")["value"].median()
    in_order = medians.reindex(names)
    is_more_better = not shown["is_less_better"].iloc[0]
    best_last = in_order.sort_values(ascending=is_more_better, kind="stable")
    return list(best_last.index)


def _points_of_panels(
    rows: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str]
) -> dict[Panel, PointsBySeries]:
    """Return the points of each panel by series, along the setting."""
    facets = [""]
    if axes.col:
        facets = values_of(rows, axes.col)
    panels: dict[Panel, PointsBySeries] = {}
    for quantity, facet in product(quantities, facets):
        is_of_quantity = rows["quantity"] == quantity
        is_shown = is_of_quantity & rows["value"].notna()
        if axes.col:
            value_of_facet = rows[axes.col].map(text)
            is_shown &= value_of_facet.isin([facet, MISSING])  # what lacks it is in all panels
        points_in_order = rows[is_shown].sort_values("at", kind="stable")
        points_of_series = {}
        for _, points in points_in_order.groupby("series", sort=False):
            series = points["series"].iloc[0]
            points_of_series[series] = points
        panels[quantity, facet] = points_of_series
    return panels


def _marks(lines_of_panel: Mapping[Panel, Sequence[_Line]]) -> pd.DataFrame:
    """Return the rows that `plot` draws."""
    tables = []
    for panel, lines in lines_of_panel.items():
        for line in lines:
            points = styled(line.points, line.look)
            column = column_of([panel] * len(points), points)
            tables.append(points.assign(panel=column))
    if not tables:
        return pd.DataFrame(columns=["panel", "look", "at", "value"])
    return pd.concat(tables)


def _only(points_of_series: PointsBySeries, equal: Mapping[Series, object]) -> PointsBySeries:
    """Return the points of the series that are drawn for all that equal them, in that order."""
    drawn = {}
    for series in equal:
        if series in points_of_series:
            drawn[series] = points_of_series[series]
    return drawn


def _joint_looks(
    equal: Mapping[Series, Sequence[Series]], looks: Mapping[Series, Look]
) -> dict[Series, Look]:
    """Return the looks of the series that are drawn, with the names of all that equal them."""
    joint = {}
    # All are stated in the legend, where no panel tells them apart.
    for series, same in equal.items():
        names = [looks[equal_series].name for equal_series in same]
        joint_name_of_all = " = ".join(names)
        joint[series] = replace(looks[series], name=joint_name_of_all)
    return joint


def _drawing_of(
    rows: pd.DataFrame,
    axes: PlotAxes,
    names: Sequence[str],
    quantities: Sequence[str],
    looks: Mapping[Series, Look],
) -> _Drawing:
    # One scale for all panels of a quantity, so that they can be compared by eye.
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

    `num_in_row` is the number of series that a row of a panel with names has.
    """
    names = drawing.names
    num_quantities = len(drawing.scales)
    num_facets = len(panels) // num_quantities
    columns = COLUMNS.get(num_quantities, 3)
    if num_facets > 1:
        columns = num_facets
    elif len(names) > MANY_NAMES:
        columns = num_quantities
    num_rows = math.ceil(len(panels) / columns)
    lines_of_row = max(1.0, 0.5 * num_in_row)
    num_lines = lines_of_row * sum(map(height_of, names))
    panel_height = max(PANEL, 0.9 + ROW * num_lines)
    width = WIDTHS.get(columns, style.WIDTH)
    if names and columns < 3:  # three columns have the page's width already
        lines = "\n".join(names).split("\n")
        letters = max(map(len, lines))
        width += style.LETTER * letters
    width = min(width, style.WIDTH)
    height = panel_height * num_rows + 0.5
    shares: dict[str, object] = {}
    if num_facets > 1:
        shares["sharey"] = "row"
        if names:  # the quantity is along x
            shares["sharex"] = "row"
    return PanelLayout(panels, columns, (width, height), shares)


# -- panels ----------------------------------------------------------------------------------------


def _lines_of_panel(
    points_of_series: PointsBySeries, panel: Panel, drawing: _Drawing
) -> list[_Line]:
    """Return what is drawn in a panel: in rows all series, of lines equal ones once."""
    if drawing.names:
        lines_in_rows = []
        for series, points in points_of_series.items():
            line = _Line(points, drawing.looks[series])
            lines_in_rows.append(line)
        return lines_in_rows
    quantity, _ = panel
    _, _, reference = quantity.partition("_vs_")  # the policy that ratios are to
    reference_series = []
    compared = []
    equal_series = defaultdict(list)  # by their points
    for series, points in points_of_series.items():
        is_one = points["value"] == 1
        if series.policy == reference and is_one.all():
            reference_series.append(series)
        else:
            compared.append(series)
            equal_series[points_of(points)].append(series)
    lines = []
    if reference_series:
        # One line at 1, also where other settings vary.
        points_of_first = points_of_series[reference_series[0]]
        first_point = points_of_first.iloc[:1]
        across = first_point.assign(at=math.nan, is_unsteady=False)
        look = _look_of_equal(reference_series, drawing)
        without_marker = replace(look, marker="")
        lines.append(_Line(across, without_marker))
    for equal in equal_series.values():
        name = joint_name(equal, compared, drawing.looks)
        points = points_of_series[equal[0]]
        look = _look_of_equal(equal, drawing)
        lines.append(_Line(points, look, name))
    return lines


def _look_of_equal(equal: Sequence[Series], drawing: _Drawing) -> Look:
    """Return the look of the first of equal series, grey where they have several colours."""
    look = drawing.looks[equal[0]]
    hues = {series.hue for series in equal}
    if len(hues) > 1 and drawing.has_swept_hue:
        return replace(look, colour=OF_SEVERAL)
    return look


def _title(panel: Panel, lines: Sequence[_Line], drawing: _Drawing, width: float) -> str:
    """Return what a panel of this width (inches) shows, and what is equal in it."""
    quantity, facet = panel
    letters = int(width / style.LETTER)
    titles = []
    first_quantity = next(iter(drawing.scales))
    is_in_first_row = quantity == first_quantity
    if drawing.axes.col is not None and is_in_first_row:
        setting = style.short_name(drawing.axes.col)
        titles.append(f"{setting} = {facet}")
    for line in lines:
        name = textwrap.fill(line.name, letters, break_on_hyphens=False)
        if name:
            titles.append(name)
    return "\n".join(titles)


def _label(
    ax: Axes, panel: Panel, along: NDArray[np.float64], drawing: _Drawing, width: float
) -> None:
    """Scale and label both axes of a panel of this width (inches); `along` are the settings."""
    quantity, _ = panel
    names = drawing.names
    scale = drawing.scales[quantity]
    quantity_label = drawing.headings[quantity]
    if scale.note:
        quantity_label += f", {scale.note}"
    set_quantity_axis(ax, scale, along_x=bool(names))
    if not names:
        setting_label = set_setting_axis(ax, along, drawing.axes.x)
        ax.set_xlabel(textwrap.fill(setting_label, LABEL))
        ax.set_ylabel(textwrap.fill(quantity_label, LABEL))
        return
    letters = int(width / style.LETTER)
    ax.set_xlabel(textwrap.fill(quantity_label, letters))
    centres = centres_of(names)
    ax.set_yticks(centres, names)
    height_of_top = height_of(names[-1])
    top = centres[-1] + height_of_top / 2
    ax.set_ylim(-0.6, top + 0.1)


# -- legend ----------------------------------------------------------------------------------------


def _legend(
    looks: Mapping[Series, Look], equal: Mapping[Series, Sequence[Series]], drawing: _Drawing
) -> list[Artist]:
    """Explain colours, dashes and markers, each once."""
    variants = {series.variant for series in looks}
    has_variants = len(variants) > 1
    looks_of_keys: dict[str, Look] = {}  # by label
    for series, same in equal.items():
        look = looks[series]
        if has_variants and not drawing.names:
            look = replace(look, marker="")  # explained by itself, below
        has_all_colours = series.hue and drawing.axes.hue != "policy"
        if series.is_baseline and has_all_colours:
            look = replace(look, colour="black")
            names_of_baseline = filter(None, [series.policy, series.bound])
            label = ", ".join(names_of_baseline) + BASELINE
        elif has_variants:
            name_of_variant = f", {series.variant}"
            name = look.name.removesuffix(name_of_variant)
            label = _in_legend(series, name)
        else:
            names = []
            for equal_series in same:
                name = looks[equal_series].name
                names.append(_in_legend(equal_series, name))
            label = " = ".join(names)
        labelled = replace(look, name=label)
        looks_of_keys.setdefault(label, labelled)
    for series, look in looks.items():
        if has_variants and series.variant and not series.is_baseline:
            marker_alone = replace(look, name=series.variant, colour="black", dash="")
            looks_of_keys.setdefault(series.variant, marker_alone)
    return [look.key() for look in looks_of_keys.values()]


def _in_legend(series: Series, name: str) -> str:
    if series.is_baseline:
        return f"{name}{BASELINE}"
    return name
