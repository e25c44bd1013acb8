"""Pictures of experiments: the paper's points, simulated ones and measured ones, by panel.

Series have the same colour and marker in all panels. The paper's points are hollow, simulated ones
a broken line beside them, measured ones filled with their interval, in panels of their device.
"""

from __future__ import annotations

import fnmatch
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sarathi_lab.results.plots import heat, style
from sarathi_lab.results.plots.spec import Kind, PlotSpec, in_tokens
from sarathi_lab.results.table import COMPOSED, MEASURED, PAPER

MOST_MARKERS = 22  # of a line, where the paper's points are dense
SIMULATED: Sequence[Any] = (
    *(style.LINES[name] for name in ("simulated", "analytic")),
    *("-.", (0, (5, 1, 1, 1, 1, 1))),
)
PANEL, COLUMN = 2.5, 3.2  # inches: height of a panel, and the widest one
PREDICTED = "simulated"  # group of the paper's points and all that is simulated
LETTERS = 11  # of a title in an inch
MOST_LEVEL = 5  # bars whose names fit beside each other
NOT_RUN = "not run: exceeds the cache, or the chunk is below the batch"
UNITS = {"1/s": "requests/s", "times": "ratio"}
TEXTS = ("panel", "hardware", "model", "method", "dataset", "slo")
Styles = Mapping[str, tuple[str, str]]  # colour and marker by series
Looks = Mapping[str, Any]  # line style by device


def draw(spec: PlotSpec, rows: pd.DataFrame, *, is_all: bool = False) -> Figure:
    """Draw the rows of one figure (`table.rows_of_points`), one axes a panel.

    Of a simulated GPU the best level is drawn, of measured kernels the GPU with the most points,
    and of a measured device the panels with at least half of their points, with a note on what is
    left out; `is_all` draws everything.
    """
    shown = _selected(rows, spec)
    note = "" if is_all else _note_on_sparse(shown, spec)
    shown = shown[shown.value.notna()] if is_all else _without_sparse(shown, spec.kind)
    if spec.kind == "heat":
        return style.finished(_gain_map(shown, spec), spec.title)
    by_device = partial(_by_device, are_together=spec.kind == "bar")
    groups = (by_device if spec.is_by_device else _by_source)(shown)
    order = list(dict.fromkeys(shown.panel))
    across = min(spec.columns, max((group.panel.nunique() for group in groups.values()), default=1))
    places: list[tuple[str, str] | None] = []
    for title, group in groups.items():
        names = sorted(group.panel.unique(), key=order.index)
        places += [*((title, name) for name in names), *[None] * (-len(names) % across)]
    columns = min(spec.columns // across * across, max(1, len(places)))
    num_rows = math.ceil(len(places) / columns) or 1
    width = min(style.WIDTH, max(COLUMN * columns, 5.0))
    series = sorted(dict.fromkeys(shown.key), key=_number)
    most = shown.groupby("panel").key.nunique().max() if spec.kind == "bar" else 0
    letters = max(map(len, map(spec.series_name, series))) if most > MOST_LEVEL else 0  # upright
    size = (width, (PANEL + style.LETTER * letters) * num_rows + 0.5)
    figure, axes = style.panels(num_rows, columns, size)
    colour = style.colours([spec.series_name(name) for name in series])
    styles = {
        name: (colour[spec.series_name(name)], style.marker(i)) for i, name in enumerate(series)
    }
    lines = _line_styles(shown, spec)
    for ax, place in zip(axes, places, strict=False):
        if place is None:
            continue
        title, panel = place
        rows = groups[title][groups[title].panel == panel]
        PANELS[spec.kind](ax, rows, spec, styles, lines)
        if title == PREDICTED:
            sources = rows.level.map({PAPER: PAPER}).fillna(PREDICTED)
            title = " and ".join(sorted(sources.unique()))
        titles = [title if len(groups) > 1 or spec.is_by_device else "", spec.panel_name(panel)]
        letters = int(LETTERS * width / columns)
        ax.set_title("\n".join(textwrap.fill(one, letters) for one in titles if one), fontsize=9)
    for ax in axes:
        if not ax.has_data():
            ax.set_axis_off()
    is_named = spec.kind == "bar" and all(map(_is_single, groups.values()))  # below its bar
    keys = [] if is_named else _series_keys(spec, styles)
    title = "\n".join([textwrap.fill(note, int(LETTERS * width)), spec.legend if keys else ""])
    style.legend_below(figure, [*keys, *_source_keys(shown, spec, lines)], title.strip())
    return style.finished(figure, spec.title)


def _gain_map(rows: pd.DataFrame, spec: PlotSpec) -> Figure:
    """Draw ratios as gains in percent: x along, series upwards, a row of panels for each device."""
    percent = 100 * (rows.value - 1)
    cells = rows.assign(
        shade=percent.where(percent.abs() > heat.NEUTRAL, 0.0),
        text=percent.map("{:+.0f}".format),
    )
    panel = spec.prefix.strip()
    cells = cells.rename(columns={"x": spec.x, "panel": panel})
    scale = heat.gain_scale(spec.title)
    of_devices = cells.groupby("device", sort=False)
    heat_rows = [heat.HeatRow(group, scale, label=str(name)) for name, group in of_devices]
    return heat.heat_map(heat_rows, x=spec.x, y="key", col=panel, not_run=NOT_RUN)


def _selected(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Select what the spec draws, with its panel and the `key` of its series."""
    shown = rows.reindex(columns=list(dict.fromkeys([*rows, *TEXTS])))
    shown = shown.fillna(dict.fromkeys(TEXTS, ""))
    for pattern in spec.left_out:
        shown = shown[~shown.panel.isin(fnmatch.filter(shown.panel, pattern))]
    for column, wanted in (("series", spec.series), ("quantity", spec.quantities)):
        shown = shown[shown[column].isin(wanted)] if wanted else shown
    shown = shown[shown.unit == spec.unit] if spec.unit else shown
    if spec.quantities:
        place = shown.dataset.where(shown.slo == "", shown.dataset + ", " + shown.slo)
        is_split = len(spec.quantities) > 1 and spec.kind != "pair"
        shown = shown.assign(panel=place + ": " + shown.quantity if is_split else place)
    if spec.kind == "pair":  # a point has a coordinate of each quantity
        known = shown.groupby(["device", "panel", "series", "x"]).quantity.transform("nunique")
        shown = shown[known == len(spec.quantities)]
    swapped = shown.panel.isin(spec.is_swapped)
    x, value = shown.x.where(~swapped, shown.value), shown.value.where(~swapped, shown.x)
    key = shown.x.map("{:g}".format) if spec.hue == "x" else shown.series.map(in_tokens)
    return shown.assign(x=x, value=value, key=key)


def _is_sparse(rows: pd.DataFrame, kind: Kind) -> pd.Series:
    """Mark measured rows of panels with less than half their values, one of several, or no line."""
    is_known, by = rows.value.notna(), [rows.device, rows.panel]
    panel = is_known.groupby(by)
    num_known = is_known.groupby([*by, rows.key]).transform("sum") if kind == "line" else is_known
    longest = num_known.groupby(by).transform("max" if kind == "line" else "sum")
    is_few = (longest < 2) & (panel.transform("size") > 1)
    return (rows.level == MEASURED) & (is_few | (panel.transform("mean") < 0.5))


def _without_sparse(rows: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """Leave out sparse panels, all but the best level of each simulated GPU and model, and of GPUs
    with measured kernels all but the one with the most points.
    """
    rank = 2 * (rows.method != "") + (rows.level != "profiled")
    best = rank.groupby([rows.hardware, rows.model, rows.panel]).transform("min")
    is_best = rows.level.isin([PAPER, MEASURED, COMPOSED]) | (rank == best)
    is_shown = (rows.level != COMPOSED) | _is_most_composed(rows)
    kept = rows[rows.value.notna() & is_best & is_shown & ~_is_sparse(rows, kind)]
    return kept if len(kept) else rows[rows.value.notna()]


def _is_most_composed(rows: pd.DataFrame) -> pd.Series:
    """Mark the GPU of whose measured kernels the most series are composed, in panels where these
    are several, or all that there are.
    """
    is_composed = rows.level == COMPOSED
    drawn = rows.groupby("panel").key.nunique()  # by any device
    num_series = rows[is_composed].groupby(["device", "panel"]).key.nunique().reset_index()
    enough = drawn.reindex(num_series.panel).clip(upper=2).to_numpy()
    shown = num_series[num_series.key >= enough]
    if shown.empty:
        return pd.Series(False, rows.index)
    most = shown.groupby("device").key.sum().idxmax()
    panels = shown.panel[shown.device == most]
    return is_composed & (rows.device == most) & rows.panel.isin(panels)


def _note_on_sparse(rows: pd.DataFrame, spec: PlotSpec) -> str:
    """Name each panel that is left out, and how many of its points were measured."""
    left_out = rows[_is_sparse(rows, spec.kind)].groupby(["device", "panel"], sort=False).value
    parts = []
    for (device, panel), known, all_ in left_out.agg(["count", "size"]).itertuples():
        name = spec.panel_name(panel)
        where = device if name in device else f"{device}, {name}"
        parts.append(f"{known} of {all_} points on {where}")
    return f"Left out, too few measured to draw: {'; '.join(parts)}" if parts else ""


def _by_source(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Group rows by title: the paper with its simulated GPUs, then each measured device, and each
    of which others measured the kernels.
    """
    titles = ("measured on " + rows.device).where(rows.level == MEASURED, PREDICTED)
    titles = titles.where(rows.level != COMPOSED, rows.device)
    groups = rows.groupby(titles, sort=False)
    return {str(title): of for title, of in sorted(groups, key=lambda one: one[0] != PREDICTED)}


def _by_device(rows: pd.DataFrame, *, are_together: bool) -> dict[str, pd.DataFrame]:
    """Group rows by device, each with the paper's rows of its hardware and panels; GPUs that ran
    the same model are one group where they `are_together`.
    """
    papers, found = rows[rows.level == PAPER], rows[rows.level != PAPER]
    is_simulated = ~found.level.isin([MEASURED, COMPOSED])
    is_joined = are_together & (found.hardware != "") & is_simulated
    titles = found.device.where(~is_joined, "simulated GPUs, " + found.model)
    groups = {}
    for title, group in found.groupby(titles, sort=False):
        is_measured = group.level.isin([MEASURED, COMPOSED]).any()
        hardware = {*group.hardware, ""} - ({""} if is_measured else set())
        beside = papers[papers.hardware.isin(hardware) & papers.panel.isin(group.panel)]
        name = str(title) if not _is_single(group) else str(group.device.iloc[0])
        groups[name] = pd.concat([group, beside])
    return groups


def _is_single(rows: pd.DataFrame) -> bool:
    return rows.device[rows.level != PAPER].nunique() <= 1


def _number(series: str) -> float:
    """Return what numbers and chunks are ordered by; names follow as they come."""
    number = re.fullmatch(r"(?:C=|sarathi)?([\d.]+)(K?)", series)
    return float(number[1]) * (1024 if number[2] else 1) if number else math.inf


def _line_styles(rows: pd.DataFrame, spec: PlotSpec) -> dict[str, Any]:
    """Return the line style of each simulated device: profiled, analytic, counted."""
    if spec.is_by_device:
        return {}
    devices = rows.device[~rows.level.isin([PAPER, MEASURED, COMPOSED])].unique()
    return dict(zip(map(str, devices), cycle(SIMULATED), strict=False))


def _lines(ax: Axes, rows: pd.DataFrame, spec: PlotSpec, styles: Styles, lines: Looks) -> None:
    has_paper = (rows.level == PAPER).any()
    for (key, device), points in rows.groupby(["key", "device"], sort=False):
        colour, shape = styles[str(key)]
        line = points.sort_values("x")
        look: dict[str, Any] = {"marker": shape, "markersize": 4 if spec.is_by_device else 6}
        if line.level.iloc[0] == PAPER:
            look |= {"linestyle": "", "fillstyle": "none", "zorder": 3}
        elif str(device) in lines:
            look["linestyle"] = lines[str(device)]
            if has_paper and len(points) > 1:
                look["marker"] = ""  # the paper's, which the line runs through, identify it
        else:
            look["linestyle"] = "" if spec.kind == "point" else "-"
            ax.vlines(line.x, line.low, line.high, color=colour, linewidth=0.8)
        every = max(1, math.ceil(len(points) / MOST_MARKERS)) if spec.kind == "line" else 1
        ax.plot(line.x, line.value, color=colour, markevery=every, linewidth=1.2, **look)
    style.scale_x(ax, np.sort(rows.x.unique()), is_log=spec.log_x and rows.x.min() > 0)
    if spec.log_y and rows.value.min() > 0:
        ax.set_yscale("log")
        style.tick_in_steps(ax.yaxis)
    elif rows.value.min() > 0 and rows.value.max() > 2 * rows.value.min():
        ax.set_ylim(bottom=0)
    panel, quantity = rows.panel.iloc[0], rows["quantity"].iloc[0]
    unit = UNITS.get(rows.unit.iloc[0], rows.unit.iloc[0])
    label = spec.ys.get(panel, spec.y or (f"{quantity} [{unit}]" if spec.quantities else unit))
    ax.set(xlabel=spec.xs.get(panel, spec.x), ylabel=textwrap.fill(label, 24))


def _bars(ax: Axes, rows: pd.DataFrame, spec: PlotSpec, styles: Styles, lines: Looks) -> None:
    """Draw a bar with its interval for each series and device, and the paper's value hollow."""
    bars = rows[rows.level != PAPER].drop_duplicates(["device", "key"])
    names, devices = list(dict.fromkeys(bars.key)), list(dict.fromkeys(bars.device))
    width = 0.6 if len(devices) == 1 else 0.8 / len(names)
    step = 1.0 if len(devices) == 1 else width

    def places_of(table: pd.DataFrame, device: pd.Series) -> pd.Series:
        beside = table.key.map(names.index) - (len(names) - 1) / 2
        return device.map(devices.index) + step * beside

    places = places_of(bars, bars.device)
    ax.bar(places, bars.value, width, color=[styles[name][0] for name in bars.key])
    ax.vlines(places, bars.low, bars.high, color="black", linewidth=0.9)
    papers = rows[(rows.level == PAPER) & rows.key.isin(names)]
    if len(papers):
        device_of = dict(zip(bars.hardware, bars.device, strict=True))
        device = papers.hardware.map(device_of).fillna(devices[0])
        ax.plot(places_of(papers, device), papers.value, "ko", fillstyle="none")
    if len(devices) > 1:
        chips = [str(one).replace("_", "\n") for one in bars.hardware.unique()]
        ax.set_xticks(range(len(devices)), chips, fontsize=8)
    else:
        space, rotation = ("\n", 0) if len(names) <= MOST_LEVEL else (" ", 90)
        words = [re.sub("[_ ]", space, spec.series_name(name)) for name in names]
        ax.set_xticks(sorted(places), words, fontsize=8, rotation=rotation)
    unit = str(bars.unit.iloc[0])
    ax.set_ylabel(spec.y or ("seconds" if unit == "s" else UNITS.get(unit, unit)))
    ax.grid(axis="x", visible=False)


def _pairs(ax: Axes, rows: pd.DataFrame, spec: PlotSpec, styles: Styles, lines: Looks) -> None:
    """Draw one quantity by another, in seconds: down and left is better."""
    y, x = spec.quantities
    both = rows.pivot(index=["x", "key"], columns="quantity", values="value").sort_index()
    if spec.hue == "x":
        ax.plot(both[x], both[y], color="0.6", linewidth=0.9)
    sizes = np.linspace(9, 5, len(both))  # points, so that equal places show, too
    keys = both.index.get_level_values("key")
    for key, size, (_, row) in zip(keys, sizes, both.iterrows(), strict=True):
        colour, shape = styles[str(key)]
        ax.plot(row[x], row[y], shape, color=colour, markersize=size)
    ax.set(xlabel=f"{x} [s]", ylabel=f"{y} [s]", xscale="log", yscale="log")
    ax.margins(0.1)
    for axis in (ax.xaxis, ax.yaxis):
        style.tick_in_steps(axis)


PANELS = {"line": _lines, "point": _lines, "bar": _bars, "pair": _pairs}


def _series_keys(spec: PlotSpec, styles: Styles) -> list[Artist]:
    look: Any = "-" if spec.kind == "line" else ""
    return [
        Line2D([], [], color=colour, marker=shape, linestyle=look, label=spec.series_name(name))
        for name, (colour, shape) in styles.items()
    ]


def _source_keys(rows: pd.DataFrame, spec: PlotSpec, lines: Looks) -> list[Artist]:
    """Explain the kinds of lines and markers."""
    keys: list[Artist] = []
    if (rows.level == PAPER).any():
        keys.append(Line2D([], [], color="k", marker="o", fillstyle="none", ls="", label="paper"))
    keys += [Line2D([], [], color="black", ls=look, label=name) for name, look in lines.items()]
    if not spec.is_by_device and (rows.level == MEASURED).any():
        label = "measured, with its interval"
        if (rows.level == COMPOSED).any():
            label = "measured, or of measured kernels"
        keys.append(Line2D([], [], color="black", marker="o", label=label))
    return keys
