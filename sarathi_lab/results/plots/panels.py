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
from sarathi_lab.results.plots.axes import LOG_SCALE
from sarathi_lab.results.plots.plot import Dash, Kind, Look, PanelLayout, column_of, plot, styled
from sarathi_lab.results.plots.selection import is_simulated, selected, without_sparse
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
YLABEL = 24  # letters of a line of an axis' label
LEAST_SPAN = 0.02  # of the largest value, that an axis shows
MOST_LEVEL = 5  # bars whose names fit beside each other
NOT_RUN = "not run: exceeds the cache, or the chunk is below the batch"
UNITS = {"1/s": "requests/s", "times": "ratio"}
BAR_UNITS = {**UNITS, "s": "seconds"}
NO_INTERVAL = {"low": math.nan, "high": math.nan}
HOLLOW = Look("paper", "black", "", "o", is_hollow=True)
PATH = Look("", "0.6", marker="")  # between the points of a pair of quantities


def draw(spec: PlotSpec, rows: pd.DataFrame, *, is_all: bool = False) -> Figure:
    """Draw the rows of one figure (`table.rows_of_points`), one axes a panel.

    Of a simulated GPU the best level is drawn, of measured kernels the GPU with the most points,
    and of a measured device the panels with at least half of their points, with a note on what is
    left out; `is_all` draws everything.
    """
    rows = selected(rows, spec)
    notes: list[str] = []
    if is_all:
        shown = rows[rows.value.notna()]
    else:
        shown, note = without_sparse(rows, spec)
        notes = [*filter(None, [note]), *_not_drawn(rows, shown, spec)]
    if spec.kind == "heat":
        return style.finished(_gain_map(shown, spec), spec.title)
    grouped = _by_device(shown, spec) if spec.is_by_device else _by_source(shown)
    cells = zip(grouped.group, grouped.panel, strict=True)
    grouped = grouped.assign(cell=column_of(cells, grouped))
    looks = _looks_of_series(shown, spec)
    dashes = _dashes(shown, spec)
    grid = _grid(grouped, spec, list(shown.panel.unique()))
    marks = _with_coordinates(grouped, spec, looks, dashes)
    kind: Kind = "bar" if spec.kind == "bar" else "line"
    figure, axes = plot(marks, x="at", col="cell", kind=kind, grid=grid)
    width, _ = grid.size
    letters = int(LETTERS * width)
    num_groups = grouped.group.nunique()
    for cell, group in grouped.groupby("cell", sort=False):
        LABEL[spec.kind](axes[cell], group, spec)
        title = _panel_title(group, spec, letters // grid.columns, num_groups)
        axes[cell].set_title(title, fontsize=9)
    legend_title = "\n".join(textwrap.fill(note, letters) for note in notes)
    keys: list[Artist] = []
    if spec.kind != "bar" or _has_several_devices(grouped):  # else names are below the bars
        legend_title += f"\n{spec.legend}"
        keys += [replace(look, dash=_dash_of(spec)).key() for look in looks.values()]
    keys += _source_keys(shown, spec, dashes)
    style.legend_below(figure, keys, legend_title.strip())
    return style.finished(figure, spec.title)


def _not_drawn(rows: pd.DataFrame, shown: pd.DataFrame, spec: PlotSpec) -> list[str]:
    """State how many simulations of the same points are left out beside the best one."""
    if spec.is_by_device:
        return []
    devices = set(rows.device[is_simulated(rows)])
    num_left_out = len(devices.difference(shown.device))
    if not num_left_out:
        return []
    simulations = "other simulation is" if num_left_out == 1 else "other simulations are"
    return [f"{num_left_out} {simulations} not drawn (figures --all)"]


def _gain_map(rows: pd.DataFrame, spec: PlotSpec) -> Figure:
    """Draw ratios as gains in percent: x along, series upwards, a row of panels for each device."""
    percent = 100 * (rows.value - 1)
    is_neutral = percent.abs() <= heat.NEUTRAL
    texts = percent.map("{:+.0f}".format)
    cells = rows.assign(shade=percent.where(~is_neutral, 0.0), text=texts)
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
    grouped = rows.assign(group=group)
    is_first = group == PREDICTED
    return pd.concat([grouped[is_first], grouped[~is_first]])


def _by_device(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Add each row's `group`, its device, and repeat the paper's rows beside those of the same
    hardware and panels; simulated GPUs that ran the same model share their bars' group.
    """
    is_paper = rows.level == PAPER
    of_paper = rows[is_paper]
    others = rows[~is_paper]
    titles = others.device
    if spec.kind == "bar":
        is_joined = is_simulated(others) & (others.hardware != "")
        titles = titles.where(~is_joined, "simulated GPUs, " + others.model)
    if others.empty:
        return rows.assign(group="")
    groups = []
    for title, group in others.groupby(titles, sort=False):
        hardware = {*group.hardware, ""}
        if not is_simulated(group).all():
            hardware.discard("")
        is_of_hardware = of_paper.hardware.isin(hardware)
        beside = of_paper[is_of_hardware & of_paper.panel.isin(group.panel)]
        devices = list(group.device.unique())
        name = devices[0] if len(devices) == 1 else str(title)
        groups.append(pd.concat([group, beside]).assign(group=name))
    return pd.concat(groups, ignore_index=True)


def _has_several_devices(rows: pd.DataFrame) -> bool:
    """Return whether a group has several devices, without the paper."""
    others = rows[rows.level != PAPER]
    return bool((others.groupby("group").device.nunique() > 1).any())


def _grid(rows: pd.DataFrame, spec: PlotSpec, panels: Sequence[str]) -> PanelLayout:
    """Place the panels of each group in rows of their own, in the order of `panels`."""
    num_panels = rows.groupby("group").panel.nunique()
    across = 1  # panels of the widest group beside each other
    if len(rows):
        across = min(spec.columns, int(num_panels.max()))
    cells: list[tuple[str, str] | None] = []
    for group in rows.group.unique():
        present = set(rows.panel[rows.group == group])
        cells += [(group, panel) for panel in panels if panel in present]
        num_empty = -len(cells) % across
        cells += [None] * num_empty
    groups_beside = spec.columns // across
    columns = min(groups_beside * across, max(1, len(cells)))
    width = max(COLUMN * columns, LEAST_WIDTH)
    height = PANEL
    if spec.kind == "bar":
        num_bars = rows.groupby("panel").key.nunique().max()
        if num_bars > MOST_LEVEL:
            names = map(spec.series_name, rows.key.unique())
            height += style.LETTER * max(map(len, names))  # they are upright
    num_rows = max(1, math.ceil(len(cells) / columns))
    size = (min(style.WIDTH, width), height * num_rows + 0.5)
    return PanelLayout(cells, columns, size)


def _panel_title(rows: pd.DataFrame, spec: PlotSpec, letters: int, num_groups: int) -> str:
    group, panel = rows["cell"].iloc[0]
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
    looks: dict[str, Look] = {}
    for key, name in names.items():
        looks[key] = Look(name, colours[name], "", style.marker(len(looks)))
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
    devices = rows.device[is_simulated(rows)].unique()
    return dict(zip(devices, cycle(SIMULATED), strict=False))


def _dash_of(spec: PlotSpec) -> Dash:
    return "-" if spec.kind == "line" else ""


def _with_coordinates(
    rows: pd.DataFrame, spec: PlotSpec, looks: Mapping[str, Look], dashes: Mapping[str, Dash]
) -> pd.DataFrame:
    """Add to each row where it is (`at`) and its `look`."""
    if spec.kind == "pair":
        return _pairs(rows, spec, looks)
    if spec.kind == "bar":
        bars = [_bars(group, looks) for _, group in rows.groupby("cell", sort=False)]
        return pd.concat(bars)
    series = []
    cells_with_paper = set(rows.cell[rows.level == PAPER])
    for _, points in rows.groupby(["cell", "key", "device"], sort=False):
        first = points.iloc[0]
        line = points.sort_values("x").assign(at=points.x)
        look = replace(looks[first.key], dash=_dash_of(spec), is_thinned=spec.kind == "line")
        if spec.is_by_device:
            look = replace(look, size=4.0)
        if first.level == PAPER:
            look = replace(look, dash="", is_hollow=True)
            line = line.assign(**NO_INTERVAL)
        elif first.device in dashes:
            look = replace(look, dash=dashes[first.device])
            line = line.assign(**NO_INTERVAL)  # it is the cost model's error
            if first.cell in cells_with_paper and len(points) > 1:
                look = replace(look, marker="")  # the paper's, which the line runs through, name it
        series.append(styled(line, look))
    return pd.concat(series)


def _bars(rows: pd.DataFrame, looks: Mapping[str, Look]) -> pd.DataFrame:
    """Place a bar for each series and device of a panel, and the paper's values on them."""
    is_paper = rows.level == PAPER
    bars = rows[~is_paper].drop_duplicates(["device", "key"])
    bars = bars.assign(look=bars.key.map(dict(looks)))
    names = list(bars.key.unique())
    devices = list(bars.device.unique())
    if bars.empty:  # nothing that was measured is enough to draw beside the paper's values
        names = list(rows.key.unique())
        devices = [PAPER]
    centre = (len(names) - 1) / 2
    width = 0.6
    step = 1.0  # between bars; those of several devices touch
    if len(devices) > 1:
        width = step = 0.8 / len(names)
    device_of = dict(zip(bars.hardware, bars.device, strict=True))
    of_paper = rows[is_paper & rows.key.isin(names)]
    device = of_paper.hardware.map(device_of).fillna(devices[0])
    hollow = of_paper.assign(device=device, width=math.nan, **NO_INTERVAL)
    hollow = styled(hollow, HOLLOW)
    marks = pd.concat([bars.assign(width=width), hollow])
    of_device = marks.device.map(devices.index)
    beside = marks.key.map(names.index) - centre
    return marks.assign(at=of_device + step * beside)


def _pairs(rows: pd.DataFrame, spec: PlotSpec, looks: Mapping[str, Look]) -> pd.DataFrame:
    """Place one quantity by another: down and left is better."""
    y, x = spec.quantities
    both = rows.pivot(index=["cell", "x", "key"], columns="quantity", values="value")
    both = both.sort_index().reset_index().rename(columns={x: "at", y: "value"})
    panels = []
    for _, points in both.groupby("cell", sort=False):
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
    x = np.sort(rows.x.unique())
    is_log_x = spec.log_x and x[0] > 0
    style.scale_x(ax, x, is_log=is_log_x)
    first = rows.iloc[0]
    label = UNITS.get(first.unit, first.unit)
    if spec.quantities:
        label = f"{first['quantity']} [{label}]"
    label = spec.ys.get(first.panel, spec.y or label)
    note = _scale_y(ax, rows.value, is_log=spec.log_y)
    along = spec.xs.get(first.panel, spec.x)
    if is_log_x:
        along = f"{along}, {LOG_SCALE}"
    letters = int(style.inches_wide(ax) / style.LETTER)
    ax.set_xlabel(textwrap.fill(along, letters))
    ax.set_ylabel(textwrap.fill(f"{label}, {note}" if note else label, YLABEL))


def _scale_y(ax: Axes, values: pd.Series, *, is_log: bool) -> str:
    """Scale the axis of values; returns the note that its label ends with, "" for one from zero."""
    low = float(values.min())
    high = float(values.max())
    if is_log and low > 0:
        ax.set_yscale("log")
        style.tick_in_steps(ax.yaxis)
        return LOG_SCALE
    if low > 0 and high > 2 * low:
        ax.set_ylim(bottom=0)
        return ""
    if high - low < LEAST_SPAN * high:  # else ticks would show the last digits alone
        ax.set_ylim(high - LEAST_SPAN * high, high + LEAST_SPAN * high)
    start = ax.get_ylim()[0]
    return f"axis\N{NO-BREAK SPACE}from\N{NO-BREAK SPACE}{start:.3g}" if start > 0 else ""


def _label_bars(ax: Axes, rows: pd.DataFrame, spec: PlotSpec) -> None:
    bars = rows[rows.level != PAPER]
    if bars.empty:
        bars = rows
    names = list(bars.key.unique())
    num_devices = bars.device.nunique()
    if num_devices > 1:
        chips = [chip.replace("_", "\n") for chip in bars.hardware.unique()]
        ax.set_xticks(range(num_devices), chips, fontsize=8)
    else:
        space = "\n"
        rotation = 0
        if len(names) > MOST_LEVEL:
            space = " "
            rotation = 90
        labels = [re.sub("[_ ]", space, spec.series_name(name)) for name in names]
        numbers = np.arange(len(names))
        ax.set_xticks(numbers - numbers.mean(), labels, fontsize=8, rotation=rotation)
    unit = bars.unit.iloc[0]
    ax.set_ylabel(spec.y or BAR_UNITS.get(unit, unit))
    ax.grid(axis="x", visible=False)


def _label_pairs(ax: Axes, rows: pd.DataFrame, spec: PlotSpec) -> None:
    y, x = spec.quantities
    ax.set(xlabel=f"{x} [s], {LOG_SCALE}", ylabel=f"{y} [s], {LOG_SCALE}")
    ax.set(xscale="log", yscale="log")
    ax.margins(0.1)
    for axis in (ax.xaxis, ax.yaxis):
        style.tick_in_steps(axis)


LABEL = {"line": _label_lines, "point": _label_lines, "bar": _label_bars, "pair": _label_pairs}


def _source_keys(rows: pd.DataFrame, spec: PlotSpec, dashes: Mapping[str, Dash]) -> list[Artist]:
    """Explain the kinds of lines and markers."""
    keys: list[Artist] = []
    levels = set(rows.level)
    if PAPER in levels:
        keys.append(HOLLOW.key())
    for device, dash in dashes.items():
        keys.append(Line2D([], [], color="black", ls=dash, label=device))
    if MEASURED in levels and not spec.is_by_device:
        label = "measured, with its interval"
        if COMPOSED in levels:
            label = "measured, or of measured kernels"
        keys.append(Look(label, "black", "-", "o").key())
    return keys
