"""The picture of a sweep by what it varied."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.plots.style import (
    AXIS_NAMES,
    LINES,
    WIDTH,
    colours,
    finished,
    keys_of,
    legend_below,
    marker,
    panels,
    tick_in_steps,
)
from sarathi_lab.results.sweep_analysis import text
from sarathi_lab.results.table import MILLISECONDS, factor, heading

QUANTITIES = ["capacity", "throughput", "throughput_vs_{}", "slo_attainment", "ttft_p50"]
QUANTITIES += ["tbt_p99", "decode_time_marginal", "kv_reread_factor"]
MOST_PANELS, MOST_ROWS = 6, 3  # of quantities: without facets, with them
MOST_FACETS, MOST_TICKS = 6, 10
MANY = 8  # names in rows from which all panels share them
LONG = 10.0  # seconds from which a time is displayed in seconds
WIDE_RANGE = 20  # largest over smallest from which an axis is logarithmic
VALUES = ["value", "low", "high"]


@dataclass(frozen=True)
class SweepAxes:
    """Settings on the axes of a sweep's picture; `others` vary, too, and have markers."""

    x: str
    hue: str | None
    facet: str | None
    others: tuple[str, ...]


def choose_axes(
    runs: pd.DataFrame, *, x: str | None = None, hue: str | None = None, facet: str | None = None
) -> SweepAxes:
    """Choose what is not named: x is the setting with the most numbers, else with the most values;
    hue is the policy, else the next; then facet. Raises UserError for an unknown name.
    """
    x, hue, facet = (analysis.find_column(runs, one) if one else None for one in (x, hue, facet))
    varied = analysis.varied(runs)
    if runs.policy.nunique() > 1:  # baselines included
        varied = list(dict.fromkeys(["policy", *varied]))
    left = [one for one in varied if one not in (x, hue, facet)]
    if x is None:
        swept = analysis.without_baselines(runs)
        numbers = [one for one in left if is_numeric(swept, one)]
        x = max(numbers or left or ["policy"], key=lambda one: swept[one].nunique())
        left = [one for one in left if one != x]
    hue = hue or (left.pop(0) if left else None)
    if facet is None and left and len(_values(runs, left[0])) <= MOST_FACETS:
        facet = left.pop(0)
    return SweepAxes(x, hue, facet, tuple(left))


def draw_sweep(
    runs: pd.DataFrame,
    *,
    x: str | None = None,
    hue: str | None = None,
    facet: str | None = None,
    y: str | Sequence[str] | None = None,
) -> Figure:
    """Draw a sweep by what it varied, a panel for each quantity of `y` and value of `facet`.

    `runs` has a row per run (`load_runs`). A name may leave out its group, as `rate` for
    `workload.rate`. Numbers are at their places on a linear or logarithmic axis, names in rows.
    Points are medians over seeds and repetitions with their intervals; a run without the setting on
    x is a line across. Raises UserError for an unknown name.
    """
    runs = runs.reset_index(drop=True)  # rows of concatenated tables may share a label
    base = analysis.reference(runs)
    named = [y] if isinstance(y, str) else list(y or [])
    for ratio in (f"throughput_vs_{base}", *named):
        quantity, is_ratio, to = ratio.partition("_vs_")
        runs = analysis.relative(runs, quantity, to) if is_ratio else runs
    axes = choose_axes(runs, x=x, hue=hue, facet=facet)
    number = 0 if is_numeric(runs, axes.x) else len(_values(runs, axes.x))  # of names in rows
    most = MOST_ROWS if axes.facet else 4 if number > MANY else MOST_PANELS
    names = [analysis.find_column(runs, name) for name in named] or _quantities(runs, base, most)
    runs = analysis.without_repeated(runs, names)
    facets = _values(runs, axes.facet) if axes.facet else [""]
    figure, grid = _grid(runs, axes, len(names), len(facets), number)
    of_facet = runs[axes.facet].map(text) if axes.facet else pd.Series("", runs.index)
    free = iter(grid)
    for name in names:
        panel = _Panel(runs, axes, name, names[0])
        parts = [panel.medians(runs[of_facet.isin([value, "-"])]) for value in facets]
        for rows, value in zip(parts, facets, strict=True):
            panel.draw(ax := next(free), rows)
            panel.set_axes(ax, pd.concat(parts))
            if axes.facet and name == names[0]:
                ax.set_title(f"{_short(axes.facet)} = {value}")
    for ax in free:
        ax.set_axis_off()
    legend_below(figure, keys_of(grid))
    return finished(figure, _title(runs, names))


def policies(runs: pd.DataFrame) -> Figure:
    """Draw latency and throughput of policies, the shortest gaps between tokens on top."""
    return draw_sweep(runs, x="policy", y=["tbt_p99", "ttft_p50", "ttft_p99", "throughput"])


def _grid(
    runs: pd.DataFrame, axes: SweepAxes, num_quantities: int, num_facets: int, number: int
) -> tuple[Figure, list[Axes]]:
    """Create the axes; `number` is that of the names in rows, 0 for numbers along x."""
    columns = num_facets
    if not axes.facet:
        most = num_quantities if number > MANY else 3 if num_quantities > 4 else 2
        columns = min(num_quantities, most)
    rows = math.ceil(num_quantities * num_facets / columns)
    lines = 0.5 * len(_values(runs, axes.hue)) if axes.hue else 1.0  # of text that a name needs
    height = max(2.6, 0.9 + 0.21 * number * max(1.0, lines))
    width = 1.2 * (number > 0) + (3.0 if columns > 2 else 4.2) * columns
    size = min(WIDTH, max(4.6, width)), height * rows + 0.9
    return panels(rows, columns, size, sharey="row" if number > MANY else False)


def _quantities(runs: pd.DataFrame, base: str | None, most: int) -> list[str]:
    """Return the quantities that runs have and in which they differ."""
    names = [name.format(base) for name in QUANTITIES]
    known = [name for name in names if name in runs and runs[name].notna().any()]
    differing = [name for name in known if runs[name].max() - runs[name].min() > 0]
    return (differing or known)[:most]


class _Panel:
    """One quantity of all `runs` by a setting; colours and limits are the same for all facets."""

    def __init__(self, runs: pd.DataFrame, axes: SweepAxes, name: str, sorted_by: str) -> None:
        self.runs, self.axes, self.name = runs, axes, name
        self.is_ratio, self.is_listed = "_vs_" in name, not is_numeric(runs, axes.x)
        is_time = not self.is_ratio and factor(name) == MILLISECONDS
        self.is_long = is_time and float(runs[name].max()) > LONG
        self.colours = colours(_values(runs, axes.hue or axes.x))
        self.noise = analysis.noise(runs)
        names = list(dict.fromkeys(runs[axes.x].map(text)))
        self.rows = names[::-1]  # names from below, the best policy on top
        if axes.x == "policy" and axes.hue is None:
            place = runs.groupby("policy")[sorted_by].median().reindex(names)
            is_more_better = factor(sorted_by) != MILLISECONDS
            self.rows = list(place.sort_values(ascending=is_more_better, kind="stable").index)
        self.by = list(dict.fromkeys(filter(None, [axes.x, axes.hue, *axes.others, "policy"])))
        kinds = dict(self._label(row) for _, row in runs.iterrows())
        self.labels, order = list(kinds), list(dict.fromkeys(kinds.values()))
        self.markers = {label: marker(order.index(kind)) for label, kind in kinds.items()}

    def _label(self, row: Any) -> tuple[str, str]:
        """Return the name of a row's series, its settings other than x, and what has a marker:
        settings without a colour or axis, else the series.
        """
        named = {one: text(row[one]) for one in self.by if one not in (self.axes.x, "policy")}
        parts = [f"{_short(name)} {value}" for name, value in named.items() if value != "-"]
        label = ", ".join([row["policy"]] * (self.axes.hue == "policy") + parts)
        return label, ", ".join(named[one] for one in self.axes.others) or label

    def medians(self, runs: pd.DataFrame) -> pd.DataFrame:
        """Return the rows to draw, in the displayed unit, with the `label` of their series."""
        rows = analysis.medians(runs, self.by, self.name)
        rows[VALUES] *= 1.0 if self.is_long else factor(self.name)
        if self.name == "decode_time_marginal":  # a difference of times that may be equal
            rows.loc[rows["value"] <= 0, VALUES] = math.nan
        return rows.assign(label=[self._label(row)[0] for _, row in rows.iterrows()])

    def draw(self, ax: Axes, rows: pd.DataFrame) -> None:
        for label, line in rows.dropna(subset=["value"]).groupby("label", sort=False):
            hue = text(line[self.axes.hue].iloc[0]) if self.axes.hue else ""
            style: dict[str, Any] = {"color": self.colours.get(hue, "C0"), "label": label or None}
            style["linestyle"] = self._line_style(line)
            is_across = ~self.is_listed & line[self.axes.x].isna()
            for _, row in line[is_across].iterrows():
                ax.axhline(row["value"], **style)
                if row["num_samples"] > 1:
                    ax.axhspan(row["low"], row["high"], color=style["color"], alpha=0.12, lw=0)
            style["marker"] = self.markers[str(label)]
            self._points(ax, line[~is_across], style)
        if self.is_ratio:
            (ax.axvline if self.is_listed else ax.axhline)(1.0, color="black", ls=":", lw=1.0)

    def _points(self, ax: Axes, line: pd.DataFrame, style: dict[str, Any]) -> None:
        """Draw a series with its intervals; ratios that are not decided are hollow. In rows each
        point may have a colour.
        """
        if not self.is_listed and len(line):
            line = line.sort_values(self.axes.x)
            ax.plot(line[self.axes.x].astype(float), line["value"], **style)
            style = {**style, "label": None}
        index = self.labels.index(style["label"] or "") if self.is_listed else 0
        shift = 0.6 * ((index + 0.5) / len(self.labels) - 0.5) if self.axes.hue else 0.0
        for _, row in line.iterrows():
            name, hue = text(row[self.axes.x]), style["color"]
            hue = hue if self.axes.hue or not self.is_listed else self.colours[name]
            is_base = self.name.endswith(f"_vs_{row['policy']}")
            is_open = self.is_ratio and not is_base and not analysis.is_decided(row, self.noise)
            ends: Any = [[max(0, row["value"] - row["low"])], [max(0, row["high"] - row["value"])]]
            ends = ends if row["num_samples"] > 1 else None
            point: dict[str, Any] = {"x": row[self.axes.x], "y": row["value"], "yerr": ends}
            if self.is_listed:
                place = self.rows.index(name) + shift
                point = {"x": row["value"], "y": place, "xerr": ends}
            point |= {**style, "color": hue, "mfc": "w" if is_open else hue, "linestyle": ""}
            ax.errorbar(**point, capsize=2, zorder=3)

    def _line_style(self, rows: pd.DataFrame) -> Any:
        known = next((one.executor for one in (rows, self.runs) if "executor" in one), None)
        is_simulated = known is not None and str(known.iloc[0]) == "simulated"
        return LINES["simulated" if is_simulated else "measured"]

    def set_axes(self, ax: Axes, rows: pd.DataFrame) -> None:
        """Fit limits to the medians of all facets and label both axes."""
        quantity = heading(self.name)
        quantity = quantity.replace("[ms]", "[s]") if self.is_long else quantity
        self._set_limits(ax, rows.dropna(subset=["value"]))
        if self.is_listed:
            ax.set_yticks(range(len(self.rows)), self.rows)
            ax.set(ylim=(-0.6, len(self.rows) - 0.4), xlabel=quantity)
            if ax.get_xscale() == "linear":
                ax.xaxis.set_major_locator(MaxNLocator(3))
            return
        values = sorted({float(value) for value in self.runs[self.axes.x].dropna()})
        if _is_geometric(values):
            ax.set_xscale("log", base=2)
        if len(values) <= MOST_TICKS:
            ax.xaxis.set_major_locator(FixedLocator(values))
            ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.margins(x=0.08)
        name = AXIS_NAMES.get(self.axes.x, self.axes.x)
        ax.set(xlabel=textwrap.fill(name, 26), ylabel=textwrap.fill(quantity, 26))

    def _set_limits(self, ax: Axes, rows: pd.DataFrame) -> None:
        """Show intervals as far as twice the range of the medians, so that noise does not stretch
        the axis; start at zero where medians differ by more than a factor of two.
        """
        if rows.empty:
            ax.text(0.5, 0.5, "below the noise", ha="center", transform=ax.transAxes)
            return
        middle = [*rows["value"], *([1.0] if self.is_ratio else [])]
        low, high = min(middle), max(middle)
        span = max(high - low, 0.02 * abs(high))
        bottom = max(low - span, min(low, float(rows["low"].min())))
        top = min(high + span, max(high, float(rows["high"].max())))
        axis = "x" if self.is_listed else "y"
        if low > 0 and high / low > WIDE_RANGE:
            ax.set(**{f"{axis}scale": "log", f"{axis}lim": (low / 1.3, high * 1.3)})
            tick_in_steps(ax.xaxis if self.is_listed else ax.yaxis)
            return
        margin = 0.08 * max(top - bottom, 0.02 * abs(top))
        is_from_zero = low >= 0 and high > 2 * low
        ax.set(**{f"{axis}lim": (0.0 if is_from_zero else bottom - margin, top + margin)})


def _is_geometric(values: Sequence[float]) -> bool:
    """Return whether sorted numbers are more alike in their ratios than in their steps."""
    if len(values) < 3 or values[0] <= 0:
        return False
    steps, ratios = np.diff(values), np.diff(np.log(values))
    return bool(np.std(ratios) / np.mean(ratios) < np.std(steps) / np.mean(steps))


def _values(runs: pd.DataFrame, name: str) -> list[str]:
    """Return the values of a setting as text, numbers in order, others as they come."""
    known = runs[name].dropna()
    known = known.sort_values(kind="stable") if is_numeric(runs, name) else known
    return list(dict.fromkeys(known.map(text)))


def is_numeric(runs: pd.DataFrame, name: str) -> bool:
    """Return whether a setting has numbers only."""
    kinds = {type(value) for value in runs[name].dropna()}
    return bool(kinds) and all(
        issubclass(kind, int | float | np.number) and kind is not bool for kind in kinds
    )


def _short(name: str) -> str:
    return AXIS_NAMES.get(name, name.rpartition(".")[2])


def _title(runs: pd.DataFrame, names: Sequence[str]) -> str:
    """Name model and device, and explain points, intervals and hollow markers."""
    swept = analysis.without_baselines(runs)
    known = {
        name: " or ".join(sorted({text(value) for value in swept[name]}))
        for name in ("model", "dtype", "device")
        if name in swept and swept[name].nunique() <= 2
    }
    title = ", ".join(words for name, words in known.items() if name != "device")
    title = " on ".join(filter(None, [title, known.get("device")]))
    over = [name for name in analysis.SAMPLES if name in swept and swept[name].nunique() > 1]
    if over:
        by = ["policy", *analysis.varied(swept)]
        table = analysis.medians(swept, by, "throughput")
        number, confidence = int(table["num_samples"].min()), table["confidence"].min()
        samples = " and ".join(f"{name}s" for name in over)
        title += f"\nmedians of {number} {samples} with their {confidence:.0%} interval"
    level = analysis.noise(runs)
    if any("_vs_" in name for name in names) and level > 1:
        title += "; hollow: difference from 1 not significant "
        title += f"(equal work differed by up to {level:.2f} times)"
    return title
