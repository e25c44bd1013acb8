"""Figures and tables that time single batches: operations, tiles, the decode's share, chunked
prefills alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from sarathi_lab.engine.compositions import chunks_of, make_batch
from sarathi_lab.experiment.bench import (
    CHUNK,
    COMPUTE,
    EVERYTHING,
    FOUR,
    SEQ_LENS,
    Bench,
    Estimate,
    Point,
    best_pd_ratio,
    weighted,
)
from sarathi_lab.model.spec import ModelSpec

FIG_03_BATCHES = (1, 2, 4, 8, 12, 18)
FIG_08_BATCHES = {"1K": range(2, 19, 2), "2K": range(2, 9, 2), "3K": range(2, 7, 2)}
FIG_10_BATCHES = FIG_08_BATCHES
FIG_13_CHUNKS = range(64, 513, 64)


def fig03(
    bench: Bench, spec: ModelSpec, batches: Iterable[int] = FIG_03_BATCHES, seq_len: int = 1024
) -> Iterator[Point]:
    """Milliseconds per token by operation, prefill-only and decode-only, at one length."""
    for batch in batches:
        prefills = bench.batch(make_batch(prefill_tokens=seq_len, num_prefills=batch))
        decodes = bench.batch(make_batch(num_decodes=batch, context=seq_len))
        for panel, times, num_tokens in (
            ("prefill", prefills, seq_len * batch),
            ("decode", decodes, batch),
        ):
            series = {
                **{kind: (kind,) for kind in FOUR},
                "others": ("elementwise", "others"),
                "total": EVERYTHING,
            }
            for name, kinds in series.items():
                yield Point(panel, name, batch, bench.seconds(times, kinds).times(1e3 / num_tokens))


def fig04(bench: Bench, spec: ModelSpec, points: Iterable[tuple[str, str, int]]) -> Iterator[Point]:
    """Tokens per millisecond of one layer by length, and FLOPs per byte of its matrix products.

    `points` are panels ("prefill", "decode", either with " intensity"), the length or the product,
    and the batch.
    """
    for panel, series, batch in points:
        phase, _, is_intensity = panel.partition(" ")
        value = (
            _intensity(spec, phase, series, batch)
            if is_intensity
            else _layer_rate(bench, spec, phase, series, batch)
        )
        yield Point(panel, series, batch, value)


def _layer_rate(bench: Bench, spec: ModelSpec, phase: str, series: str, batch: int) -> Estimate:
    """Tokens per millisecond of one layer, for sequences of `series` tokens."""
    seq_len = int(series)
    prefills = make_batch(prefill_tokens=seq_len, num_prefills=batch)
    one = prefills if phase == "prefill" else make_batch(num_decodes=batch, context=seq_len)
    layer = bench.seconds(bench.batch(one), COMPUTE).times(1e3 / spec.num_layers)
    return layer.inverse().times(one.num_tokens)


def _intensity(spec: ModelSpec, phase: str, product: str, batch: int) -> Estimate:
    """FLOPs per element moved of a product [rows, k] x [k, n], at length 1024, in whole numbers as
    the paper has it.
    """
    rows = batch * (1024 if phase == "prefill" else 1)
    hidden = spec.hidden_size
    qkv_size = spec.q_size + 2 * spec.kv_size
    k, n = {
        "preproj": (hidden, qkv_size),
        "postproj": (spec.q_size, hidden),
        "ffn": (hidden, spec.ffn_size),
    }[product]
    return Estimate(max(1.0, math.floor(1 / (1 / rows + 1 / k + 1 / n))), 0.0)


def fig07(bench: Bench, spec: ModelSpec, num_tokens: Iterable[int]) -> Iterator[Point]:
    """Milliseconds of one prefill iteration by operation against its tokens: the steps of the
    tiles.
    """
    for n in num_tokens:
        times = bench.batch(make_batch(prefill_tokens=n))
        for name, kinds in {
            "preproj": ("preproj",),
            "postproj": ("postproj",),
            "ffn": ("ffn",),
            "total": COMPUTE,
        }.items():
            yield Point("", name, n, bench.seconds(times, kinds).times(1e3))


def decode_speedup(bench: Bench, seq_len: int, batch: int, chunk: int = CHUNK) -> Estimate:
    """Time per token of a decode-only iteration over the marginal time of a decode in a
    decode-maximal batch.

    Marginal is the decode-maximal batch less a prefill of as many tokens, per decode (section
    5.1.1, Table 2).
    """
    alone = bench.seconds(bench.batch(make_batch(num_decodes=batch, context=seq_len))).times(
        1 / batch
    )
    num_decodes = batch - 1
    hybrid = make_batch(
        prefill_tokens=chunk - num_decodes, num_decodes=num_decodes, context=seq_len
    )
    added = weighted(
        (1.0, bench.batch(hybrid)), (-1.0, bench.batch(make_batch(prefill_tokens=chunk)))
    )
    return alone.over(bench.seconds(added).times(1 / num_decodes))


def fig08(
    bench: Bench,
    spec: ModelSpec,
    batches: Mapping[str, Iterable[int]] = FIG_08_BATCHES,
    seq_lens: Mapping[str, int] = SEQ_LENS,
    chunk: int = CHUNK,
) -> Iterator[Point]:
    """Decode speed-up by batch and length at one chunk."""
    for name, sizes in batches.items():
        for batch in sizes:
            yield Point("", name, batch, decode_speedup(bench, seq_lens[name], batch, chunk))


def fig10(bench: Bench, spec: ModelSpec) -> Iterator[Point]:
    """Seconds by operation to serve B requests at P:D = C/(B-1), baseline and SARATHI."""
    for chunk in (256, 512):
        for name, batches in FIG_10_BATCHES.items():
            for batch in batches:
                served, baseline = bench.sarathi(
                    chunk, SEQ_LENS[name], best_pd_ratio(chunk, batch), batch
                )
                for system, times in (("baseline", baseline), ("sarathi", served)):
                    series = {**{kind: (kind,) for kind in FOUR}, "total": FOUR}
                    for operation, kinds in series.items():
                        total = bench.seconds(times, kinds).times(batch)
                        yield Point(f"{name} C={chunk}", f"{system} {operation}", batch, total)


def fig13ab(
    bench: Bench,
    spec: ModelSpec,
    chunks: Iterable[int] = FIG_13_CHUNKS,
    seq_lens: Mapping[str, int] = SEQ_LENS,
) -> Iterator[Point]:
    """Speed of a prefill in chunks over that of the whole: attention alone, and all of it."""
    for name, seq_len in seq_lens.items():
        whole = bench.batch(*chunks_of(seq_len, seq_len))
        for chunk in chunks:
            cut = bench.batch(*chunks_of(seq_len, chunk))
            for panel, kinds in (("a_attn", ("attn",)), ("b_prefill", EVERYTHING)):
                yield Point(
                    panel, name, chunk, bench.seconds(whole, kinds).over(bench.seconds(cut, kinds))
                )


def table2(
    bench: Bench, spec: ModelSpec, num_tokens: int = 1024, num_decodes: int = 4
) -> Iterator[Point]:
    """Milliseconds of a prefill-only, a decode-only and a decode-maximal batch at contexts of
    `num_tokens`.
    """
    batches = {
        "prefill-only": make_batch(prefill_tokens=num_tokens),
        "decode-only": make_batch(num_decodes=num_decodes, context=num_tokens),
        "decode-maximal": make_batch(
            prefill_tokens=num_tokens - (num_decodes - 1),
            num_decodes=num_decodes - 1,
            context=num_tokens,
        ),
    }
    linear = tuple(kind for kind in COMPUTE if kind != "attn")
    for panel, batch in batches.items():
        times = bench.batch(batch)
        for name, kinds in (("linear", linear), ("attention", ("attn",)), ("total", COMPUTE)):
            yield Point(panel, name, batch.num_tokens, bench.seconds(times, kinds).times(1e3))
