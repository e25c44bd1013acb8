"""Lines by a numeric setting, and points in rows by a named one, a panel for each quantity.

A series has the colour of its `hue`: of the swept value, or of the policy where it has none.
Baselines are dashed, all else is solid, and further settings have markers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.axes import (
    is_geometric,
    is_ratio,
    is_wide,
    scale_of,
    set_quantity_axis,
    set_setting_axis,
)
from sarathi_lab.results.plots.choice import PlotAxes
from sarathi_lab.results.plots.plot import Dash, Look, PanelLayout, column_of, plot
from sarathi_lab.results.plots.sweep_rows import at_each_value, named, names_of
from sarathi_lab.results.sweep_analysis import group_keys, is_numeric, text, values_of

# Of baselines in turn: matplotlib's offset, then the lengths of lines and gaps in widths of a line.
DASHES: Sequence[Dash] = (
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (9, 3)),
)
SAME = 9  # digits that equal values share: the last ones are the order of a sum
COLUMNS = {1: 1, 2: 2, 4: 2}  # of panels, of so many quantities; else three
WIDTHS = {1: 5.2, 2: 8.4}  # inches of one and two columns; more have the page's width
PANEL = 2.6  # inches, height of a panel
ROW = 0.21  # inches, height of a name


def draw_lines(
    rows: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str], notes: Sequence[Artist]
) -> Figure:
    """Draw medians (`sweep_rows.long_rows`): one panel for each quantity and value of `axes.col`.

    `notes` are further keys of the legend.
    """
    facets = [""]
    rows = rows.assign(facet="")
    if axes.col:
        facets = values_of(rows, axes.col)
        repeated = at_each_value(rows, axes.col)
        rows = repeated.reset_index(drop=True)
        rows["facet"] = rows[axes.col].map(text)
    panels = list(product(quantities, facets))
    panel_of_row = zip(rows["quantity"], rows["facet"], strict=True)
    at, names = _places(rows, axes, quantities[0])
    looks, keys = _looks(rows, axes)
    marks = rows.assign(
        panel=column_of(panel_of_row, rows),
        at=at,
        look=looks,
    )
    drawn = marks.dropna(subset=["value", "look"])
    in_order = drawn.sort_values("at", kind="stable")
    grid = _grid(panels, num_facets=len(facets), num_names=len(names))
    if names:
        figure, ax_of_panel = plot(in_order, x="value", y="at", grid=grid)
    else:
        figure, ax_of_panel = plot(in_order, x="at", y="value", grid=grid)

    for quantity, facet in panels:
        ax = ax_of_panel[quantity, facet]
        is_of_quantity = rows["quantity"] == quantity
        _label_quantity(ax, rows[is_of_quantity], along_x=bool(names))
        if names:
            ax.set_yticks(range(len(names)), names)
            ax.set_ylim(-0.6, len(names) - 0.4)
        else:
            label = style.axis_name(axes.x)
            is_log = is_geometric(at)
            set_setting_axis(ax, at.dropna(), label, is_log=is_log)
        if facet != facets[0]:
            ax.set_ylabel("")  # the first panel of a row has it, with the same scale
        if axes.col and quantity == quantities[0]:
            setting = style.short_name(axes.col)
            ax.set_title(f"{setting} = {facet}", fontsize=9)
    style.legend_below(figure, [*keys, *notes])
    return figure


def _label_quantity(ax: Axes, rows: pd.DataFrame, *, along_x: bool) -> None:
    """Scale and label the axis of a quantity, of which the rows are those of all panels."""
    quantity = rows["quantity"].iloc[0]
    heading = rows["heading"].iloc[0]
    scale = scale_of(
        rows,
        is_ratio=is_ratio(quantity),
        is_log=is_wide(rows["value"]),
    )
    set_quantity_axis(ax, scale, heading, along_x=along_x)


def _places(rows: pd.DataFrame, axes: PlotAxes, quantity: str) -> tuple[pd.Series, list[str]]:
    """Return where each row is, and the names in rows from below, [] along a number.

    Of policies the best by `quantity` is on top.
    """
    if is_numeric(rows, axes.x):
        numbers = rows[axes.x].astype(float)
        return numbers, []
    name = names_of(rows, axes.x)
    names = list(name.unique())
    names.reverse()  # the first on top
    if axes.x == "policy":
        is_of_quantity = rows["quantity"] == quantity
        names = _best_last(rows[is_of_quantity], name, names)
    return name.map(names.index), names


def _best_last(rows: pd.DataFrame, name: pd.Series, names: list[str]) -> list[str]:
    """Sort names by the median of the quantity that the rows have; equal ones keep their order."""
    values_of_name = rows["value"].groupby(name)
    medians = values_of_name.median()
    in_given_order = medians.reindex(names)
    first_row = rows.iloc[0]
    is_more_better = not first_row["is_less_better"]
    best_last = in_given_order.sort_values(
        ascending=is_more_better,
        kind="stable",
    )
    return list(best_last.index)


def _grid(panels: Sequence[tuple[str, str]], *, num_facets: int, num_names: int) -> PanelLayout:
    """Place the panels of a quantity beside each other, or panels with the same names."""
    if num_facets > 1:
        columns = num_facets
    elif num_names:
        columns = len(panels)
    else:
        columns = COLUMNS.get(len(panels), 3)
    num_rows = math.ceil(len(panels) / columns)
    height = max(PANEL, 0.9 + ROW * num_names)
    size = (
        WIDTHS.get(columns, style.WIDTH),
        num_rows * height + 0.5,
    )
    shares = {}
    if num_names or num_facets > 1:
        shares["sharey"] = "row"
    return PanelLayout(panels, columns, size, shares)


# -- series ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Styles:
    """What the colours, dashes and markers of series stand for.

    Attributes:
        hue: setting with colours, the policy where none is chosen.
        colours: by value of `hue`.
        baselines: policies, which have dashes in turn.
        variants: names of further settings' values, which have markers; [""] without any.
        is_listed: whether there are points in rows of names, without lines.
    """

    hue: str
    colours: Mapping[str, str]
    baselines: Sequence[str]
    variants: Sequence[str]
    is_listed: bool

    @property
    def has_variants(self) -> bool:
        """Return whether markers stand for settings other than the hue."""
        return len(self.variants) > 1

    def look(self, row: pd.Series) -> Look:
        """Return the look of a row's series, with its name in the legend."""
        value = text(row[self.hue])
        policy = row["policy"]
        if value in self.colours:
            colour = self.colours[value]
        else:
            colour = style.colours([policy])[policy]
        marker_number = self._marker_number(row["variant"], value)
        marker = style.marker(marker_number)
        look = Look(row["label"], colour, marker=marker)
        if self.is_listed:
            return replace(look, dash="")
        if not row["is_baseline"]:
            return look
        number = self.baselines.index(policy)
        turn = number % len(DASHES)
        if not self.has_variants:
            look = replace(look, marker="")  # the dash is enough
        return replace(look, dash=DASHES[turn])

    def _marker_number(self, variant: str, value: str) -> int:
        if self.has_variants:
            return self.variants.index(variant)
        if value in self.colours:
            values = list(self.colours)
            return values.index(value)
        return 0

    def keys(self, row: pd.Series, look: Look) -> list[Look]:
        """Return what explains a series: its colour and dash, and the marker of its variant."""
        value = text(row[self.hue])
        is_of_a_value = self.hue != "policy" and value in self.colours
        is_dashed = row["is_baseline"] and not self.is_listed
        if is_dashed and is_of_a_value:
            look = replace(look, colour="black")  # it has the colours of all values
        if not self.has_variants:
            return [look]
        without_marker = replace(look, marker="")
        variant = row["variant"]
        if not variant:
            return [without_marker]
        marker_alone = Look(variant, "black", dash="", marker=look.marker)
        return [without_marker, marker_alone]


def _looks(rows: pd.DataFrame, axes: PlotAxes) -> tuple[pd.Series, list[Artist]]:
    """Return the look of each row, None where another policy's line stands for it, and the keys."""
    hue = axes.hue or "policy"
    is_listed = not is_numeric(rows, axes.x)
    variants = []
    for _, row in rows.iterrows():
        variants.append(named(row, axes.others))
    rows = rows.assign(
        label=_labels(rows, axes, hue),
        variant=variants,
    )
    if hue == "policy" and not is_listed:
        joint_names = _joint_names(rows, axes)
        rows["label"] = rows["label"].map(joint_names)
    rows["series"] = group_keys(rows, ["label", hue, "variant"])
    is_baseline = rows["is_baseline"].astype(bool)
    baselines = rows["policy"][is_baseline]
    hues = values_of(rows, hue)
    styles = _Styles(
        hue=hue,
        colours=style.colours(hues),
        baselines=list(baselines.unique()),
        variants=list(dict.fromkeys(variants)),
        is_listed=is_listed,
    )
    looks = {}
    keys: dict[str, Look] = {}  # each label once
    with_label = rows.dropna(subset="label")
    first_rows = with_label.drop_duplicates("series")
    baselines_last = first_rows.sort_values("is_baseline", kind="stable")
    for _, row in baselines_last.iterrows():
        look = styles.look(row)
        looks[row["series"]] = look
        for key in styles.keys(row, look):
            keys.setdefault(key.name, key)
    look_of_row = rows["series"].map(looks)
    has_names_below = axes.x == "policy" and axes.hue is None
    if len(keys) == 1 or has_names_below:
        return look_of_row, []
    artists: list[Artist] = [key.key() for key in keys.values()]
    return look_of_row, artists


def _labels(rows: pd.DataFrame, axes: PlotAxes, hue: str) -> pd.Series:
    """Return the name of each row's colour or dash: its policy, or the value of another setting."""
    policies = names_of(rows, "policy")
    if hue == "policy":
        return policies
    values = []
    for _, row in rows.iterrows():
        values.append(named(row, [hue]))
    labels = pd.Series(values, rows.index)
    if axes.x == "policy":  # rows are named by it
        return labels
    is_baseline = rows["is_baseline"].astype(bool)
    return labels.mask(is_baseline, policies)


def _joint_names(rows: pd.DataFrame, axes: PlotAxes) -> dict[str, str]:
    """Return the names of the policies that are drawn, joined with those of policies that are equal
    to the last digit in all panels.
    """
    compared = [axes.x, *axes.others, "quantity", "digits"]
    if axes.col:
        compared.append(axes.col)
    with_equal_digits = f"{{:.{SAME}g}}"
    digits = rows["value"].map(with_equal_digits.format)
    with_digits = rows.assign(digits=digits)
    points = group_keys(with_digits, compared)
    # The first of equal ones is drawn: a baseline only if all are.
    baselines_last = rows.sort_values("is_baseline", kind="stable")
    equal_labels = defaultdict(list)
    for label, of_label in baselines_last.groupby("label", sort=False):
        points_of_label = frozenset(points[of_label.index])
        equal_labels[points_of_label].append(str(label))
    joint_names = {}
    for equal in equal_labels.values():
        drawn = equal[0]
        joint_names[drawn] = " = ".join(equal)
    return joint_names
