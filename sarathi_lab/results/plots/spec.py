"""How figures are drawn, as data; imports no drawing library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SERIES = {
    "preproj": "QKV projection",
    "postproj": "output projection",
    "ffn": "feed-forward",
    "attn": "attention",
    "others": "all else",
    "total": "total",
    "orca_worst": "Orca, worst case",
    "orca_best": "Orca, best case",
    "sarathi": "SARATHI",
    "baseline total": "baseline, total",
    "baseline attn": "baseline, attention",
    "sarathi total": "SARATHI, total",
    "sarathi attn": "SARATHI, attention",
    "tp_pp_orca": "Orca, best case, TP 8, PP 8",
    "tp_8rep": "Orca, best case, 8 replicas of TP 8",
    "decode_speedup": "decodes",
    "throughput_gain": "end to end",
}
Kind = Literal["line", "point", "bar", "heat"]


@dataclass(frozen=True)
class PlotSpec:
    """How the points of one experiment become panels.

    Attributes:
        title: Of the picture.
        x: Label along x; in a map the name of the setting.
        y: Label upwards; without one the rows' unit.
        log_x: Whether x is logarithmic.
        log_y: Whether y is.
        kind: "line" and "point" draw by x for each series, "bar" for each series, "heat" a gain in
            each cell by x and series.
        is_by_device: Whether each device has a group of panels, instead of one for the paper and
            all that is simulated.
        columns: Most panels beside each other.
        legend: Title of the legend.
        prefix: Before the names of panels that `panels` does not have.
        series: Those that are drawn; () for all.
        quantities: Those that are drawn; () for all.
        unit: Of the rows that are drawn; "" for all.
        panels: Display names of panels.
        ys: Labels upwards of panels that differ from `y`.
        xs: Labels along x of panels that differ from `x`.
        left_out: Patterns of panels that are not drawn, such as "* over Orca".
        swapped: Panels whose rows are quantiles by share, drawn as shares by quantile.
        names: Display names of series.
    """

    title: str = ""
    x: str = ""
    y: str = ""
    log_x: bool = False
    log_y: bool = False
    kind: Kind = "line"
    is_by_device: bool = False
    columns: int = 3
    legend: str = ""
    prefix: str = ""
    series: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ()
    unit: str = ""
    panels: Mapping[str, str] = field(default_factory=dict)
    ys: Mapping[str, str] = field(default_factory=dict)
    xs: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def panel_name(self, panel: str) -> str:
        panel_in_tokens = in_tokens(panel)
        name = re.sub(r" (?=[A-Z]=)", ", ", panel_in_tokens)
        return self.panels.get(panel, self.prefix + name)

    def series_name(self, series: str) -> str:
        usual_name = SERIES.get(series, series)
        name = self.names.get(series, usual_name)
        of_chunk = re.sub(r"^sarathi(\d+)$", r"SARATHI, C = \1", name)
        return of_chunk.replace("C=", "C = ")


def in_tokens(name: str) -> str:
    """Write the paper's "1K" as tokens."""
    return re.sub(r"\b(\d+)K\b", lambda number: str(1024 * int(number[1])), name)


def by_device(kind: Kind, *quantities: str, columns: int = 4, **options: Any) -> PlotSpec:
    """Make the spec of an experiment under load: a group of panels for each device."""
    return PlotSpec(kind=kind, quantities=quantities, is_by_device=True, columns=columns, **options)
