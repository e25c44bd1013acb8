"""The series of a sweep's lines: colour, dash and marker of each, and which of them are equal."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.choice import PlotAxes
from sarathi_lab.results.plots.plot import Dash, Look
from sarathi_lab.results.sweep_analysis import text, values_of

DASHES: Sequence[Dash] = ((0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)))
SQUARES = ("s", "D", "P", "X")  # of baselines in rows
NAME = 30  # letters of a line of names in rows
SAME = 9  # digits that equal values share: the last ones are the order of a sum
IN_ROW = 0.6  # of a row, which the series of a name share
WITHOUT_NAME = ("policy", "model", "device", "hardware")  # settings whose values need no name
BASELINE = " (baseline)"
MISSING = "-"  # text of a setting that a run lacks


@dataclass(frozen=True)
class Series:
    """Points of one colour, dash and marker: `hue` is "" where runs lack the setting, `other` names
    further settings, and `bound` what follows from them, such as the batch of a server.
    """

    policy: str
    hue: str
    other: str
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
    return named(row, [setting for setting in settings if text(row[setting]) != MISSING])


# -- names in rows ---------------------------------------------------------------------------------


def names_in_rows(rows: pd.DataFrame, setting: str, bound: Sequence[str] = ()) -> pd.Series:
    """Return the values of a setting as names, with the settings that are `bound` to it; policies
    that are baselines are marked.
    """
    names = []
    for _, row in rows.iterrows():
        name = text(row[setting])
        if setting == "policy" and row["is_baseline"]:
            name += BASELINE
        bound_values = _stated(row, bound)
        if bound_values:
            name += f", {bound_values}"
        names.append(name)
    return pd.Series(names, rows.index, dtype=object)


def equal_names_once(rows: pd.DataFrame, names: pd.Series, settings: Sequence[str]) -> pd.DataFrame:
    """Add the `name` of each row, a joint one where all values are equal by `settings` and
    quantity; rows under the other names are left out.
    """
    rows = rows.assign(name=names)
    equal: dict[Hashable, list[str]] = {}
    for name, group in rows.groupby("name", sort=False):
        keys = [group[setting].map(text) for setting in [*settings, "quantity"]]
        cells = zip(*keys, _digits(group["value"]), strict=True)
        equal.setdefault(frozenset(cells), []).append(str(name))
    joint = {}
    for same in equal.values():
        joint[same[0]] = textwrap.fill(" = ".join(same), NAME, break_on_hyphens=False)
    once = rows[rows["name"].isin(joint)]
    return once.assign(name=once["name"].map(joint))


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
    series = [_series_of(row, axes) for _, row in rows.iterrows()]
    return rows.assign(series=pd.Series(series, rows.index, dtype=object))


def _series_of(row: pd.Series, axes: PlotAxes) -> Series:
    hue = text(row[axes.hue]) if axes.hue else MISSING
    is_by_policy = axes.x == "policy"
    # In rows by policy a baseline is named there, and what is bound to it.
    return Series(
        policy="" if is_by_policy and axes.hue else row["policy"],
        hue="" if hue == MISSING else hue,
        other=_stated(row, axes.others),
        is_baseline=bool(row["is_baseline"]) and not is_by_policy,
        bound="" if is_by_policy else _stated(row, axes.bound),
    )


def with_places(rows: pd.DataFrame, axes: PlotAxes, names: Sequence[str]) -> pd.DataFrame:
    """Add where each row is drawn (`at`): a number, or the row of its name in `names`; NaN for runs
    without the setting.
    """
    if not names:
        return rows.assign(at=rows[axes.x].astype(float))
    centre_of = dict(zip(names, centres_of(names), strict=True))
    centres = rows["name"].map(centre_of)
    if has_row_each(axes):
        return rows.assign(at=centres)
    order = list(dict.fromkeys(rows["series"]))
    numbers = rows["series"].map(order.index)
    from_middle = numbers - (len(order) - 1) / 2
    return rows.assign(at=centres - from_middle * IN_ROW / len(order))


def has_row_each(axes: PlotAxes) -> bool:
    """Return whether a series is a row, as where the names are the policies."""
    return axes.x == "policy" and axes.hue is None


def looks_of(rows: pd.DataFrame, axes: PlotAxes, *, is_in_rows: bool) -> dict[Series, Look]:
    """Choose colour, dash, marker and name of every series."""
    first_rows = rows.drop_duplicates("series")
    every: list[Series] = list(first_rows["series"])
    hues = values_of(rows, axes.hue) if axes.hue else []
    colour_of = style.colours(hues)
    baselines: list[tuple[str, str]] = []
    others: list[str] = []
    for series in every:
        if series.is_baseline and _baseline(series) not in baselines:
            baselines.append(_baseline(series))
        if series.other not in others:
            others.append(series.other)
    looks = {}
    for series, (_, row) in zip(every, first_rows.iterrows(), strict=True):
        number = 0  # of its marker
        if series.hue:
            colour = colour_of[series.hue]
            number = hues.index(series.hue)
        else:
            colour = style.colours([series.policy])[series.policy]
        if len(others) > 1:
            number = others.index(series.other)
        look = Look(_name_of(series, row, axes), colour, marker=style.marker(number))
        if series.is_baseline:
            turn = baselines.index(_baseline(series)) % len(DASHES)
            look = replace(look, dash=DASHES[turn])
            if is_in_rows:
                look = replace(look, marker=SQUARES[turn])
            elif len(others) == 1:
                look = replace(look, marker="")  # the dash is enough
        if is_in_rows:
            look = replace(look, dash="")
        looks[series] = look
    return looks


def _baseline(series: Series) -> tuple[str, str]:
    return series.policy, series.bound


def _name_of(series: Series, row: pd.Series, axes: PlotAxes) -> str:
    names = []
    if not series.hue or (series.is_baseline and axes.hue != "policy"):
        names.append(series.policy)
    if series.hue:
        names.append(named(row, [str(axes.hue)]))
    return ", ".join(filter(None, [*names, series.bound, series.other]))


# -- equal series ----------------------------------------------------------------------------------


def points_of(rows: pd.DataFrame) -> Hashable:
    """Return where the points of a series are, equal for series that lie on each other."""
    along = rows["at"].fillna(-1.0).round(6)
    return tuple(zip(along, _digits(rows["value"]), strict=True))


def _digits(values: pd.Series) -> pd.Series:
    return values.map(f"{{:.{SAME}g}}".format)


def equal_everywhere(
    panels: Sequence[Mapping[Series, pd.DataFrame]],
) -> dict[Series, list[Series]]:
    """Return the series that are drawn, each with all that are equal to it in every panel."""
    every: dict[Series, None] = {}
    for panel in panels:
        every |= dict.fromkeys(panel)
    groups: dict[Hashable, list[Series]] = {}
    for series in sorted(every, key=lambda series: series.is_baseline):
        points: list[Hashable] = []
        for panel in panels:
            points.append(points_of(panel[series]) if series in panel else None)
        groups.setdefault(tuple(points), []).append(series)
    return {group[0]: group for group in groups.values()}


def joint_name(
    equal: Sequence[Series], drawn: Iterable[Series], looks: Mapping[Series, Look]
) -> str:
    """Return the names of series that are equal in a panel; "" for a baseline's alone: where all of
    them that are `drawn` are equal, the policy's name stands for them.
    """
    names: dict[str, None] = {}
    for series in equal:
        name = looks[series].name
        if series.is_baseline:
            same = [each for each in drawn if each.is_baseline and each.policy == series.policy]
            if set(same) <= set(equal):
                name = series.policy
        names[name] = None
    return " = ".join(names) if len(names) > 1 else ""
