"""The ridge, and what riding decodes gain at the roofline, against a run's iterations."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from helpers import ScriptedExecutor, requests_of, scheduler_for
from simulated import TWO_LAYERS

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.model.quantisation import Quantisation
from sarathi_lab.model.roofline import (
    Peaks,
    expert_ridge_tokens,
    ridge_tokens,
    riding_gain,
    roofline_time,
)
from sarathi_lab.policy import RequestLevel
from sarathi_lab.results.metrics import add_costs

EQUAL_REQUESTS = pd.DataFrame({"prompt_len": [64] * 4, "output_len": [3] * 4})


@pytest.mark.parametrize("bytes_per_second", [1e3, 1e5, 1e7])
def test_a_product_of_ridge_tokens_computes_as_long_as_it_reads(bytes_per_second):
    peaks = Peaks(1e9, bytes_per_second, "test")
    linear = TWO_LAYERS.layer_linears[0]
    tokens = ridge_tokens(TWO_LAYERS, 2, peaks)
    computing = 2 * tokens * linear.num_params / peaks.flops_per_second
    assert computing == pytest.approx(2 * linear.num_params / peaks.bytes_per_second)


def test_an_expert_has_the_ridge_of_its_own_weights():
    peaks = Peaks(1e9, 1e5, "test")
    experts = Quantisation("4 bits", 0.5, of="experts")
    spec = replace(TWO_LAYERS, num_experts=8, experts_per_token=2, quantisation=experts)
    assert expert_ridge_tokens(spec, 2, peaks) == ridge_tokens(spec, 2, peaks) / 4


def test_nothing_is_gained_where_only_compute_bounds():
    assert riding_gain(TWO_LAYERS, EQUAL_REQUESTS, 4, 2, Peaks(1.0, 1e12, "test")) == 1.0


def test_the_gain_is_request_level_batchings_time_over_that_of_its_flops():
    peaks = Peaks(1e6, 1e5, "decodes wait for memory")
    ledger = Ledger()
    scheduler = scheduler_for(RequestLevel(), batch_size=4)
    run_engine(requests_of(*[(64, 3)] * 4), scheduler, ScriptedExecutor(), ledger)
    iterations = add_costs(ledger.iterations(), TWO_LAYERS, 2, peaks)
    seconds = roofline_time(TWO_LAYERS, iterations, 2, peaks).sum()
    computing = TWO_LAYERS.flops(iterations).sum() / peaks.flops_per_second
    gain = riding_gain(TWO_LAYERS, EQUAL_REQUESTS, 4, 2, peaks)
    assert gain > 1.05
    assert gain == pytest.approx(seconds / computing, rel=0.01)
