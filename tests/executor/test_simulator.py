"""The cost model against hand-worked sums and the paper's tables, and the virtual clock."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from simulated import SPEC, TOY, batch_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.kernel_times import matmul_time
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.scenario import batch

SHAPES = {
    "qkv_proj": (2, 6),
    "out_proj": (2, 2),
    "ffn_up": (2, 4),
    "ffn_down": (4, 2),
}  # the toy's products


def test_operation_times_by_hand():
    # 3 tokens: a chunk of 2 at offset 1, and a decode that sees 5. The toy's seconds are launches,
    # all else is microseconds, so the table without launches is the one to work out.
    batch = batch_of(chunk=2, start=1, decodes=1, context=5)
    free = dataclasses.replace(TOY, kernel_launch=0.0, attention_launch=0.0)
    times = make_cost_model("analytic", SPEC, free, dtype_bytes=2).operation_times(batch)
    assert times == pytest.approx(
        {
            **{name: matmul_time(3, *shape, free, 2) for name, shape in SHAPES.items()},
            # a tile of 64 queries: 64*1 dense pairs at 4e9 FLOP/s, 64*64 masked at 2e9, 4*2 FLOPs
            # each; the cut into quarters keeps all 4 SMs busy; 3 tokens of 8 bytes at 5e8 bytes/s
            # are too few to count
            "prefill_attention": 8 * 64 / 4e9 + 8 * 4096 / 2e9,
            "decode_attention": 5 * 8 / 5e8,
            "norms": 3
            * (3 * 4 * 2)
            * 2
            / 1e9,  # 3 norms of 3 tokens, 2 rows of 2 read and 2 written
            "activation": 3 * (2 * 4) * 2 / 1e9,
            "kv_write": 3 * (4 * 2) * 2 / 1e9,
            "lm_head": matmul_time(1, 2, 10, free, 2),  # one row emits
            "sampling": 10 * 2 / 1e9,
            "overhead": 0.125,
        },
        rel=1e-6,
    )
    launches = {
        "norms": 3,
        "activation": 1,
        "kv_write": 1,
        "sampling": 1,
        "lm_head": 1,
        "prefill_attention": 3,
    }
    launches |= {"decode_attention": 3, "overhead": 0, **dict.fromkeys(SHAPES, 1)}
    with_launches = make_cost_model("analytic", SPEC, TOY, dtype_bytes=2).operation_times(batch)
    assert with_launches == pytest.approx(
        {name: times[name] + launches[name] for name in times}, abs=1e-3
    )


PROMPT, DECODES, CONTEXT = (
    {"chunk": 1000},
    {"decodes": 17, "context": 1000},
    {"chunk": 512, "start": 8192},
)


@pytest.mark.parametrize(
    ("field", "batch", "at_least"),
    [
        ("flops_per_second", PROMPT, 1.5),
        ("num_sms", DECODES, 1.001),
        ("matmul_efficiency", PROMPT, 1.5),
        ("bytes_per_second", DECODES, 1.5),
        ("memory_efficiency", DECODES, 1.3),
        ("kv_efficiency", DECODES, 1.2),
        ("attention_efficiency", CONTEXT, 1.2),
        ("causal_efficiency", PROMPT, 1.01),
    ],
)
def test_every_rate_has_an_effect(field, batch, at_least):
    base = load_option("hardware", "a6000")
    slower = dataclasses.replace(
        base, **{field: type(getattr(base, field))(getattr(base, field) / 2)}
    )
    if field == "num_sms":  # fewer SMs each do more: what changes is how whole waves fit
        slower = dataclasses.replace(base, num_sms=61)
    times = [
        make_cost_model("analytic", load_option("model", "13b"), gpu, 2).iteration_time(
            batch_of(**batch)
        )
        for gpu in (slower, base)
    ]
    assert times[0] > at_least * times[1]


# Table 2 of the paper, LLaMA-13B on an A6000: prefill of 1024, 4 decodes at 1024, and 1021 + 3
# together.
TABLE_2 = [
    (batch_of(chunk=1024), 0.2348),
    (batch_of(decodes=4, context=1024), 0.04996),
    (batch_of(chunk=1021, decodes=3, context=1024), 0.2384),
]


def test_table_2_within_ten_percent():
    cost = make_cost_model(
        "analytic", load_option("model", "13b"), load_option("hardware", "a6000"), 2
    )
    errors = [abs(cost.iteration_time(batch) / seconds - 1) for batch, seconds in TABLE_2]
    assert sum(errors) / len(errors) < 0.07  # never fitted
    assert max(errors) < 0.1


def test_wider_elements_are_refused_as_the_peaks_are_of_16_bits():
    hardware = load_option("hardware", "a6000")
    assert SimulatedBackend(hardware, "bfloat16").dtype_bytes == 2
    with pytest.raises(
        UserError,
        match=r"dtype=float32 is not .* of 2 bytes.* use one of auto, bfloat16, float16",
    ):
        SimulatedBackend(hardware, "float32")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flops_per_second", 0),
        ("num_sms", 84.5),
        ("matmul_efficiency", 1.2),
        ("attention_launch", float("inf")),
        ("uncertainty", {"matmul": 0.1}),
        ("dtype_bytes", 3),
        ("tables", ""),
        ("network_bytes_per_second", "fast"),
        ("link_efficiency", 1.5),
        ("chunk_splits", 0),
    ],
)
def test_impossible_hardware_is_refused(field, value):
    with pytest.raises(UserError, match=field):
        dataclasses.replace(TOY, **{field: value})


def test_an_error_that_was_never_held_out_is_said_to_be_none():
    gpu = dataclasses.replace(TOY, uncertainty={"matmul": 0.1, "attention": None})
    backend, spec = SimulatedBackend(gpu), load_option("model", "tiny")
    (said, *_) = backend.cautions(spec)
    assert said.endswith("matmul 10%, attention none stated")
    clock = CostBench(make_cost_model("analytic", spec, gpu, gpu.dtype_bytes))
    work = batch(prefill_tokens=8, num_decodes=2, context=8)
    assert np.isfinite(clock.seconds(work, ["ffn"]).draws).all()
    assert np.isnan(clock.seconds(work).draws).all()
