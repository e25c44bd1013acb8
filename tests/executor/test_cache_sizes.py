"""What servers leave to a cache of a device's memory: by hand, as real ones logged it, and by one
rule wherever a cache is sized.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from composed import config_of, refusal_of
from scripts import load_script

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.engine.served_system import DeviceMemory, ServerSetup
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.executor.simulated.kv_capacity import device_memory, served_tokens
from sarathi_lab.model.activations import iteration_bytes
from sarathi_lab.policy import SGLang, TensorRTLLM, VllmV1
from sarathi_lab.policy.systems import (
    GIB,
    MIB,
    OLDER_VLLM_MEMORY,
    SYSTEMS,
    VLLM_MEMORY,
    setup_of,
    vllm_memory,
)
from sarathi_lab.tasks.plan import Plan, make_plan

PAGE = REPOSITORY / "experiments" / "lab" / "cache_sizes"
H100 = load_option("hardware", "h100")
LLAMA = load_option("model", "llama3.1-8b")


def test_servers_share_the_memory_by_their_own_rules() -> None:
    device = DeviceMemory(
        total=80_000 * MIB,
        weights=15e9,
        libraries=1e9,
        iteration=2e9,
        graphs=0.5e9,
        token_budget=8192,
        num_devices=1,
    )
    total = device.total
    rules = {system.name: system.memory for system in SYSTEMS}
    assert rules["vLLM 0.32"].cache_bytes(device) == pytest.approx(0.92 * total - 18.5e9)
    assert rules["vLLM 0.8 (v0)"].cache_bytes(device) == pytest.approx(0.9 * total - 18e9)
    # MiB: 512, 1.5 by token of the chunk, 2 by sequence of the largest graph, 128 by device.
    share = round((80_000 - (512 + 1.5 * 8192 + 2 * 256 + 128)) / 80_000, 3)
    assert rules["SGLang 0.5"].cache_bytes(device) == pytest.approx(share * total - 16e9)
    assert rules["TensorRT-LLM 1.0"].cache_bytes(device) == pytest.approx(0.9 * (total - 18e9))
    lmdeploy = rules["LMDeploy 0.10 (TurboMind)"]
    assert lmdeploy.cache_bytes(device) == pytest.approx(0.8 * (total - 16e9))
    for system in SYSTEMS:
        assert system.memory.source
        assert system.memory.cache_bytes(device, share=0.5) < system.memory.cache_bytes(device)


def test_versions_of_vllm_differ_in_share_and_graphs() -> None:
    assert [vllm_memory(version) for version in ("0.19.0", "0.8")] == [OLDER_VLLM_MEMORY] * 2
    assert [vllm_memory(version) for version in ("0.21.0", "1.0", "")] == [VLLM_MEMORY] * 3


@pytest.mark.parametrize(
    ("model", "peak"),
    [("llama3.1-8b", 1.89), ("qwen3-8b", 2.21), ("qwen3-30b-a3b", 2.68), ("llama2-7b", 0.77)],
)
def test_peaks_of_an_iteration_are_those_that_vllm_logged(model: str, peak: float) -> None:
    """GiB on an H100, with 8,192 tokens and 1,024 sequences; equal on one device and on several."""
    spec = load_option("model", model)
    assert iteration_bytes(spec, 8192, 1024, 2) / GIB == pytest.approx(peak, rel=0.08)
    if model == "llama3.1-8b":
        assert iteration_bytes(spec, 8192, 1024, 2, tensor=4) == iteration_bytes(
            spec, 8192, 1024, 2
        )


def test_the_largest_stage_decides() -> None:
    """Of two stages each has half the layers and the embedding or the head; of four, a quarter."""
    layers, head = LLAMA.layer_weight_bytes(2), LLAMA.lm_head.num_params * 2
    assert Parallel(1, 2).device_weight_bytes(LLAMA, 2) == pytest.approx(layers / 2 + head)
    assert Parallel(2, 4).device_weight_bytes(LLAMA, 2) == pytest.approx((layers / 4 + head) / 2)
    setup = ServerSetup(VLLM_MEMORY, 2048, 256)
    four = device_memory(LLAMA, H100, 2, Parallel(1, 4), setup)
    tokens = served_tokens(LLAMA, H100, 2, setup, Parallel(1, 4))
    token_bytes = LLAMA.kv_bytes_per_token(2) / 4
    assert tokens == int(setup.cache_bytes(four) // token_bytes)


def test_weights_and_caches_in_8_bits_leave_more_tokens() -> None:
    setup = ServerSetup(VLLM_MEMORY, 2048, 256)

    def tokens(weights: str = "auto", kv_dtype: str = "auto") -> int:
        backend = SimulatedBackend(H100, weights=weights)  # type: ignore[arg-type]
        return backend.kv_blocks(replace(LLAMA, kv_dtype=kv_dtype), 1, setup)  # type: ignore[arg-type]

    saved = LLAMA.num_linear_params / LLAMA.kv_bytes_per_token(2)
    assert tokens(weights="fp8") - tokens() == pytest.approx(saved, abs=2)
    assert tokens(kv_dtype="fp8") > 1.9 * tokens()


def test_recorded_points_are_those_of_today() -> None:
    compare = load_script(PAGE / "compare.py")
    table = compare.compare(pd.read_csv(compare.POINTS)).drop(columns=["note"])
    recorded = pd.read_csv(compare.RESULTS)
    pd.testing.assert_frame_equal(table, recorded, check_dtype=False)
    ruled = table[~table.version.str.startswith(compare.OLDER)]
    assert len(ruled) >= 8
    assert ruled.error_simulated.abs().mean() < 0.05
    assert ruled.error_simulated.abs().mean() < 0.7 * ruled.error_share_before.abs().mean()


# -- through settings ------------------------------------------------------------------------------


def plan_of(*settings: str) -> Plan:
    return make_plan(config_of(*settings))


SERVED = ["executor=simulated", "hardware=a100", "model=qwen3-32b", "cache.num_blocks=auto"]
SERVED += ["workload.num_requests=2", "seq_len=512", "baselines=[]", "batch=64"]


@pytest.mark.parametrize(
    ("policy", "made"),
    [
        ("vllm_v1", VllmV1(max_num_batched_tokens=2048)),
        ("sglang", SGLang(chunked_prefill_size=2048)),
        ("trtllm", TensorRTLLM(max_num_tokens=2048)),
        ("sarathi_serve", None),
    ],
)
def test_runs_have_the_cache_of_their_system(policy: str, made: object) -> None:
    plan = plan_of(*SERVED, f"policy={policy}", "chunk=2048")
    budget = made or VllmV1(max_num_batched_tokens=2048)  # a paper's rule has vLLM's memory
    setup = setup_of(budget, 64, plan.max_model_len)  # type: ignore[arg-type]
    assert plan.engine.num_blocks == plan.backend.kv_blocks(plan.spec, 16, setup)


def test_a_stated_share_is_used() -> None:
    def blocks(share: float) -> int:
        return plan_of(*SERVED, "policy=vllm_v1", f"cache.memory_share={share}").engine.num_blocks

    more, fewer = blocks(0.95), blocks(0.9)
    memory = load_option("hardware", "a100").memory_bytes
    block_bytes = 16 * load_option("model", "qwen3-32b").kv_bytes_per_token(2)
    assert more - fewer == pytest.approx(0.05 * memory / block_bytes, abs=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["cache.memory_share=0.7"], ["no room for KV", "gpu_memory_utilization=0.7 of 85.1 GB"]),
        (["cache.memory_share=1.2"], ["cache.memory_share=1.2 exceeds 1"]),
        (["cache.memory_share=0.9", "cache.num_blocks=5000"], ["add cache.num_blocks=auto"]),
        (
            ["seq_len=40000", "batch=1", "cache.memory_share=0.85"],
            ["can never fit", "the cache of a device is"],
        ),
    ],
)
def test_errors_name_the_rule_and_its_numbers(settings: list[str], words: list[str]) -> None:
    said = refusal_of(*SERVED, "policy=vllm_v1", *settings)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("card", "words"),
    [
        # 61 layers, a prime number.
        (["hardware=h100"], "take executor.weights=mxfp4 with executor.tensor_parallel=8, "),
        (["hardware=h200", "executor.tensor_parallel=8"], "by executor.weights=fp8 or mxfp4"),
        (["hardware=h100", "model=llama3.1-405b"], "take 16 devices by executor.tensor_parallel=8"),
    ],
)
def test_a_model_that_does_not_fit_is_told_what_has_room(card: list[str], words: str) -> None:
    settings = ["executor=simulated", "model=deepseek-v3", "cache.num_blocks=auto", *card]
    said = refusal_of("policy=vllm_v1", *settings)
    assert words in said, said
    assert "executor.pipeline_parallel=61" not in said


def test_a_cache_that_does_not_fit_is_no_fault_of_the_layers() -> None:
    model = ["executor=simulated", "model=llama3.1-8b", "hardware=h100"]
    said = refusal_of(*model, "batch=256", "seq_len=8000", "cache.num_blocks=200000")
    assert "take 8 devices by executor.tensor_parallel=8" in said
    said = refusal_of(*model, "batch=64", "seq_len=8000", "cache.num_blocks=500000")
    assert "or take a smaller model" in said


def test_a_real_device_takes_what_is_free() -> None:
    with pytest.raises(UserError, match=r"cache\.memory_share=0\.5 is of simulated servers"):
        plan_of("model=tiny", "seq_len=32", "cache.num_blocks=auto", "cache.memory_share=0.5")
