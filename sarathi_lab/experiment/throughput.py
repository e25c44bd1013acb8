"""Figures and tables of end-to-end throughput, by the engine's loop in its steady state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sarathi_lab.engine.compositions import chunks_of, make_batch
from sarathi_lab.experiment.bench import (
    CHUNK,
    LARGEST_BATCH,
    SEQ_LENS,
    Bench,
    Point,
    best_pd_ratio,
    weighted,
)
from sarathi_lab.experiment.iterations import FIG_13_CHUNKS, decode_speedup
from sarathi_lab.experiment.steady_state import lengths
from sarathi_lab.model.spec import ModelSpec

Setting = tuple[str, int, float]  # length by name, batch, P:D
TABLE_4 = {
    "13b": [("1K", 6, 50.0), ("2K", 6, 50.0), ("3K", 6, 50.0)],
    "33b": [("1K", 10, 28.0), ("2K", 5, 63.0), ("3K", 3, 127.0)],
}


def fig09(
    bench: Bench, spec: ModelSpec, points: Iterable[tuple[str, int, float]]
) -> Iterator[Point]:
    """Throughput over the baseline against P:D; `points` are the panel's length, the chunk and P:D
    of each.
    """
    for name, chunk, pd_ratio in points:
        gain = bench.gain(bench.sarathi(chunk, SEQ_LENS[name], pd_ratio, LARGEST_BATCH[name]))
        yield Point(name, f"C={chunk}", pd_ratio, gain)


def fig09_counted(
    bench: Bench, spec: ModelSpec, points: Iterable[tuple[str, int, float]]
) -> Iterator[Point]:
    """The same by counting, as the paper does, instead of serving: no remainders, no part-filled
    tiles.

    P / (C - (B-1)) chunks each carry B-1 decodes. Left over are decodes in full batches of B, or
    else prompt tokens at the price of whole prompts.
    """
    for name, chunk, pd_ratio in points:
        batch = LARGEST_BATCH[name]
        prompt_len, num_decodes = lengths(SEQ_LENS[name], pd_ratio, chunk - (batch - 1))
        context = prompt_len + num_decodes // 2
        prompts = bench.batch(make_batch(prefill_tokens=prompt_len, num_prefills=batch))
        decodes = bench.batch(make_batch(num_decodes=batch, context=context))
        chunks = chunks_of(prompt_len, chunk - (batch - 1), num_decodes=batch - 1, context=context)
        # Of a batch of requests, the share of chunks that finds decodes to carry; what is left over
        # of either.
        share = min(1.0, num_decodes / (batch - 1) / len(chunks))
        decodes_left = num_decodes - share * len(chunks) * (batch - 1)
        baseline = weighted((1.0, prompts), (num_decodes, decodes))
        served = weighted(
            (share * batch, bench.batch(*chunks)), (1.0 - share, prompts), (decodes_left, decodes)
        )
        yield Point(
            name, f"C={chunk}", pd_ratio, bench.seconds(baseline).over(bench.seconds(served))
        )


def fig11a(bench: Bench, spec: ModelSpec) -> Iterator[Point]:
    """Orca worst and best and SARATHI over the baseline, by length, at the P:D that suits chunk
    256.
    """
    for name, seq_len in SEQ_LENS.items():
        batch = LARGEST_BATCH[name]
        load = (seq_len, best_pd_ratio(CHUNK, batch), batch)
        yield Point("a", "orca_worst", seq_len, bench.gain(bench.orca_worst(*load)))
        yield Point("a", "orca_best", seq_len, bench.gain(bench.orca_best(*load)))
        yield Point("a", "sarathi", seq_len, bench.gain(bench.sarathi(CHUNK, *load)))


def fig11b(bench: Bench, spec: ModelSpec, points: Iterable[tuple[str, float]]) -> Iterator[Point]:
    """Orca best and SARATHI over the baseline against P:D at length 1K; `points` are series and
    P:D.
    """
    seq_len, batch = SEQ_LENS["1K"], LARGEST_BATCH["1K"]
    for series, pd_ratio in points:
        if series == "orca_best":
            gain = bench.gain(bench.orca_best(seq_len, pd_ratio, batch))
        else:
            gain = bench.gain(
                bench.sarathi(int(series.removeprefix("sarathi")), seq_len, pd_ratio, batch)
            )
        yield Point("b", series, pd_ratio, gain)


def fig13c(bench: Bench, spec: ModelSpec) -> Iterator[Point]:
    """Throughput over the baseline by chunk, each at its own P:D = C/(B-1) and the length's largest
    batch.
    """
    for name, seq_len in SEQ_LENS.items():
        batch = LARGEST_BATCH[name]
        for chunk in FIG_13_CHUNKS:
            gain = bench.gain(bench.sarathi(chunk, seq_len, best_pd_ratio(chunk, batch), batch))
            yield Point("c_overall", name, chunk, gain)


def table4(bench: Bench, spec: ModelSpec, settings: Iterable[Setting]) -> Iterator[Point]:
    """Decode speed-up and throughput gain at chunk 256."""
    for name, batch, pd_ratio in settings:
        seq_len = SEQ_LENS[name]
        yield Point(spec.name, "decode_speedup", seq_len, decode_speedup(bench, seq_len, batch))
        yield Point(
            spec.name,
            "throughput_gain",
            seq_len,
            bench.gain(bench.sarathi(CHUNK, seq_len, pd_ratio, batch)),
        )
