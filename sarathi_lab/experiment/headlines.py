"""What each of the paper's figures says in one number, for all that have points of it: paper,
simulations, devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.experiment.bench import LARGEST_BATCH, best_pd_ratio

HOLDS, PARTLY, BEYOND = (
    0.8,
    0.25,
    1.25,
)  # share of the paper's effect: at least, at least, and above
QUESTIONS = {
    "fig03": "Why are decodes expensive?",
    "fig04": "What fills the device: prompts, or only large batches of decodes?",
    "fig07": "What does one token past a tile cost?",
    "fig08": "How much cheaper is a decode that rides on a chunk?",
    "fig09": "How much faster is SARATHI end to end, and at which P:D?",
    "fig10": "Where does the time go?",
    "fig11": "Does chunking beat Orca, whose whole prompts carry decodes, too?",
    "fig12": "Do equal chunks close the bubbles of a pipeline?",
    "fig13": "What do small chunks cost the prefill, and what remains end to end?",
    "table2": "What does a decode add to a batch that holds a prompt?",
    "table4": "How much do decodes and whole requests gain on two models and GPUs?",
}


@dataclass(frozen=True)
class Headline:
    """A number that `value` reads from the points of one device (NaN where they do not tell), and
    what it says.

    The effect is the distance from `neutral`, the number at which the figure would say nothing.
    """

    figure: str
    words: str
    value: Callable[[pd.DataFrame], float]
    neutral: float = 1.0


def headlines(points: pd.DataFrame) -> pd.DataFrame:
    """A row per headline and device that has its points: figure, headline, device, source, value,
    verdict.

    `verdict` holds the device's effect against the paper's: "holds" from 80 % of it (above 125 %:
    "beyond the paper's"), "partly" from 25 %, else "fails".
    """
    return pd.DataFrame(
        _found(points), columns=["figure", "headline", "device", "source", "value", "verdict"]
    ).reset_index(drop=True)


def verdict(figure: str, points: pd.DataFrame) -> str:
    """What a figure says, in Markdown: a line per headline with the paper's number and everyone
    else's.
    """
    lines = []
    found = headlines(points[points.figure == figure])
    for words, rows in found.groupby("headline", sort=False):
        values = [
            f"{row['device']} **{row['value']:.3g}**{_in_brackets(row['verdict'])}"
            for row in rows.to_dict("records")
        ]
        lines.append(f"- {words}: " + "; ".join(values) + ".")
    measured = points[(points.figure == figure) & (points.source == "measured")]
    for device, rows in measured.groupby("device", sort=False):
        if rows.y.isna().any():
            lines.append(
                f"- {device}: {rows.y.isna().sum()} of {len(rows)} points spread too widely to "
                "say a number."
            )
    if measured.empty:
        lines.append("- No device has recorded results of it.")
    return "\n".join(lines)


def _in_brackets(words: str) -> str:
    return f" ({words})" if words else ""


def _found(points: pd.DataFrame) -> Iterator[tuple[object, ...]]:
    for headline in HEADLINES:
        rows = points[(points.figure == headline.figure) & points.y.notna()]
        values = {
            key: headline.value(own) for key, own in rows.groupby(["device", "source"], sort=False)
        }
        papers = next(
            (value for (_, source), value in values.items() if source == "paper"), math.nan
        )
        for (device, source), value in values.items():
            if math.isfinite(value):
                said = "" if source == "paper" else _compared(value, papers, headline.neutral)
                yield headline.figure, headline.words, device, source, value, said


def _compared(value: float, papers: float, neutral: float) -> str:
    share = (value - neutral) / (papers - neutral)
    if not math.isfinite(share):
        return ""
    if share > BEYOND:
        return "holds, beyond the paper's"
    return "holds" if share >= HOLDS else "partly" if share >= PARTLY else "fails"


def _line(points: pd.DataFrame, panel: str, series: str) -> pd.Series:
    """y by x of one line; empty if there is none."""
    chosen = points[(points.panel == panel) & (points.series == series)]
    return chosen.groupby("x").y.mean()


def _highest(points: pd.DataFrame) -> float:
    return float(points.y.max()) if len(points) else math.nan


def _decode_over_prefill(points: pd.DataFrame) -> float:
    """Of the two curves, or where a device measured it as a ratio."""
    paired = _line(points, "ratio", "decode / prefill")
    ratio = (
        paired
        if len(paired)
        else (_line(points, "decode", "total") / _line(points, "prefill", "total")).dropna()
    )
    return float(ratio.iloc[0]) if len(ratio) else math.nan


def _decode_growth(points: pd.DataFrame) -> float:
    """Over the batches that prefills have, too, at the longest sequences: their growth is the
    device's limit.
    """
    lengths = sorted({int(name) for name in points.series if str(name).isdecimal()})
    if not lengths:
        return math.nan
    prefill, decode = (_line(points, panel, str(lengths[-1])) for panel in ("prefill", "decode"))
    shared = prefill.index.intersection(decode.index)
    if len(shared) < 2:
        return math.nan
    ends = [shared.min(), shared.max()]
    return float(decode[ends[1]] / decode[ends[0]] / (prefill[ends[1]] / prefill[ends[0]]))


def _step_past_256(points: pd.DataFrame) -> float:
    """From the curve, or where a device measured it as a ratio."""
    total, step = _line(points, "", "total"), _line(points, "step", "one token more")
    if {256, 257} <= set(total.index):
        return float(total[257] / total[256])
    return float(step.get(256, math.nan))


def _best_pd_over_rule(points: pd.DataFrame) -> float:
    """For 1K and chunks of 256, whose optimum C/(B-1) all points surround."""
    line = _line(points, "1K", "C=256")
    return (
        line.index[int(line.argmax())] / best_pd_ratio(256, LARGEST_BATCH["1K"])
        if len(line)
        else math.nan
    )


def _most_saved(points: pd.DataFrame) -> float:
    panels = points.panel.unique()
    saved = [
        (_line(points, panel, "baseline total") / _line(points, panel, "sarathi total")).max()
        for panel in panels
    ]
    return float(max(saved, default=math.nan))


def _over_orca(points: pd.DataFrame) -> float:
    """Of the best chunk; a device's chunks need not be the paper's."""
    chunks = [
        name for name in points.series.unique() if name.startswith("sarathi") and name != "sarathi"
    ]
    orca = _line(points, "b", "orca_best")
    return max(
        (float((_line(points, "b", name) / orca).max()) for name in chunks), default=math.nan
    )


def _ratio_of(name: str) -> Callable[[pd.DataFrame], float]:
    return lambda points: _highest(points[(points.panel == "ratios") & (points.series == name)])


def _kept_at_256(points: pd.DataFrame) -> float:
    return float(points[(points.panel == "b_prefill") & (points.x == 256)].y.mean())


def _alone_over_added(points: pd.DataFrame) -> float:
    """Table 2: the decode-only batch has four decodes, the decode-maximal one adds three to a
    prompt.
    """
    totals = points[points.series == "total"].drop_duplicates("panel").set_index("panel").y
    if not {"decode-only", "decode-maximal", "prefill-only"} <= set(totals.index):
        return math.nan
    return float(
        totals["decode-only"] / 4 / ((totals["decode-maximal"] - totals["prefill-only"]) / 3)
    )


def _end_to_end(points: pd.DataFrame) -> float:
    return _highest(points[points.panel == "c_overall"])


def _gain(is_33b: bool) -> Callable[[pd.DataFrame], float]:
    """Table 4's panels are models: the paper's two, and a device's own."""
    return lambda points: _highest(
        points[(points.series == "throughput_gain") & ((points.panel == "33b") == is_33b)]
    )


HEADLINES = (
    Headline(
        "fig03",
        "time per decode token over time per prefill token, smallest batch",
        _decode_over_prefill,
    ),
    Headline(
        "fig04", "growth of decode throughput with the batch, over that of prefills", _decode_growth
    ),
    Headline("fig07", "time of 257 tokens over that of 256", _step_past_256),
    Headline("fig08", "decode speed-up, highest", lambda points: _highest(points)),
    Headline(
        "fig09", "throughput over request-level batching, highest", lambda points: _highest(points)
    ),
    Headline("fig09", "best P:D of chunk 256 at 1K, over C/(B-1)", _best_pd_over_rule, neutral=0.0),
    Headline("fig10", "time of the baseline over SARATHI's, highest", _most_saved),
    Headline("fig11", "SARATHI over Orca's best case at the same P:D, highest", _over_orca),
    Headline(
        "fig12", "median bubble time, Orca over SARATHI", _ratio_of("bubbles, orca / sarathi")
    ),
    Headline(
        "fig12", "time to completion, Orca over SARATHI", _ratio_of("completion, orca / sarathi")
    ),
    Headline(
        "fig13",
        "prefill speed kept with chunks of 256, mean over lengths",
        _kept_at_256,
        neutral=0.0,
    ),
    Headline("fig13", "end to end over request-level batching, highest", _end_to_end),
    Headline("table2", "time of a decode alone over what it adds to a prompt", _alone_over_added),
    Headline(
        "table4", "throughput over request-level batching, 13B or the device's model", _gain(False)
    ),
    Headline("table4", "throughput over request-level batching, 33B", _gain(True)),
)
