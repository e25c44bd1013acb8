"""The series of a sweep's lines: colour, dash and marker of each, and which of them are equal."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.choice import PlotAxes
from sarathi_lab.results.plots.plot import Dash, Look, column_of
from sarathi_lab.results.sweep_analysis import text, values_of

# Of baselines in turn: matplotlib's offset, then the lengths of lines and gaps in widths of a line.
DASHES: Sequence[Dash] = (
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (9, 3)),
)
SQUARES = ("s", "D", "P", "X")  # of baselines in rows
NAME = 30  # letters of a line of names in rows
SAME = 9  # digits that equal values share: the last ones are the order of a sum
IN_ROW = 0.6  # of a row, which the series of a name share
WITHOUT_NAME = ("policy", "model", "device", "hardware")  # settings whose values need no name
BASELINE = " (baseline)"
MISSING = "-"  # text of a setting that a run lacks


@dataclass(frozen=True)
class Series:
    """Points of one colour, dash and marker.

    Attributes:
        policy: its name; "" where rows are named by policy.
        hue: value of the setting with colours; "" where runs lack it.
        variant: names of further settings' values.
        is_baseline: whether it is a baseline, where rows are not named by policy.
        bound: names of values that follow from the settings, such as the batch of a server.
    """

    policy: str
    hue: str
    variant: str
    is_baseline: bool
    bound: str = ""


def named(row: pd.Series, settings: Sequence[str]) -> str:
    """Name the values of settings that a run has: policies, models and devices by themselves."""
    values = []
    for setting in settings:
        value = text(row[setting])
        if setting not in WITHOUT_NAME:
            value = f"{style.short_name(setting)} {value}"
        values.append(value)
    return ", ".join(values)


def _stated(row: pd.Series, settings: Sequence[str]) -> str:
    """Name the values of those settings that a run has."""
    stated = []
    for setting in settings:
        if text(row[setting]) != MISSING:
            stated.append(setting)
    return named(row, stated)


# -- names in rows ---------------------------------------------------------------------------------


def names_in_rows(rows: pd.DataFrame, setting: str, bound: Sequence[str] = ()) -> pd.Series:
    """Return the values of a setting as names, with the settings that are `bound` to it.

    Policies that are baselines are marked.
    """
    names = []
    for _, row in rows.iterrows():
        name = text(row[setting])
        if setting == "policy" and row["is_baseline"]:
            name += BASELINE
        name_with_bound = _joined(name, _stated(row, bound))
        names.append(name_with_bound)
    return pd.Series(names, rows.index, dtype=object)


def equal_names_once(rows: pd.DataFrame, names: pd.Series, settings: Sequence[str]) -> pd.DataFrame:
    """Add the `name` of each row, a joint one where all values are equal.

    Values are equal if they are in every quantity and for all values of `settings`. The rows of all
    but the first of equal names are left out.
    """
    named_rows = rows.assign(name=names)
    names_of_cells = defaultdict(list)
    for name, group in named_rows.groupby("name", sort=False):
        columns = [group[setting].map(text) for setting in settings]
        digits = _digits(group["value"])
        cells = zip(*columns, group["quantity"], digits, strict=True)
        # A set, as policies that act alike may have their rows in another order.
        names_of_cells[frozenset(cells)].append(str(name))
    joint_name_of_first = {}
    for same in names_of_cells.values():
        joint_name = " = ".join(same)
        wrapped = textwrap.fill(joint_name, NAME, break_on_hyphens=False)
        joint_name_of_first[same[0]] = wrapped
    is_first = named_rows["name"].isin(joint_name_of_first)
    first_rows = named_rows[is_first]
    joint_names = first_rows["name"].map(joint_name_of_first)
    return first_rows.assign(name=joint_names)


def centres_of(names: Sequence[str]) -> list[float]:
    """Return where names are, from below, each as high as its lines."""
    centres: list[float] = []
    below = -0.5
    for name in names:
        height = height_of(name)
        centres.append(below + height / 2)
        below += height
    return centres


def height_of(name: str) -> float:
    """Return the rows that the lines of a name take."""
    return 1 + 0.7 * name.count("\n")


# -- series ----------------------------------------------------------------------------------------


def with_series(rows: pd.DataFrame, axes: PlotAxes) -> pd.DataFrame:
    """Add the `series` of each row."""
    series = []
    for _, row in rows.iterrows():
        series.append(_series_of(row, axes))
    return rows.assign(series=column_of(series, rows))


def _series_of(row: pd.Series, axes: PlotAxes) -> Series:
    policy = row["policy"]
    bound = _stated(row, axes.bound)
    is_baseline = bool(row["is_baseline"])
    hue = ""
    if axes.hue:
        hue = _stated_value(row, axes.hue)
    if axes.x == "policy":
        # The row's name states the policy, whether it is a baseline, and what is bound to it.
        bound = ""
        is_baseline = False
        if axes.hue:
            policy = ""
    variant = _stated(row, axes.others)
    return Series(policy, hue, variant, is_baseline, bound)


def _stated_value(row: pd.Series, setting: str) -> str:
    """Return the text of a setting, "" for a run that lacks it."""
    value = text(row[setting])
    if value == MISSING:
        return ""
    return value


def with_places(rows: pd.DataFrame, axes: PlotAxes, names: Sequence[str]) -> pd.DataFrame:
    """Add where each row is drawn (`at`): at its number, or in the row of its name in `names`.

    Runs without the setting have NaN.
    """
    if not names:
        return rows.assign(at=rows[axes.x].astype(float))
    centre_of_name = dict(zip(names, centres_of(names), strict=True))
    centres = rows["name"].map(centre_of_name)
    if has_row_each(axes):
        return rows.assign(at=centres)
    # The series of a name are below each other, the first on top.
    order = list(rows["series"].unique())
    series_number = rows["series"].map(order.index)
    middle = (len(order) - 1) / 2
    step = IN_ROW / len(order)
    below_centre = step * (series_number - middle)
    return rows.assign(at=centres - below_centre)


def has_row_each(axes: PlotAxes) -> bool:
    """Return whether a series is a row, as where the names are the policies."""
    return axes.x == "policy" and axes.hue is None


def looks_of(rows: pd.DataFrame, axes: PlotAxes, *, is_in_rows: bool) -> dict[Series, Look]:
    """Choose colour, dash, marker and name of every series.

    The colour is that of the hue's value, or of the policy where a series has none. The marker
    tells other settings apart if there are any, else the hues. Baselines are dashed, in turn.
    """
    first_rows = rows.drop_duplicates("series")
    hues: list[str] = []
    if axes.hue:
        hues = values_of(rows, axes.hue)
    colour_of_hue = style.colours(hues)
    baselines = []
    variants = []
    for series in first_rows["series"]:
        if series.is_baseline and _baseline(series) not in baselines:
            baselines.append(_baseline(series))
        if series.variant not in variants:
            variants.append(series.variant)
    has_variants = len(variants) > 1
    looks = {}
    for _, row in first_rows.iterrows():
        series = row["series"]
        name = _name_of(series, row, axes)
        if series.hue:
            colour = colour_of_hue[series.hue]
        else:
            colour_of_policy = style.colours([series.policy])
            colour = colour_of_policy[series.policy]
        marker_number = 0
        if has_variants:
            marker_number = variants.index(series.variant)
        elif series.hue:
            marker_number = hues.index(series.hue)
        look = Look(name, colour, marker=style.marker(marker_number))
        if series.is_baseline:
            number = baselines.index(_baseline(series))
            turn = number % len(DASHES)
            look = replace(look, dash=DASHES[turn])
            if is_in_rows:
                look = replace(look, marker=SQUARES[turn])
            elif not has_variants:
                look = replace(look, marker="")  # the dash is enough
        if is_in_rows:  # points, without a line
            look = replace(look, dash="")
        looks[series] = look
    return looks


def _baseline(series: Series) -> tuple[str, str]:
    """Return what baselines of the same dash share."""
    return series.policy, series.bound


def _name_of(series: Series, row: pd.Series, axes: PlotAxes) -> str:
    policy = series.policy
    hue = ""
    if series.hue:
        hue = named(row, [str(axes.hue)])
        # Runs of one policy need not state it, but a baseline has another than the swept runs.
        if not series.is_baseline or axes.hue == "policy":
            policy = ""
    return _joined(policy, hue, series.bound, series.variant)


def _joined(*texts: str) -> str:
    """Join the texts that are not empty."""
    return ", ".join(filter(None, texts))


# -- equal series ----------------------------------------------------------------------------------


def points_of(rows: pd.DataFrame) -> Hashable:
    """Return where the points of a series are, equal for series that lie on each other."""
    along = rows["at"].fillna(-1.0).round(6)  # NaN would differ from itself
    digits = _digits(rows["value"])
    return tuple(zip(along, digits, strict=True))


def _digits(values: pd.Series) -> pd.Series:
    return values.map(f"{{:.{SAME}g}}".format)


def equal_everywhere(
    panels: Sequence[Mapping[Series, pd.DataFrame]],
) -> dict[Series, list[Series]]:
    """Return the series that are drawn, each with all that are equal to it in every panel."""
    every_series: dict[Series, None] = {}
    for panel in panels:
        every_series |= dict.fromkeys(panel)
    # The first one is drawn: a baseline only if all are.
    baselines_last = sorted(every_series, key=lambda series: series.is_baseline)
    equal_series = defaultdict(list)  # by their points in each panel
    for series in baselines_last:
        points: list[Hashable] = []
        for panel in panels:
            if series in panel:
                points.append(points_of(panel[series]))
            else:
                points.append(None)
        equal_series[tuple(points)].append(series)
    return {same[0]: same for same in equal_series.values()}


def joint_name(
    equal: Sequence[Series], drawn: Iterable[Series], looks: Mapping[Series, Look]
) -> str:
    """Return the names of series that are equal in a panel; "" if that is a single name.

    The policy's name stands for its baselines if all of them that are `drawn` are equal.
    """
    baselines_of_policy: defaultdict[str, set[Series]] = defaultdict(set)
    for series in drawn:
        if series.is_baseline:
            baselines_of_policy[series.policy].add(series)
    names: dict[str, None] = {}  # in order, each once
    for series in equal:
        name = looks[series].name
        baselines = baselines_of_policy[series.policy]
        if series.is_baseline and baselines.issubset(equal):
            name = series.policy
        names[name] = None
    if len(names) == 1:
        return ""
    return " = ".join(names)
