"""Mixtures of experts: their counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated import SPEC, batch_of
from simulated import TOY as GPU

from sarathi_lab.executor.simulated.cost_model import KINDS, make_cost_model
from sarathi_lab.model.roofline import Peaks, operation_rooflines

# Of 3 experts with 2 x 4 and 4 x 2 weights a token passes 2, and always one of 2 x 5 and 5 x 2.
TOY = replace(SPEC, num_experts=3, experts_per_token=2, shared_expert_size=5)
ATTENTION, ROUTER, SHARED, SHARED_GATE, EXPERT = 2 * 6 + 2 * 2, 2 * 3, 2 * 2 * 5, 2, 2 * 2 * 4


def test_a_mixture_by_hand():
    always = ATTENTION + ROUTER + SHARED + SHARED_GATE
    assert TOY.num_linear_params == always + 3 * EXPERT == 44 + 48
    assert TOY.num_params == 92 + 2 * 20  # embedding and output head
    assert TOY.weight_bytes(2) == 2 * 132
    work = batch_of(decodes=4)
    head_bytes = 2 * 20
    chosen = 3 * (1 - (1 / 3) ** 4)  # experts; each token leaves out one of three
    assert TOY.weight_read_bytes(work, 2) == pytest.approx(2 * (44 + chosen * 16) + head_bytes)
    attention = 4 * TOY.num_layers * TOY.q_size * work.decode_kv_tokens
    assert TOY.flops(work) == 2 * 4 * (44 + 2 * 16) + 2 * 4 * 20 + attention
    gated = replace(TOY, gated_ffn=True)  # a third more of every expert
    assert gated.num_linear_params == 92 + 10 + 3 * 8
    assert gated.flops(work) == TOY.flops(work) + 2 * 4 * (10 + 2 * 8)


def test_the_rooflines_of_a_mixtures_products_by_hand():
    """At 1 FLOP/s and no end of bandwidth, seconds are FLOPs."""
    times = operation_rooflines(TOY, batch_of(decodes=4), 2, Peaks(1.0, 1e30, "by hand"))
    found = [times[name] for name in ("router", "shared_up", "shared_down", "shared_gate")]
    assert found == pytest.approx([2 * 4 * params for params in (6, 10, 10, 2)])
    assert times["ffn_up"] == times["ffn_down"] == pytest.approx(2 * 4 * 2 * 8)


def test_a_simulated_iteration_has_the_shared_expert_among_its_ffn():
    cost, batch = make_cost_model("analytic", TOY, GPU, 2), batch_of(decodes=4)
    times = cost.operation_times(batch)
    assert {"shared_up", "shared_down", "shared_gate", "activation"} <= {*times} & {*KINDS["ffn"]}
    assert sum(times.values()) == pytest.approx(cost.iteration_time(batch))
