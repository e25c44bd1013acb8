"""Figures of decodes that ride on chunks: what one adds to a batch, and the time by operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from sarathi_lab.experiment.bench import COMPUTE, EVERYTHING, FOUR, Bench
from sarathi_lab.experiment.grid import Grid, Map
from sarathi_lab.experiment.iterations import OPERATIONS
from sarathi_lab.experiment.points import Estimate, Parts, Point, part
from sarathi_lab.experiment.registry import Ints, experiment
from sarathi_lab.experiment.scenario import Scenario, Work, batch, best_pd_ratio, request
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.spec import PlotSpec


def speedup(
    bench: Bench, panel: str, series: str, x: float, seq_len: int, size: int, chunk: int
) -> Iterator[Point]:
    """Yield the time of a decode alone over its marginal time in a decode-maximal batch.

    Marginal is that batch less a prefill of as many tokens, per decode (section 5.1.1, Table 2).
    """
    riders = size - 1  # the prompt takes one of the batch's places
    alone = batch(num_decodes=size, context=seq_len)
    # As many tokens as the prefill alone, so that the tiles of products are equally full.
    hybrid = batch(prefill_tokens=chunk - riders, num_decodes=riders, context=seq_len)
    prefill = batch(prefill_tokens=chunk)
    saving = bench.saving(alone, hybrid, prefill)
    # Of `size` decodes alone over `riders` that ride: per decode.
    yield Point(panel, series, x, saving * (riders / size))


@experiment(
    Grid,
    question="How much cheaper is a decode that rides on a chunk?",
    seconds=40,
    look=PlotSpec(
        "Fig 8: a decode alone over a decode riding on a chunk",
        "batch",
        "decode speed-up",
        legend="P + D",
    ),
)
def fig08(
    spec: ModelSpec, *, seq_lens: Mapping[str, int], batches: Mapping[str, Ints], chunk: int
) -> Parts:
    """Decode speed-up by batch and length at one chunk."""
    for name, sizes in batches.items():
        for size in sizes:
            yield part(speedup, "", name, size, seq_lens[name], size, chunk)


@experiment(
    Grid,
    question="Where does the time go?",
    seconds=20,
    look=PlotSpec(
        "Fig 10: time to serve B requests at P:D = C/(B-1)",
        "batch",
        "seconds",
        legend="policy, operation",
        prefix="P + D = ",
        series=("baseline total", "baseline attn", "sarathi total", "sarathi attn"),
    ),
)
def fig10(
    spec: ModelSpec, *, seq_lens: Mapping[str, int], batches: Mapping[str, Ints], chunks: Ints
) -> Parts:
    """Seconds by operation to serve B requests at P:D = C/(B-1), baseline and SARATHI."""
    for chunk in chunks:
        for name, sizes in batches.items():
            for size in sizes:
                pd_ratio = best_pd_ratio(chunk, size)
                scenario = Scenario.of("sarathi", seq_lens[name], pd_ratio, size, chunk)
                yield part(_operations, f"{name} C={chunk}", scenario)


def _operations(bench: Bench, panel: str, scenario: Scenario) -> Iterator[Point]:
    size = scenario.batch_size
    work_of_systems = {"baseline": request(scenario.baseline), "sarathi": request(scenario)}
    kinds_of_series = {**OPERATIONS, "total": FOUR}
    for system, work in work_of_systems.items():
        for operation, kinds in kinds_of_series.items():
            seconds = bench.seconds(work, kinds) * size
            yield Point(panel, f"{system} {operation}", size, seconds, "s")


@experiment(
    Grid,
    question="What does a decode add to a batch that holds a prompt?",
    seconds=10,
    look=PlotSpec(
        "Table 2: a batch of prompt, decodes, and both",
        "",
        "ms",
        kind="bar",
        is_by_device=True,
        left_out=("ratio",),
    ),
)
def table2(spec: ModelSpec, *, num_tokens: int, num_decodes: int) -> Parts:
    """Milliseconds of batches of a prompt, of decodes at `num_tokens` of context, and of both; and
    what a decode takes alone over what it adds.
    """
    yield part(_kinds_of_batch, num_tokens, num_decodes)


def _kinds_of_batch(bench: Bench, num_tokens: int, num_decodes: int) -> Iterator[Point]:
    # The batch of both has as many tokens as the prompt alone, so that tiles and weights cost both
    # the same (section 4.3).
    riders = num_decodes - 1
    prefill = batch(prefill_tokens=num_tokens)
    decodes = batch(num_decodes=num_decodes, context=num_tokens)
    both = batch(prefill_tokens=num_tokens - riders, num_decodes=riders, context=num_tokens)
    linear = tuple(kind for kind in COMPUTE if kind != "attn")
    kinds_by_series = {"linear": linear, "attention": ("attn",), "total": COMPUTE}
    work_by_panel = {"prefill-only": prefill, "decode-only": decodes, "decode-maximal": both}
    for panel, work in work_by_panel.items():
        for series, kinds in kinds_by_series.items():
            seconds = bench.seconds(work, kinds)
            yield Point(panel, series, work.num_tokens, seconds * 1e3, "ms")
    alone = bench.seconds(decodes, COMPUTE)
    added = bench.seconds(both - prefill, COMPUTE)
    ratio = alone * (1 / num_decodes) / (added * (1 / riders))
    yield Point("ratio", "decode alone / added", num_decodes, ratio)


@experiment(
    Grid,
    question="What does one attention call over prefills and decodes together cost?",
    seconds=30,
    look=PlotSpec(x="decodes", y="ratio"),
)
def hybrid_attention(spec: ModelSpec, *, chunks: Ints, decodes: Ints, contexts: Ints) -> Parts:
    """Attention of a chunk and decodes over that of either alone, and what it leaves of the decode
    speed-up (section 5.1.1), as it is and with a call for each (section 4.3.2).
    """
    for chunk in chunks:
        for context in contexts:
            for number in decodes:
                yield part(_hybrid_attention, chunk, context, number)


def _hybrid_attention(bench: Bench, chunk: int, context: int, number: int) -> Iterator[Point]:
    """The chunk's context is half of the decodes', as of a prompt that is half done."""
    attention = ("attn",)
    series = f"chunk {chunk}, context {context}"
    chunk_at = partial(batch, start=context // 2)
    with_decodes = partial(chunk_at, num_decodes=number, context=context)
    prompt = chunk_at(prefill_tokens=chunk)
    decodes = batch(num_decodes=number, context=context)
    together = bench.seconds(with_decodes(prefill_tokens=chunk), attention)
    apart = bench.seconds(prompt + decodes, attention)
    yield Point("attention / apart", series, number, together / apart)
    # What they add to as many tokens, so that products have one size, whose error cancels.
    alone = bench.seconds(decodes)
    full = with_decodes(prefill_tokens=chunk - number)
    added = bench.seconds(full - prompt)
    yield Point("decode speed-up", series, number, alone / added)
    # With a call for each, decodes pay for their own attention and ride in all else.
    shorter = chunk_at(prefill_tokens=chunk - number)
    added_attention = bench.seconds(shorter + decodes - prompt, attention)
    added_apart = bench.seconds(full - prompt, NOT_ATTENTION) + added_attention
    yield Point("decode speed-up, apart", series, number, alone / added_apart)


# Ways to call attention for a chunk with decodes.
AS_CALLED = "as called"
TWO_CALLS = "two calls"
PRODUCTS = tuple(kind for kind in FOUR if kind != "attn")
NOT_ATTENTION = tuple(kind for kind in EVERYTHING if kind != "attn")


@experiment(
    Map,
    question="Does a decode that rides on a chunk cost less than in a batch of its own?",
    seconds=60,
    look=PlotSpec(
        x="decodes",
        y="ratio",
        log_x=True,
        log_y=True,
        legend="chunk behind its context, tokens of a decode",
    ),
)
def piggyback_boundary(
    spec: ModelSpec,
    *,
    ways: Sequence[str],
    chunks: Ints,
    starts: Ints,
    decodes: Ints,
    contexts: Ints,
) -> Parts:
    """Products and attention of a chunk with decodes over those of two batches, with attention
    `ways`: as the device calls it, and with a call for prompts and one for decodes (section 4.3.2).
    """
    for chunk in chunks:
        for start in starts:
            for context in contexts:
                for number in decodes:
                    yield part(_ways_to_decode, ways, chunk, start, context, number)


def _ways_to_decode(
    bench: Bench, ways: Sequence[str], chunk: int, start: int, context: int, number: int
) -> Iterator[Point]:
    prompt = batch(prefill_tokens=chunk, start=start)
    decodes = batch(num_decodes=number, context=context)
    both = batch(prefill_tokens=chunk, start=start, num_decodes=number, context=context)
    series = f"{chunk} behind {start}, {context} each"
    if AS_CALLED in ways:
        separate = bench.seconds(prompt + decodes, FOUR)
        riding = bench.seconds(both, FOUR) / separate
        yield Point(f"{AS_CALLED} / two batches", series, number, riding)
    if TWO_CALLS in ways:
        riding = _riding_in_two_calls(bench, both, prompt + decodes)
        yield Point(f"{TWO_CALLS} / two batches", series, number, riding)


def _riding_in_two_calls(bench: Bench, both: Work, separate: Work) -> Estimate:
    """Return the seconds of `both`, with the attention of `separate` batches as its calls, over
    those of these batches.
    """
    attention = bench.seconds(separate, ("attn",))
    together = bench.seconds(both, PRODUCTS) + attention
    apart = bench.seconds(separate, PRODUCTS) + attention
    return together / apart
