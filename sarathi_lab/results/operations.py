"""Where a run's time went, by operation, beside the least time that each allows."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from sarathi_lab.model.roofline import Peaks, operation_rooflines
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.result import Shown

OUTSIDE = "others"  # packing, launches, and whatever else was not timed
PARTS = {  # of the timed operations, whose rooflines have other names
    "attention": ("attention_prefill", "attention_decode"),
    "rotary": (),  # within that of `elementwise`
    "ffn": ("ffn_up", "ffn_down", "router", "shared_up", "shared_down", "shared_gate"),
    "logits": ("lm_head",),
}
EXPERTS = {  # the same in C++, of a mixture
    "experts": ("router", "ffn_up", "ffn_down"),
    "ffn_up": ("shared_gate", "shared_up"),
    "ffn_down": ("shared_down",),
}


def operation_table(
    times: pd.DataFrame,
    iterations: pd.DataFrame,
    spec: ModelSpec,
    dtype_bytes: int,
    peaks: Peaks,
) -> pd.DataFrame:
    """Of `times` (operation, seconds) and the `iterations` they were taken in: `operation`,
    `seconds`, `share` of the time in iterations, `roofline` (seconds; that of each operation alone,
    NaN where it has none) and `time_over_roofline`, the inverse of the share of what bounds it.
    """
    seconds = times.groupby("operation", sort=False).seconds.sum()
    seconds[OUTSIDE] = iterations.busy.sum() - seconds.sum()
    least: Counter[str] = Counter()
    for work in iterations.itertuples():
        least.update(operation_rooflines(spec, work, dtype_bytes, peaks))
    parts = PARTS | (EXPERTS if "experts" in seconds else {})
    roofline = [sum(least[part] for part in parts.get(name, (name,))) for name in seconds.index]
    table = pd.DataFrame({"operation": seconds.index, "seconds": seconds.to_numpy()})
    table["share"] = table.seconds / iterations.busy.sum()
    table["roofline"] = pd.Series(roofline, dtype=float).where(lambda least: least > 0)
    return table.assign(time_over_roofline=table.seconds / table.roofline)


def shown_operations(table: pd.DataFrame) -> Shown:
    """`operation_table`'s, longest first."""
    headings = {
        "operation": "operation",
        "seconds": "seconds",
        "share": "of all",
        "time_over_roofline": "/ roofline",
    }
    rows = table.sort_values("seconds", ascending=False)[list(headings)].rename(columns=headings)
    formats = {"seconds": ".3f", "of all": ".1%", "/ roofline": ".2f"}
    return Shown(rows.to_dict("records"), left=["operation"], formats=formats)
