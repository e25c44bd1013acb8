"""Iterations composed of measured kernels: exact at measured sizes, near ones within the stated
reach, and no value elsewhere.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import MEASURED_KERNELS, CostModel, make_cost_model
from sarathi_lab.executor.simulated.measured_kernels import LEAST_NOISE, REACH, bends
from sarathi_lab.executor.tables import read_tables

SERVER = "experiments/lab/real_servers/rtx-4090-llama-3.1-8b/tp1"
MIXTURE = "experiments/lab/real_servers/rtx-pro-6000-qwen3-30b-a3b/tp1"
ISOLATED = "experiments/lab/measured_kernels/tables/h100-qwen3-8b"
POINT = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]


def cost_of(gpu: str, model: str, tables: str, **figures: object) -> CostModel:
    hardware = dataclasses.replace(load_option("hardware", gpu), tables=tables, **figures)
    return make_cost_model(MEASURED_KERNELS, load_option("model", model), hardware, 2)


@pytest.fixture(scope="module")
def server() -> CostModel:
    return cost_of("rtx-4090", "llama3.1-8b", SERVER)


def row_of(*sizes: int) -> float:
    rows = read_tables(SERVER).frames["attention"].set_index(POINT)
    return float(rows.time_us[sizes]) * 1e-6


def test_a_measured_batch_takes_the_seconds_of_its_rows(server):
    batch = make_batch(prefill_tokens=256, start=1024, num_decodes=16, context=2048)
    prefill, decode = server.operations.attention_times(batch)
    assert prefill == pytest.approx(row_of(256, 1024, 0, 0))
    assert prefill + decode == pytest.approx(row_of(256, 1024, 16, 2048))
    dense = read_tables(SERVER).frames["dense"].query("layer == 'qkv_proj' and tokens == 272")
    products = server.operations.times("layer", 272)["qkv_proj"]
    assert products == pytest.approx(float(dense.time_us.iloc[0]) * 1e-6)


def test_two_calls_are_the_sum_of_both_rows():
    cost = cost_of("rtx-4090", "llama3.1-8b", SERVER, hybrid_call=False)
    batch = make_batch(prefill_tokens=256, start=1024, num_decodes=16, context=2048)
    expected = (row_of(256, 1024, 0, 0), row_of(0, 0, 16, 2048))
    assert cost.operations.attention_times(batch) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "is_near"), [(256, True), (int(256 * (1 - REACH)), True), (224, False), (300, False)]
)
def test_a_size_takes_the_nearest_row_within_reach_or_none(server, size, is_near):
    batch = make_batch(prefill_tokens=size, start=1024)
    attention, _ = server.operations.attention_times(batch)
    if is_near:
        assert attention == pytest.approx(row_of(256, 1024, 0, 0))
    else:
        assert math.isnan(attention)


def test_there_is_no_time_past_the_rows_or_between_far_ones(server):
    assert math.isnan(server.operations.times("layer", 4096)["qkv_proj"])
    decodes = make_batch(num_decodes=3, context=1024)  # between 2 and 4
    assert math.isnan(server.iteration_time(decodes))
    assert math.isnan(server.iteration_time(make_batch(prefill_tokens=256, num_prefills=2)))


def test_experts_have_the_seconds_of_their_rows_and_none_past_them():
    cost = cost_of("rtx-pro-6000", "qwen3-30b-a3b", MIXTURE)
    rows = read_tables(MIXTURE).frames["moe"]
    first = rows.query("tokens == 1 and activated_experts == 8").time_us.iloc[0]
    assert cost.experts.seconds(1) == pytest.approx(first * 1e-6)
    most = rows.query("tokens == 2048 and activated_experts == 128").time_us.iloc[0]
    assert cost.experts.seconds(2048) == pytest.approx(most * 1e-6, rel=1e-3)
    assert math.isnan(cost.experts.seconds(2049))


def test_equal_prompts_in_one_call_were_measured_where_rows_say_so():
    cost = cost_of("h100", "qwen3-8b", ISOLATED)
    prompts = make_batch(prefill_tokens=1024, num_prefills=4)
    rows = read_tables(ISOLATED).frames["attention"]
    row = rows.query("num_prefills == 4 and prefill_chunk == 1024 and n_decode == 0")
    seconds, _ = cost.operations.attention_times(prompts)
    assert seconds == pytest.approx(float(row.time_us.iloc[0]) * 1e-6)


def test_tables_without_a_product_are_refused():
    with pytest.raises(UserError, match=r"no measured qkv_proj of model llama3\.1-8b"):
        cost_of("rtx-4090", "llama3.1-8b", str(EXPERIMENTS / "lab/cost_model/tables/rtx-4090"))


def test_the_label_names_who_measured_and_serving_is_refused():
    hardware = dataclasses.replace(load_option("hardware", "rtx-4090"), tables=SERVER)
    backend = SimulatedBackend(hardware, cost_model=MEASURED_KERNELS)
    assert "composed of kernels measured by LLMServingSim" in backend.device_name
    assert "vLLM 0.19.0, 2026-08-17" in backend.device_name
    with pytest.raises(UserError, match=r"serving takes any; use executor\.cost_model=profiled"):
        backend.build(load_option("model", "llama3.1-8b"), None, None)


def test_an_iteration_that_emits_needs_a_measured_output_head():
    cost = cost_of("h100", "qwen3-8b", ISOLATED)
    assert math.isnan(cost.iteration_time(make_batch(num_decodes=1, context=1024)))
    assert not math.isnan(cost.iteration_time(make_batch(prefill_tokens=1024)))


def test_products_are_as_far_off_as_neighbouring_rows_of_the_same_tables_differ(server):
    """Not as those of another card."""
    isolated = cost_of("h100", "qwen3-8b", ISOLATED)
    assert server.uncertainty["matmul"] == LEAST_NOISE
    assert isolated.uncertainty["matmul"] > LEAST_NOISE


def test_a_bend_is_a_share_of_the_line_between_near_rows():
    sizes = np.array([8.0, 16.0, 24.0, 32.0, 320.0])
    seconds = np.array([1.0, 1.5, 2.0, 5.0, 9.0])
    assert bends(sizes, seconds) == pytest.approx([0.0, 2.0 / 3.25 - 1])
