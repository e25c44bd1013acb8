"""Figures of decodes that ride on chunks: what one adds to a batch, and the time by operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sarathi_lab.experiment.cases import Case, Cases, Quantity, seconds
from sarathi_lab.experiment.clock import COMPUTE, FOUR
from sarathi_lab.experiment.iterations import OPERATIONS
from sarathi_lab.experiment.registry import Aims, ErrorRow, Figure, Ints, Sizes, figure
from sarathi_lab.experiment.scenario import Room, Scenario, batch, best_pd_ratio, request
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.spec import PlotSpec

SPEEDUP: Aims = {"profiled": (0.04, 0.12), "analytic": (0.10, 0.20)}  # aims of decode speed-ups


def speedup(panel: str, series: str, x: float, seq_len: int, size: int, chunk: int) -> Case:
    """Return the time of a decode alone over its marginal time in a decode-maximal batch.

    Marginal is that batch less a prefill of as many tokens, per decode (section 5.1.1, Table 2).
    """
    riders = size - 1
    alone = batch(num_decodes=size, context=seq_len)
    hybrid = batch(prefill_tokens=chunk - riders, num_decodes=riders, context=seq_len)
    prefill = batch(prefill_tokens=chunk)
    return Case(panel, series, x, Quantity("saving", (alone, hybrid, prefill)) * (riders / size))


@figure(
    question="How much cheaper is a decode that rides on a chunk?",
    seconds=40,
    errors=[ErrorRow("Fig 8, decode speed-up", aims=SPEEDUP)],
    look=PlotSpec(
        "Fig 8: a decode alone over a decode riding on a chunk",
        "batch",
        "decode speed-up",
        legend="P + D",
    ),
)
def fig08(
    spec: ModelSpec, *, seq_lens: Mapping[str, int], batches: Mapping[str, Ints], chunk: int
) -> Cases:
    """Decode speed-up by batch and length at one chunk."""
    for name, sizes in batches.items():
        for size in sizes:
            yield speedup("", name, size, seq_lens[name], size, chunk)


FIG_10: Aims = {"profiled": (0.02, 0.08), "analytic": (0.06, 0.15)}
TOTALS = "in ('baseline total', 'sarathi total')"


@figure(
    question="Where does the time go?",
    seconds=20,
    errors=[
        ErrorRow("Fig 10, totals", f"series {TOTALS}", FIG_10),
        ErrorRow("Fig 10, by operation", f"series not {TOTALS}"),
    ],
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
) -> Cases:
    """Seconds by operation to serve B requests at P:D = C/(B-1), baseline and SARATHI."""
    for chunk in chunks:
        for name, sizes in batches.items():
            for size in sizes:
                pd_ratio = best_pd_ratio(chunk, size)
                scenario = Scenario.of("sarathi", seq_lens[name], pd_ratio, size, chunk)
                yield _operations(f"{name} C={chunk}", scenario)


def _operations(panel: str, scenario: Scenario) -> Iterator[Case]:
    size = scenario.batch_size
    for system, served in (("baseline", scenario.baseline), ("sarathi", scenario)):
        for operation, kinds in {**OPERATIONS, "total": FOUR}.items():
            y = seconds(request(served), kinds) * size
            yield Case(panel, f"{system} {operation}", size, y, "s")


@figure(
    question="What does a decode add to a batch that holds a prompt?",
    seconds=10,
    errors=[ErrorRow("Table 2", aims=SPEEDUP)],
    look=PlotSpec(
        "Table 2: a batch of prompt, decodes, and both",
        "",
        "ms",
        kind="bar",
        is_by_device=True,
        left_out=("ratio",),
    ),
)
def table2(spec: ModelSpec, *, num_tokens: int, num_decodes: int) -> Cases:
    """Milliseconds of batches of a prompt, of decodes at `num_tokens` of context, and of both; and
    what a decode takes alone over what it adds.
    """
    yield _kinds_of_batch(num_tokens, num_decodes)


def _kinds_of_batch(num_tokens: int, num_decodes: int) -> Iterator[Case]:
    riders = num_decodes - 1
    prefill = batch(prefill_tokens=num_tokens)
    decodes = batch(num_decodes=num_decodes, context=num_tokens)
    both = batch(prefill_tokens=num_tokens - riders, num_decodes=riders, context=num_tokens)
    linear = tuple(kind for kind in COMPUTE if kind != "attn")
    parts = {"linear": linear, "attention": ("attn",), "total": COMPUTE}
    works = {"prefill-only": prefill, "decode-only": decodes, "decode-maximal": both}
    for panel, work in works.items():
        for name, kinds in parts.items():
            yield Case(panel, name, work.num_tokens, seconds(work, kinds) * 1e3, "ms")
    alone = seconds(decodes, COMPUTE) * (1 / num_decodes)
    ratio = alone / (seconds(both - prefill, COMPUTE) * (1 / riders))
    yield Case("ratio", "decode alone / added", num_decodes, ratio)


@figure(
    question="What does one attention call over prefills and decodes together cost?",
    seconds=30,
    look=PlotSpec(x="decodes", y="ratio"),
)
def hybrid_attention(spec: ModelSpec, *, chunks: Ints, decodes: Ints, contexts: Ints) -> Cases:
    """Attention of a chunk and decodes over that of either alone, and what it leaves of the decode
    speed-up (section 5.1.1), as it is and with a call for each (section 4.3.2).
    """
    for chunk in chunks:
        for context in contexts:
            for number in decodes:
                yield _hybrid_attention(chunk, context, number)


def _hybrid_attention(chunk: int, context: int, number: int) -> Iterator[Case]:
    """The chunk's context is half of the decodes', as of a prompt that is half done."""
    start = context // 2
    whole = batch(prefill_tokens=chunk, start=start)
    alone = batch(num_decodes=number, context=context)
    both = batch(prefill_tokens=chunk, start=start, num_decodes=number, context=context)
    together, separate = seconds(both, ("attn",)), seconds(whole + alone, ("attn",))
    added = seconds(both - whole)
    added_separate = Quantity("with_attention_of", (both - whole, whole + alone, both))
    series = f"chunk {chunk}, context {context}"
    yield Case("attention / apart", series, number, together / separate)
    yield Case("decode speed-up", series, number, seconds(alone) / added)
    yield Case("decode speed-up, apart", series, number, seconds(alone) / added_separate)


AS_CALLED, TWO_CALLS = "as called", "two calls"  # of attention, for a chunk with decodes


@dataclass(frozen=True)
class Map(Figure):
    """Batches of many sizes, of which a device measures those that its memory holds."""

    def least_room(self, spec: ModelSpec, sizes: Sizes) -> int:
        rooms = [Room.of(group.subjects) for group in self.cases(spec, sizes)]
        return min(room.kv_tokens for room in rooms)


@figure(
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
) -> Cases:
    """Products and attention of a chunk with decodes over those of two batches, and the decodes
    alone over what they add, with attention `ways`: as the device calls it, and with a call for
    prompts and one for decodes (section 4.3.2).
    """
    for chunk in chunks:
        for start in starts:
            for context in contexts:
                for number in decodes:
                    yield _ways_to_decode(ways, chunk, start, context, number)


def _ways_to_decode(
    ways: Sequence[str], chunk: int, start: int, context: int, number: int
) -> Iterator[Case]:
    prompt = batch(prefill_tokens=chunk, start=start)
    alone = batch(num_decodes=number, context=context)
    both = batch(prefill_tokens=chunk, start=start, num_decodes=number, context=context)
    series = f"{chunk} behind {start}, {context} each"
    if AS_CALLED in ways:
        apart = seconds(prompt + alone, FOUR)
        gained = Quantity("saving", (alone, both, prompt, FOUR))
        yield Case(f"{AS_CALLED} / two batches", series, number, seconds(both, FOUR) / apart)
        yield Case(f"decode speed-up, {AS_CALLED}", series, number, gained)
    if TWO_CALLS in ways:
        riding = Quantity("riding_apart", (both, prompt + alone, FOUR))
        gained = Quantity("riding_saves", (alone, both, prompt, FOUR))
        yield Case(f"{TWO_CALLS} / two batches", series, number, riding)
        yield Case(f"decode speed-up, {TWO_CALLS}", series, number, gained)
