"""Pictures of the walkthrough: costs of batches, schedules as timelines, bubbles, and the chunk.

`python notebooks/walkthrough_pictures.py` draws the four schedules of the README.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from sarathi_lab.results.plots.plot import Look, PanelLayout, plot, styled
from sarathi_lab.results.plots.style import AXIS_NAMES, WIDTH, colours, finished, panels
from sarathi_lab.results.table import HEADINGS, MILLISECONDS

Style = dict[str, Any]  # matplotlib's settings of bars
HYBRID: Style = {**PREFILL, "facecolor": "#35b779"}
KEYS = {"prefill": PREFILL, "decodes": DECODE, "hybrid": HYBRID}
NUMBER: Style = {"ha": "center", "va": "center", "color": "white", "fontsize": 8}  # in a bar
NARROWEST = 0.012  # share of the time axis into which a digit fits
BAR = 0.4  # width of one of two bars, whose labels are 1 apart
TIMES = ("duration", "ttft", "tbt")  # quantities whose names begin so are shown in milliseconds


def cost_bars(tokens: pd.DataFrame, hybrids: pd.DataFrame) -> Figure:
    """Left `walkthrough_lab.token_costs`, right `hybrid_costs`: a decode alone and on a chunk."""
    figure, (left, right) = panels(1, 2, (9, 3.4))

    per_token = tokens.pivot(index="batch", columns="kind", values="per_token")
    _draw_bars(left, per_token.prefill, -BAR / 2, "prefill", PREFILL)
    _draw_bars(left, per_token.decode, BAR / 2, "decode", DECODE)
    _label_pairs(left, per_token.index)
    left.set(xlabel="sequences in the batch", ylabel="ms per token", yscale="log")
    left.set_title("one token, alone")
    _add_legend(left, room=6)  # of a logarithmic axis

    _draw_bars(right, hybrids.alone, -BAR / 2, "decode alone", DECODE)
    _draw_bars(right, hybrids.added, BAR / 2, "decode on a chunk", HYBRID)
    _label_pairs(right, hybrids.chunk)
    right.set(xlabel=AXIS_NAMES["chunk"], ylabel="ms per decode")
    right.set_title("what a decode adds")
    _add_legend(right)
    return finished(figure)


def _draw_bars(ax: Axes, seconds: pd.Series, shift: float, name: str, style: Style) -> None:
    """Draw bars in milliseconds at 0, 1, 2, ..., shifted by half a width to stand in pairs."""
    at = shift + np.arange(len(seconds))
    ax.bar(at, 1e3 * seconds, BAR, label=name, **style)


def _label_pairs(ax: Axes, numbers: pd.Index | pd.Series) -> None:
    """Write a number below each pair of bars."""
    names = [f"{number:g}" for number in numbers]
    ax.set_xticks(range(len(names)), names)


def tile_steps(tables: Mapping[str, pd.DataFrame], tile: int) -> Figure:
    """`walkthrough_lab.prefill_times` by device, with a line at every multiple of `tile` tokens."""
    look = Look("iteration", "C0", marker="o", size=3)
    tables_of_devices = []
    for name, table in tables.items():
        milliseconds = 1e3 * table.seconds
        tables_of_devices.append(table.assign(panel=name, value=milliseconds))
    rows = pd.concat(tables_of_devices, ignore_index=True)
    num_devices = len(tables)
    grid = PanelLayout(list(tables), columns=num_devices, size=(4.5 * num_devices, 3.2))
    figure, axes = plot(styled(rows, look), x="tokens", grid=grid)
    most_tokens = int(rows.tokens.max())
    for device, ax in axes.items():
        for edge in range(tile, most_tokens + 1, tile):
            ax.axvline(edge, color="black", linestyle=":", linewidth=0.8)
        ax.set(title=device, xlabel="prompt tokens", ylabel="ms per iteration")
        ax.set_ylim(bottom=0)
    return finished(figure)


def timelines(schedules: Mapping[str, pd.DataFrame]) -> Figure:
    """Several schedules (`Schedule.chunks` by policy) on one time axis, a lane per request.

    A bar is the chunk of an iteration, with its number of prompt tokens where it fits.
    """
    ends = {}
    lanes = {}
    heights = []
    for name, chunks in schedules.items():
        ends[name] = float(chunks.end.max())
        lanes[name] = sorted(chunks.request_id.unique())
        heights.append(0.45 + 0.2 * len(lanes[name]))
    figure, axes = _stacked(heights)
    seconds_of_digit = NARROWEST * max(ends.values())
    for ax, (name, chunks) in zip(axes, schedules.items(), strict=True):
        _draw_lanes(ax, chunks, seconds_of_digit)
        ax.set_title(f"{name}: {1e3 * ends[name]:,.4g} ms", loc="left")
        ax.set_yticks(lanes[name], list(map(str, lanes[name])))
        ax.set_ylabel("request")
    return _over_time(figure, axes, ["prefill", "decodes"])


def _draw_lanes(ax: Axes, chunks: pd.DataFrame, seconds_of_digit: float) -> None:
    """Draw bars by request, with the tokens of prompts in those that are wide enough."""
    is_decode = chunks.is_decode
    prompts = chunks[~is_decode]
    _draw_spans(ax, prompts, "request_id", 0.85, PREFILL)
    _draw_spans(ax, chunks[is_decode], "request_id", 0.85, DECODE)
    num_digits = prompts.num_tokens.astype(str).str.len()
    has_room = prompts.end - prompts.start > seconds_of_digit * num_digits
    for chunk in prompts[has_room].to_dict("records"):
        middle = 1e3 * (chunk["start"] + chunk["end"]) / 2
        ax.text(middle, chunk["request_id"], chunk["num_tokens"], **NUMBER)


def batches(chunks: pd.DataFrame) -> Figure:
    """The tokens of every iteration of a schedule, prompt tokens below and decodes on top."""
    tokens = chunks.pivot_table("num_tokens", "iteration", "is_decode", aggfunc="sum")
    # A schedule of one kind lacks the other's column.
    tokens = tokens.reindex(columns=[False, True]).fillna(0)
    prompt_tokens = tokens[False]
    decodes = tokens[True]
    figure, (ax,) = panels(1, 1, (WIDTH, 2.8))
    ax.bar(tokens.index, prompt_tokens, 0.8, label="prompt tokens", **PREFILL)
    ax.bar(tokens.index, decodes, 0.8, bottom=prompt_tokens, label="decodes", **DECODE)
    ax.set(xlabel="iteration", ylabel="tokens in the batch")
    _add_legend(ax)
    return finished(figure)


def pipeline(stages: Mapping[str, pd.DataFrame], iterations: Mapping[str, pd.DataFrame]) -> Figure:
    """A pipeline's stages over time by policy (the ledger's tables); gaps are bubbles."""
    figure, axes = _stacked([2.0] * len(stages))
    for ax, (name, spans) in zip(axes, stages.items(), strict=True):
        kind_of_iteration = _kinds(iterations[name])
        kind_of_span = spans.iteration.map(kind_of_iteration)
        for kind, style in KEYS.items():
            of_kind = spans[kind_of_span == kind]
            _draw_spans(ax, of_kind, "stage", 0.8, style)
        duration = spans.end.max()
        stage_numbers = sorted(spans.stage.unique())
        busy = (spans.end - spans.start).sum()
        idle = 1 - busy / (duration * len(stage_numbers))
        ax.set_title(f"{name}: {1e3 * duration:,.4g} ms, stages idle {idle:.0%} of it", loc="left")
        ax.set_yticks(stage_numbers)
        ax.set_ylabel("stage")
    return _over_time(figure, axes, list(KEYS))


def _kinds(iterations: pd.DataFrame) -> pd.Series:
    """Return the kind (`KEYS`) of each iteration, by its number."""
    kind = pd.Series("hybrid", iterations.index)
    kind = kind.mask(iterations.num_decode_tokens == 0, "prefill")
    kind = kind.mask(iterations.num_prefill_tokens == 0, "decodes")
    return kind.set_axis(iterations.iteration)


def chunk_choice(table: pd.DataFrame) -> Figure:
    """Throughput, the longest time between tokens and KV re-read by chunk (`by_chunk`)."""
    gain = "throughput / request-level"
    quantities = {
        gain: table.gain,
        "longest time between tokens [ms]": 1e3 * table.tbt_max,
        "KV re-read factor": table.kv_reread_factor,
    }
    by_quantity = pd.DataFrame(quantities).assign(chunk=table.chunk)
    rows = by_quantity.melt("chunk", var_name="panel")
    colour_of_policy = colours(["sarathi"])
    look = Look("sarathi", colour_of_policy["sarathi"], marker="o")
    grid = PanelLayout(list(quantities), columns=len(quantities), size=(WIDTH, 3))
    figure, axes = plot(styled(rows, look), x="chunk", grid=grid)
    for quantity, ax in axes.items():
        ax.set_xscale("log", base=2)
        ax.set_xticks(table.chunk, list(map(str, table.chunk)))
        ax.set(xlabel=AXIS_NAMES["chunk"], ylabel=quantity)
    axes[gain].axhline(1.0, color="black", linestyle=":")
    return finished(figure)


def readable(outcomes: pd.DataFrame) -> pd.DataFrame:
    """`walkthrough_lab.outcomes` as people read it: text, with units in the headings."""
    columns = {}
    for name, values in outcomes.items():
        quantity = str(name)
        heading = quantity
        factor = 1.0
        digits = ",.0f"
        if quantity in HEADINGS:
            heading, factor, digits = HEADINGS[quantity]
        if quantity.startswith(TIMES):
            heading = heading.replace("[s]", "[ms]")
            factor = MILLISECONDS
            digits = ",.4g"
        if digits == ".0f":
            digits = ",.0f"  # thousands are set apart
        columns[heading] = [format(factor * value, digits) for value in values]
    return pd.DataFrame(columns, outcomes.index)


def _stacked(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Axes below each other, of these heights in inches, with one time axis."""
    size = (WIDTH, sum(heights) + 0.9)
    return panels(len(heights), 1, size, sharex=True, height_ratios=heights)


def _draw_spans(ax: Axes, spans: pd.DataFrame, lane: str, height: float, style: Style) -> None:
    """Draw a bar of `height` from start to end of every row, in milliseconds, in its lane."""
    start = 1e3 * spans.start.to_numpy()
    end = 1e3 * spans.end.to_numpy()
    bottom = spans[lane].to_numpy() - height / 2
    top = bottom + height
    corners = np.array([(start, bottom), (start, top), (end, top), (end, bottom)])
    polygons = corners.transpose(2, 0, 1)  # by bar, corner and axis
    # One collection: a bar of its own for each of a thousand chunks takes seconds.
    ax.add_collection(PolyCollection(list(polygons), **style))
    ax.autoscale_view()


def _over_time(figure: Figure, axes: Sequence[Axes], kinds: Sequence[str]) -> Figure:
    """Finish a picture over time, the first lane on top, with a key for each kind of batch."""
    for ax in axes:
        ax.invert_yaxis()
    axes[-1].set_xlabel("time [ms]")
    patches = [Patch(label=kind, **KEYS[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(kinds))
    return finished(figure)


def _add_legend(ax: Axes, room: float = 1.3) -> None:
    """Add a legend at the top, above bars of which the highest gets `room` times its height."""
    _, top = ax.get_ylim()
    ax.set_ylim(top=room * top)
    ax.legend(loc="upper right", ncols=2)


def four_schedules() -> Figure:
    """Six requests of 13B, four at a time, on a simulated A6000; half have half the output."""
    requests = lab.requests_of(6, seq_len=1040, pd_ratio=64)
    gpu = lab.paper_gpu()
    chunks_of_policies = {}
    for policy in (RequestLevel(), PrefillFirst(), Orca(), Sarathi(chunk=512)):
        schedule = lab.serve(policy, requests, gpu)
        chunks_of_policies[policy.name] = schedule.chunks()
    return timelines(chunks_of_policies)


if __name__ == "__main__":
    schedules_of_readme = four_schedules()
    schedules_of_readme.savefig(Path(__file__).with_name("schedules.png"))
