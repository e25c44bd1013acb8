"""Pictures of `walkthrough`: what batches cost, schedules as timelines, bubbles, the choice of a
chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sarathi_lab.results.plots.sweeps import AXIS_NAMES, use_style

# Prefills and decodes, dark and light, so that print without colour tells them apart; hatched
# besides.
Style = dict[str, Any]
PREFILL: Style = {"facecolor": "#31688e", "edgecolor": "black", "linewidth": 0.5}
DECODE: Style = {"facecolor": "#fde725", "edgecolor": "black", "linewidth": 0.5, "hatch": "////"}
HYBRID: Style = {"facecolor": "#35b779", "edgecolor": "black", "linewidth": 0.5, "hatch": ".."}
KEYS = {"prefill": PREFILL, "decodes": DECODE, "hybrid": HYBRID}
FONT = 8  # points, of the numbers inside bars
NARROWEST = 0.012  # share of the time axis into which a number of tokens fits


def cost_bars(tokens: pd.DataFrame, hybrids: pd.DataFrame) -> Figure:
    """Left `walkthrough.token_costs`, right `walkthrough.hybrid_costs`: a decode alone and on a
    chunk.
    """
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for shift, (kind, style) in zip(
        (-0.2, 0.2), (("prefill", PREFILL), ("decode", DECODE)), strict=True
    ):
        rows = tokens[tokens.kind == kind]
        left.bar(
            [i + shift for i in range(len(rows))], 1e3 * rows.per_token, 0.4, label=kind, **style
        )
    batches = sorted(tokens.batch.unique())
    left.set_xticks(range(len(batches)), [f"{batch:g}" for batch in batches])
    left.set(
        xlabel="sequences in the batch",
        ylabel="ms per token",
        yscale="log",
        title="one token, alone",
    )
    places = range(len(hybrids))
    right.bar([i - 0.2 for i in places], 1e3 * hybrids.alone, 0.4, label="decode alone", **DECODE)
    right.bar(
        [i + 0.2 for i in places], 1e3 * hybrids.added, 0.4, label="decode on a chunk", **HYBRID
    )
    right.set_xticks(places, [f"{chunk:g}" for chunk in hybrids.chunk])
    right.set(xlabel=AXIS_NAMES["chunk"], ylabel="ms per decode", title="what a decode adds")
    return _finished(figure, left, right)


def tile_steps(tables: Mapping[str, pd.DataFrame], tile: int) -> Figure:
    """`walkthrough.prefill_times` by device, an axes each, with a line at every multiple of `tile`
    tokens.
    """
    use_style()
    figure, axes = plt.subplots(
        1, len(tables), figsize=(4.5 * len(tables), 3.2), layout="constrained", squeeze=False
    )
    for ax, (name, table) in zip(axes.flat, tables.items(), strict=True):
        ax.plot(table.tokens, 1e3 * table.seconds, marker="o", markersize=3)
        for edge in range(tile, int(table.tokens.max()) + 1, tile):
            ax.axvline(edge, color="black", linestyle=":", linewidth=0.8)
        ax.set(title=name, xlabel="prompt tokens", ylabel="ms per iteration")
        ax.set_ylim(bottom=0)
    return _finished(figure)


def timelines(schedules: Mapping[str, pd.DataFrame]) -> Figure:
    """The schedules of several policies on one time axis (`Schedule.chunks` by name): a lane per
    request.

    A bar is the chunk of an iteration, with its number of prompt tokens where it fits.
    """
    use_style()
    lanes = {name: sorted(chunks.request_id.unique()) for name, chunks in schedules.items()}
    heights = [0.45 + 0.2 * len(own) for own in lanes.values()]
    figure, axes = plt.subplots(
        len(schedules),
        figsize=(10, sum(heights) + 0.9),
        sharex=True,
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
    )
    longest = max(float(chunks.end.max()) for chunks in schedules.values())
    for ax, (name, chunks) in zip(axes.flat, schedules.items(), strict=True):
        _lanes(ax, chunks, NARROWEST * longest)
        ax.set_title(f"{name}: {1e3 * chunks.end.max():.2f} ms", loc="left")
        ax.set_yticks(lanes[name], [str(number) for number in lanes[name]])
        ax.set_ylabel("request")
        ax.invert_yaxis()
    axes[-1, 0].set_xlabel("time [ms]")
    figure.legend(handles=_keys("prefill", "decodes"), loc="outside lower center", ncols=2)
    return _finished(figure)


def batches(chunks: pd.DataFrame) -> Figure:
    """The tokens of every iteration of a schedule, prompt tokens below and decodes on top."""
    use_style()
    tokens = chunks.pivot_table(
        index="iteration", columns="is_decode", values="num_tokens", aggfunc="sum"
    )
    tokens = tokens.reindex(columns=[False, True]).fillna(0)
    figure, ax = plt.subplots(figsize=(10, 2.8), layout="constrained")
    ax.bar(tokens.index, tokens[False], 0.8, label="prompt tokens", **PREFILL)
    ax.bar(tokens.index, tokens[True], 0.8, bottom=tokens[False], label="decodes", **DECODE)
    ax.set(xlabel="iteration", ylabel="tokens in the batch")
    return _finished(figure, ax)


def pipeline(stages: Mapping[str, pd.DataFrame], iterations: Mapping[str, pd.DataFrame]) -> Figure:
    """The stages of a pipeline over time for several policies (the ledger's tables by name); gaps
    are bubbles.
    """
    use_style()
    figure, axes = plt.subplots(
        len(stages),
        1,
        figsize=(10, 2.0 * len(stages) + 0.7),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for ax, (name, spans) in zip(axes.flat, stages.items(), strict=True):
        kinds = _kinds(iterations[name])
        for kind, style in KEYS.items():
            own = spans[spans.iteration.map(kinds) == kind]
            ax.barh(own.stage, 1e3 * (own.end - own.start), 0.8, left=1e3 * own.start, **style)
        idle = 1 - (spans.end - spans.start).sum() / (spans.end.max() * spans.stage.nunique())
        ax.set_title(
            f"{name}: {1e3 * spans.end.max():.2f} ms, stages idle {idle:.0%} of it", loc="left"
        )
        ax.set_yticks(sorted(spans.stage.unique()))
        ax.set_ylabel("stage")
        ax.invert_yaxis()
    axes[-1, 0].set_xlabel("time [ms]")
    figure.legend(handles=_keys(*KEYS), loc="outside lower center", ncols=3)
    return _finished(figure)


def chunk_choice(table: pd.DataFrame) -> Figure:
    """Throughput, the longest time between tokens and KV re-read by chunk
    (`walkthrough.by_chunk`).
    """
    use_style()
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    shown = (
        ("throughput / request-level", table.gain),
        ("longest time between tokens [ms]", 1e3 * table.tbt_max),
        ("KV re-read factor", table.kv_reread_factor),
    )
    for ax, (name, values) in zip(axes, shown, strict=True):
        ax.plot(range(len(table)), values, marker="o")
        ax.set_xticks(range(len(table)), [str(chunk) for chunk in table.chunk])
        ax.set(xlabel=AXIS_NAMES["chunk"], ylabel=name)
    axes[0].axhline(1.0, color="black", linestyle=":")
    return _finished(figure)


def _lanes(ax: Axes, chunks: pd.DataFrame, narrowest: float) -> None:
    """Bars by request, and the tokens of prompts written in where they fit (`narrowest`,
    seconds).
    """
    for is_decode, style in ((False, PREFILL), (True, DECODE)):
        own = chunks[chunks.is_decode == is_decode]
        ax.barh(own.request_id, 1e3 * (own.end - own.start), 0.85, left=1e3 * own.start, **style)
    wide = chunks[
        ~chunks.is_decode
        & (chunks.end - chunks.start > narrowest * chunks.num_tokens.map(_num_digits))
    ]
    for row in wide.to_dict("records"):
        middle = 1e3 * (row["start"] + row["end"]) / 2
        ax.text(
            middle,
            row["request_id"],
            row["num_tokens"],
            ha="center",
            va="center",
            color="white",
            fontsize=FONT,
        )


def _num_digits(number: int) -> int:
    return len(str(number))


def _kinds(iterations: pd.DataFrame) -> dict[int, str]:
    """What every iteration holds, by its number."""
    kinds = {}
    for row in iterations.to_dict("records"):
        has_prompt, has_decodes = row["num_prefill_tokens"] > 0, row["num_decode_tokens"] > 0
        kinds[row["iteration"]] = (
            "hybrid" if has_prompt and has_decodes else "prefill" if has_prompt else "decodes"
        )
    return kinds


def _keys(*names: str) -> list[Patch]:
    return [Patch(label=name, **KEYS[name]) for name in names]


def _finished(figure: Figure, *with_legend: Axes) -> Figure:
    for ax in with_legend:
        ax.set_ylim(
            top=ax.get_ylim()[1] * (6 if ax.get_yscale() == "log" else 1.3)
        )  # room for the legend
        ax.legend(loc="upper right", ncols=2)
    plt.close(figure)  # callers hold it; an open figure would be drawn once more by a notebook
    return figure
