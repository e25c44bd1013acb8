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
LETTERS_BELOW = 18  # of the names below bars in an inch
LINES_BELOW = 3  # that such a name may have
NAMES_HEIGHT = 0.6  # inches, of the names below bars
PANEL_WIDTH = 3.2  # inches
BAR_WIDTH = 0.6  # of a bar's place
LEAST_WIDTH = 5.0  # inches, of the picture
PREDICTED = "simulated"  # group of the paper's points and all that is simulated
LETTERS = 11  # of a title in an inch
NOT_RUN = "not run: exceeds the cache, or the chunk is below the batch"
NOT_DECIDED = f"~: undecided, as the interval reaches past {100 * BAND:g} %, or is not known"
UNITS = {"1/s": "requests/s", "times": "ratio", "s": "seconds"}
RATIOS = ("ratio", "times")  # units of what is compared with 1
HOLLOW = Look("paper", "black", "", "o", is_hollow=True)
Looks = Mapping[str, Look]  # by the keys of series
Dashes = Mapping[str, Dash]  # by the names of simulated devices


def draw(spec: PlotSpec, points: pd.DataFrame, *, is_all: bool = False) -> Figure:
    """Draw the points of one experiment (`load.POINT`, `source` and `device`), one axes a panel.

    Of a simulated GPU the best level is drawn, and of measured kernels the GPU with the most
    points; `is_all` draws everything.
    """
    stated = selected(points, spec)
    every_point = stated.dropna(subset="value")
    shown = every_point
    if not is_all:
        shown = best_sources(every_point)
    if spec.kind == "heat":
        figure = _gain_map(shown, spec)
        return style.finished(figure, spec.title)
    figure = _panels(shown, spec)
    num_devices = every_point.device.nunique()
    num_left_out = num_devices - shown.device.nunique()
    _add_legend(figure, shown, spec, num_left_out)
    return style.finished(figure, spec.title)


def _panels(rows: pd.DataFrame, spec: PlotSpec) -> Figure:
    """Draw lines, points or bars in panels with titles and labels."""
    in_cells = _in_cells(rows, spec)
    looks = _looks_of_series(rows, spec)
    dashes = _dashes(rows, spec)
    marks = []
    for _, rows_of_cell in in_cells.groupby("cell", sort=False):
        if spec.kind == "bar":
            marks_of_cell = _bars(rows_of_cell, looks)
        else:
            marks_of_cell = _lines(rows_of_cell, looks, dashes)
        marks.append(marks_of_cell)
    table = pd.concat(marks)
    panels = list(rows.panel.unique())  # in the order of the table
    grid = _grid(in_cells, spec, panels)
    kind: Kind = "line"
    if spec.kind == "bar":
        kind = "bar"
    figure, axes = plot(table, x="at", col="cell", kind=kind, grid=grid)

    width, _ = grid.size
    letters_of_picture = int(LETTERS * width)
    letters = letters_of_picture // grid.columns
    num_groups = in_cells.group.nunique()
    has_groups = spec.is_by_device or num_groups > 1
    for cell, marks_of_cell in table.groupby("cell", sort=False):
        ax = axes[cell]
        _label(ax, marks_of_cell, spec)
        title = _title(marks_of_cell, spec, letters, has_groups=has_groups)
        ax.set_title(title, fontsize=9)
    return figure


def _title(marks: pd.DataFrame, spec: PlotSpec, letters: int, *, has_groups: bool) -> str:
    """Return the name of a panel, below that of its group, in lines of so many `letters`."""
    panel = marks.panel.iloc[0]
    titles = [spec.panel_name(panel)]
    if has_groups:
        group = str(marks.group.iloc[0])
        if group == PREDICTED:
            # It has the paper's points, simulated ones, or both.
            sources = sorted(marks.source.unique())
            group = " and ".join(sources)
        titles.insert(0, group)
    lines = []
    for title in filter(None, titles):
        wrapped = textwrap.fill(title, letters)
        lines.append(wrapped)
    return "\n".join(lines)


def _add_legend(figure: Figure, rows: pd.DataFrame, spec: PlotSpec, num_left_out: int) -> None:
    """Explain series and sources, and state how many devices are left out."""
    heading = ""
    if num_left_out:
        heading = f"simulations or GPUs that are not drawn (figures --all): {num_left_out}\n"
    keys: list[Artist] = []
    if spec.kind != "bar":  # the names of bars are below them
        heading += spec.legend
        looks = _looks_of_series(rows, spec)
        keys = [look.key() for look in looks.values()]
    keys += _source_keys(rows, spec)
    style.legend_below(figure, keys, heading)


def _gain_map(rows: pd.DataFrame, spec: PlotSpec) -> Figure:
    """Draw ratios as gains in percent: x along, series upwards, a row of panels for each device.

    Only a gain or a loss that the whole interval shows has a colour.
    """
    gain = rows.value - 1
    percent = 100 * gain
    effect_of_row = map(effect, rows.low, rows.high)
    effects = pd.Series(effect_of_row, rows.index)
    has_colour = effects.isin([GAIN, LOSS])
    is_undecided = effects == UNDECIDED
    notes = []
    if is_undecided.any():
        notes.append(NOT_DECIDED)
    number = percent.map("{:+.0f}".format)
    scales = [heat.GAIN] * len(rows)
    cells = rows.assign(
        row=rows.device,
        scale=column_of(scales, rows),
        shade=percent.where(has_colour, 0.0),
        text=number.mask(is_undecided, "~" + number),
    )
    # A map's labels are the names of its columns.
    panel = spec.prefix.strip()
    cells = cells.rename(columns={"x": spec.x, "panel": panel})
    return heat.heat_map(
        cells,
        x=spec.x,
        y="key",
        col=panel,
        not_run=NOT_RUN,
        notes=notes,
    )


# -- groups of panels ------------------------------------------------------------------------------


def _in_cells(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Add each row's `group` and its `cell`, which is the panel of a group."""
    if spec.is_by_device:
        grouped = _by_device(rows)
    else:
        grouped = _by_source(rows)
    cells = zip(grouped.group, grouped.panel, strict=True)
    return grouped.assign(cell=column_of(cells, grouped))


def _by_source(rows: pd.DataFrame) -> pd.DataFrame:
    """Add each row's `group`: the paper with its simulated GPUs, then each measured device, and
    each of which others measured the kernels.
    """
    is_measured = rows.source == MEASURED
    is_composed = rows.source == COMPOSED_SOURCE
    device = rows.device
    group = pd.Series(PREDICTED, rows.index)
    group = group.mask(is_measured, "measured on " + device)
    group = group.mask(is_composed, device)
    grouped = rows.assign(group=group)
    # Panels follow the order of the rows, and what is measured follows what predicts it.
    is_predicted = group == PREDICTED
    predicted = grouped[is_predicted]
    others = grouped[~is_predicted]
    return pd.concat([predicted, others])


def _by_device(rows: pd.DataFrame) -> pd.DataFrame:
    """Add each row's `group`, its device, and repeat the paper's rows in the groups of their
    hardware, which is any simulated one where none is stated.
    """
    is_paper = rows.source == PAPER
    if is_paper.all():
        return rows.assign(group="")
    others = rows[~is_paper]
    grouped = others.assign(group=others.device)
    # Where the paper's rows belong.
    places = grouped[["group", "panel", "hardware"]]
    has_hardware = places.hardware != ""
    is_predicted = is_simulated(others)
    predicted = places[is_predicted]
    # The merge takes "" for a hardware: it finds all simulated devices.
    of_any_hardware = predicted.assign(hardware="")
    of_hardware = places[has_hardware]
    places_of_hardware = pd.concat([of_hardware, of_any_hardware])
    each_once = places_of_hardware.drop_duplicates()
    papers_rows = rows[is_paper]
    of_paper = papers_rows.merge(each_once, on=["panel", "hardware"])
    return pd.concat([grouped, of_paper], ignore_index=True)


def _grid(rows: pd.DataFrame, spec: PlotSpec, panels: Sequence[str]) -> PanelLayout:
    """Place the panels of each group in rows of their own, in the order of `panels`."""
    cells_of_groups = []
    for group, of_group in rows.groupby("group", sort=False):
        present = set(of_group.panel)
        cells_of_group = []
        for panel in panels:
            if panel in present:
                cells_of_group.append((group, panel))
        cells_of_groups.append(cells_of_group)
    most_panels = max(map(len, cells_of_groups))
    across = min(spec.columns, most_panels)
    cells: list[Hashable | None] = []
    for cells_of_group in cells_of_groups:
        num_empty = -len(cells_of_group) % across
        cells += cells_of_group
        cells += [None] * num_empty  # so the next group starts a row
    # Narrow groups stand beside each other.
    groups_across = spec.columns // across
    columns_of_groups = groups_across * across
    columns = min(columns_of_groups, len(cells))
    num_rows = math.ceil(len(cells) / columns)
    width = max(PANEL_WIDTH * columns, LEAST_WIDTH)
    height = PANEL_HEIGHT
    if spec.kind == "bar":
        height += NAMES_HEIGHT
    size = (
        min(width, style.WIDTH),
        num_rows * height + 0.5,
    )
    return PanelLayout(cells, columns, size)


# -- looks and coordinates -------------------------------------------------------------------------


def _looks_of_series(rows: pd.DataFrame, spec: PlotSpec) -> dict[str, Look]:
    """Return the look of each series by its key, in the order of their numbers."""
    keys = sorted(rows.key.unique(), key=_number)
    names = [spec.series_name(key) for key in keys]
    colour_of_name = style.colours(names)
    is_line = spec.kind == "line"
    looks = {}
    for number, key in enumerate(keys):
        name = names[number]
        looks[key] = Look(
            name,
            colour_of_name[name],
            dash="-" if is_line else "",
            marker=style.marker(number),
            size=4.0 if spec.is_by_device else 6.0,
            is_thinned=is_line,
        )
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
    # More devices than dashes begin with the first dash again.
    dashes = cycle(SIMULATED)
    return dict(zip(devices, dashes, strict=False))


def _lines(rows: pd.DataFrame, looks: Looks, dashes: Dashes) -> pd.DataFrame:
    """Place the points of a panel by their x, in a line for each series and device."""
    has_paper = PAPER in set(rows.source)
    marks = []
    for (key, device), points in rows.groupby(["key", "device"], sort=False):
        look = looks[str(key)]
        dash = dashes.get(str(device))
        placed = points.assign(at=points.x)
        in_order = placed.sort_values("at")
        if device == PAPER:
            look = replace(look, dash="", is_hollow=True)
        elif dash is not None:
            look = replace(look, dash=dash)
            # Its interval is the cost model's error, not a spread.
            in_order = in_order.assign(
                low=math.nan,
                high=math.nan,
            )
            is_line = len(points) > 1
            if has_paper and is_line:
                look = replace(look, marker="")  # the paper's markers name the line
        marks_of_line = styled(in_order, look)
        marks.append(marks_of_line)
    return pd.concat(marks)


def _bars(rows: pd.DataFrame, looks: Looks) -> pd.DataFrame:
    """Place a bar for each series of a panel, and the paper's values on them."""
    is_paper = rows.source == PAPER
    bars = rows[~is_paper]
    if bars.empty:
        bars = rows
    keys = list(bars.key.unique())
    marks = rows[rows.key.isin(keys)]
    marks = marks.assign(
        at=marks.key.map(keys.index),
        look=marks.key.map(dict(looks)),
        width=BAR_WIDTH,
    )
    is_point = marks.source == PAPER
    points = styled(marks[is_point], HOLLOW)
    points = points.assign(width=math.nan)  # by which `plot` knows that they are no bars
    bars_alone = marks[~is_point]
    return pd.concat([bars_alone, points])


# -- labels ----------------------------------------------------------------------------------------


def _label(ax: Axes, marks: pd.DataFrame, spec: PlotSpec) -> None:
    """Scale and label both axes of a panel."""
    first = marks.iloc[0]
    # A bar's height is compared with zero, of a ratio, too.
    is_ratio = first.unit in RATIOS and spec.kind != "bar"
    scale = scale_of(
        marks,
        is_ratio=is_ratio,
        is_log=spec.log_y,
    )
    y_label = _quantity(first, spec)
    set_quantity_axis(ax, scale, y_label)
    if spec.kind == "bar":
        _name_bars(ax, marks, spec)
        return
    at = marks["at"]
    x_label = spec.xs.get(first.panel, spec.x)
    is_log = spec.log_x and at.min() > 0
    set_setting_axis(ax, at, x_label, is_log=is_log)


def _quantity(row: pd.Series, spec: PlotSpec) -> str:
    """Return what is upwards: as the spec states it, else the row's unit, which follows the name of
    the quantity where the spec chooses some. Titles of bars have that name.
    """
    stated = spec.ys.get(row.panel, spec.y)
    if stated:
        return stated
    unit = str(UNITS.get(row.unit, row.unit))
    if spec.quantities and spec.kind != "bar":
        return f"{row['quantity']} [{unit}]"
    return unit


def _name_bars(ax: Axes, marks: pd.DataFrame, spec: PlotSpec) -> None:
    """Write the series below bars: a word a line, or slanted where these do not fit."""
    bars = marks.drop_duplicates("key")
    names = bars.key.map(spec.series_name).str.replace("_", " ")
    letters = int(LETTERS_BELOW * style.inches_wide(ax)) // len(bars)
    words = names.str.split()
    longest_word = words.explode().map(len).max()
    if longest_word <= letters and words.map(len).max() <= LINES_BELOW:
        ax.set_xticks(bars["at"], words.map("\n".join), fontsize=8)
    else:
        ax.set_xticks(
            bars["at"], names, fontsize=8, rotation=45, ha="right", rotation_mode="anchor"
        )
    ax.grid(axis="x", visible=False)


def _source_keys(rows: pd.DataFrame, spec: PlotSpec) -> list[Artist]:
    """Explain the kinds of lines and markers."""
    sources = set(rows.source)
    looks = []
    if PAPER in sources:
        looks.append(HOLLOW)
    for device, dash in _dashes(rows, spec).items():
        line = Look(device, "black", dash)
        looks.append(line)
    if MEASURED in sources and not spec.is_by_device:
        label = "measured, with its interval"
        if COMPOSED_SOURCE in sources:
            label = "measured, or of measured kernels"
        measured = Look(label, "black", "-", "o")
        looks.append(measured)
    return [look.key() for look in looks]
