"""Pictures of experiments: the paper's points, simulated ones and measured ones, by panel.

Series have the same colour and marker in all panels. The paper's points are hollow, simulated ones
a broken line beside them, measured ones filled with their interval, in panels of their device.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results.intervals import BAND, GAIN, LOSS, UNDECIDED, effect
from sarathi_lab.results.load import COMPOSED_SOURCE
from sarathi_lab.results.plots import heat, style
from sarathi_lab.results.plots.axes import scale_of, set_quantity_axis, set_setting_axis
from sarathi_lab.results.plots.plot import Dash, Kind, Look, PanelLayout, column_of, plot, styled
from sarathi_lab.results.plots.selection import best_sources, is_simulated, selected
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.results.table import MEASURED, PAPER

SIMULATED: Sequence[Dash] = (
    style.LINES["simulated"],
    style.LINES["analytic"],
    "-.",
    (0, (5, 1, 1, 1, 1, 1)),
)
PANEL_HEIGHT = 2.6  # inches
NAMES_HEIGHT = 0.6  # inches, of the names below bars
PANEL_WIDTH = 3.2  # inches
LEAST_WIDTH = 5.0  # inches, of the picture
PREDICTED = "simulated"  # group of the paper's points and all that is simulated
LETTERS = 11  # of a title in an inch
NOT_RUN = "not run: exceeds the cache, or the chunk is below the batch"
NOT_DECIDED = f"~: undecided, as the interval reaches past {100 * BAND:g} %, or is not known"
UNITS = {"1/s": "requests/s", "times": "ratio", "s": "seconds"}
RATIOS = ("ratio", "times")  # units of what is compared with 1
HOLLOW = Look("paper", "black", "", "o", is_hollow=True)
Cell = tuple[str, str]  # of the grid: a group and a panel
Looks = Mapping[str, Look]  # by the keys of series
Dashes = Mapping[str, Dash]  # by the names of simulated devices


def draw(spec: PlotSpec, points: pd.DataFrame, *, is_all: bool = False) -> Figure:
    """Draw the points of one experiment (`load.POINT`, `source` and `device`), one axes a panel.

    Of a simulated GPU the best level is drawn, and of measured kernels the GPU with the most
    points; `is_all` draws everything.
    """
    every_point = selected(points, spec).dropna(subset="value")
    shown = every_point
    if not is_all:
        shown = best_sources(every_point)
    if spec.kind == "heat":
        figure = _gain_map(shown, spec)
    else:
        num_left_out = every_point.device.nunique() - shown.device.nunique()
        figure = _panels(shown, spec, num_left_out)
    return style.finished(figure, spec.title)


def _panels(rows: pd.DataFrame, spec: PlotSpec, num_left_out: int) -> Figure:
    """Draw lines, points or bars, and state how many devices are left out."""
    panels = list(rows.panel.unique())  # in the order of the table
    grouped = _by_device(rows, spec) if spec.is_by_device else _by_source(rows)
    cells = zip(grouped.group, grouped.panel, strict=True)
    in_cells = grouped.assign(cell=column_of(cells, grouped))
    looks = _looks_of_series(rows, spec)
    dashes = _dashes(rows, spec)
    grid = _grid(in_cells, spec, panels)
    marks = []
    for _, rows_of_cell in in_cells.groupby("cell", sort=False):
        if spec.kind == "bar":
            marks.append(_bars(rows_of_cell, looks))
        else:
            marks.append(_lines(rows_of_cell, looks, dashes))
    table = pd.concat(marks)
    kind: Kind = "bar" if spec.kind == "bar" else "line"
    figure, axes = plot(table, x="at", col="cell", kind=kind, grid=grid)
    width, _ = grid.size
    letters = int(LETTERS * width) // grid.columns
    num_groups = in_cells.group.nunique()
    for cell, marks_of_cell in table.groupby("cell", sort=False):
        ax = axes[cell]
        _label(ax, marks_of_cell, spec)
        titles = [spec.panel_name(marks_of_cell.panel.iloc[0])]
        if spec.is_by_device or num_groups > 1:
            titles.insert(0, _title_of_group(marks_of_cell))
        lines = [textwrap.fill(title, letters) for title in titles if title]
        ax.set_title("\n".join(lines), fontsize=9)

    notes = []
    if num_left_out:
        notes.append(f"simulations or GPUs that are not drawn (figures --all): {num_left_out}\n")
    keys: list[Artist] = []
    if spec.kind != "bar" or _has_several_devices(in_cells):  # else the names are below the bars
        notes.append(spec.legend)
        keys = [look.key() for look in looks.values()]
    keys += _source_keys(rows, spec, dashes)
    style.legend_below(figure, keys, "\n".join(filter(None, notes)))
    return figure


def _gain_map(rows: pd.DataFrame, spec: PlotSpec) -> Figure:
    """Draw ratios as gains in percent: x along, series upwards, a row of panels for each device.

    Only a gain or a loss that the whole interval shows has a colour.
    """
    percent = 100 * (rows.value - 1)
    effects = pd.Series(map(effect, rows.low, rows.high), rows.index)
    has_colour = effects.isin([GAIN, LOSS])
    is_undecided = effects == UNDECIDED
    number = percent.map("{:+.0f}".format)
    notes = []
    if is_undecided.any():
        notes.append(NOT_DECIDED)
    cells = rows.assign(
        row=rows.device,
        scale=column_of([heat.GAIN] * len(rows), rows),
        shade=percent.where(has_colour, 0.0),
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
    return pd.concat([grouped[is_predicted], grouped[~is_predicted]])


def _by_device(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Add each row's `group`, its device, and repeat the paper's rows in the groups of their
    hardware, which is any simulated one where none is stated.

    Simulated GPUs that ran the same model share their bars' group.
    """
    is_paper = rows.source == PAPER
    if is_paper.all():
        return rows.assign(group="")
    others = rows[~is_paper]
    group = others.device
    if spec.kind == "bar":
        is_gpu = is_simulated(others) & (others.hardware != "")
        of_model = group.groupby(others.model[is_gpu]).transform("nunique") > 1
        group = group.mask(of_model, "simulated GPUs, " + others.model)
    grouped = others.assign(group=group)
    of_hardware = grouped[["group", "panel", "hardware"]]
    is_stated = others.hardware != ""
    of_any_hardware = of_hardware[is_simulated(others)].assign(hardware="")
    places = pd.concat([of_hardware[is_stated], of_any_hardware]).drop_duplicates()
    of_paper = rows[is_paper].merge(places, on=["panel", "hardware"])
    return pd.concat([grouped, of_paper], ignore_index=True)


def _has_several_devices(rows: pd.DataFrame) -> bool:
    """Return whether a group has several devices, without the paper."""
    others = rows[rows.source != PAPER]
    num_devices = others.groupby("group").device.nunique()
    return bool((num_devices > 1).any())


def _title_of_group(marks: pd.DataFrame) -> str:
    """Return the group of a panel: what it has of the paper's points and simulated ones."""
    group = str(marks.group.iloc[0])
    if group != PREDICTED:
        return group
    return " and ".join(sorted(marks.source.unique()))


def _grid(rows: pd.DataFrame, spec: PlotSpec, panels: Sequence[str]) -> PanelLayout:
    """Place the panels of each group in rows of their own, in the order of `panels`."""
    cells_of_groups = []
    for group, of_group in rows.groupby("group", sort=False):
        present = set(of_group.panel)
        cells_of_groups.append([(group, panel) for panel in panels if panel in present])
    across = min(spec.columns, max(map(len, cells_of_groups)))
    cells: list[Hashable | None] = []
    for cells_of_group in cells_of_groups:
        num_empty = -len(cells_of_group) % across  # so the next group starts a row
        cells += [*cells_of_group, *[None] * num_empty]
    # Narrow groups stand beside each other.
    columns = min(spec.columns // across * across, len(cells))
    width = min(max(PANEL_WIDTH * columns, LEAST_WIDTH), style.WIDTH)
    height = PANEL_HEIGHT
    if spec.kind == "bar":
        height += NAMES_HEIGHT
    num_rows = math.ceil(len(cells) / columns)
    return PanelLayout(cells, columns, (width, num_rows * height + 0.5))


# -- looks and coordinates -------------------------------------------------------------------------


def _looks_of_series(rows: pd.DataFrame, spec: PlotSpec) -> dict[str, Look]:
    """Return the look of each series by its key, in the order of their numbers."""
    keys = sorted(rows.key.unique(), key=_number)
    names = list(map(spec.series_name, keys))
    colour_of_name = style.colours(names)
    looks: dict[str, Look] = {}
    for number, (key, name) in enumerate(zip(keys, names, strict=True)):
        look = Look(name, colour_of_name[name], dash="", marker=style.marker(number))
        if spec.kind == "line":
            look = replace(look, dash="-", is_thinned=True)
        if spec.is_by_device:
            look = replace(look, size=4.0)
        looks[key] = look
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


def _lines(rows: pd.DataFrame, looks: Looks, dashes: Dashes) -> pd.DataFrame:
    """Place the points of a panel by their x, in a line for each series and device."""
    has_paper = (rows.source == PAPER).any()
    marks = []
    for (key, device), points in rows.groupby(["key", "device"], sort=False):
        look = looks[str(key)]
        placed = points.assign(at=points.x).sort_values("at")
        if device == PAPER:
            look = replace(look, dash="", is_hollow=True)
        elif device in dashes:
            look = replace(look, dash=dashes[str(device)])
            # Its interval is the cost model's error, not a spread.
            placed = placed.assign(low=math.nan, high=math.nan)
            if has_paper and len(points) > 1:  # the paper's markers name the line
                look = replace(look, marker="")
        marks.append(styled(placed, look))
    return pd.concat(marks)


def _bars(rows: pd.DataFrame, looks: Looks) -> pd.DataFrame:
    """Place a bar for each series and device of a panel, and the paper's values on them.

    Values of other hardware, or of none that is stated, are on the bars of the first device.
    """
    is_paper = rows.source == PAPER
    bars = rows[~is_paper]
    if bars.empty:
        bars = rows
    keys = list(bars.key.unique())
    devices = list(bars.device.unique())
    device_of_hardware = dict(zip(bars.hardware, bars.device, strict=True))
    papers_device = rows.hardware.map(device_of_hardware).fillna(devices[0])
    device_of_bar = rows.device.mask(is_paper, papers_device)
    width = 0.6
    step = 1.0  # from a bar to the next
    if len(devices) > 1:
        # Bars of a device touch, and fill four fifths of its place.
        step = 0.8 / len(keys)
        width = step
    has_bar = rows.key.isin(keys)
    marks = rows[has_bar]
    key_number = marks.key.map(keys.index)
    from_middle = key_number - (len(keys) - 1) / 2
    device_number = device_of_bar[has_bar].map(devices.index)
    marks = marks.assign(at=device_number + step * from_middle, width=width)
    marks["look"] = marks.key.map(dict(looks))
    papers_points = styled(marks[is_paper], HOLLOW).assign(width=math.nan)
    return pd.concat([marks[~is_paper], papers_points])


# -- labels ----------------------------------------------------------------------------------------


def _label(ax: Axes, marks: pd.DataFrame, spec: PlotSpec) -> None:
    """Scale and label both axes of a panel."""
    first = marks.iloc[0]
    unit = UNITS.get(first.unit, first.unit)
    label = spec.ys.get(first.panel, spec.y) or unit
    if spec.kind != "bar" and spec.quantities and not spec.y:
        label = f"{first['quantity']} [{unit}]"
    is_ratio = first.unit in RATIOS and spec.kind != "bar"  # a bar's height is compared with zero
    scale = scale_of(marks, is_ratio=is_ratio, is_log=spec.log_y)
    set_quantity_axis(ax, scale, label)
    if spec.kind == "bar":
        _name_bars(ax, marks, spec)
        return
    label = spec.xs.get(first.panel, spec.x)
    is_log = spec.log_x and marks["at"].min() > 0
    set_setting_axis(ax, marks["at"], label, is_log=is_log)


def _name_bars(ax: Axes, marks: pd.DataFrame, spec: PlotSpec) -> None:
    """Write the devices below bars, or the series of a single device."""
    bars = marks[marks.source != PAPER]
    if bars.empty:
        bars = marks
    by_device = bars.drop_duplicates("device")
    by_key = bars.drop_duplicates("key")
    if len(by_device) > 1:
        at = pd.Series(range(len(by_device)))
        names = by_device.hardware
        if names.duplicated().any():  # of one GPU at several levels
            names = by_device.device
    else:
        at = by_key["at"]
        names = by_key.key.map(spec.series_name)
    ax.set_xticks(at, names, fontsize=8, rotation=45, ha="right", rotation_mode="anchor")
    ax.grid(axis="x", visible=False)


def _source_keys(rows: pd.DataFrame, spec: PlotSpec, dashes: Dashes) -> list[Artist]:
    """Explain the kinds of lines and markers."""
    sources = set(rows.source)
    looks = []
    if PAPER in sources:
        looks.append(HOLLOW)
    for device, dash in dashes.items():
        looks.append(Look(device, "black", dash))
    if MEASURED in sources and not spec.is_by_device:
        label = "measured, with its interval"
        if COMPOSED_SOURCE in sources:
            label = "measured, or of measured kernels"
        looks.append(Look(label, "black", "-", "o"))
    return [look.key() for look in looks]
