"""Pictures of runs: a sweep (`draw_sweep`), and runs side by side. No measuring, no file access."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from sarathi_lab.results import swept
from sarathi_lab.results.columns import factor, heading
from sarathi_lab.results.comparison import ComparedRun
from sarathi_lab.results.plots.style import (
    AXIS_NAMES,
    colours,
    finished,
    marker,
    panels,
    tick_in_steps,
)
from sarathi_lab.results.swept import text

LINES = ("-", "--", "-.", ":")
# Column of the iterations, factor and y label.
CURVES = (
    ("num_prefill_tokens", 1.0, "prompt tokens"),
    ("num_decode_tokens", 1.0, "decodes"),
    ("busy", 1e3, "iteration time [ms]"),
    ("num_waiting", 1.0, "requests waiting"),
)
NUM_MARKERS = 10
LABEL_WIDTH = 52  # characters
QUANTITIES = ["capacity", "throughput", "throughput_vs_{}", "slo_attainment", "ttft_p50"]
QUANTITIES += ["tbt_p99", "decode_time_marginal", "kv_reread_factor"]
MOST_PANELS, MOST_ROWS = 6, 3  # of quantities: without facets, with them
MOST_FACETS = 6
MOST_TICKS = 10
WIDE_RANGE = 20  # largest over smallest from which an axis is logarithmic


@dataclass(frozen=True)
class Axis:
    """What a picture of a sweep shows by what: settings by the names of their columns. `others`
    vary, too, and are told apart by marker and label.
    """

    x: str
    hue: str | None
    facet: str | None
    others: tuple[str, ...]


def draw_sweep(
    runs: pd.DataFrame,
    *,
    x: str | None = None,
    hue: str | None = None,
    facet: str | None = None,
    y: str | Sequence[str] | None = None,
) -> Figure:
    """A sweep by what it varied, a panel a quantity of `y` and a value of `facet`.

    `runs` has a row a run and flat columns (`swept`). Settings are chosen from those that vary
    unless named; a name may leave out its group, as `rate` for `workload.rate`. Numbers are at
    their places on a linear or logarithmic axis, names in rows. Points are medians over seeds and
    repetitions with their intervals; a run without the setting on the x axis is a line across.
    Raises UserError for a name that the runs don't have.
    """
    base = swept.reference(runs)
    named = [y] if isinstance(y, str) else list(y or [])
    for ratio in (f"throughput_vs_{base}", *named):
        quantity, is_ratio, to = ratio.partition("_vs_")
        runs = swept.relative(runs, quantity, to) if is_ratio else runs
    axis = choose_axes(runs, x=x, hue=hue, facet=facet)
    facets = _values(runs, axis.facet) if axis.facet else [None]
    names = [swept.column(runs, name) for name in named]
    is_listed = not _is_numeric(runs, axis.x)
    number = len(_values(runs, axis.x)) if is_listed else 0
    most = MOST_ROWS if axis.facet else 4 if number > 8 else MOST_PANELS
    names = names or _quantities(runs, base, most)
    runs = _without_repeated(runs, names)
    if axis.facet:
        columns = len(facets)
    else:
        columns = len(names) if number > 8 else min(len(names), 3 if len(names) > 4 else 2)
    rows = math.ceil(len(names) * len(facets) / columns)
    height = max(2.6, 0.9 + 0.24 * number * _crowd(runs, axis))
    size = (
        max(4.6, 1.2 * is_listed + (3.0 if columns > 2 else 4.2) * columns),
        height * rows + 0.9,
    )
    figure, axes = panels(rows, columns, size, sharey="row" if is_listed and number > 8 else False)
    grid = [(name, value) for name in names for value in facets]
    for ax, (name, value) in zip(axes, grid, strict=False):
        shown = runs if value is None else _of_facet(runs, str(axis.facet), value)
        _Panel(ax, runs, axis, name, is_listed, names[0]).draw(shown)
        if value is not None and name == names[0]:
            ax.set_title(f"{_short(str(axis.facet))} = {value}")
    for ax in axes[len(grid) :]:
        ax.set_axis_off()
    return _described(figure, axes, runs, names)


def choose_axes(
    runs: pd.DataFrame, *, x: str | None = None, hue: str | None = None, facet: str | None = None
) -> Axis:
    """What is on which axis: on x the setting with the most numbers, else with the most values; the
    policy, baselines included, or else the next by colour; then a panel a value. Raises UserError
    for a name that the runs don't have.
    """
    x, hue, facet = (swept.column(runs, one) if one else None for one in (x, hue, facet))
    varying = swept.varying_settings(runs)
    if "policy" not in varying and runs.policy.nunique() > 1:
        varying.insert(0, "policy")
    left = [one for one in varying if one not in (x, hue, facet)]
    if x is None:
        own = swept.own_runs(runs)
        numbers = [one for one in left if _is_numeric(own, one)]
        x = max(numbers or left or ["policy"], key=lambda one: own[one].nunique())
    left = [one for one in left if one != x]
    hue = hue or (left.pop(0) if left else None)
    if facet is None and left and len(_values(runs, left[0])) <= MOST_FACETS:
        facet = left.pop(0)
    return Axis(x, hue, facet, tuple(one for one in left if one not in (hue, facet)))


def _quantities(runs: pd.DataFrame, base: str | None, most: int) -> list[str]:
    """Those that runs have and that tell them apart."""
    names = [name.format(base) for name in QUANTITIES]
    known = [name for name in names if name in runs and runs[name].notna().any()]
    telling = [name for name in known if runs[name].max() - runs[name].min() > 0]
    return (telling or known)[:most]


def _values(runs: pd.DataFrame, name: str) -> list[str]:
    """The values of a setting as text, numbers in order, others as they come."""
    known = runs[name].dropna()
    known = known.sort_values(kind="stable") if _is_numeric(runs, name) else known
    return list(dict.fromkeys(known.map(text)))


def _is_numeric(runs: pd.DataFrame, name: str) -> bool:
    values = runs[name].dropna()
    return not values.empty and all(
        isinstance(value, int | float | np.number) and not isinstance(value, bool)
        for value in values
    )


def _of_facet(runs: pd.DataFrame, facet: str, value: str) -> pd.DataFrame:
    """Runs that do not have the setting belong to all of its panels."""
    return runs[runs[facet].isna() | (runs[facet].map(text) == value)]


def _without_repeated(runs: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Without baselines that are the same as an own run of their policy, as they are in simulation;
    where they were measured they may differ, and are called baselines.
    """
    if "is_baseline" not in runs or runs.is_baseline.all():
        return runs
    is_baseline = runs.is_baseline.astype(bool)
    settings = [one for one in swept.varying_settings(runs) if one != "chunk"]
    columns = list(dict.fromkeys(["policy", *settings, *(n for n in names if "_vs_" not in n)]))
    own = set(runs.loc[~is_baseline, columns].map(text).itertuples(index=False, name=None))
    is_same = [row in own for row in runs[columns].map(text).itertuples(index=False, name=None)]
    return runs[~(is_baseline & pd.Series(is_same, runs.index))]


def _crowd(runs: pd.DataFrame, axis: Axis) -> float:
    """How many rows of text a name needs, for the series beside each other."""
    return max(1.0, 0.5 * len(_values(runs, axis.hue))) if axis.hue else 1.0


def _short(name: str) -> str:
    """A setting's name without its group, or what people call it."""
    return AXIS_NAMES.get(name, name.rpartition(".")[2])


@dataclass(frozen=True)
class _Panel:
    """One quantity of all `runs` against a setting: colours and limits are those of all."""

    ax: Axes
    runs: pd.DataFrame
    axis: Axis
    name: str
    is_listed: bool  # names, in rows
    sorted_by: str

    def draw(self, shown: pd.DataFrame) -> None:
        by = [one for one in (self.axis.x, self.axis.hue, *self.axis.others) if one]
        by = list(dict.fromkeys([*by, "policy"]))
        table = swept.medians(shown, by, self.name)
        ends = ["median", "low", "high"]
        table[ends] *= factor(self.name)
        if self.name == "decode_time_marginal":  # a difference of times that may be equal
            table.loc[table["median"] <= 0, ends] = math.nan
        columns = [one for one in by if one != self.axis.x]
        names = self._labels(table[columns])
        self._across(table, names, dict.fromkeys(self._labels(self.runs[columns])))
        self._limits(table)
        self._name_axes()

    def _labels(self, series: pd.DataFrame) -> list[str]:
        return [self._label(row) for _, row in series.map(text).iterrows()]

    def _label(self, row: pd.Series) -> str:
        named = {str(key): value for key, value in row.items() if value != "-"}
        parts = [named.pop("policy")] if self.axis.hue == "policy" else []
        named.pop("policy", None)
        return ", ".join([*parts, *(f"{_short(key)} {value}" for key, value in named.items())])

    def _across(self, table: pd.DataFrame, names: Sequence[str], known: Iterable[str]) -> None:
        """Every series as points with intervals, those without an x as lines across; each has the
        marker of its place among all `known`, whichever have this quantity.
        """
        colour = colours(_values(self.runs, self.axis.hue or self.axis.x))
        noise = swept.noise(self.runs)
        labels = list(dict.fromkeys([*known, *names]))
        for i, label in enumerate(labels):
            if label not in names:
                continue
            rows = table[[name == label for name in names]]
            places = self._places(rows)
            own = text(rows[self.axis.hue].iloc[0]) if self.axis.hue else None
            for (_, row), place in zip(rows.iterrows(), places, strict=True):
                hue = colour.get(own or text(row[self.axis.x]), "C0")
                if math.isnan(row["median"]):
                    continue
                if math.isnan(place):
                    self._level(row, hue, label)
                    continue
                is_ratio = "_vs_" in self.name and not self.name.endswith(f"_vs_{row['policy']}")
                is_open = is_ratio and not swept.is_decided(row, noise)
                shift = 0.6 * ((i + 0.5) / len(labels) - 0.5) if self.is_listed else 0.0
                self._point(row, place + shift, hue, marker(i), is_open=is_open)
            if not self.is_listed:
                line = rows.assign(_x=places).dropna(subset=["_x", "median"]).sort_values("_x")
                hue = colour.get(own or "", "C0")
                if not line.empty:
                    style: dict[str, Any] = {"color": hue, "marker": marker(i), "markersize": 0.0}
                    self.ax.plot(line["_x"], line["median"], label=label or None, **style)
            elif own is not None:
                self.ax.plot([], [], marker(i), color=colour.get(own, "C0"), label=label)
        if "_vs_" in self.name:
            self._line(1.0, color="black", linestyle=":", linewidth=1.0)

    def _places(self, rows: pd.DataFrame) -> list[float]:
        if not self.is_listed:
            return [float(value) for value in rows[self.axis.x]]
        names = self._rows()
        return [float(names.index(text(value))) for value in rows[self.axis.x].map(text)]

    def _rows(self) -> list[str]:
        """Names from below; policies by how well they do."""
        names = list(dict.fromkeys(self.runs[self.axis.x].map(text)))
        if self.axis.x == "policy" and self.axis.hue is None:
            place = self.runs.groupby("policy")[self.sorted_by].median()
            return sorted(names, key=lambda one: float(place.get(one, math.nan)))
        return names[::-1]

    def _point(
        self, row: pd.Series, place: float, colour: str, shape: str, *, is_open: bool
    ) -> None:
        bars = [[max(0.0, row["median"] - row["low"])], [max(0.0, row["high"] - row["median"])]]
        x, y = (row["median"], place) if self.is_listed else (place, row["median"])
        style: dict[str, Any] = {"fmt": shape, "color": colour, "capsize": 2, "zorder": 3}
        style["mfc"] = "white" if is_open else colour
        if row["number"] > 1:
            style["xerr" if self.is_listed else "yerr"] = bars
        self.ax.errorbar(x, y, **style)

    def _level(self, row: pd.Series, colour: str, label: str) -> None:
        self._line(row["median"], color=colour, linestyle="--", label=label)
        if row["number"] > 1:
            self.ax.axhspan(row["low"], row["high"], color=colour, alpha=0.12, linewidth=0)

    def _line(self, at: float, **style: Any) -> None:
        (self.ax.axvline if self.is_listed else self.ax.axhline)(at, **style)

    def _limits(self, table: pd.DataFrame) -> None:
        """Axes fit the medians: intervals show as far as twice their range, so that noise does not
        stretch it; from zero where medians differ by more than a factor of two.
        """
        known = table.dropna(subset=["median"])
        if known.empty:
            self.ax.text(0.5, 0.5, "below the noise", ha="center", transform=self.ax.transAxes)
            return
        middle = [*known["median"], *([1.0] if "_vs_" in self.name else [])]
        low, high = min(middle), max(middle)
        span = max(high - low, 0.02 * abs(high))
        bottom = max(low - span, min(low, float(known["low"].min())))
        top = min(high + span, max(high, float(known["high"].max())))
        setter = self.ax.set_xlim if self.is_listed else self.ax.set_ylim
        if low > 0 and high / low > WIDE_RANGE:
            (self.ax.set_xscale if self.is_listed else self.ax.set_yscale)("log")
            setter(low / 1.3, high * 1.3)
            tick_in_steps(self.ax.xaxis if self.is_listed else self.ax.yaxis)
            return
        margin = 0.08 * max(top - bottom, 0.02 * abs(top))
        starts_at_zero = low >= 0 and high > 2 * low
        setter(0.0 if starts_at_zero else bottom - margin, top + margin)

    def _name_axes(self) -> None:
        quantity = heading(self.name)
        if self.is_listed:
            names = self._rows()
            self.ax.set_yticks(range(len(names)), names)
            self.ax.set_ylim(-0.6, len(names) - 0.4)
            self.ax.set_xlabel(quantity)
            return
        values = sorted({float(value) for value in self.runs[self.axis.x].dropna()})
        if is_geometric(values):
            self.ax.set_xscale("log", base=2)
        if len(values) <= MOST_TICKS:
            self.ax.xaxis.set_major_locator(FixedLocator(values))
            self.ax.xaxis.set_minor_locator(NullLocator())
        self.ax.xaxis.set_major_formatter("{x:g}")
        self.ax.xaxis.set_minor_formatter(NullFormatter())
        self.ax.margins(x=0.08)
        self.ax.set(xlabel=AXIS_NAMES.get(self.axis.x, self.axis.x), ylabel=quantity)


def is_geometric(values: Sequence[float]) -> bool:
    """Whether sorted numbers are more alike in their ratios than in their steps."""
    if len(values) < 3 or values[0] <= 0:
        return False
    steps, ratios = np.diff(values), np.diff(np.log(values))
    return bool(np.std(ratios) / np.mean(ratios) < np.std(steps) / np.mean(steps))


def _described(
    figure: Figure, axes: Sequence[Axes], runs: pd.DataFrame, names: Sequence[str]
) -> Figure:
    """Which model and device, what points and bars are, and one legend for all panels."""
    own = swept.own_runs(runs)
    parts = [
        sorted({text(value) for value in own[name]})
        for name in ("model", "dtype", "device")
        if name in own
    ]
    said = [" or ".join(one) for one in parts if len(one) <= 2]
    title = ", ".join(said[:-1]) + f" on {said[-1]}" if len(said) > 1 else " ".join(said)
    if note := sampling(runs):
        title += f"\n{note}"
    if (
        any("_vs_" in name for name in names)
        and not math.isnan(level := swept.noise(runs))
        and level > 1
    ):
        title += f"; hollow: not told apart from 1 (equal work differed by up to {level:.2f} times)"
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=min(5, len(handles)),
        )
    return finished(figure, title)


def sampling(runs: pd.DataFrame) -> str:
    """What a point and its bar are; nothing where every point is one run."""
    own = swept.own_runs(runs)
    over = [name for name in swept.SAMPLES if name in own and own[name].nunique() > 1]
    if not over:
        return ""
    table = swept.medians(own, ["policy", *swept.varying_settings(own)], "throughput")
    number, confidence = int(table["number"].min()), table["confidence"].min()
    words = " and ".join(f"{name}s" for name in over)
    return f"medians of {number} {words} with their {confidence:.0%} interval"


def curves(runs: Sequence[ComparedRun], x: str = "iteration") -> Figure:
    """What each run's iterations held and took, against `x`: "iteration", or "end" for the time."""
    shown = [curve for curve in CURVES if any(curve[0] in run.iterations for run in runs)]
    figure, axes = panels(len(shown), 1, (9, 1.9 * len(shown) + 0.8), sharex=True)
    for ax, (column, scale, words) in zip(axes, shown, strict=True):
        for i, run in enumerate(runs):
            if column in run.iterations and x in run.iterations:
                ax.plot(
                    run.iterations[x],
                    scale * run.iterations[column],
                    label=run.name,
                    linestyle=LINES[i % len(LINES)],
                    marker=marker(i),
                    markersize=4,
                    markevery=max(1, len(run.iterations) // NUM_MARKERS),
                    color=f"C{i}",  # the same in all axes, whichever columns the runs before have
                    # an iteration lasts until its end
                    drawstyle="steps-pre" if x == "end" else "default",
                )
        ax.set_ylabel(words)
    axes[-1].set_xlabel("time [s]" if x == "end" else x)
    return _with_legend(figure, axes[0])


def ratios(metrics: pd.DataFrame) -> Figure:
    """Ratios of `comparison.compared_metrics` as dots on a logarithmic axis; 1: the reference."""
    import seaborn as sns  # takes two seconds

    table = metrics.xs("ratio", axis="columns", level=1).dropna(how="all")
    long = table.melt(ignore_index=False, var_name="run", value_name="ratio").reset_index()
    figure, (ax,) = panels(1, 1, (8, 0.3 * len(table) + 1.6))
    markers = list(map(marker, range(table.shape[1])))
    sns.pointplot(
        long, x="ratio", y="metric", hue="run", linestyle="none", markers=markers, dodge=0.4, ax=ax
    )
    ax.axvline(1.0, color="black", linestyle=":")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="ratio to the reference", ylabel="")
    if ax.legend_ is not None:
        ax.legend_.remove()
    return _with_legend(figure, ax)


def _with_legend(figure: Figure, ax: Axes) -> Figure:
    """The legend of `ax` below all, wrapped: a single run is called by all its settings."""
    handles, labels = ax.get_legend_handles_labels()
    wrapped = [textwrap.fill(label, LABEL_WIDTH, break_on_hyphens=False) for label in labels]
    figure.legend(handles, wrapped, loc="outside lower center", ncols=2)
    return finished(figure)
