"""Pictures of the walkthrough: costs of batches, schedules as timelines, bubbles, and the chunk.

`python notebooks/walkthrough_pictures.py` draws the four schedules of the README.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import walkthrough_lab as lab
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sarathi_lab.extensions.playground import DECODE, PREFILL
from sarathi_lab.policy import Orca, PrefillFirst, RequestLevel, Sarathi
from sarathi_lab.results.plots.plot import Look, PanelLayout, column_of, plot
from sarathi_lab.results.plots.style import AXIS_NAMES, WIDTH, colours, finished, panels
from sarathi_lab.results.table import HEADINGS, MILLISECONDS

Style = dict[str, Any]
HYBRID: Style = {**PREFILL, "facecolor": "#35b779"}
KEYS = {"prefill": PREFILL, "decodes": DECODE, "hybrid": HYBRID}
FONT = 8  # points, of the numbers inside bars
NARROWEST = 0.012  # share of the time axis into which a digit fits


def cost_bars(tokens: pd.DataFrame, hybrids: pd.DataFrame) -> Figure:
    """Left `walkthrough_lab.token_costs`, right `hybrid_costs`: a decode alone and on a chunk."""
    figure, (left, right) = panels(1, 2, (9, 3.4))
    alone = tokens.pivot(index="batch", columns="kind", values="per_token")
    kinds = {"prefill": (alone.prefill, PREFILL), "decode": (alone.decode, DECODE)}
    _pairs(left, alone.index, kinds)
    left.set(xlabel="sequences in the batch", ylabel="ms per token", yscale="log")
    left.set_title("one token, alone")
    added = {"decode alone": (hybrids.alone, DECODE), "decode on a chunk": (hybrids.added, HYBRID)}
    _pairs(right, hybrids.chunk, added)
    right.set(xlabel=AXIS_NAMES["chunk"], ylabel="ms per decode", title="what a decode adds")
    _add_legend(left)
    _add_legend(right)
    return finished(figure)


def _pairs(ax: Axes, labels: Iterable[float], bars: Mapping[str, tuple[pd.Series, Style]]) -> None:
    """Two bars in milliseconds beside each other at every label."""
    names = [f"{label:g}" for label in labels]
    for shift, (name, (seconds, style)) in zip((-0.2, 0.2), bars.items(), strict=True):
        ax.bar(np.arange(len(names)) + shift, 1e3 * seconds, 0.4, label=name, **style)
    ax.set_xticks(range(len(names)), names)


def tile_steps(tables: Mapping[str, pd.DataFrame], tile: int) -> Figure:
    """`walkthrough_lab.prefill_times` by device, with a line at every multiple of `tile` tokens."""
    rows = []
    for name, table in tables.items():
        rows.append(table.assign(panel=name, value=1e3 * table.seconds))
    rows_of_all = pd.concat(rows, ignore_index=True)
    look = Look("iteration", "C0", marker="o", size=3)
    rows_of_all["look"] = column_of([look] * len(rows_of_all), rows_of_all)
    size = (4.5 * len(tables), 3.2)
    figure, axes = plot(rows_of_all, x="tokens", grid=PanelLayout(list(tables), len(tables), size))
    for device, ax in axes.items():
        for edge in range(tile, int(rows_of_all.tokens.max()) + 1, tile):
            ax.axvline(edge, color="black", linestyle=":", linewidth=0.8)
        ax.set(title=device, xlabel="prompt tokens", ylabel="ms per iteration")
        ax.set_ylim(bottom=0)
    return finished(figure)


def timelines(schedules: Mapping[str, pd.DataFrame]) -> Figure:
    """Several schedules (`Schedule.chunks` by policy) on one time axis, a lane per request.

    A bar is the chunk of an iteration, with its number of prompt tokens where it fits.
    """
    lanes = {name: sorted(chunks.request_id.unique()) for name, chunks in schedules.items()}
    figure, axes = _stacked([0.45 + 0.2 * len(own) for own in lanes.values()])
    longest = max(float(chunks.end.max()) for chunks in schedules.values())
    for ax, (name, chunks) in zip(axes, schedules.items(), strict=True):
        _lanes(ax, chunks, NARROWEST * longest)
        ax.set_title(f"{name}: {1e3 * chunks.end.max():,.4g} ms", loc="left")
        ax.set_yticks(lanes[name], [str(number) for number in lanes[name]])
        ax.set_ylabel("request")
    return _over_time(figure, axes, ("prefill", "decodes"))


def batches(chunks: pd.DataFrame) -> Figure:
    """The tokens of every iteration of a schedule, prompt tokens below and decodes on top."""
    tokens = chunks.pivot_table("num_tokens", "iteration", "is_decode", aggfunc="sum")
    tokens = tokens.reindex(columns=[False, True]).fillna(0)
    figure, (ax,) = panels(1, 1, (WIDTH, 2.8))
    ax.bar(tokens.index, tokens[False], 0.8, label="prompt tokens", **PREFILL)
    ax.bar(tokens.index, tokens[True], 0.8, bottom=tokens[False], label="decodes", **DECODE)
    ax.set(xlabel="iteration", ylabel="tokens in the batch")
    _add_legend(ax)
    return finished(figure)


def pipeline(stages: Mapping[str, pd.DataFrame], iterations: Mapping[str, pd.DataFrame]) -> Figure:
    """A pipeline's stages over time by policy (the ledger's tables); gaps are bubbles."""
    figure, axes = _stacked([2.0] * len(stages))
    for ax, (name, spans) in zip(axes, stages.items(), strict=True):
        table = iterations[name]
        is_pure = [table.num_decode_tokens == 0, table.num_prefill_tokens == 0]
        kinds = pd.Series(np.select(is_pure, ["prefill", "decodes"], "hybrid"), table.iteration)
        own_kind = spans.iteration.map(kinds)
        for kind, style in KEYS.items():
            _bars(ax, spans[own_kind == kind], "stage", 0.8, style)
        idle = 1 - (spans.end - spans.start).sum() / (spans.end.max() * spans.stage.nunique())
        duration = f"{1e3 * spans.end.max():,.4g} ms"
        ax.set_title(f"{name}: {duration}, stages idle {idle:.0%} of it", loc="left")
        ax.set_yticks(sorted(spans.stage.unique()))
        ax.set_ylabel("stage")
    return _over_time(figure, axes, tuple(KEYS))


def chunk_choice(table: pd.DataFrame) -> Figure:
    """Throughput, the longest time between tokens and KV re-read by chunk (`by_chunk`)."""
    gain = "throughput / request-level"
    quantities = {
        gain: table.gain,
        "longest time between tokens [ms]": 1e3 * table.tbt_max,
        "KV re-read factor": table.kv_reread_factor,
    }
    rows = pd.DataFrame(quantities).assign(chunk=table.chunk)
    rows = rows.melt("chunk", var_name="panel")
    look = Look("sarathi", colours(["sarathi"])["sarathi"], marker="o")
    rows["look"] = column_of([look] * len(rows), rows)
    grid = PanelLayout(list(quantities), len(quantities), (WIDTH, 3))
    figure, axes = plot(rows, x="chunk", grid=grid)
    for quantity, ax in axes.items():
        ax.set_xscale("log", base=2)
        ax.set_xticks(table.chunk, list(map(str, table.chunk)))
        ax.set(xlabel=AXIS_NAMES["chunk"], ylabel=quantity)
    axes[gain].axhline(1.0, color="black", linestyle=":")
    return finished(figure)


def readable(outcomes: pd.DataFrame) -> pd.DataFrame:
    """`walkthrough_lab.outcomes` as people read it: text, with units in the headings."""
    shown = {}
    for name, values in outcomes.items():
        words, factor, digits = HEADINGS.get(str(name), (str(name), 1, ".0f"))
        if name == "duration" or str(name).startswith(("ttft", "tbt")):
            words, factor, digits = words.replace("[s]", "[ms]"), MILLISECONDS, ",.4g"
        shown[words] = [format(factor * value, digits.replace(".0f", ",.0f")) for value in values]
    return pd.DataFrame(shown, outcomes.index)


def _stacked(heights: list[float]) -> tuple[Figure, list[Axes]]:
    """Axes below each other, of these heights in inches, with one time axis."""
    size = (WIDTH, sum(heights) + 0.9)
    return panels(len(heights), 1, size, sharex=True, height_ratios=heights)


def _bars(ax: Axes, spans: pd.DataFrame, lane: str, height: float, style: Style) -> None:
    """A bar from start to end of every row, in milliseconds; a thousand drawn as one collection."""
    left, right = 1e3 * spans.start.to_numpy(), 1e3 * spans.end.to_numpy()
    bottom = spans[lane].to_numpy() - height / 2
    corners = [(left, bottom), (left, bottom + height), (right, bottom + height), (right, bottom)]
    ax.add_collection(PolyCollection([*np.array(corners).transpose(2, 0, 1)], **style))
    ax.autoscale_view()


def _lanes(ax: Axes, chunks: pd.DataFrame, narrowest: float) -> None:
    """Bars by request, with the tokens of prompts where each digit has `narrowest` seconds."""
    prompts = chunks[~chunks.is_decode]
    _bars(ax, prompts, "request_id", 0.85, PREFILL)
    _bars(ax, chunks[chunks.is_decode], "request_id", 0.85, DECODE)
    digits = prompts.num_tokens.astype(str).str.len()
    text: Style = {"ha": "center", "va": "center", "color": "white", "fontsize": FONT}
    for row in prompts[prompts.end - prompts.start > narrowest * digits].to_dict("records"):
        middle = 1e3 * (row["start"] + row["end"]) / 2
        ax.text(middle, row["request_id"], row["num_tokens"], **text)


def _over_time(figure: Figure, axes: list[Axes], keys: tuple[str, ...]) -> Figure:
    for ax in axes:
        ax.invert_yaxis()
    axes[-1].set_xlabel("time [ms]")
    patches = [Patch(label=key, **KEYS[key]) for key in keys]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(keys))
    return finished(figure)


def _add_legend(ax: Axes) -> None:
    ax.set_ylim(top=ax.get_ylim()[1] * (6 if ax.get_yscale() == "log" else 1.3))  # room for it
    ax.legend(loc="upper right", ncols=2)


def four_schedules() -> Figure:
    """Six requests of 13B, four at a time, on a simulated A6000; half have half the output."""
    requests, gpu = lab.requests_of(6, seq_len=1040, pd_ratio=64), lab.paper_gpu()
    served = {
        policy.name: lab.serve(policy, requests, gpu).chunks()
        for policy in (RequestLevel(), PrefillFirst(), Orca(), Sarathi(chunk=512))
    }
    return timelines(served)


if __name__ == "__main__":
    four_schedules().savefig(Path(__file__).with_name("schedules.png"))
