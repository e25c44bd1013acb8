"""Latent and linear attention: parameters, FLOPs, bytes, seconds and blocks, by hand from each
model's public config.json.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.experts import Experts
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.executor.simulated.kv_capacity import check_room
from sarathi_lab.executor.simulated.mixed_layers import LatentTimes, LinearTimes, MixedOperations
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.scenario import chunked
from sarathi_lab.extensions.cluster.lockstep import Lockstep, SharedExperts
from sarathi_lab.model.layers import ALIKE, Layers
from sarathi_lab.policy import VllmV1

DEEPSEEK, QWEN, NEMOTRON, NANO = (
    load_option("model", name)
    for name in ("deepseek-v3", "qwen3-next-80b-a3b", "nemotron-h-56b", "nemotron-3-nano-30b-a3b")
)
ALL = (DEEPSEEK, QWEN, NEMOTRON, NANO)
H200 = load_option("hardware", "h200")


def active(spec):
    """Parameters that a token passes."""
    unused = spec.num_experts - spec.experts_per_token
    return spec.num_params - spec.num_expert_params * unused // max(1, spec.num_experts)


@pytest.mark.parametrize(
    ("spec", "stated", "stated_active"),
    [(DEEPSEEK, 671e9, 37e9), (NEMOTRON, 56e9, 56e9), (NANO, 31.6e9, 3.6e9)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parameters_are_those_stated_with_the_models(spec, stated, stated_active):
    assert spec.num_params == pytest.approx(stated, rel=0.006)
    assert active(spec) == pytest.approx(stated_active, rel=0.02)


def test_parameters_by_hand():
    # Latent attention: [7168, 1536 + 576], [1536, 128 * 192], [512, 128 * 256], [128 * 128, 7168].
    attention = 7168 * 2112 + 1536 * 24576 + 512 * 32768 + 16384 * 7168
    ffn = 3 * 7168 * (3 * 18432 + 58 * 257 * 2048) + 58 * 7168 * 256
    assert DEEPSEEK.num_params == 61 * attention + ffn + 2 * 129280 * 7168
    # Queries with their gate 2 * 16 * 256, keys and values 2 * 2 * 256; of the delta rule queries
    # and keys 2 * 16 * 128, values and their gate 2 * 32 * 128, two gates a head.
    attention = 2048 * (8192 + 1024) + 4096 * 2048
    delta = 2048 * (4096 + 8192 + 64) + 4096 * 2048
    ffn = 3 * 2048 * 513 * 512 + 2048 * (512 + 1)
    assert QWEN.num_params == 12 * attention + 36 * delta + 48 * ffn + 2 * 151936 * 2048
    # Mamba-2: inner 256 * 64, its gate, 8 groups of two states of 256, a step size a head.
    mamba = 8192 * (2 * 16384 + 2 * 8 * 256 + 256) + 16384 * 8192
    attention = 8192 * (64 + 2 * 8) * 128 + 8192 * 8192
    layers = 54 * mamba + 10 * attention + 54 * 2 * 8192 * 32768
    assert NEMOTRON.num_params == layers + 2 * 131072 * 8192


def test_bytes_of_caches_and_states():
    assert DEEPSEEK.kv_bytes_per_token(2) == 61 * 576 * 2
    assert DEEPSEEK.state_bytes(2) == DEEPSEEK.state_tokens(2) == 0
    assert replace(DEEPSEEK, kv_dtype="fp8").kv_bytes_per_token(2) == 61 * 576
    assert QWEN.kv_bytes_per_token(2) == 12 * 2 * 2 * 256 * 2
    assert QWEN.state_bytes(2) == 36 * 2 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert QWEN.state_tokens(2) == 1608  # 39.5 MB at 24,576 bytes a token
    assert NEMOTRON.state_bytes(2) == 54 * (4 * 256 * 64 * 256 + 2 * 3 * (16384 + 2 * 8 * 256))
    # Latents, and the products that make them, are on each device.
    for devices in (1, 2):
        parallel = Parallel(tensor=devices)
        rest = B200X16.memory_bytes - parallel.device_weight_bytes(DEEPSEEK, 2)
        tokens = int(rest / 70272)
        check_room(DEEPSEEK, B200X16, 2, parallel, tokens)
        with pytest.raises(UserError, match="for weights and"):
            check_room(DEEPSEEK, B200X16, 2, parallel, tokens + 1)


B200X16 = replace(H200, memory_bytes=16 * 180e9)


def test_flops_of_prompts_and_decodes():
    chunk = make_batch(prefill_tokens=100, start=1000)
    pairs = 100 * 1000 + 5050
    expanded = 61 * (128 * 2 * (192 + 128) * pairs + 2 * 512 * 128 * 256 * 1000)
    assert DEEPSEEK.attention_flops(chunk) == (expanded, 0)
    decode = make_batch(num_decodes=1, context=1000)
    seen = decode.decode_kv_tokens
    absorbed = 61 * 128 * 2 * (576 + 512) * seen
    assert DEEPSEEK.attention_flops(decode) == (0, absorbed)
    # Three products of [128] and [128, 128] in each of 32 heads, and a convolution of 8192 by 4.
    delta = 36 * 2 * (3 * 32 * 128 * 128 + 4 * 8192)
    attention = 12 * 4 * 16 * 256
    assert QWEN.attention_flops(decode) == (0, attention * seen + delta)
    assert QWEN.attention_flops(chunk) == (attention * pairs + 100 * delta, 0)
    moved = QWEN.min_bytes(decode, 2) - replace(QWEN, layers=LESS).min_bytes(decode, 2)
    assert moved == 2 * QWEN.state_bytes(2) + 2 * 36 * (2048 * 12352 + 4096 * 2048)


LESS = replace(QWEN.layers, linear=None)


@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_that_are_alike_after_all_take_as_long(tensor):
    spec = load_option("model", "qwen3-30b-a3b")
    stated = Layers(attention=spec.num_layers, ffn=spec.num_layers)
    parallel, batch = Parallel(tensor=tensor), make_batch(prefill_tokens=64, num_decodes=3)
    as_before = make_cost_model("analytic", spec, H200, 2, parallel)
    mixed = make_cost_model("analytic", replace(spec, layers=stated), H200, 2, parallel)
    assert isinstance(mixed.operations, MixedOperations)
    assert mixed.operation_times(batch) == pytest.approx(as_before.operation_times(batch))


def test_both_kinds_of_attention_take_their_shares_of_the_mean_layer():
    mixed = make_cost_model("analytic", QWEN, H200, 2, Parallel()).operations
    batch, linear = make_batch(num_decodes=3), LinearTimes(QWEN.layers.linear, H200, 2)
    _, alone = AnalyticOperations.attention_times(mixed, batch)
    assert mixed.attention_times(batch)[1] == pytest.approx(alone / 4 + linear.decode(3) * 3 / 4)


@pytest.mark.parametrize("spec", [QWEN, NANO], ids=lambda spec: spec.name)
def test_attention_is_as_uncertain_as_its_worse_kind(spec):
    """Nothing is fitted to Mamba-2's: its error is unknown, and so is that of all attention."""
    cost = make_cost_model("analytic", spec, H200, 2, Parallel())
    known = [error for kind, error in cost.uncertainty.items() if "attention" in kind]
    estimate = CostBench(cost).seconds(chunked(64, 64), ("attn",))
    ends = estimate.ends
    assert np.isnan(ends.high) == np.isnan(np.max(known)) == (spec is NANO)
    if spec is QWEN:
        assert ends.high / estimate.value > 1 + max(known)


def test_experts_in_some_layers_take_their_share_of_the_mean_layer():
    every = replace(NANO, layers=replace(NANO.layers, ffn=None))
    few, many = (Experts(spec, H200, 2) for spec in (NANO, every))
    assert few.seconds(64) == pytest.approx(23 / 52 * many.seconds(64))
    few, many = (SharedExperts(one, Lockstep(num=2)) for one in (few, many))
    for tokens in ((0, 0), (64, 1)):
        assert few.of_all(tokens) == pytest.approx(23 / 52 * many.of_all(tokens))


def test_a_chunk_pays_for_expanding_its_context_again():
    formula = make_cost_model("analytic", DEEPSEEK, H200, 2, Parallel(tensor=8)).operations
    times = LatentTimes(formula, DEEPSEEK.layers.latent)
    cut = sum(times.prefill([(start, 512)]) for start in range(0, 4096, 512))
    expansion = formula.product_time(512 * (8 * 7 // 2), 512, 128 // 8 * 256)
    assert cut > times.prefill([(0, 4096)]) + expansion
    assert times.decode(1, 10**6) > times.decode(1, 10**5) > times.decode(1, 10**3)


def test_linear_attention_has_no_context_and_whole_chunks():
    times = LinearTimes(QWEN.layers.linear, H200, 2)
    assert times.prefill([(0, 640)]) == times.prefill([(9999, 640)])
    half = replace(QWEN.layers.linear, chunk=128)
    assert LinearTimes(half, H200, 2).prefill([(0, 1)]) >= times.prefill([(0, 1)])
    assert times.decode(64) - times.decode(32) == pytest.approx(
        32 * 2 * QWEN.layers.linear.sequence_bytes(2) / H200.memory_rate
    )


@pytest.fixture(scope="module")
def script():
    folder = REPOSITORY / "tools" / "cost_model"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("fit_mixed")


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_times_of_held_out_shapes(script, gpu):
    rows = pd.read_csv(script.ROWS)
    for kind, half in rows[rows.gpu == gpu].groupby("kind"):
        held_out = half[~script.fitted_half(half)].iloc[::5]
        found = np.abs(script.errors(load_option("hardware", gpu), kind, held_out))
        assert np.mean(found) < 0.15, kind


@given(st.integers(0, 5), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_each_sequence_holds_its_states_beside_its_tokens(state_blocks, lengths):
    blocks = BlockManager(40, 4, state_blocks=state_blocks)
    held = []
    for number, length in enumerate(lengths):
        sequence = SequenceState(Request(number, 0.0, length, 1), order=number)
        needed = -(-length // 4) + state_blocks
        assert blocks.admit(sequence, length) == (needed <= 40 - sum(map(len, held)))
        assert len(sequence.block_ids) in (0, needed)
        if sequence.block_ids:
            held.append(sequence.block_ids)
            sequence.num_computed = length
            assert blocks.num_slots(sequence) == 4 * (blocks.num_free + -(-length // 4)) - length
    assert blocks.num_used == sum(map(len, held))


@pytest.mark.parametrize(
    ("budget", "ends"),
    [(12, [8, 16, 20]), (20, [16, 20]), (9, [8, 16, 20]), (5, [5, 8, 13, 16, 20])],
)
def test_aligned_chunks_end_with_blocks(budget, ends):
    """By vLLM's rule; a budget below a block has no whole one."""
    policy, found = VllmV1(max_num_batched_tokens=budget), []
    engine = EngineConfig(policy, 1, 9, 8, max_model_len=30, aligns_chunks=True)
    scheduler = engine.make_engine(policy)
    sequence = scheduler.add(Request(0, 0.0, 20, 2))
    while sequence.num_computed < 20:
        batch = scheduler.schedule(0.0)
        scheduler.update(StepResult(batch, 0.0, 1.0, []))
        found.append(sequence.num_computed)
    assert found == ends


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_what_does_not_compute_them_says_so(spec):
    for refuse in (
        spec.require_runnable,
        lambda: SimulatedBackend(H200, cost_model="profiled").cautions(spec),
    ):
        with pytest.raises(UserError, match=f"{spec.name}.*executor") as caught:
            refuse()
        assert "\n" not in str(caught.value)
    sources = " ".join(SimulatedBackend(H200).cautions(spec))
    assert "a layer's time is the mean" in sources


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"attention": 49}, "layers.attention=49 exceeds"),
        ({"attention": 13}, "layers.linear.num_layers=36 exceeds 35"),
        ({"dense": 3}, "layers.dense=3 needs"),
        ({"dense": 3, "ffn": 2}, "layers.dense=3 exceeds 2"),
        ({"latent": DEEPSEEK.layers.latent}, "num_kv_heads=2"),
        ({"linear": replace(QWEN.layers.linear, num_layers=49)}, "num_layers=49 exceeds"),
        ({"linear": 5}, "layers.linear=5"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_impossible_layers(change, part):
    with pytest.raises(UserError, match=part):
        replace(QWEN, layers=replace(QWEN.layers, **change))
    assert load_option("model", "tiny").layers == ALIKE
