"""How the paper's figures are laid out and named for people: titles, axes, what series are called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Look:
    """How one figure is drawn.

    `panels` names panels for people, others have `prefix` before them; `xs` and `units` are the axes' labels of panels
    that differ from `x` and `y`. `series` leaves only those whose name ends so, `left_out` panels are not drawn.
    `is_swapped` panels hold quantiles by share, which people read the other way round.
    """

    title: str
    x: str
    y: str
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

    def panel(self, name: str) -> str:
        """What people call a panel."""
        return self.panels.get(name, self.prefix + name)


PER_LAYER = "tokens / ms and layer"

LOOKS: Mapping[str, Look] = {
    "fig03": Look(
        "Fig 3: time per token by operation",
        "batch",
        "ms per token",
        log_y=True,
        columns=3,
        legend="operation",
        panels={"ratio": "a decode over a prompt's token"},
        units={"ratio": "ratio"},
    ),
    "fig04": Look(
        "Fig 4: throughput of one layer, and arithmetic intensity of its products",
        "batch",
        PER_LAYER,
        log_x=True,
        log_y=True,
        columns=4,
        legend="tokens a sequence,\nor matrix product",
        panels={"prefill intensity": "prefill", "decode intensity": "decode"},
        units={"prefill intensity": "FLOPs per element moved", "decode intensity": "FLOPs per element moved"},
    ),
    "fig07": Look(
        "Fig 7: one prefill iteration by its tokens (tile quantization)",
        "prompt tokens",
        "ms per iteration",
        columns=2,
        legend="operation",
        panels={"step": "one token past full tiles"},
        units={"step": "time / that of full tiles"},
        xs={"step": "tokens that fill tiles"},
    ),
    "fig08": Look(
        "Fig 8: a decode alone over a decode riding on a chunk",
        "batch",
        "decode speed-up",
        columns=1,
        legend="P + D",
    ),
    "fig09": Look(
        "Fig 9: throughput of SARATHI over request-level batching by P:D",
        "P:D",
        "throughput / baseline",
        log_x=True,
        legend="tokens a batch",
        prefix="P + D = ",
    ),
    "fig10": Look(
        "Fig 10: time to serve B requests at P:D = C/(B-1)",
        "batch",
        "seconds",
        legend="policy, operation",
        prefix="P + D = ",
        series=("total", "attn"),
    ),
    "fig11": Look(
        "Fig 11: Orca and SARATHI over request-level batching",
        "P:D",
        "throughput / baseline",
        columns=2,
        legend="policy",
        panels={"a": "a: by sequence length", "b": "b: by P:D"},
        xs={"a": "P + D [tokens]"},
    ),
    "fig12": Look(
        "Fig 12: GPT-3 on 64 GPUs, bubbles and completion",
        "requests done",
        "time [s]",
        columns=2,
        legend="system",
        panels={"a": "a: bubbles of a request", "b": "b: completion"},
        units={"a": "share of requests"},
        xs={"a": "bubble time of a request [s]"},
        left_out=("ratios",),
        is_swapped=("a",),
    ),
    "fig13": Look(
        "Fig 13: speed with chunks over speed without",
        "chunk [tokens]",
        "speed / un-chunked",
        legend="P + D",
        panels={"a_attn": "a: attention", "b_prefill": "b: prefill", "c_overall": "c: end to end"},
    ),
    "table2": Look("Table 2: a batch of prompt, decodes, and both", "", "ms", is_bars=True),
    "table4": Look(
        "Table 4: chunk 256, decodes and end to end",
        "P + D [tokens]",
        "speed-up",
        columns=2,
        legend="of what",
        panels={"13b": "13B on an A6000", "33b": "33B on an A100"},
    ),
}

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
    "tp_pp_orca": "Orca, best case,\nTP 8, PP 8",
    "tp_8rep": "Orca, best case,\n8 replicas of TP 8",
    "decode_speedup": "decodes",
    "throughput_gain": "end to end",
}
SERIES_OF = {"fig12": {"sarathi": "SARATHI,\nTP 8, PP 8"}}


def series_name(figure: str, series: str) -> str:
    """What people call a series; one without a name of its own keeps the table's."""
    words = re.sub(r"^sarathi(\d+)$", r"SARATHI, C = \1", series).replace("C=", "C = ")
    return SERIES_OF.get(figure, {}).get(series, SERIES.get(series, words))
