"""Pictures of experiments: the paper's points, simulated ones and measured ones, by panel.

Series have the same colour and marker in all panels. The paper's points are hollow, simulated ones
a broken line beside them, measured ones filled with their interval, in panels of their device.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sarathi_lab.results.plots import heat, style
from sarathi_lab.results.plots.plot import Dash, Grid, Kind, Look, column_of, plot, styled
from sarathi_lab.results.plots.selection import note_on_sparse, selected, without_sparse
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.results.table import COMPOSED, MEASURED, PAPER

SIMULATED: Sequence[Dash] = (
    style.LINES["simulated"],
    style.LINES["analytic"],
    "-.",
    (0, (5, 1, 1, 1, 1, 1)),
)
PANEL, COLUMN, LEAST_WIDTH = 2.5, 3.2, 5.0  # inches: height of a panel, width of one and of all
PREDICTED = "simulated"  # group of the paper's points and all that is simulated
LETTERS = 11  # of a title in an inch
MOST_LEVEL = 5  # bars whose names fit beside each other
NOT_RUN = "not run: exceeds the cache, or the chunk is below the batch"
UNITS = {"1/s": "requests/s", "times": "ratio"}
BAR_UNITS = {**UNITS, "s": "seconds"}
PATH = Look("", "0.6", marker="")  # between the points of a pair of quantities
GROUP = ["group", "panel"]


def draw(spec: PlotSpec, rows: pd.DataFrame, *, is_all: bool = False) -> Figure:
    """Draw the rows of one figure (`table.rows_of_points`), one axes a panel.

    Of a simulated GPU the best level is drawn, of measured kernels the GPU with the most points,
    and of a measured device the panels with at least half of their points, with a note on what is
    left out; `is_all` draws everything.
    """
    rows = selected(rows, spec)
    note = ""
    if is_all:
        shown = rows[rows.value.notna()]
    else:
        note = note_on_sparse(rows, spec)
        shown = without_sparse(rows, spec)
    if spec.kind == "heat":
        return style.finished(_gain_map(shown, spec), spec.title)
    grouped = _by_device(shown, spec) if spec.is_by_device else _by_source(shown)
    places = zip(grouped.group, grouped.panel, strict=True)
    grouped = grouped.assign(place=column_of(places, grouped))
    dashes = _dashes(shown, spec)
    looks = _looks_of_series(shown, spec)
    grid = _grid(grouped, spec, list(shown.panel.unique()))
    marks = _with_coordinates(grouped, spec, looks, dashes)
    kind: Kind = "bar" if spec.kind == "bar" else "line"
    figure, axes = plot(marks, x="at", col="place", kind=kind, grid=grid)
    letters = int(LETTERS * grid.size[0] / grid.columns)
    for place, group in grouped.groupby("place", sort=False):
        ax = axes[place]
        LABEL[spec.kind](ax, group, spec)
        ax.set_title(_panel_title(group, spec, letters, grouped.group.nunique()), fontsize=9)
    keys: list[Artist] = [replace(look, dash=_dash_of(spec)).key() for look in looks.values()]
    if spec.kind == "bar" and _num_devices(grouped).max() <= 1:
        keys = []  # bars have their names below them
    heading = [textwrap.fill(note, int(LETTERS * grid.size[0]))]
    if keys:
        heading.append(spec.legend)
    keys += _source_keys(shown, spec, dashes)
    style.legend_below(figure, keys, "\n".join(heading).strip())
    return style.finished(figure, spec.title)


def _gain_map(rows: pd.DataFrame, spec: PlotSpec) -> Figure:
    """Draw ratios as gains in percent: x along, series upwards, a row of panels for each device."""
    percent = 100 * (rows.value - 1)
    shade = percent.where(percent.abs() > heat.NEUTRAL, 0.0)
    cells = rows.assign(shade=shade, text=percent.map("{:+.0f}".format))
    panel = spec.prefix.strip()
    cells = cells.rename(columns={"x": spec.x, "panel": panel})
    scale = heat.gain_scale(spec.title)
    heat_rows = []
    for device, of_device in cells.groupby("device", sort=False):
        heat_rows.append(heat.HeatRow(of_device, scale, label=str(device)))
    return heat.heat_map(heat_rows, x=spec.x, y="key", col=panel, not_run=NOT_RUN)


# -- groups of panels ------------------------------------------------------------------------------


def _by_source(rows: pd.DataFrame) -> pd.DataFrame:
    """Add each row's `group`: the paper with its simulated GPUs, then each measured device, and
    each of which others measured the kernels.
    """
    group = pd.Series(PREDICTED, rows.index)
    group = group.where(rows.level != MEASURED, "measured on " + rows.device)
    group = group.where(rows.level != COMPOSED, rows.device)
    return rows.assign(group=group).sort_values(
        "group", key=lambda groups: groups != PREDICTED, kind="stable"
    )


def _by_device(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Add each row's `group`, its device, and repeat the paper's rows beside those of the same
    hardware and panels; simulated GPUs that ran the same model share their bars' group.
    """
    is_paper = rows.level == PAPER
    of_paper, others = rows[is_paper], rows[~is_paper]
    titles = others.device
    if spec.kind == "bar":
        is_simulated = ~others.level.isin([MEASURED, COMPOSED])
        is_joined = is_simulated & (others.hardware != "")
        titles = titles.where(~is_joined, "simulated GPUs, " + others.model)
    groups = []
    for title, group in others.groupby(titles, sort=False):
        hardware = set(group.hardware)
        if group.level.isin([MEASURED, COMPOSED]).any():
            hardware -= {""}
        else:
            hardware |= {""}
        is_beside = of_paper.hardware.isin(hardware) & of_paper.panel.isin(group.panel)
        devices = group.device.unique()
        name = devices[0] if len(devices) == 1 else title
        groups.append(pd.concat([group, of_paper[is_beside]]).assign(group=name))
    if not groups:
        return rows.assign(group="")
    return pd.concat(groups, ignore_index=True)


def _num_devices(rows: pd.DataFrame) -> pd.Series:
    """Return the number of devices by group, without the paper."""
    return rows[rows.level != PAPER].groupby("group").device.nunique()


def _grid(rows: pd.DataFrame, spec: PlotSpec, panels: Sequence[str]) -> Grid:
    """Place the panels of each group in rows of their own, in the order of `panels`."""
    panels_of: dict[str, list[str]] = {}
    for group, of_group in rows.groupby("group", sort=False):
        present = set(of_group.panel)
        panels_of[str(group)] = [panel for panel in panels if panel in present]
    longest = max(map(len, panels_of.values()), default=1)
    across = min(spec.columns, longest)
    places: list[tuple[str, str] | None] = []
    for name, of_name in panels_of.items():
        places += [(name, panel) for panel in of_name]
        places += [None] * (-len(of_name) % across)
    columns = min(spec.columns // across * across, max(1, len(places)))
    width = min(style.WIDTH, max(COLUMN * columns, LEAST_WIDTH))
    height = PANEL
    if spec.kind == "bar" and _longest_bars(rows) > MOST_LEVEL:
        letters = max(len(spec.series_name(series)) for series in rows.key.unique())
        height += style.LETTER * letters  # of names that are upright
    num_rows = math.ceil(len(places) / columns) or 1
    return Grid(places, columns, (width, height * num_rows + 0.5))


def _longest_bars(rows: pd.DataFrame) -> int:
    return int(rows.groupby("panel").key.nunique().max())


def _panel_title(rows: pd.DataFrame, spec: PlotSpec, letters: int, num_groups: int) -> str:
    group, panel = rows[GROUP].iloc[0]
    if group == PREDICTED:
        sources = rows.level.where(rows.level == PAPER, PREDICTED)
        group = " and ".join(sorted(sources.unique()))
    lines = [spec.panel_name(panel)]
    if num_groups > 1 or spec.is_by_device:
        lines.insert(0, group)
    return "\n".join(textwrap.fill(line, letters) for line in lines if line)


# -- looks and coordinates -------------------------------------------------------------------------


def _looks_of_series(rows: pd.DataFrame, spec: PlotSpec) -> dict[str, Look]:
    """Return the look of each series by its key, in the order of their numbers."""
    series = sorted(dict.fromkeys(rows.key), key=_number)
    names = {key: spec.series_name(key) for key in series}
    colours = style.colours(list(names.values()))
    looks = {}
    for i, (key, name) in enumerate(names.items()):
        looks[key] = Look(name, colours[name], "", style.marker(i))
    return looks


def _number(series: str) -> float:
    """Return what numbers and chunks are ordered by; names follow as they come."""
    number = re.fullmatch(r"(?:C=|sarathi)?([\d.]+)(K?)", series)
    if number is None:
        return math.inf
    digits, thousands = number.groups()
    return float(digits) * (1024 if thousands else 1)


def _dashes(rows: pd.DataFrame, spec: PlotSpec) -> dict[str, Dash]:
    """Return the line style of each simulated device: profiled, analytic, counted."""
    if spec.is_by_device:
        return {}
    devices = rows.device[~rows.level.isin([PAPER, MEASURED, COMPOSED])].unique()
    return dict(zip(map(str, devices), cycle(SIMULATED), strict=False))


def _dash_of(spec: PlotSpec) -> Dash:
    return "-" if spec.kind == "line" else ""


def _with_coordinates(
    rows: pd.DataFrame, spec: PlotSpec, looks: Mapping[str, Look], dashes: Mapping[str, Dash]
) -> pd.DataFrame:
    """Add to each row where it is (`at`) and its `look`."""
    if spec.kind == "pair":
        return _pairs(rows, spec, looks)
    if spec.kind == "bar":
        bars = [_bars(group, looks) for _, group in rows.groupby("place", sort=False)]
        return pd.concat(bars)
    series = []
    has_paper = (rows.level == PAPER).groupby(rows.place).any()
    for _, points in rows.groupby(["place", "key", "device"], sort=False):
        place, key, device, level = points[["place", "key", "device", "level"]].iloc[0]
        look = replace(looks[key], dash=_dash_of(spec))
        if spec.is_by_device:
            look = replace(look, size=4.0)
        if level == PAPER:
            look = replace(look, dash="", is_hollow=True)
        elif device in dashes:
            look = replace(look, dash=dashes[device])
            if has_paper[place] and len(points) > 1:
                look = replace(look, marker="")  # the paper's, which the line runs through, name it
        points = styled(points.sort_values("x").assign(at=points.x), look)
        if level == PAPER or device in dashes:
            points = points.assign(low=math.nan, high=math.nan)  # the cost model's error
        series.append(points)
    return pd.concat(series)


def _bars(rows: pd.DataFrame, looks: Mapping[str, Look]) -> pd.DataFrame:
    """Place a bar for each series and device of a panel, and the paper's values on them."""
    is_paper = rows.level == PAPER
    bars = rows[~is_paper].drop_duplicates(["device", "key"])
    names = list(bars.key.unique())
    devices = list(bars.device.unique())
    width = 0.6
    step = 1.0  # between bars; those of several devices touch
    if len(devices) > 1:
        width = step = 0.8 / len(names)
    of_paper = rows[is_paper & rows.key.isin(names)]
    device_of = dict(zip(bars.hardware, bars.device, strict=True))
    device = of_paper.hardware.map(device_of).fillna(devices[0])
    hollow = Look("paper", "black", "", "o", is_hollow=True)
    marks = pd.concat(
        [
            bars.assign(width=width, look=bars.key.map(dict(looks))),
            styled(
                of_paper.assign(device=device, width=math.nan, low=math.nan, high=math.nan), hollow
            ),
        ]
    )
    beside = marks.key.map(names.index) - (len(names) - 1) / 2
    return marks.assign(at=marks.device.map(devices.index) + step * beside)


def _pairs(rows: pd.DataFrame, spec: PlotSpec, looks: Mapping[str, Look]) -> pd.DataFrame:
    """Place one quantity by another: down and left is better."""
    y, x = spec.quantities
    both = rows.pivot(index=["place", "x", "key"], columns="quantity", values="value")
    both = both.sort_index().reset_index().rename(columns={x: "at", y: "value"})
    panels = []
    for _, points in both.groupby("place", sort=False):
        if spec.hue == "x":
            panels.append(styled(points, PATH))
        # The first ones are larger, so that equal places show, too.
        sizes = np.linspace(9, 5, len(points))
        marks = []
        for key, size in zip(points.key, sizes, strict=True):
            marks.append(replace(looks[key], size=size))
        panels.append(points.assign(look=column_of(marks, points)))
    return pd.concat(panels)


# -- labels ----------------------------------------------------------------------------------------


def _label_lines(ax: Axes, rows: pd.DataFrame, spec: PlotSpec) -> None:
    low, high = rows.value.min(), rows.value.max()
    style.scale_x(ax, np.sort(rows.x.unique()), is_log=spec.log_x and rows.x.min() > 0)
    if spec.log_y and low > 0:
        ax.set_yscale("log")
        style.tick_in_steps(ax.yaxis)
    elif low > 0 and high > 2 * low:
        ax.set_ylim(bottom=0)
    panel = rows.panel.iloc[0]
    unit = rows.unit.iloc[0]
    label = UNITS.get(unit, unit)
    if spec.quantities:
        label = f"{rows['quantity'].iloc[0]} [{label}]"
    label = spec.ys.get(panel, spec.y or label)
    ax.set(xlabel=spec.xs.get(panel, spec.x), ylabel=textwrap.fill(label, 24))


def _label_bars(ax: Axes, rows: pd.DataFrame, spec: PlotSpec) -> None:
    bars = rows[rows.level != PAPER]
    names = list(bars.key.unique())
    num_devices = bars.device.nunique()
    if num_devices > 1:
        chips = [chip.replace("_", "\n") for chip in bars.hardware.unique()]
        ax.set_xticks(range(num_devices), chips, fontsize=8)
    else:
        is_level = len(names) <= MOST_LEVEL
        space = "\n" if is_level else " "
        labels = [re.sub("[_ ]", space, spec.series_name(name)) for name in names]
        centres = np.arange(len(names)) - (len(names) - 1) / 2
        ax.set_xticks(centres, labels, fontsize=8, rotation=0 if is_level else 90)
    unit = bars.unit.iloc[0]
    ax.set_ylabel(spec.y or BAR_UNITS.get(unit, unit))
    ax.grid(axis="x", visible=False)


def _label_pairs(ax: Axes, rows: pd.DataFrame, spec: PlotSpec) -> None:
    y, x = spec.quantities
    ax.set(xlabel=f"{x} [s]", ylabel=f"{y} [s]", xscale="log", yscale="log")
    ax.margins(0.1)
    for axis in (ax.xaxis, ax.yaxis):
        style.tick_in_steps(axis)


LABEL = {"line": _label_lines, "point": _label_lines, "bar": _label_bars, "pair": _label_pairs}


def _source_keys(rows: pd.DataFrame, spec: PlotSpec, dashes: Mapping[str, Dash]) -> list[Artist]:
    """Explain the kinds of lines and markers."""
    keys: list[Artist] = []
    levels = set(rows.level)
    if PAPER in levels:
        keys.append(Look("paper", "black", "", "o", is_hollow=True).key())
    for device, dash in dashes.items():
        keys.append(Line2D([], [], color="black", ls=dash, label=device))
    if MEASURED in levels and not spec.is_by_device:
        label = "measured, with its interval"
        if COMPOSED in levels:
            label = "measured, or of measured kernels"
        keys.append(Look(label, "black", "-", "o").key())
    return keys
