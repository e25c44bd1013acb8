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

from sarathi_lab.results.intervals import BAND, GAIN, LOSS, UNDECIDED, effect
from sarathi_lab.results.load import COMPOSED_SOURCE
from sarathi_lab.results.plots import heat, style
from sarathi_lab.results.plots.axes import LOG_SCALE
from sarathi_lab.results.plots.plot import Dash, Kind, Look, PanelLayout, column_of, plot, styled
from sarathi_lab.results.plots.selection import is_simulated, selected, without_sparse
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.results.table import MEASURED, PAPER

SIMULATED: Sequence[Dash] = (
    style.LINES["simulated"],
    style.LINES["analytic"],
    "-.",
    (0, (5, 1, 1, 1, 1, 1)),
)
PANEL_HEIGHT = 2.5  # inches
PANEL_WIDTH = 3.2  # inches
LEAST_WIDTH = 5.0  # inches, of the picture
PREDICTED = "simulated"  # group of the paper's points and all that is simulated
LETTERS = 11  # of a title in an inch
YLABEL = 24  # letters of a line of an axis' label
LEAST_SPAN = 0.02  # of the largest value, that an axis shows
MOST_LEVEL = 5  # bars whose names fit beside each other; names of more are upright
NOT_RUN = "not run: exceeds the cache, or the chunk is below the batch"
NOT_DECIDED = f"~: undecided, as the interval reaches past {100 * BAND:g} %, or is not known"
UNITS = {"1/s": "requests/s", "times": "ratio"}
BAR_UNITS = {**UNITS, "s": "seconds"}
NO_INTERVAL = {"low": math.nan, "high": math.nan}
HOLLOW = Look("paper", "black", "", "o", is_hollow=True)
Cell = tuple[str, str]  # of the grid: a group and a panel
Looks = Mapping[str, Look]  # by the keys of series
Dashes = Mapping[str, Dash]  # by the names of simulated devices
PATH = Look("", "0.6", marker="")  # between the points of a pair of quantities


def draw(spec: PlotSpec, points: pd.DataFrame, *, is_all: bool = False) -> Figure:
    """Draw the points of one experiment (`load.POINT`, `source` and `device`), one axes a panel.

    Of a simulated GPU the best level is drawn, of measured kernels the GPU with the most points,
    and of a measured device the panels with at least half of their points, with a note on what is
    left out; `is_all` draws everything.
    """
    stated = selected(points, spec)
    notes: list[str] = []
    if is_all:
        shown = stated.dropna(subset="value")
    else:
        shown, note_on_sparse = without_sparse(stated, spec)
        note_on_simulations = _note_on_simulations(stated, shown, spec)
        notes = [note_on_sparse, note_on_simulations]
    if spec.kind == "heat":
        figure = _gain_map(shown, spec)
    else:
        figure = _panels(shown, spec, notes)
    return style.finished(figure, spec.title)


def _panels(rows: pd.DataFrame, spec: PlotSpec, notes: Sequence[str]) -> Figure:
    """Draw lines, points, bars or pairs, with the notes above the legend."""
    panels = list(rows.panel.unique())  # in the order of the table
    if spec.is_by_device:
        grouped = _by_device(rows, spec)
    else:
        grouped = _by_source(rows)
    cells = zip(grouped.group, grouped.panel, strict=True)
    in_cells = grouped.assign(cell=column_of(cells, grouped))
    looks = _looks_of_series(rows, spec)
    dashes = _dashes(rows, spec)
    grid = _grid(in_cells, spec, panels)
    marks = _with_coordinates(in_cells, spec, looks, dashes)
    kind: Kind = "line"
    if spec.kind == "bar":
        kind = "bar"
    figure, axes = plot(marks, x="at", col="cell", kind=kind, grid=grid)

    width, _ = grid.size
    letters_of_picture = int(LETTERS * width)
    letters_of_panel = letters_of_picture // grid.columns
    num_groups = in_cells.group.nunique()
    for cell, rows_of_cell in in_cells.groupby("cell", sort=False):
        ax = axes[cell]
        LABEL[spec.kind](ax, rows_of_cell, spec)
        title = _panel_title(rows_of_cell, spec, letters_of_panel, num_groups)
        ax.set_title(title, fontsize=9)

    above_keys = _wrapped_notes(notes, letters_of_picture)
    keys: list[Artist] = []
    # The names of bars are below them, unless devices share a panel.
    if spec.kind != "bar" or _has_several_devices(in_cells):
        above_keys.append(spec.legend)
        keys += _series_keys(looks, spec)
    keys += _source_keys(rows, spec, dashes)
    style.legend_below(figure, keys, _lines(above_keys))
    return figure


def _wrapped_notes(notes: Sequence[str], letters: int) -> list[str]:
    """Return the notes that are not empty in lines of so many `letters`, with a blank line last:
    without it they would read as the legend's heading.
    """
    wrapped = []
    for note in filter(None, notes):
        lines = textwrap.fill(note, letters)
        wrapped.append(lines)
    if wrapped:
        wrapped.append(" ")
    return wrapped


def _lines(texts: Sequence[str]) -> str:
    """Put the texts that are not empty below each other."""
    return "\n".join(filter(None, texts))


def _note_on_simulations(rows: pd.DataFrame, shown: pd.DataFrame, spec: PlotSpec) -> str:
    """State how many simulations of the same points are left out beside the best one."""
    if spec.is_by_device:
        return ""
    simulated = rows[is_simulated(rows)]
    left_out = set(simulated.device).difference(shown.device)
    num_left_out = len(left_out)
    if num_left_out == 0:
        return ""
    if num_left_out == 1:
        return "1 other simulation is not drawn (figures --all)"
    return f"{num_left_out} other simulations are not drawn (figures --all)"


def _gain_map(rows: pd.DataFrame, spec: PlotSpec) -> Figure:
    """Draw ratios as gains in percent: x along, series upwards, a row of panels for each device.

    Only a gain or a loss that the whole interval shows has a colour.
    """
    gain = rows.value - 1
    percent = 100 * gain
    effects = pd.Series(map(effect, rows.low, rows.high), rows.index)
    has_colour = effects.isin([GAIN, LOSS])
    is_undecided = effects == UNDECIDED
    shade = percent.where(has_colour, 0.0)
    number = percent.map("{:+.0f}".format)
    notes = []
    if is_undecided.any():
        notes.append(NOT_DECIDED)
    cells = rows.assign(
        row=rows.device,
        scale=column_of([heat.GAIN] * len(rows), rows),
        shade=shade,
        text=number.mask(is_undecided, "~" + number),
    )
    # A map's labels are the names of its columns.
    panel = spec.prefix.strip()
    cells = cells.rename(columns={"x": spec.x, "panel": panel})
    return heat.heat_map(cells, x=spec.x, y="key", col=panel, not_run=NOT_RUN, notes=notes)


# -- groups of panels ------------------------------------------------------------------------------


def _by_source(rows: pd.DataFrame) -> pd.DataFrame:
    """Add each row's `group`: the paper with its simulated GPUs, then each measured device, and
    each of which others measured the kernels.
    """
    is_measured = rows.source == MEASURED
    is_composed = rows.source == COMPOSED_SOURCE
    group = pd.Series(PREDICTED, rows.index)
    group = group.mask(is_measured, "measured on " + rows.device)
    group = group.mask(is_composed, rows.device)
    grouped = rows.assign(group=group)
    is_predicted = group == PREDICTED
    predicted = grouped[is_predicted]
    others = grouped[~is_predicted]
    return pd.concat([predicted, others])


def _by_device(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Add each row's `group`, its device, and repeat the paper's rows in the groups they belong to.

    Simulated GPUs that ran the same model share their bars' group.
    """
    is_paper = rows.source == PAPER
    of_paper = rows[is_paper]
    others = rows[~is_paper]
    if others.empty:
        return rows.assign(group="")
    group_name = others.device
    if spec.kind == "bar":
        is_simulated_gpu = is_simulated(others) & (others.hardware != "")
        group_name = group_name.mask(is_simulated_gpu, "simulated GPUs, " + others.model)
    groups = []
    for common_name, group in others.groupby(group_name, sort=False):
        devices = group.device.unique()
        title = str(common_name)
        if len(devices) == 1:
            title = devices[0]
        of_same_hardware = _of_same_hardware(of_paper, group)
        with_paper = pd.concat([group, of_same_hardware])
        groups.append(with_paper.assign(group=title))
    return pd.concat(groups, ignore_index=True)


def _of_same_hardware(of_paper: pd.DataFrame, group: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's rows of the group's panels and hardware.

    Points of the paper that name no hardware are compared with simulations alone.
    """
    hardware = set(group.hardware)
    if is_simulated(group).all():
        hardware.add("")
    else:
        hardware.discard("")
    is_of_hardware = of_paper.hardware.isin(hardware)
    is_in_panels = of_paper.panel.isin(group.panel)
    return of_paper[is_of_hardware & is_in_panels]


def _has_several_devices(rows: pd.DataFrame) -> bool:
    """Return whether a group has several devices, without the paper."""
    others = rows[rows.source != PAPER]
    num_devices = others.groupby("group").device.nunique()
    return bool((num_devices > 1).any())


def _grid(rows: pd.DataFrame, spec: PlotSpec, panels: Sequence[str]) -> PanelLayout:
    """Place the panels of each group in rows of their own, in the order of `panels`."""
    cells_of_groups = _cells_of_groups(rows, panels)
    most_panels = max(map(len, cells_of_groups), default=1)
    panels_across = min(spec.columns, most_panels)
    cells = _in_full_rows(cells_of_groups, panels_across)
    # Narrow groups stand beside each other.
    groups_across = spec.columns // panels_across
    num_cells = max(1, len(cells))
    columns = min(groups_across * panels_across, num_cells)
    num_rows = math.ceil(num_cells / columns)
    width = max(PANEL_WIDTH * columns, LEAST_WIDTH)
    width = min(width, style.WIDTH)
    height_of_row = PANEL_HEIGHT + _height_of_names(rows, spec)
    height = num_rows * height_of_row + 0.5
    return PanelLayout(cells, columns, (width, height))


def _cells_of_groups(rows: pd.DataFrame, panels: Sequence[str]) -> list[list[Cell]]:
    """Return the cells of each group, in the order of `panels`."""
    cells_of_groups = []
    for group, rows_of_group in rows.groupby("group", sort=False):
        present = set(rows_of_group.panel)
        cells = [(str(group), panel) for panel in panels if panel in present]
        cells_of_groups.append(cells)
    return cells_of_groups


def _in_full_rows(cells_of_groups: Sequence[Sequence[Cell]], across: int) -> list[Cell | None]:
    """Return all cells, row by row of so many, with empty ones behind a group's last: so the next
    group starts a row.
    """
    cells: list[Cell | None] = []
    for cells_of_group in cells_of_groups:
        num_empty = -len(cells_of_group) % across
        cells += cells_of_group
        cells += [None] * num_empty
    return cells


def _height_of_names(rows: pd.DataFrame, spec: PlotSpec) -> float:
    """Return the inches that upright names below many bars take, else 0."""
    if spec.kind != "bar":
        return 0.0
    num_bars = rows.groupby("panel").key.nunique().max()
    if num_bars <= MOST_LEVEL:
        return 0.0
    names = map(spec.series_name, rows.key.unique())
    return style.LETTER * max(map(len, names))


def _panel_title(rows: pd.DataFrame, spec: PlotSpec, letters: int, num_groups: int) -> str:
    """Return a panel's name, below the name of its group where there are several."""
    group, panel = rows["cell"].iloc[0]
    titles = []
    if num_groups > 1 or spec.is_by_device:
        if group == PREDICTED:
            group = _predicted_sources(rows)
        titles.append(group)
    titles.append(spec.panel_name(panel))
    wrapped = [textwrap.fill(title, letters) for title in titles]
    return _lines(wrapped)


def _predicted_sources(rows: pd.DataFrame) -> str:
    """Return which a panel has of the paper's points and simulated ones."""
    is_paper = rows.source == PAPER
    sources = rows.source.where(is_paper, PREDICTED)
    return " and ".join(sorted(sources.unique()))


# -- looks and coordinates -------------------------------------------------------------------------


def _looks_of_series(rows: pd.DataFrame, spec: PlotSpec) -> dict[str, Look]:
    """Return the look of each series by its key, in the order of their numbers."""
    keys = sorted(rows.key.unique(), key=_number)
    names = list(map(spec.series_name, keys))
    colour_of_name = style.colours(names)
    looks: dict[str, Look] = {}
    for number, key in enumerate(keys):
        name = names[number]
        marker = style.marker(number)
        looks[key] = Look(name, colour_of_name[name], dash="", marker=marker)
    return looks


def _number(series: str) -> float:
    """Return what numbers and chunks are ordered by; names follow as they come."""
    number = re.fullmatch(r"(?:C=|sarathi)?([\d.]+)(K?)", series)
    if number is None:
        return math.inf
    digits, is_in_thousands = number.groups()
    if is_in_thousands:
        return 1024 * float(digits)
    return float(digits)


def _dashes(rows: pd.DataFrame, spec: PlotSpec) -> dict[str, Dash]:
    """Return the line style of each simulated device: profiled, analytic, counted."""
    if spec.is_by_device:
        return {}
    simulated = rows[is_simulated(rows)]
    devices = simulated.device.unique()
    return dict(zip(devices, cycle(SIMULATED), strict=False))


def _dash_of(spec: PlotSpec) -> Dash:
    return "-" if spec.kind == "line" else ""


def _with_coordinates(
    rows: pd.DataFrame, spec: PlotSpec, looks: Looks, dashes: Dashes
) -> pd.DataFrame:
    """Add to each row where it is (`at`) and its `look`."""
    if spec.kind == "pair":
        return _pairs(rows, spec, looks)
    marks = []
    if spec.kind == "bar":
        for _, rows_of_cell in rows.groupby("cell", sort=False):
            marks.append(_bars(rows_of_cell, looks))
        return pd.concat(marks)
    is_paper = rows.source == PAPER
    cells_with_paper = set(rows.cell[is_paper])
    for _, points in rows.groupby(["cell", "key", "device"], sort=False):
        first = points.iloc[0]
        look = _look_of_points(first, looks[first.key], spec)
        is_of_paper = first.source == PAPER
        is_dashed = first.device in dashes and not is_of_paper
        if is_dashed:
            look = replace(look, dash=dashes[first.device])
            # The paper's markers name the line.
            if first.cell in cells_with_paper and len(points) > 1:
                look = replace(look, marker="")
        # The interval of a simulated point is the cost model's error, not a spread.
        has_interval = not (is_of_paper or is_dashed)
        marks.append(_by_x(points, look, has_interval=has_interval))
    return pd.concat(marks)


def _by_x(points: pd.DataFrame, look: Look, *, has_interval: bool) -> pd.DataFrame:
    """Place the points of one series and device by their x."""
    in_order = points.sort_values("x")
    placed = in_order.assign(at=in_order.x)
    if not has_interval:
        placed = placed.assign(**NO_INTERVAL)
    return styled(placed, look)


def _look_of_points(first: pd.Series, look_of_series: Look, spec: PlotSpec) -> Look:
    """Return the look of points of one series and device, of which `first` is one."""
    is_line = spec.kind == "line"
    look = replace(look_of_series, dash=_dash_of(spec), is_thinned=is_line)
    if spec.is_by_device:
        look = replace(look, size=4.0)
    if first.source == PAPER:
        look = replace(look, dash="", is_hollow=True)
    return look


def _bars(rows: pd.DataFrame, looks: Looks) -> pd.DataFrame:
    """Place a bar for each series and device of a panel, and the paper's values on them."""
    is_paper = rows.source == PAPER
    predicted = rows[~is_paper]
    bars = predicted.drop_duplicates(["device", "key"])
    names = list(bars.key.unique())
    devices = list(bars.device.unique())
    if bars.empty:  # nothing that was measured is enough to draw beside the paper's values
        names = list(rows.key.unique())
        devices = [PAPER]
    width = 0.6
    step = 1.0  # from a bar to the next
    if len(devices) > 1:
        # Bars of a device touch, and fill four fifths of its place.
        step = 0.8 / len(names)
        width = step
    look = bars.key.map(dict(looks))
    styled_bars = bars.assign(look=look, width=width)
    has_bar = rows.key.isin(names)
    papers_points = _on_bars(rows[is_paper & has_bar], bars, devices[0])
    marks = pd.concat([styled_bars, papers_points])
    device_number = marks.device.map(devices.index)
    bar_number = marks.key.map(names.index)
    middle = (len(names) - 1) / 2
    from_middle = bar_number - middle
    return marks.assign(at=device_number + step * from_middle)


def _on_bars(papers_points: pd.DataFrame, bars: pd.DataFrame, usual_device: str) -> pd.DataFrame:
    """Return the paper's points, each with the device of its hardware: those of other hardware, or
    of none that is stated, are on the bars of the `usual_device`.
    """
    device_of_hardware = dict(zip(bars.hardware, bars.device, strict=True))
    device = papers_points.hardware.map(device_of_hardware)
    device_with_bars = device.fillna(usual_device)
    # Rows without a width are points.
    placed = papers_points.assign(device=device_with_bars, width=math.nan, **NO_INTERVAL)
    return styled(placed, HOLLOW)


def _pairs(rows: pd.DataFrame, spec: PlotSpec, looks: Looks) -> pd.DataFrame:
    """Place one quantity by another: down and left is better."""
    y, x = spec.quantities
    point = ["cell", "x", "key"]
    pairs = rows.pivot(index=point, columns="quantity", values="value")
    pairs = pairs.sort_index().reset_index()
    pairs = pairs.rename(columns={x: "at", y: "value"})
    marks = []
    for _, points in pairs.groupby("cell", sort=False):
        if spec.hue == "x":  # a path through the points, by x
            marks.append(styled(points, PATH))
        # The first ones are larger, so that equal places show, too.
        sizes = np.linspace(9, 5, len(points))
        looks_of_points = []
        for key, size in zip(points.key, sizes, strict=True):
            look = replace(looks[key], size=size)
            looks_of_points.append(look)
        column = column_of(looks_of_points, points)
        marks.append(points.assign(look=column))
    return pd.concat(marks)


# -- labels ----------------------------------------------------------------------------------------


def _label_lines(ax: Axes, rows: pd.DataFrame, spec: PlotSpec) -> None:
    first = rows.iloc[0]
    x_label = spec.xs.get(first.panel, spec.x)
    _label_x(ax, rows.x, x_label, may_be_log=spec.log_x)
    y_label = spec.ys.get(first.panel, spec.y)
    if not y_label:
        y_label = _label_of_quantity(first, spec)
    _label_y(ax, rows.value, y_label, may_be_log=spec.log_y)


def _label_x(ax: Axes, x: pd.Series, label: str, *, may_be_log: bool) -> None:
    ticks = np.sort(x.unique())
    is_log = may_be_log and ticks[0] > 0
    style.scale_x(ax, ticks, is_log=is_log)
    if is_log:
        label = f"{label}, {LOG_SCALE}"
    letters = int(style.inches_wide(ax) / style.LETTER)
    wrapped = textwrap.fill(label, letters)
    ax.set_xlabel(wrapped)


def _label_y(ax: Axes, values: pd.Series, label: str, *, may_be_log: bool) -> None:
    note = _scale_y(ax, values, is_log=may_be_log)
    if note:
        label = f"{label}, {note}"
    wrapped = textwrap.fill(label, YLABEL)
    ax.set_ylabel(wrapped)


def _label_of_quantity(row: pd.Series, spec: PlotSpec) -> str:
    """Return the unit of a row, after the name of its quantity where the spec chooses some."""
    unit = UNITS.get(row.unit, row.unit)
    if spec.quantities:
        return f"{row['quantity']} [{unit}]"
    return str(unit)


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
    least_span = LEAST_SPAN * high
    if high - low < least_span:
        # Ticks would show the last digits alone.
        ax.set_ylim(high - least_span, high + least_span)
    start, _ = ax.get_ylim()
    if start <= 0:
        return ""
    return f"axis from {start:.3g}".replace(" ", "\N{NO-BREAK SPACE}")


def _label_bars(ax: Axes, rows: pd.DataFrame, spec: PlotSpec) -> None:
    bars = rows[rows.source != PAPER]
    if bars.empty:
        bars = rows
    devices = bars.drop_duplicates("device")
    if len(devices) > 1:
        names = devices.hardware
        if names.duplicated().any():  # of one GPU at several levels
            names = devices.device
        wrapped = names.str.replace("_|(?<=,) ", "\n", regex=True)
        ax.set_xticks(range(len(devices)), wrapped, fontsize=8)
    else:
        keys = list(bars.key.unique())
        _name_bars(ax, keys, spec)
    unit = bars.unit.iloc[0]
    unit_in_words = BAR_UNITS.get(unit, unit)
    ax.set_ylabel(spec.y or unit_in_words)
    ax.grid(axis="x", visible=False)


def _name_bars(ax: Axes, keys: Sequence[str], spec: PlotSpec) -> None:
    """Write names below bars: a word a line, or upright where there are many."""
    space = "\n"
    rotation = 0
    if len(keys) > MOST_LEVEL:
        space = " "
        rotation = 90
    names = []
    for key in keys:
        name = spec.series_name(key)
        names.append(re.sub("[_ ]", space, name))
    numbers = np.arange(len(keys))
    from_middle = numbers - numbers.mean()  # as `_bars` places them
    ax.set_xticks(from_middle, names, fontsize=8, rotation=rotation)


def _label_pairs(ax: Axes, rows: pd.DataFrame, spec: PlotSpec) -> None:
    y, x = spec.quantities
    ax.set_xlabel(f"{x} [s], {LOG_SCALE}")
    ax.set_ylabel(f"{y} [s], {LOG_SCALE}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(0.1)
    style.tick_in_steps(ax.xaxis)
    style.tick_in_steps(ax.yaxis)


LABEL = {"line": _label_lines, "point": _label_lines, "bar": _label_bars, "pair": _label_pairs}


def _series_keys(looks: Looks, spec: PlotSpec) -> list[Artist]:
    keys = []
    for look in looks.values():
        dashed = replace(look, dash=_dash_of(spec))
        keys.append(dashed.key())
    return keys


def _source_keys(rows: pd.DataFrame, spec: PlotSpec, dashes: Dashes) -> list[Artist]:
    """Explain the kinds of lines and markers."""
    keys: list[Artist] = []
    sources = set(rows.source)
    if PAPER in sources:
        keys.append(HOLLOW.key())
    for device, dash in dashes.items():
        line = Look(device, "black", dash, marker="")
        keys.append(line.key())
    if MEASURED in sources and not spec.is_by_device:
        label = "measured, with its interval"
        if COMPOSED_SOURCE in sources:
            label = "measured, or of measured kernels"
        measured = Look(label, "black", "-", "o")
        keys.append(measured.key())
    return keys
