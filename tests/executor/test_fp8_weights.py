"""Weights, activations and caches in 8 bits, simulated; refused by the lab's own engine."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from sarathi_lab.config.console import amount
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.model.quantisation import STORED
from sarathi_lab.model.roofline import operation_rooflines, ridge_tokens
from sarathi_lab.results.metrics import RunTables
from tests.support.simulated import SPEC, TOY, batch_of

# As fast at products of 8 bits as at others, and launched for nothing.
GPU = replace(
    TOY,
    kernel_launch=0.0,
    fp8_flops_per_second=TOY.flops_per_second,
    fp8_efficiency=TOY.matmul_efficiency,
)
PRODUCTS = ("qkv_proj", "out_proj", "ffn_up", "ffn_down")
FP8 = replace(SPEC, weight_dtype="fp8")


def test_the_layers_weights_take_half_and_the_heads_what_they_took():
    saved = SPEC.weight_bytes(2) - FP8.weight_bytes(2)
    assert saved == SPEC.num_linear_params
    assert SPEC.weight_read_bytes(batch_of(decodes=1), 2) - FP8.weight_read_bytes(
        batch_of(decodes=1), 2
    ) == pytest.approx(saved)


def test_a_product_bound_by_memory_reads_half_and_its_activations_are_converted():
    slow = replace(GPU, flops_per_second=1e18, fp8_flops_per_second=1e18)  # memory is the bound
    times = {
        weights: SimulatedBackend(slow, weights=weights)
        .predictor(SPEC)
        .operation_times(batch_of(decodes=1))
        for weights in ("auto", "fp8")
    }
    for name, linear in zip(PRODUCTS, SPEC.layer_linears, strict=True):
        conversion = 3 * linear.in_features / GPU.memory_rate
        assert times["fp8"][name] == pytest.approx(times["auto"][name] / 2 + conversion)
    assert times["fp8"]["lm_head"] == times["auto"]["lm_head"]


def test_a_product_bound_by_compute_goes_by_its_own_peak():
    fast = replace(GPU, bytes_per_second=1e18)  # nothing waits for memory
    twice = replace(fast, fp8_flops_per_second=2 * GPU.flops_per_second)
    own, faster = (
        SimulatedBackend(gpu, weights="fp8").predictor(SPEC).operation_times(batch_of(chunk=64))
        for gpu in (fast, twice)
    )
    for name in PRODUCTS:
        assert faster[name] == pytest.approx(own[name] / 2)


def test_products_in_4_bits_go_by_their_own_peak_where_the_card_states_one():
    fast = replace(GPU, bytes_per_second=1e18)
    eightfold = replace(fast, fp4_flops_per_second=8 * GPU.flops_per_second)

    def times(gpu, weights):
        backend = SimulatedBackend(gpu, weights=weights)
        return backend.predictor(SPEC).operation_times(batch_of(chunk=64))

    for name in PRODUCTS:
        plain = times(fast, "auto")[name]
        assert times(fast, "nvfp4")[name] == pytest.approx(plain)  # only stored so
        assert times(eightfold, "nvfp4")[name] == pytest.approx(plain / 8)
        assert times(eightfold, "int8")[name] == pytest.approx(plain)
        assert times(fast, "w8a8")[name] == times(fast, "int8")[name]  # fp8's peak is no integers'
    (caution,) = (
        line
        for line in SimulatedBackend(eightfold, weights="nvfp4").cautions(SPEC)
        if "4-bit products" in line
    )
    assert "none in 4-bit products was measured" in caution


def test_weights_in_4_bits_take_nine_sixteenths_of_a_byte():
    nvfp4 = replace(SPEC, weight_dtype="nvfp4")
    saved = SPEC.weight_bytes(2) - nvfp4.weight_bytes(2)
    assert saved == pytest.approx(SPEC.num_linear_params * (2 - 9 / 16), abs=1)


def test_integers_of_8_bits_have_a_rate_of_their_own_where_one_is_stated():
    without = replace(GPU, fp8_flops_per_second=None)
    ampere = replace(without, int8_flops_per_second=2 * GPU.flops_per_second)
    chunk = batch_of(chunk=512)

    def time_of(gpu, weights):
        backend = SimulatedBackend(gpu, weights=weights)
        return backend.predictor(SPEC).operation_times(chunk)["ffn_up"]

    assert time_of(ampere, "w8a8") < 0.7 * time_of(without, "w8a8")
    assert time_of(ampere, "auto") == time_of(without, "auto")
    said = " ".join(SimulatedBackend(without, weights="w8a8").cautions(SPEC))
    assert "hardware.int8_flops_per_second of toy is not stated" in said


# mxfp4 is of experts, which this model has not.
@pytest.mark.parametrize("weights", sorted({*STORED, "auto"} - {"mxfp4"}))
def test_ridge_and_peak_are_those_of_the_products(weights):
    peak = GPU.flops_per_second
    rates = {"int8_flops_per_second": 1.5 * peak, "fp4_flops_per_second": 4 * peak}
    gpu = replace(GPU, fp8_flops_per_second=2 * peak, **rates)
    products = gpu.for_products(STORED.get(weights)) or gpu
    in_checkpoint = replace(SPEC, quantisation=STORED.get(weights))
    stated = replace(SPEC, weight_dtype=weights)
    for spec, of_run in ((stated, weights), (in_checkpoint, "auto")):
        peaks = SimulatedBackend(gpu, weights=of_run).peaks().times(4)
        assert peaks.rate(spec) == 4 * products.flops_per_second
        assert peaks.flops_per_second == 4 * peak  # attention's
        assert f"{amount(4 * products.flops_per_second / 1e12)} TFLOP/s" in peaks.describe(spec)
        at_ridge = 2 * ridge_tokens(spec, 2, peaks) / products.flops_per_second
        assert at_ridge == pytest.approx(spec.linear_bytes(2) / gpu.bytes_per_second)


@pytest.mark.parametrize("weights", ["fp8", "w8a8"])
def test_hardware_without_such_a_peak_reads_fewer_bytes_into_the_models_products(weights):
    def times_and_cautions(weights):
        backend = SimulatedBackend(TOY, weights=weights)
        backend.check(SPEC, 0)
        times = backend.predictor(SPEC).operation_times(batch_of(chunk=64))
        return times, " ".join(backend.cautions(SPEC))

    times, cautions = times_and_cautions(weights)
    only_stored, _ = times_and_cautions("int8")
    assert times == only_stored
    assert "run at the rate of the model's type" in cautions
    assert f"hardware.{STORED[weights].product_type}_flops_per_second of toy" in cautions


def test_experts_in_8_bits_are_read_in_half_the_time():
    mixture = replace(SPEC, num_experts=2, experts_per_token=1)
    gpu = replace(GPU, bytes_per_second=1.0, fp8_flops_per_second=1e18, flops_per_second=1e18)
    own, faster = (
        SimulatedBackend(gpu, weights=weights)
        .predictor(mixture)
        .operation_times(batch_of(decodes=1))
        for weights in ("auto", "fp8")
    )
    assert faster["experts"] == pytest.approx(own["experts"] / 2, rel=1e-6)


def test_bytes_of_a_token_in_a_cache_of_8_bits():
    spec = load_option("model", "13b")
    assert spec.kv_bytes_per_token(2) == 2 * 40 * 40 * 128 * 2
    for kv_dtype in ("int8", "fp8"):
        in_8_bits = replace(spec, kv_dtype=kv_dtype).kv_bytes_per_token(2)
        assert in_8_bits == 2 * 40 * 40 * (128 + 4)
    with pytest.raises(UserError, match=r"kv_dtype=int4 is unknown \(did you mean int8\?\)"):
        replace(spec, kv_dtype="int4")


def test_a_simulation_says_what_it_does_not_count():
    spec = replace(load_option("model", "13b"), kv_dtype="fp8")
    backend = SimulatedBackend(load_option("hardware", "a6000"))
    assert any("cache.dtype=fp8" in line for line in backend.cautions(spec))
    profiled = SimulatedBackend(load_option("hardware", "a6000"), cost_model="profiled")
    with pytest.raises(UserError, match=r"cache\.dtype=auto, not with .*=fp8; use"):
        profiled.check(spec, 16)


@pytest.mark.parametrize(("weights", "card"), [("w8a8", "h100"), ("fp8", "a100")])
def test_tables_have_no_weights_of_other_products(weights, card):
    hardware = load_option("hardware", card)
    backend = SimulatedBackend(hardware, weights=weights, cost_model="profiled")
    spec = backend.with_weights(load_option("model", "llama3-8b"), None)
    with pytest.raises(UserError, match=f"has {weights} on {card}; use executor.cost_model=analyt"):
        backend.check(spec, 16)


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("cache.dtype=int8", "use executor=vllm or executor=simulated"),
        ("dtype=int8", '{quantization: fp8_per_channel}" with executor=vllm'),
        ("executor.weights=fp8", "add executor=simulated"),
    ],
)
def test_the_labs_own_engine_names_what_computes_8_bits(setting, fix, refused):
    assert fix in refused("model=tiny", "device=cpu", setting)


def test_attention_is_bound_by_the_peak_of_the_models_type():
    gpu = replace(GPU, fp8_flops_per_second=4 * GPU.flops_per_second, bytes_per_second=1e18)
    prompt = batch_of(chunk=64)
    plain, low = (
        operation_rooflines(
            replace(SPEC, weight_dtype=weights),
            prompt,
            2,
            SimulatedBackend(gpu, weights=weights).peaks(),
        )
        for weights in ("auto", "fp8")
    )
    assert low["attention_prefill"] == plain["attention_prefill"]
    assert low["ffn_up"] == pytest.approx(plain["ffn_up"] / 4)


@pytest.mark.parametrize(("weights", "times"), [("auto", 1), ("fp8", 2)])
def test_a_runs_peak_is_that_of_which_its_mfu_is_the_share(weights, times):
    gpu = replace(GPU, fp8_flops_per_second=2 * GPU.flops_per_second)
    of_checkpoint = replace(SPEC, quantisation=STORED.get(weights))
    peaks = SimulatedBackend(gpu).peaks()
    run = RunTables(pd.DataFrame(), pd.DataFrame(), peaks, spec=of_checkpoint)
    assert run.peak_flops_per_second == times * GPU.flops_per_second
