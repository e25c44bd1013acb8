"""One panel of a sweep's picture: a quantity of its runs against a setting."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

from sarathi_lab.results import sweep_analysis
from sarathi_lab.results.plots.style import AXIS_NAMES, LINES, colours, marker, tick_in_steps
from sarathi_lab.results.sweep_analysis import text
from sarathi_lab.results.table import MILLISECONDS, factor, heading

MOST_TICKS = 10
LONG = 10.0  # seconds from which a time is shown in seconds
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


@dataclass(frozen=True)
class SweepPanel:
    """One quantity of all `runs` against a setting: colours and limits are those of all."""

    ax: Axes
    runs: pd.DataFrame
    axis: Axis
    name: str
    is_listed: bool  # names, in rows
    sorted_by: str

    def draw(self, shown: pd.DataFrame) -> pd.DataFrame:
        """Draw the runs `shown`; returns their medians, by which `name_axes` sets the limits."""
        by = [one for one in (self.axis.x, self.axis.hue, *self.axis.others) if one]
        by = list(dict.fromkeys([*by, "policy"]))
        table = sweep_analysis.medians(shown, by, self.name)
        ends = ["value", "low", "high"]
        table[ends] *= 1.0 if self._is_long else factor(self.name)
        if self.name == "decode_time_marginal":  # a difference of times that may be equal
            table.loc[table["value"] <= 0, ends] = math.nan
        columns = [one for one in by if one != self.axis.x]
        names = self._labels(table[columns])
        self._across(table, names, dict.fromkeys(self._labels(self.runs[columns])))
        return table

    def name_axes(self, table: pd.DataFrame) -> None:
        """Fit the axes to the medians of `table`, of all panels beside this, and name them."""
        self._limits(table)
        self._name_axes()

    @property
    def _is_long(self) -> bool:
        """Whether a time that people read in milliseconds has too many of them here."""
        is_time = "_vs_" not in self.name and factor(self.name) == MILLISECONDS
        return is_time and float(self.runs[self.name].max()) > LONG

    def _labels(self, series: pd.DataFrame) -> list[str]:
        labels = []
        for row in series.map(text).to_dict("records"):
            named = {str(key): value for key, value in row.items() if value != "-"}
            policy = named.pop("policy", "")
            parts = [policy] if self.axis.hue == "policy" else []
            parts += [f"{short_name(key)} {value}" for key, value in named.items()]
            labels.append(", ".join(parts))
        return labels

    def _across(self, table: pd.DataFrame, names: Sequence[str], known: Iterable[str]) -> None:
        """Every series as points with intervals, those without an x as lines across; each has the
        marker of its place among all `known`, whichever have this quantity.
        """
        colour = colours(values_of(self.runs, self.axis.hue or self.axis.x))
        noise = sweep_analysis.noise(self.runs)
        labels = list(dict.fromkeys([*known, *names]))
        shapes: dict[object, str] = {}  # by device or what else is neither colour nor axis
        for i, label in enumerate(labels):
            if label not in names:
                continue
            rows = table[[name == label for name in names]]
            places, line = self._places(rows), self._line_style(rows)
            other = tuple(text(rows[one].iloc[0]) for one in self.axis.others) or label
            at = len(shapes) if self.axis.others else i
            shape = shapes.setdefault(other, marker(at))
            own = text(rows[self.axis.hue].iloc[0]) if self.axis.hue else None
            for (_, row), place in zip(rows.iterrows(), places, strict=True):
                hue = colour.get(own or text(row[self.axis.x]), "C0")
                if math.isnan(row["value"]):
                    continue
                if math.isnan(place):
                    self._level(row, hue, line, label)
                    continue
                is_ratio = "_vs_" in self.name and not self.name.endswith(f"_vs_{row['policy']}")
                is_open = is_ratio and not sweep_analysis.is_decided(row, noise)
                shift = 0.6 * ((i + 0.5) / len(labels) - 0.5) if self.is_listed else 0.0
                self._point(row, place + shift, hue, shape, is_open=is_open)
            if not self.is_listed:
                ends = rows.assign(_x=places).dropna(subset=["_x", "value"]).sort_values("_x")
                style: dict[str, Any] = {"color": colour.get(own or "", "C0"), "linestyle": line}
                if not ends.empty:
                    self.ax.plot(ends["_x"], ends["value"], **style)
                    self.ax.plot([], [], marker=shape, label=label or None, **style)
            elif own is not None:
                self.ax.plot([], [], shape, color=colour.get(own, "C0"), label=label)
        if "_vs_" in self.name:
            self._line(1.0, color="black", linestyle=":", linewidth=1.0)

    def _line_style(self, rows: pd.DataFrame) -> Any:
        """That of what was measured or simulated."""
        known = next((one.executor for one in (rows, self.runs) if "executor" in one), None)
        is_simulated = known is not None and str(known.iloc[0]) == "simulated"
        return LINES["simulated" if is_simulated else "measured"]

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
        bars = [[max(0.0, row["value"] - row["low"])], [max(0.0, row["high"] - row["value"])]]
        x, y = (row["value"], place) if self.is_listed else (place, row["value"])
        style: dict[str, Any] = {"fmt": shape, "color": colour, "capsize": 2, "zorder": 3}
        style["mfc"] = "white" if is_open else colour
        if row["num_samples"] > 1:
            style["xerr" if self.is_listed else "yerr"] = bars
        self.ax.errorbar(x, y, **style)

    def _level(self, row: pd.Series, colour: str, line: Any, label: str) -> None:
        self._line(row["value"], color=colour, linestyle=line, label=label)
        if row["num_samples"] > 1:
            self.ax.axhspan(row["low"], row["high"], color=colour, alpha=0.12, linewidth=0)

    def _line(self, at: float, **style: Any) -> None:
        (self.ax.axvline if self.is_listed else self.ax.axhline)(at, **style)

    def _limits(self, table: pd.DataFrame) -> None:
        """Axes fit the medians: intervals show as far as twice their range, so that noise does not
        stretch it; from zero where medians differ by more than a factor of two.
        """
        known = table.dropna(subset=["value"])
        if known.empty:
            self.ax.text(0.5, 0.5, "below the noise", ha="center", transform=self.ax.transAxes)
            return
        middle = [*known["value"], *([1.0] if "_vs_" in self.name else [])]
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
        quantity = quantity.replace("[ms]", "[s]") if self._is_long else quantity
        if self.is_listed:
            names = self._rows()
            self.ax.set_yticks(range(len(names)), names)
            self.ax.set_ylim(-0.6, len(names) - 0.4)
            self.ax.set_xlabel(quantity)
            if self.ax.get_xscale() == "linear":
                self.ax.xaxis.set_major_locator(MaxNLocator(3))
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
        name = AXIS_NAMES.get(self.axis.x, self.axis.x)
        self.ax.set(xlabel=textwrap.fill(name, 26), ylabel=textwrap.fill(quantity, 26))


def is_geometric(values: Sequence[float]) -> bool:
    """Whether sorted numbers are more alike in their ratios than in their steps."""
    if len(values) < 3 or values[0] <= 0:
        return False
    steps, ratios = np.diff(values), np.diff(np.log(values))
    return bool(np.std(ratios) / np.mean(ratios) < np.std(steps) / np.mean(steps))


def values_of(runs: pd.DataFrame, name: str) -> list[str]:
    """The values of a setting as text, numbers in order, others as they come."""
    known = runs[name].dropna()
    known = known.sort_values(kind="stable") if is_numeric(runs, name) else known
    return list(dict.fromkeys(known.map(text)))


def is_numeric(runs: pd.DataFrame, name: str) -> bool:
    values = runs[name].dropna()
    return not values.empty and all(
        isinstance(value, int | float | np.number) and not isinstance(value, bool)
        for value in values
    )


def short_name(name: str) -> str:
    """A setting's name without its group, or what people call it."""
    return AXIS_NAMES.get(name, name.rpartition(".")[2])
