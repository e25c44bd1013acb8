"""Figures of decodes that ride on chunks: what one adds to a batch, and the time by operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import pandas as pd

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.experiment.clock import (
    COMPUTE,
    FOUR,
    Clock,
    Estimate,
    Point,
    Unit,
    best_pd_ratio,
    one,
    weighted,
)
from sarathi_lab.experiment.iterations import OPERATIONS
from sarathi_lab.experiment.registry import Aims, ErrorRow, Ints, figure
from sarathi_lab.experiment.scenario import Scenario
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.look import Look

SPEEDUP: Aims = {"profiled": (0.04, 0.12), "analytic": (0.10, 0.20)}  # aims of decode speed-ups


def speedup(panel: str, series: str, x: float, seq_len: int, batch: int, chunk: int) -> Unit:
    """Time of a decode alone over its marginal time in a decode-maximal batch.

    Marginal is that batch less a prefill of as many tokens, per decode (section 5.1.1, Table 2).
    """
    riders = batch - 1

    def y(clock: Clock) -> Estimate:
        alone = make_batch(num_decodes=batch, context=seq_len)
        hybrid = make_batch(prefill_tokens=chunk - riders, num_decodes=riders, context=seq_len)
        prefill = make_batch(prefill_tokens=chunk)
        return clock.saving(alone, hybrid, prefill).times(riders / batch)

    return one(panel, series, x, y)


@figure(
    question="How much cheaper is a decode that rides on a chunk?",
    seconds=40,
    columns={"seqlen": "series", "batch": "x", "speedup": "y"},
    errors=[ErrorRow("Fig 8, decode speed-up", aims=SPEEDUP)],
    look=Look(
        "Fig 8: a decode alone over a decode riding on a chunk",
        "batch",
        "decode speed-up",
        legend="P + D",
    ),
)
def fig08(
    spec: ModelSpec, *, seq_lens: Mapping[str, int], batches: Mapping[str, Ints], chunk: int
) -> Iterator[Unit]:
    """Decode speed-up by batch and length at one chunk."""
    for name, sizes in batches.items():
        for batch in sizes:
            yield speedup("", name, batch, seq_lens[name], batch, chunk)


def _fig10_paper(table: pd.DataFrame) -> pd.DataFrame:
    table["panel"] = table.seqlen + " C=" + table.chunk.astype(str)
    points = table.melt(
        ["panel", "system", "x"], [*FOUR, "total"], var_name="operation", value_name="y"
    )
    return points.assign(series=points.system + " " + points.operation, unit="s")


FIG_10: Aims = {"profiled": (0.02, 0.08), "analytic": (0.06, 0.15)}
TOTALS = "in ('baseline total', 'sarathi total')"


@figure(
    question="Where does the time go?",
    seconds=20,
    columns={"batch": "x"},
    paper=_fig10_paper,
    errors=[
        ErrorRow("Fig 10, totals", f"series {TOTALS}", FIG_10),
        ErrorRow("Fig 10, by operation", f"series not {TOTALS}"),
    ],
    look=Look(
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
) -> Iterator[Unit]:
    """Seconds by operation to serve B requests at P:D = C/(B-1), baseline and SARATHI."""
    for chunk in chunks:
        for name, sizes in batches.items():
            for batch in sizes:
                yield partial(_operations, f"{name} C={chunk}", seq_lens[name], batch, chunk)


def _operations(panel: str, seq_len: int, batch: int, chunk: int, clock: Clock) -> Iterator[Point]:
    scenario = Scenario.of("sarathi", seq_len, best_pd_ratio(chunk, batch), batch, chunk)
    for system, own in (("baseline", scenario.baseline), ("sarathi", scenario)):
        times = clock.request(own)
        for operation, kinds in {**OPERATIONS, "total": FOUR}.items():
            y = clock.seconds(times, kinds).times(batch)
            yield Point(panel, f"{system} {operation}", batch, y, "s")


MILLISECONDS = {"linear_ms": "linear", "attention_ms": "attention", "total_ms": "total"}


def _table2_paper(table: pd.DataFrame) -> pd.DataFrame:
    table["x"] = table.num_prefill_tokens + table.num_decode_tokens
    points = table.melt(["panel", "x"], [*MILLISECONDS.values()], var_name="series", value_name="y")
    return points.assign(unit="ms")


@figure(
    question="What does a decode add to a batch that holds a prompt?",
    seconds=10,
    columns={"batch": "panel", **MILLISECONDS},
    paper=_table2_paper,
    errors=[ErrorRow("Table 2", aims=SPEEDUP)],
    look=Look(
        "Table 2: a batch of prompt, decodes, and both", "", "ms", is_bars=True, left_out=("ratio",)
    ),
)
def table2(spec: ModelSpec, *, num_tokens: int, num_decodes: int) -> Iterator[Unit]:
    """Milliseconds of batches of a prompt, of decodes at `num_tokens` of context, and of both; and
    what a decode takes alone over what it adds.
    """
    yield partial(_kinds_of_batch, num_tokens, num_decodes)


def _kinds_of_batch(num_tokens: int, num_decodes: int, clock: Clock) -> Iterator[Point]:
    riders = num_decodes - 1
    batches = {
        "prefill-only": make_batch(prefill_tokens=num_tokens),
        "decode-only": make_batch(num_decodes=num_decodes, context=num_tokens),
        "decode-maximal": make_batch(
            prefill_tokens=num_tokens - riders, num_decodes=riders, context=num_tokens
        ),
    }
    linear = tuple(kind for kind in COMPUTE if kind != "attn")
    found = {panel: clock.batch(batch) for panel, batch in batches.items()}
    for panel, batch in batches.items():
        times = found[panel]
        for name, kinds in (("linear", linear), ("attention", ("attn",)), ("total", COMPUTE)):
            yield Point(panel, name, batch.num_tokens, clock.seconds(times, kinds).times(1e3), "ms")
    added = weighted((1.0, found["decode-maximal"]), (-1.0, found["prefill-only"]))
    alone = clock.seconds(found["decode-only"], COMPUTE).times(1 / num_decodes)
    ratio = alone.over(clock.seconds(added, COMPUTE).times(1 / riders))
    yield Point("ratio", "decode alone / added", num_decodes, ratio)


@figure(
    question="What does one attention call over prefills and decodes together cost?",
    seconds=30,
    look=Look(x="decodes", y="ratio"),
)
def hybrid_attention(
    spec: ModelSpec, *, chunks: Ints, decodes: Ints, contexts: Ints
) -> Iterator[Unit]:
    """Attention of a chunk and decodes over that of either alone, and what it leaves of the decode
    speed-up (section 5.1.1), as it is and with a call for each (section 4.3.2).
    """
    for chunk in chunks:
        for context in contexts:
            for number in decodes:
                yield partial(_hybrid_attention, chunk, context, number)


def _hybrid_attention(chunk: int, context: int, number: int, clock: Clock) -> Iterator[Point]:
    """The chunk's own context is half of the decodes', as of a prompt in the middle of its way."""
    start = context // 2
    prefill = make_batch(prefill_tokens=chunk, start=start)
    decodes = make_batch(num_decodes=number, context=context)
    both = clock.batch(
        make_batch(prefill_tokens=chunk, start=start, num_decodes=number, context=context)
    )
    alone, whole = clock.batch(decodes), clock.batch(prefill)
    apart = clock.seconds(weighted((1.0, whole), (1.0, alone)), ("attn",))
    together = clock.seconds(both, ("attn",))
    added = clock.seconds(weighted((1.0, both), (-1.0, whole)))
    added_apart = Estimate(added.value - together.value + apart.value, added.error)
    series = f"chunk {chunk}, context {context}"
    yield Point("attention / apart", series, number, together.over(apart))
    yield Point("decode speed-up", series, number, clock.seconds(alone).over(added))
    yield Point("decode speed-up, apart", series, number, clock.seconds(alone).over(added_apart))
