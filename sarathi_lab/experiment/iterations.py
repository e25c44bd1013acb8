"""Figures that time batches: the cost of a token, tiles, a GPU's targets, and prompts in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import pandas as pd

from sarathi_lab.experiment.bench import COMPUTE, EVERYTHING, FOUR, Bench
from sarathi_lab.experiment.grid import Grid
from sarathi_lab.experiment.points import Estimate, Parts, Point, part
from sarathi_lab.experiment.registry import Ints, experiment
from sarathi_lab.experiment.scenario import Work, batch, chunked
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.spec import PlotSpec

KV_BYTES = 2  # an element's in the panel of bytes, for any dtype of the device
OPERATIONS = {kind: (kind,) for kind in FOUR}


@experiment(
    Grid,
    question="Why are decodes expensive?",
    seconds=15,
    look=PlotSpec(
        "Fig 3: time per token by operation",
        "batch",
        "ms per token",
        log_y=True,
        legend="operation",
        panels={"ratio": "a decode over a prompt's token"},
        ys={"ratio": "ratio"},
    ),
)
def fig03(spec: ModelSpec, *, batches: Ints, seq_len: int) -> Parts:
    """Milliseconds per token by operation of prefills and decodes alone, and their ratio (3.1)."""
    for number in batches:
        yield part(_token_costs, number, seq_len)


def _token_costs(bench: Bench, number: int, seq_len: int) -> Iterator[Point]:
    prefills = batch(prefill_tokens=seq_len, num_prefills=number)
    decodes = batch(num_decodes=number, context=seq_len)
    series = {**OPERATIONS, "others": ("elementwise", "others"), "total": EVERYTHING}
    for panel, phase in (("prefill", prefills), ("decode", decodes)):
        of_token = 1e3 / phase.num_tokens
        for name, kinds in series.items():
            milliseconds = bench.seconds(phase, kinds) * of_token
            yield Point(panel, name, number, milliseconds, "ms/token")
    # Per token: a prefill has `seq_len` of them for each decode.
    of_prefill = bench.seconds(prefills) * (1 / prefills.num_tokens)
    of_decode = bench.seconds(decodes) * (1 / number)
    ratio = of_decode / of_prefill
    yield Point("ratio", "decode / prefill", number, ratio)


def _fig04_at(points: pd.DataFrame) -> dict[str, object]:
    points = points.astype({"x": int})
    speed = points[points.unit == "tokens/ms"]
    products = points[points.unit == "FLOP/B"]
    phase = products.panel.str.removesuffix(" intensity")
    return {
        "layers": list(zip(speed.panel, speed.series.astype(int), speed.x, strict=True)),
        "products": list(zip(phase, products.series, products.x, strict=True)),
    }


@experiment(
    Grid,
    question="What fills the device: prompts, or only large batches of decodes?",
    seconds=15,
    at=_fig04_at,
    look=PlotSpec(
        "Fig 4: throughput of one layer, and arithmetic intensity of its products",
        "batch",
        "tokens / ms and layer",
        log_x=True,
        log_y=True,
        columns=4,
        legend="tokens a sequence, or matrix product",
        panels={"prefill intensity": "prefill", "decode intensity": "decode"},
        ys=dict.fromkeys(("prefill intensity", "decode intensity"), "FLOPs per element moved"),
    ),
)
def fig04(
    spec: ModelSpec,
    *,
    lengths: Ints,
    batches: Ints,
    layers: Sequence[tuple[str, int, int]] = (),
    products: Sequence[tuple[str, str, int]] = (),
) -> Parts:
    """Tokens per millisecond of one layer by length and batch, and FLOPs per byte of its products.

    `layers` (phase, length, batch) and `products` (phase, operation, batch) are single points, in
    place of all of `lengths` and `batches`.
    """
    grid = product(("prefill", "decode"), lengths, batches)
    for phase, length, number in layers or grid:
        yield part(_layer_rate, spec.num_layers, phase, length, number)
    for phase, operation, number in products:
        yield part(_intensity, spec, phase, operation, number)


def _layer_rate(
    bench: Bench, num_layers: int, phase: str, length: int, number: int
) -> Iterator[Point]:
    if phase == "prefill":
        work = batch(prefill_tokens=length, num_prefills=number)
    else:
        work = batch(num_decodes=number, context=length)
    of_layer = bench.seconds(work, COMPUTE) * (1e3 / num_layers)
    rate = Estimate(work.num_tokens) / of_layer
    yield Point(phase, str(length), number, rate, "tokens/ms")


def _intensity(
    bench: Bench, spec: ModelSpec, phase: str, operation: str, number: int
) -> Iterator[Point]:
    """Yield FLOPs per element of [rows, k] x [k, n] at length 1024, in whole numbers."""
    rows = 1024 * number if phase == "prefill" else number
    hidden = spec.hidden_size
    shapes = {
        "preproj": (hidden, spec.q_size + 2 * spec.kv_size),
        "postproj": (spec.q_size, hidden),
        "ffn": (hidden, spec.ffn_size),
    }
    k, n = shapes[operation]
    # Of rows k n products, over the elements of both inputs and of the output.
    moved_for_each = 1 / rows + 1 / k + 1 / n
    intensity = max(1.0, math.floor(1 / moved_for_each))
    yield Point(f"{phase} intensity", operation, number, Estimate(intensity), "FLOP/B")


PREFILL_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "preproj": ("preproj",),
    "postproj": ("postproj",),
    "ffn": ("ffn",),
    "total": COMPUTE,
}


@experiment(
    Grid,
    question="What does one token past a tile cost?",
    seconds=20,
    at=lambda points: {"tokens": sorted(set(points.x.astype(int)))},
    look=PlotSpec(
        "Fig 7: one prefill iteration by its tokens (tile quantization)",
        "prompt tokens",
        "ms per iteration",
        legend="operation",
        panels={"step": "one token past full tiles"},
        ys={"step": "time / that of full tiles"},
        xs={"step": "tokens that fill tiles"},
    ),
)
def fig07(spec: ModelSpec, *, tokens: Ints, tiles: Ints) -> Parts:
    """Milliseconds of a prefill by operation and tokens; and of one token more than fills its
    tiles, over that of full tiles (section 4.4).
    """
    for num_tokens in tokens:
        yield part(_prefill_times, num_tokens)
    for num_tokens in tiles:
        yield part(_step_past_tiles, num_tokens)


def _prefill_times(bench: Bench, num_tokens: int) -> Iterator[Point]:
    prefill = batch(prefill_tokens=num_tokens)
    for name, kinds in PREFILL_OPERATIONS.items():
        seconds = bench.seconds(prefill, kinds)
        yield Point("", name, num_tokens, seconds * 1e3, "ms")


def _step_past_tiles(bench: Bench, num_tokens: int) -> Iterator[Point]:
    full_tiles = batch(prefill_tokens=num_tokens)
    past_tiles = batch(prefill_tokens=num_tokens + 1)
    ratio = bench.seconds(past_tiles) / bench.seconds(full_tiles)
    yield Point("step", "one token more", num_tokens, ratio)


@experiment(Grid, question="Does the engine reach on a GPU what it should?", seconds=15)
def gpu_targets(
    spec: ModelSpec, *, context: int, decodes: Ints, prefills: Ints, chunks: Ints, beside: int
) -> Parts:
    """Milliseconds of the iterations that the targets are judged by."""
    for number in decodes:
        work = batch(num_decodes=number, context=context)
        yield part(milliseconds, "decodes", f"context {context}", number, work)
    for number in prefills:
        work = batch(prefill_tokens=number)
        yield part(milliseconds, "prefill", "alone", number, work)
    for number in chunks:
        work = batch(prefill_tokens=number - beside, num_decodes=beside, context=context)
        yield part(milliseconds, "hybrid", f"{beside} decodes at {context}", number, work)


def milliseconds(bench: Bench, panel: str, series: str, x: int, work: Work) -> Iterator[Point]:
    """Yield the time of one iteration."""
    yield Point(panel, series, x, bench.seconds(work) * 1e3, "ms")


CAUSES = {"re-read": "attention", "smaller products": "matmul", "fixed cost": "fixed"}
# Of the smaller products of a mixture, those of experts, which each chunk loads again.
OF_EXPERTS = {"experts": "experts"}
BEHIND = ("attention [ms]", "KV read [MB]")  # panels of one chunk behind cached tokens


@experiment(
    Grid,
    question="What does chunking cost when no decode rides along?",
    seconds=30,
    look=PlotSpec(
        "KV re-read: prompts in chunks beside whole ones, and single chunks behind cached tokens",
        "tokens of a chunk",
        "cut / whole",
        log_x=True,
        legend="prompt [tokens], or chunk C",
        left_out=(
            "N(N+1)/2 / N",  # the same line as the bytes
            "counted / N(N+1)/2",  # 1
            "price: smaller products",
            "price: fixed cost",
        ),
        panels={
            "KV bytes / whole": "KV bytes read: (N+1)/2 of N chunks",
            "attention time / whole": "time of attention",
            "prefill time / whole": "time of the prefill",
            **dict(zip(BEHIND, ("attention of a chunk", "KV read by a chunk"), strict=True)),
        },
        ys={
            **{f"price: {cause}": "share of the whole's time" for cause in (*CAUSES, *OF_EXPERTS)},
            **dict(zip(BEHIND, ("ms", "MB"), strict=True)),
        },
        xs=dict.fromkeys(BEHIND, "cached tokens before the chunk"),
    ),
)
def kv_reread(spec: ModelSpec, *, prompts: Ints, chunks: Ints) -> Parts:
    """Prompts whole beside themselves in chunks; by chunk and context one chunk alone."""
    causes = CAUSES
    if spec.num_experts:
        causes = {**CAUSES, **OF_EXPERTS}
    for prompt in prompts:
        for chunk in chunks:
            if chunk <= prompt:
                yield part(_prompt_in_chunks, prompt, chunk, causes)
    longest = max(prompts)
    for chunk in chunks[:3]:
        starts = {0, longest // 4, longest // 2, longest - chunk}
        for start in sorted(starts):
            yield part(_chunk_at_context, spec, start, chunk)


def _prompt_in_chunks(
    bench: Bench, prompt: int, chunk: int, causes: Mapping[str, str]
) -> Iterator[Point]:
    """Yield ratios of cut to whole, bytes and the device's counted reads beside the N(N+1)/2 of
    section 4.2, and the price by cause as shares of the whole prompt's time.
    """
    name = str(prompt)
    uncut = chunked(prompt, prompt)
    cut = chunked(prompt, chunk)
    # Each chunk reads all tokens up to its end: N chunks read (N + 1) / 2 times the prompt.
    ends = [min(start + chunk, prompt) for start in range(0, prompt, chunk)]
    formula = (len(ends) + 1) / 2
    yield Point("KV bytes / whole", name, chunk, Estimate(sum(ends) / prompt))
    yield Point("N(N+1)/2 / N", name, chunk, Estimate(formula))
    num_read = bench.keys_read(cut)
    if num_read is not None:
        yield Point("counted / N(N+1)/2", name, chunk, num_read * (1 / prompt / formula))
    attention_of_whole = bench.seconds(uncut, ("attn",))
    slower = bench.seconds(cut, ("attn",)) / attention_of_whole
    yield Point("attention time / whole", name, chunk, slower)
    losses = bench.losses(prompt, chunk)
    yield Point("prefill time / whole", name, chunk, Estimate(1.0) + losses["total"])
    for title, cause in causes.items():
        yield Point(f"price: {title}", name, chunk, losses[cause], kind="share")


def _chunk_at_context(bench: Bench, spec: ModelSpec, start: int, chunk: int) -> Iterator[Point]:
    """Yield a chunk's attention behind `start` cached tokens, and the keys and values it reads."""
    series = f"C={chunk}"
    work = batch(prefill_tokens=chunk, start=start)
    attention = bench.seconds(work, ("attn",))
    yield Point("attention [ms]", series, start, attention * 1e3, "ms")
    num_read = start + chunk
    megabytes = num_read * spec.kv_bytes_per_token(KV_BYTES) / 1e6
    yield Point("KV read [MB]", series, start, Estimate(megabytes), "MB")


@experiment(
    Grid,
    question="Where is an iteration's time flat in its tokens and its context?",
    seconds=60,
    look=PlotSpec(x="tokens", log_x=True, log_y=True, legend="context"),
)
def iteration_time(spec: ModelSpec, *, tokens: Ints, decodes: Ints, contexts: Ints) -> Parts:
    """Milliseconds of one prompt's `tokens` and of `decodes`, one a sequence, all behind
    `contexts` of cached tokens: where more tokens cost nothing, reading the weights bounds them.
    """
    for context in contexts:
        series = f"context {context}"
        for number in tokens:
            prompt = batch(prefill_tokens=number, start=context, emits=True)
            yield part(milliseconds, "one prompt", series, number, prompt)
        for number in decodes:
            together = batch(num_decodes=number, context=context + 1)
            yield part(milliseconds, "decodes", series, number, together)
