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
Kind = Literal["line", "point", "bar", "pair"]
GAPS, TBT, TTFT, CAPACITY = "longest gap", "TBT P99", "TTFT P50", "capacity"


@dataclass(frozen=True)
class PlotSpec:
    """How the rows of one figure (`table.rows_of_points`) become panels.

    "line" and "point" are drawn by x for each series, a "bar" for each series, a "pair" as a point
    for each value of `hue` at the two `quantities` (y, then x). `is_by_device`: a group of panels
    for each device instead of one for the paper and all that is simulated.

    `xs` and `ys` are axis labels of panels that differ from `x` and `y`; without a y it is the
    rows' unit. `names` and `panels` are display names, other panels have `prefix` before them.
    Only `series`, `quantities` and `unit` are drawn where given, `left_out` panels are not.
    `is_swapped` panels hold quantiles by share, which are drawn as shares by quantile.
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
    hue: str = "series"
    series: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ()
    unit: str = ""
    panels: Mapping[str, str] = field(default_factory=dict)
    ys: Mapping[str, str] = field(default_factory=dict)
    xs: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    is_swapped: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def panel_name(self, panel: str) -> str:
        words = re.sub(r" (?=[A-Z]=)", ", ", in_tokens(panel))
        return self.panels.get(panel, self.prefix + words)

    def series_name(self, series: str) -> str:
        known = self.names.get(series, SERIES.get(series, series))
        return re.sub(r"^sarathi(\d+)$", r"SARATHI, C = \1", known).replace("C=", "C = ")


def in_tokens(name: str) -> str:
    """Write the paper's "1K" as tokens."""
    return re.sub(r"\b(\d+)K\b", lambda number: str(1024 * int(number[1])), name)


def _by_device(kind: Kind, *quantities: str, **options: Any) -> PlotSpec:
    return PlotSpec(kind=kind, quantities=quantities, is_by_device=True, columns=4, **options)


SERVING: Mapping[str, PlotSpec] = {
    "sarathi_serve_stalls": _by_device(
        "point", GAPS, x="time [s]", y="longest gap [ms]", log_y=True, unit="ms"
    ),
    "sarathi_serve_ablation": _by_device("bar", TTFT, TBT),
    "sarathi_serve_capacity": _by_device("bar", CAPACITY),
    "sarathi_serve_budget": _by_device("pair", TBT, TTFT, hue="x", legend="budget [tokens]"),
    "disaggregation": _by_device("bar", "goodput per GPU"),
    "long_prompts": _by_device("pair", "TTFT P99, short", "TTFT, long"),
    "dynamic_chunks": _by_device(
        "line", "throughput / one stage's", x="chunk [tokens]", log_x=True
    ),
    "layered_prefill": _by_device("line", "TTFT mean", x="load [of saturation]"),
    "adaptive_budgets": _by_device("bar", CAPACITY),
    "p_pas_gain": _by_device("bar", "mean latency, low load", "mean latency, high load"),
    "energy": _by_device("bar", "energy a token", "power of a device"),
    "speculation": _by_device(
        "line",
        "latency P50 / no drafts",
        "throughput, all at once / no drafts",
        x="chunk [tokens]",
        log_x=True,
    ),
    "agentic": _by_device("bar", "TTFT P50, later turns", "hit share, later turns"),
}
