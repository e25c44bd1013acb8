"""How a figure is drawn, stated where the figure is declared; imports no drawing library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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


# What a series' name begins with, by the policy that it is of, whose colour it has.
POLICY_OF = {
    "sarathi": "sarathi",
    "orca": "orca",
    "tp_": "orca",
    "baseline": "request_level",
    "C=": "sarathi",
}


def policy_of(series: str) -> str | None:
    """The policy that a series shows, if it shows one."""
    return next((own for start, own in POLICY_OF.items() if series.startswith(start)), None)


def in_tokens(name: str) -> str:
    """A name with the paper's "1K" as the tokens that it means."""
    return re.sub(r"\b(\d+)K\b", lambda found: str(1024 * int(found[1])), name)


@dataclass(frozen=True)
class Look:
    """How one figure is drawn.

    `panels` names panels for people, others have `prefix` before them; `xs` and `units` are the
    axes' labels of panels that differ from `x` and `y`, in place of which the points' unit stands
    where there is none. `series` are the only ones drawn, if any are given; `left_out` panels are
    not drawn. `is_swapped` panels hold quantiles by share, which people read the other way round.
    `names` are series called otherwise than in `SERIES`.
    """

    title: str = ""
    x: str = ""
    y: str = ""
    log_x: bool = False
    log_y: bool = False
    is_bars: bool = False
    columns: int = 3
    legend: str = ""
    prefix: str = ""
    series: tuple[str, ...] = ()
    panels: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    xs: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    is_swapped: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def panel(self, name: str) -> str:
        return self.panels.get(name, self.prefix + re.sub(r" (?=[A-Z]=)", ", ", in_tokens(name)))

    def series_name(self, series: str) -> str:
        """What people call a series; one without a name of its own keeps the table's."""
        words = re.sub(r"^sarathi(\d+)$", r"SARATHI, C = \1", series).replace("C=", "C = ")
        return self.names.get(series, SERIES.get(series, words))
