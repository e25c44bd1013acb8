"""Figures and tables of end-to-end throughput: SARATHI and Orca over request-level batching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from sarathi_lab.experiment.bench import COMPARED, THROUGHPUT, Bench
from sarathi_lab.experiment.decodes import speedup
from sarathi_lab.experiment.grid import Grid
from sarathi_lab.experiment.points import Parts, Point, part
from sarathi_lab.experiment.registry import A6000, Ints, Platform, experiment
from sarathi_lab.experiment.scenario import Scenario, best_pd_ratio, chunked
from sarathi_lab.experiment.scenario import lengths as whole_lengths
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.spec import PlotSpec

# Of P:D = C/(B-1), at which chunks and decodes run out together (section 4.3.3).
SHARES_OF_OPTIMUM = (0.25, 0.5, 1.0, 2.0, 4.0)
Lengths = Mapping[str, int]


def throughput_gain(
    bench: Bench, panel: str, series: str, x: float, scenario: Scenario
) -> Iterator[Point]:
    """Yield the throughput of a scenario over that of request-level batching."""
    yield Point(panel, series, x, bench.gain(scenario))


def served_gain(
    bench: Bench, panel: str, series: str, x: float, scenario: Scenario
) -> Iterator[Point]:
    """Yield what `throughput_gain` does, with both served on the engine, also in simulation."""
    ratios = bench.served_ratios(scenario.baseline, scenario)
    yield Point(panel, series, x, ratios[THROUGHPUT])


def _fig09_at(points: pd.DataFrame) -> dict[str, object]:
    chunks = points.series.str.removeprefix("C=").astype(int)
    return {"points": list(zip(points.panel, chunks, points.x, strict=True))}


@experiment(
    Grid,
    question="How much faster is SARATHI end to end, and at which P:D?",
    seconds=45,
    at=_fig09_at,
    is_counted=True,
    look=PlotSpec(
        "Fig 9: throughput of SARATHI over request-level batching by P:D",
        "P:D",
        "throughput / baseline",
        log_x=True,
        legend="C: tokens a batch",
        prefix="P + D = ",
    ),
)
def fig09(
    spec: ModelSpec,
    *,
    seq_lens: Lengths,
    batches: Lengths,
    chunks: Ints,
    pd_ratios: Sequence[float],
    points: Sequence[tuple[str, int, float]] = (),
) -> Parts:
    """Throughput over the baseline against P:D: each chunk at its C/(B-1), and at the first
    length the first two chunks at `pd_ratios`; or at `points` (length by name, chunk, P:D).
    """
    grid = []
    for chunk in chunks:
        for name in seq_lens:
            # Else the batch's decodes leave no room for a prompt's tokens.
            if chunk > batches[name]:
                grid.append((name, chunk, best_pd_ratio(chunk, batches[name])))
    first = next(iter(seq_lens))  # the length of which the paper shows whole curves
    for ratio in pd_ratios:
        for chunk in chunks[:2]:
            grid.append((first, chunk, ratio))
    for name, chunk, ratio in points or grid:
        scenario = Scenario.of("sarathi", seq_lens[name], ratio, batches[name], chunk)
        yield part(throughput_gain, name, f"C={chunk}", ratio, scenario)


def _fig11_at(points: pd.DataFrame) -> dict[str, object]:
    panel = points[points.panel == "b"]
    chunks: list[int | None] = []
    for series in panel.series:
        # The paper's series are "orca_best" and, with the chunk, such as "sarathi256".
        chunk = series.removeprefix("sarathi")
        if chunk.isdecimal():
            chunks.append(int(chunk))
        else:
            chunks.append(None)
    return {"by_pd": list(zip(chunks, panel.x, strict=True))}


@experiment(
    Grid,
    question="Does chunking beat Orca, whose whole prompts carry decodes, too?",
    seconds=45,
    at=_fig11_at,
    look=PlotSpec(
        "Fig 11: Orca and SARATHI over request-level batching",
        "P:D",
        "throughput / baseline",
        log_x=True,
        legend="policy",
        panels={"a": "a: by sequence length", "b": "b: by P:D"},
        xs={"a": "P + D [tokens]"},
    ),
)
def fig11(
    spec: ModelSpec,
    *,
    seq_lens: Lengths,
    batches: Lengths,
    chunks: Ints,
    pd_ratios: Sequence[float],
    by_pd: Sequence[tuple[int | None, float]] = (),
) -> Parts:
    """Orca's best and worst case and SARATHI over the baseline: by length at the P:D that suits the
    first chunk, and by P:D at the first length, `by_pd` giving chunk (None: Orca) and P:D.
    """
    for name, seq_len in seq_lens.items():
        pd_ratio = best_pd_ratio(chunks[0], batches[name])
        for policy in ("orca_worst", "orca_best", "sarathi"):
            chunk = None
            if policy == "sarathi":
                chunk = chunks[0]
            scenario = Scenario.of(policy, seq_len, pd_ratio, batches[name], chunk)
            yield part(throughput_gain, "a", policy, seq_len, scenario)
    first = next(iter(seq_lens))
    grid = []
    for pd_ratio in pd_ratios:
        for chunk in (*chunks[:2], None):
            grid.append((chunk, pd_ratio))
    for chunk, pd_ratio in by_pd or grid:
        policy = "orca_best"
        series = policy
        if chunk is not None:
            policy = "sarathi"
            series = f"sarathi{chunk}"
        scenario = Scenario.of(policy, seq_lens[first], pd_ratio, batches[first], chunk)
        yield part(throughput_gain, "b", series, pd_ratio, scenario)


@experiment(
    Grid,
    question="What do small chunks cost the prefill, and what remains end to end?",
    seconds=40,
    look=PlotSpec(
        "Fig 13: speed with chunks over speed without",
        "chunk [tokens]",
        "speed / un-chunked",
        legend="P + D",
        panels={"a_attn": "a: attention", "b_prefill": "b: prefill", "c_overall": "c: end to end"},
    ),
)
def fig13(
    spec: ModelSpec,
    *,
    prefill_lens: Lengths,
    prefill_chunks: Ints,
    seq_lens: Lengths,
    batches: Lengths,
    chunks: Ints,
) -> Parts:
    """Speed of a prefill in chunks over that of the whole, attention alone and all of it; and
    throughput over the baseline, each chunk at its P:D = C/(B-1).
    """
    for name, length in prefill_lens.items():
        for chunk in prefill_chunks:
            yield part(_chunked_prefill, name, length, chunk)
    for name, length in seq_lens.items():
        for chunk in chunks:
            batch = batches[name]
            if chunk > batch:
                pd_ratio = best_pd_ratio(chunk, batch)
                scenario = Scenario.of("sarathi", length, pd_ratio, batch, chunk)
                yield part(throughput_gain, "c_overall", name, chunk, scenario)


def _chunked_prefill(bench: Bench, name: str, length: int, chunk: int) -> Iterator[Point]:
    uncut = chunked(length, length)
    cut = chunked(length, chunk)
    attention_of_cut = bench.seconds(cut, ("attn",))
    of_attention = bench.seconds(uncut, ("attn",)) / attention_of_cut
    of_prefill = bench.seconds(uncut) / bench.seconds(cut)
    yield Point("a_attn", name, chunk, of_attention)
    yield Point("b_prefill", name, chunk, of_prefill)


@experiment(
    Grid,
    question="How much do decodes and whole requests gain on two models and GPUs?",
    seconds=15,
    papers=[A6000, Platform("33b", "a100_2023")],
    look=PlotSpec(
        "Table 4: chunk 256, decodes and end to end",
        "P + D [tokens]",
        "speed-up",
        panels={"13b": "13B on an A6000", "33b": "33B on an A100"},
    ),
)
def table4(
    spec: ModelSpec,
    *,
    seq_lens: Lengths,
    chunk: int,
    settings: Mapping[str, Sequence[tuple[str, int, float]]],
) -> Parts:
    """Decode speed-up and throughput gain; `settings` are length by name, batch and P:D by model,
    the first model's for all that are not there.
    """
    stated = settings.get(spec.name, next(iter(settings.values())))
    for name, batch, pd_ratio in stated:
        length = seq_lens[name]
        yield part(speedup, spec.name, "decode_speedup", length, length, batch, chunk)
        scenario = Scenario.of("sarathi", length, pd_ratio, batch, chunk)
        yield part(throughput_gain, spec.name, "throughput_gain", length, scenario)


# -- beyond the paper's figures: served on the engine, also in simulation --------------------------


@experiment(
    Grid,
    question="Is the best P:D of a chunk C near C/(B-1)?",
    seconds=45,
    look=PlotSpec(x="P:D in C/(B-1)", y="throughput gain", log_x=True, prefix="P + D = "),
)
def chunk_optimum(spec: ModelSpec, *, seq_len: int, batch: int, chunks: Ints) -> Parts:
    """Throughput against P:D, counted in C/(B-1)."""
    for chunk in chunks:
        for share in SHARES_OF_OPTIMUM:
            pd_ratio = share * best_pd_ratio(chunk, batch)
            scenario = Scenario.of("sarathi", seq_len, pd_ratio, batch, chunk)
            yield part(served_gain, f"{seq_len} B={batch}", f"C={chunk}", share, scenario)


@experiment(
    Grid,
    question="What do longer sequences leave of the gain?",
    seconds=25,
    look=PlotSpec(x="P + D [tokens]", y="gain", log_x=True),
)
def sequence_length(spec: ModelSpec, *, lengths: Ints, batch: int, chunk: int) -> Parts:
    """Decode speed-up and throughput gain against length at one batch."""
    sizes = [(length, length, batch) for length in lengths]
    yield from _speedups_and_gains(f"B={batch} C={chunk}", sizes, chunk)


@experiment(
    Grid,
    question="What do larger batches leave of the gain?",
    seconds=25,
    look=PlotSpec(x="batch", y="gain", prefix="P + D = "),
)
def batch_size(spec: ModelSpec, *, seq_len: int, batches: Ints, chunk: int) -> Parts:
    """Decode speed-up and throughput gain against batch at one length."""
    sizes = [(batch, seq_len, batch) for batch in batches]
    yield from _speedups_and_gains(f"{seq_len} C={chunk}", sizes, chunk)


def _speedups_and_gains(panel: str, sizes: Sequence[tuple[int, int, int]], chunk: int) -> Parts:
    """List the decode speed-up, then the throughput gain, at each of `sizes`: x, length, batch."""
    for size in sizes:
        yield part(speedup, panel, "decode_speedup", *size, chunk)
    for x, seq_len, batch in sizes:
        pd_ratio = best_pd_ratio(chunk, batch)
        scenario = Scenario.of("sarathi", seq_len, pd_ratio, batch, chunk)
        series = "throughput_gain"
        yield part(served_gain, panel, series, x, scenario)


@experiment(
    Grid,
    question="What does the token budget do to waiting?",
    seconds=20,
    look=PlotSpec(
        x="tokens of a batch",
        y="over the largest budget",
        log_x=True,
        prefix="P + D = ",
        names={"tbt_p99": "TBT P99", "ttft_p50": "TTFT P50", THROUGHPUT: "time per request"},
    ),
)
def token_budget(spec: ModelSpec, *, seq_len: int, batch: int, budgets: Ints) -> Parts:
    """Time to the first token and between tokens by token budget, over those of the largest."""
    size = (*whole_lengths(seq_len, 4.0), batch)
    largest = Scenario("sarathi_serve", *size, budgets[-1])
    for budget in budgets[:-1]:
        scenario = Scenario("sarathi_serve", *size, budget)
        yield part(_waits, f"{seq_len} B={batch}", budget, scenario, largest)


def _waits(
    bench: Bench, panel: str, budget: int, scenario: Scenario, largest: Scenario
) -> Iterator[Point]:
    ratios = bench.served_ratios(scenario, largest)
    for quantity in reversed(COMPARED):
        yield Point(panel, quantity, budget, ratios[quantity])
