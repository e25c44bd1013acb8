"""Figures that time single batches: the cost of a token, tiles, and the targets of a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.experiment.clock import COMPUTE, EVERYTHING, FOUR, Clock, Estimate, Point
from sarathi_lab.experiment.registry import KEYS, Aim, ErrorRow, Platform, Unit, figure
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.look import Look

A6000 = Platform("13b", "a6000")
OPERATIONS = {kind: (kind,) for kind in FOUR}
Ints = Sequence[int]


def _fig03_paper(table: pd.DataFrame) -> pd.DataFrame:
    names = {"phase": "panel", "op": "series", "batch": "x", "ms_per_token": "y"}
    points = table.rename(columns=names)
    points["series"] = points.series.replace({"ffn_ln1": "ffn", "ffn_ln2": "ffn"})
    return points.groupby(KEYS, as_index=False).y.sum().assign(unit="ms/token")


@figure(
    question="Why are decodes expensive?",
    seconds=15,
    papers=[A6000],
    paper=_fig03_paper,
    errors=[ErrorRow("Fig 3, time per token", given="profiled")],
    look=Look(
        "Fig 3: time per token by operation",
        "batch",
        "ms per token",
        log_y=True,
        legend="operation",
        panels={"ratio": "a decode over a prompt's token"},
        units={"ratio": "ratio"},
    ),
)
def fig03(spec: ModelSpec, *, batches: Ints, seq_len: int) -> Iterator[Unit]:
    """Milliseconds per token by operation, prefilled alone and decoded alone, and the time of a
    token decoded over that of one prefilled (section 3.1).
    """
    yield from (partial(_token_costs, batch, seq_len) for batch in batches)


def _token_costs(batch: int, seq_len: int, clock: Clock) -> Iterator[Point]:
    prefills = clock.batch(make_batch(prefill_tokens=seq_len, num_prefills=batch))
    decodes = clock.batch(make_batch(num_decodes=batch, context=seq_len))
    series = {**OPERATIONS, "others": ("elementwise", "others"), "total": EVERYTHING}
    phases = {"prefill": (prefills, seq_len * batch), "decode": (decodes, batch)}
    for panel, (times, num_tokens) in phases.items():
        for name, kinds in series.items():
            y = clock.seconds(times, kinds).times(1e3 / num_tokens)
            yield Point(panel, name, batch, y, "ms/token")
    prefilled = clock.seconds(prefills).times(1 / (seq_len * batch))
    decoded = clock.seconds(decodes).times(1 / batch)
    yield Point("ratio", "decode / prefill", batch, decoded.over(prefilled))


def _fig04_paper(speed: pd.DataFrame, intensity: pd.DataFrame) -> pd.DataFrame:
    names = {"phase": "panel", "batch": "x"}
    speed = speed.rename(columns={**names, "seqlen": "series", "tokens_per_ms": "y"})
    intensity = intensity.rename(columns={**names, "op": "series", "flops_per_byte": "y"})
    intensity = intensity[
        intensity.series != "attn"
    ]  # computed by the paper as if all requests were one product
    both = [
        speed.assign(series=speed.series.astype(str), phase=speed.panel, unit="tokens/ms"),
        intensity.assign(
            panel=intensity.panel + " intensity", phase=intensity.panel, unit="FLOP/B"
        ),
    ]
    return pd.concat(both)[[*KEYS, "y", "unit", "phase"]]


def _fig04_at(points: pd.DataFrame) -> dict[str, object]:
    speed, products = (points[points.unit == unit] for unit in ("tokens/ms", "FLOP/B"))
    return {
        "layers": list(zip(speed.phase, speed.series.astype(int), speed.x, strict=True)),
        "products": list(zip(products.phase, products.series, products.x, strict=True)),
    }


@figure(
    question="What fills the device: prompts, or only large batches of decodes?",
    seconds=15,
    papers=[A6000],
    paper=_fig04_paper,
    files=("a", "b"),
    at=_fig04_at,
    errors=[
        ErrorRow("Fig 4a, single layer", "unit == 'tokens/ms'"),
        ErrorRow("Fig 4b, arithmetic intensity", "unit == 'FLOP/B'", is_formula=True),
    ],
    look=Look(
        "Fig 4: throughput of one layer, and arithmetic intensity of its products",
        "batch",
        "tokens / ms and layer",
        log_x=True,
        log_y=True,
        columns=4,
        legend="tokens a sequence,\nor matrix product",
        panels={"prefill intensity": "prefill", "decode intensity": "decode"},
        units={
            "prefill intensity": "FLOPs per element moved",
            "decode intensity": "FLOPs per element moved",
        },
    ),
)
def fig04(
    spec: ModelSpec,
    *,
    lengths: Ints,
    batches: Ints,
    layers: Sequence[tuple[str, int, int]] = (),
    products: Sequence[tuple[str, str, int]] = (),
) -> Iterator[Unit]:
    """Tokens per millisecond of one layer by length and batch, and FLOPs per byte of its products.

    `layers` (phase, length, batch) and `products` (phase, operation, batch) are single points, in
    place of all of `lengths` and `batches`.
    """
    phases = ("prefill", "decode")
    grid = [(phase, length, batch) for phase in phases for length in lengths for batch in batches]
    for phase, length, batch in layers or grid:
        yield partial(_layer_rate, spec, phase, length, batch)
    for phase, operation, batch in products:
        yield partial(_intensity, spec, phase, operation, batch)


def _layer_rate(
    spec: ModelSpec, phase: str, length: int, batch: int, clock: Clock
) -> Iterator[Point]:
    prefills = make_batch(prefill_tokens=length, num_prefills=batch)
    one = prefills if phase == "prefill" else make_batch(num_decodes=batch, context=length)
    layer = clock.seconds(clock.batch(one), COMPUTE).times(1e3 / spec.num_layers)
    yield Point(phase, str(length), batch, layer.inverse().times(one.num_tokens), "tokens/ms")


def _intensity(
    spec: ModelSpec, phase: str, operation: str, batch: int, clock: Clock
) -> Iterator[Point]:
    """FLOPs per element moved of a product [rows, k] x [k, n], at length 1024, in whole numbers as
    the paper has it.
    """
    rows, hidden = batch * (1024 if phase == "prefill" else 1), spec.hidden_size
    shapes = {
        "preproj": (hidden, spec.q_size + 2 * spec.kv_size),
        "postproj": (spec.q_size, hidden),
        "ffn": (hidden, spec.ffn_size),
    }
    k, n = shapes[operation]
    value = max(1.0, math.floor(1 / (1 / rows + 1 / k + 1 / n)))
    yield Point(f"{phase} intensity", operation, batch, Estimate(value), "FLOP/B")


def _fig07_paper(table: pd.DataFrame) -> pd.DataFrame:
    table = table.rename(columns={"num_tokens": "x", "total_compute": "total"})
    return table.melt("x", var_name="series", value_name="y").assign(panel="", unit="ms")


FIG_07_AIM = Aim(0.08, 0.20)


@figure(
    question="What does one token past a tile cost?",
    seconds=20,
    papers=[A6000],
    paper=_fig07_paper,
    at=lambda points: {"tokens": sorted(set(points.x))},
    errors=[
        ErrorRow(
            "Fig 7, iteration time",
            "series == 'total'",
            analytic=FIG_07_AIM,
            given="profiled",
            fitted="analytic",
        ),
        # The analytic model is fitted to the others: odd tiles of 128 tokens
        # (experiments/lab/cost_model/fit.py).
        ErrorRow(
            "Fig 7, even tiles",
            "series == 'total' and (x - 1) // 128 % 2 == 1",
            analytic=FIG_07_AIM,
            given="profiled",
        ),
        ErrorRow("Fig 7, by operation", "series != 'total'", given="profiled"),
    ],
    look=Look(
        "Fig 7: one prefill iteration by its tokens (tile quantization)",
        "prompt tokens",
        "ms per iteration",
        columns=2,
        legend="operation",
        panels={"step": "one token past full tiles"},
        units={"step": "time / that of full tiles"},
        xs={"step": "tokens that fill tiles"},
    ),
)
def fig07(spec: ModelSpec, *, tokens: Ints, tiles: Ints) -> Iterator[Unit]:
    """Milliseconds of one prefill iteration by operation against its tokens; and the time of one
    token more than fills its tiles over that of full tiles (section 4.4).
    """
    yield from (partial(_iteration, num_tokens) for num_tokens in tokens)
    yield from (partial(_tile_step, num_tokens) for num_tokens in tiles)


def _iteration(num_tokens: int, clock: Clock) -> Iterator[Point]:
    times = clock.batch(make_batch(prefill_tokens=num_tokens))
    for name in ("preproj", "postproj", "ffn", "total"):
        kinds = COMPUTE if name == "total" else (name,)
        yield Point("", name, num_tokens, clock.seconds(times, kinds).times(1e3), "ms")


def _tile_step(num_tokens: int, clock: Clock) -> Iterator[Point]:
    full, more = (
        clock.seconds(clock.batch(make_batch(prefill_tokens=n)))
        for n in (num_tokens, num_tokens + 1)
    )
    yield Point("step", "one token more", num_tokens, more.over(full))


@figure(question="Does the engine reach on a GPU what it should?", seconds=15)
def gpu_targets(
    spec: ModelSpec, *, context: int, decodes: Ints, prefills: Ints, chunks: Ints, beside: int
) -> Iterator[Unit]:
    """Milliseconds of the iterations that the targets are judged by: decodes at `context` alone,
    prefills, and chunks with `beside` decodes.
    """
    for n in decodes:
        batch = {"num_decodes": n, "context": context}
        yield partial(_whole, "decodes", f"context {context}", n, batch)
    for n in prefills:
        yield partial(_whole, "prefill", "alone", n, {"prefill_tokens": n})
    for n in chunks:
        batch = {"prefill_tokens": n - beside, "num_decodes": beside, "context": context}
        yield partial(_whole, "hybrid", f"{beside} decodes at {context}", n, batch)


def _whole(
    panel: str, series: str, x: float, batch: Mapping[str, Any], clock: Clock
) -> Iterator[Point]:
    y = clock.seconds(clock.batch(make_batch(**batch))).times(1e3)
    yield Point(panel, series, x, y, "ms")
