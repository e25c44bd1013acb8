"""The serving systems that policies follow, with the defaults of each: its token budget, its number
of sequences, and what it leaves of a device's memory to the cache.

They are what an operator gets who starts the server and states neither. Where the system chooses by
the device, so do they. A policy names its system in `Policy.system`; rules of papers have none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.served_system import (
    CacheRoom,
    DeviceMemory,
    MemoryRule,
    ServedSystem,
    ServerSetup,
    ServingDevice,
)

WHOLE_PROMPT_TOKENS = 2048  # of vLLM's iterations without chunks, at least
NULL_BLOCKS = 1  # of vLLM's blocks, never allocated from its second engine (V1) on
GPU_MAKERS = ("nvidia", "amd")  # by the installation guides of vLLM, SGLang and TGI
GIB = 2**30
MIB = 2**20


def always(number: int) -> Callable[..., int]:
    """Make a default that is `number` on every device."""
    return lambda *_: number


def fixed_share(value: float) -> Callable[[DeviceMemory], float]:
    """Make a share of the memory that is `value` on every device."""
    return lambda _: value


_vllm_memory = partial(MemoryRule, setting="gpu_memory_utilization")
VLLM_MEMORY = _vllm_memory(
    share=fixed_share(0.92),
    has_graphs=True,
    source=(
        "vllm/config/cache.py, gpu_memory_utilization, and vLLM's pull request 38284: since 0.21 a "
        "larger share than before, which the CUDA graphs must fit into"
    ),
)
OLDER_VLLM_MEMORY = _vllm_memory(
    share=fixed_share(0.9),
    source="vllm/config.py of 0.8 to 0.20, CacheConfig.gpu_memory_utilization",
)
GRAPHS_IN_SHARE = (0, 21)  # the version of vLLM from which VLLM_MEMORY holds


def vllm_memory(version: str) -> MemoryRule:
    """Return the rule of a version of vLLM such as "0.19.0"; today's for an unknown one."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    is_older = len(numbers) == 2 and tuple(numbers) < GRAPHS_IN_SHARE
    return OLDER_VLLM_MEMORY if is_older else VLLM_MEMORY


def _has_large_batches(device: ServingDevice) -> bool:
    """Return whether vLLM gives `device` its large defaults; an A100 loses throughput by them."""
    return device.memory_bytes >= 70 * GIB and "a100" not in device.name.lower()


def _vllm_budget(device: ServingDevice) -> int:
    return 8192 if _has_large_batches(device) else 2048


def _vllm_sequences(device: ServingDevice, room: CacheRoom) -> int:
    return 1024 if _has_large_batches(device) else 256


VLLM = ServedSystem(
    name="vLLM 0.32",
    token_budget=_vllm_budget,
    num_sequences=_vllm_sequences,
    # Of the API server; its offline class takes 16384 and 8192 tokens. On a CPU others hold.
    source="vllm/engine/arg_utils.py, EngineArgs.get_batch_defaults, usage context API server",
    memory=VLLM_MEMORY,
    makers=GPU_MAKERS,
)

VLLM_V0 = ServedSystem(
    name="vLLM 0.8 (v0)",
    # Of chunked prefill; without it the budget is max(max_model_len, 2048).
    token_budget=always(2048),
    num_sequences=always(256),
    source="vllm/config.py of 0.8, _DEFAULT_MAX_NUM_BATCHED_TOKENS, and EngineArgs.max_num_seqs",
    memory=OLDER_VLLM_MEMORY,
    makers=GPU_MAKERS,
)

VLLM_ASCEND = ServedSystem(
    name="vLLM-Ascend 0.18",
    # vLLM's function on NPUs, which have 64 GiB and so the small defaults. So has a GPU
    # of any memory on which their rule is simulated here.
    token_budget=always(2048),
    num_sequences=always(256),
    source="vllm/engine/arg_utils.py, EngineArgs.get_batch_defaults, on a device below 70 GiB",
    # Of vLLM 0.18, whose worker it has.
    memory=OLDER_VLLM_MEMORY,
    makers=("huawei",),
)

# MiB of memory below which SGLang takes a chunk of so many tokens; above the last, 16384.
SGLANG_CHUNKS = ((35 * 1024, 2048), (60 * 1024, 4096), (160 * 1024, 8192))


def _sglang_budget(device: ServingDevice) -> int:
    memory = device.memory_bytes / MIB
    for limit, chunk in SGLANG_CHUNKS:
        if memory < limit:
            return chunk
    return 16384


# MiB of memory below which SGLang records CUDA graphs for batches of so many decodes, on fewer than
# four devices and on four or more.
SGLANG_GRAPHS = (
    *((20 * 1024, 8, 8), (35 * 1024, 24, 80), (60 * 1024, 32, 160), (160 * 1024, 256, 512)),
)
SGLANG_LARGE = 60 * 1024  # MiB of memory above which it keeps at least SGLANG_KEPT
SGLANG_KEPT = 10 * 1024


def _sglang_share(device: DeviceMemory) -> float:
    """What is kept, in MiB, is for metadata, activations by the chunk, graphs by their largest
    batch, and the devices.
    """
    memory = device.total / MIB
    graph_batch = 512
    for limit, alone, together in SGLANG_GRAPHS:
        if memory < limit:
            graph_batch = alone if device.num_devices < 4 else together
            break
    reserved = 512 + 1.5 * max(device.token_budget, 2048) + 2 * graph_batch
    reserved += device.num_devices / 8 * 1024
    if memory > SGLANG_LARGE:
        reserved = max(reserved, SGLANG_KEPT)
    return round((memory - reserved) / memory, 3)


def _sglang_sequences(device: ServingDevice, room: CacheRoom) -> int:
    """512 for each context that the cache holds, from 2048 to 4096, but two tokens each at least:
    no limit in practice, as SGLang admits by the cache.
    """
    by_contexts = int(room.cache_tokens / room.context_len * 512)
    return max(1, min(max(2048, min(by_contexts, 4096)), room.cache_tokens // 2))


SGLANG = ServedSystem(
    name="SGLang 0.5",
    token_budget=_sglang_budget,
    num_sequences=_sglang_sequences,
    source=(
        "python/sglang/srt/server_args.py (chunked_prefill_size by memory) and "
        "model_executor/model_runner_kv_cache_mixin.py, _resolve_max_num_reqs"
    ),
    memory=MemoryRule(
        setting="mem_fraction_static",
        share=_sglang_share,
        has_iteration=False,  # which lies in what the share leaves
        source="python/sglang/srt/server_args.py, _handle_gpu_memory_settings",
    ),
    makers=GPU_MAKERS,
)

TENSORRT_LLM = ServedSystem(
    name="TensorRT-LLM 1.0",
    token_budget=always(8192),
    num_sequences=always(2048),
    source="tensorrt_llm/llmapi/llm_args.py, max_num_tokens and max_batch_size",
    memory=MemoryRule(
        setting="free_gpu_memory_fraction",
        share=fixed_share(0.9),
        is_of_free=True,
        source="tensorrt_llm/llmapi/llm_args.py, KvCacheConfig, of what a profiled run leaves",
    ),
    makers=("nvidia",),
)

TGI = ServedSystem(
    name="TGI 3",
    # The launcher's for a card whose FLOP/s it does not list; of others it divides the card's
    # FLOP/s by the model's per token.
    token_budget=always(4096),
    # max_concurrent_requests: further ones are refused there, and wait here.
    num_sequences=always(128),
    source="launcher/src/main.rs, max_batch_prefill_tokens, and the launcher's reference",
    memory=MemoryRule(
        setting="TGI_WIGGLE_ROOM",
        share=fixed_share(0.9),
        is_of_free=True,
        source="server/text_generation_server/models/globals.py, of what a warm-up leaves",
    ),
    makers=GPU_MAKERS,
)

# Sequences by a part of the device's name; 128 on others.
LMDEPLOY_SEQUENCES = {
    "a100": 384,
    "a800": 384,
    "h100": 1024,
    "h800": 1024,
    "l20y": 1024,
    "h200": 1024,
}


def _lmdeploy_sequences(device: ServingDevice, room: CacheRoom) -> int:
    for name, number in LMDEPLOY_SEQUENCES.items():
        if name in device.name.lower():
            return number
    return 128


_lmdeploy = partial(
    ServedSystem,
    num_sequences=_lmdeploy_sequences,
    source="lmdeploy/messages.py, max_prefill_token_num, and utils.py, get_max_batch_size",
    memory=MemoryRule(
        setting="cache_max_entry_count",
        share=fixed_share(0.8),
        is_of_free=True,
        has_iteration=False,
        source="lmdeploy/messages.py, cache_max_entry_count, of what the weights leave",
    ),
)
LMDEPLOY = _lmdeploy(name="LMDeploy 0.10 (TurboMind)", token_budget=always(8192))
LMDEPLOY_PYTORCH = _lmdeploy(name="LMDeploy 0.10 (PyTorch)", token_budget=always(4096))

LIGHTLLM = ServedSystem(
    name="LightLLM of 2025",
    # Twice a piece of 4096 tokens, and 256.
    token_budget=always(8448),
    num_sequences=always(1000),
    source="lightllm/server/api_cli.py, chunked_prefill_size and running_max_req_size",
    memory=MemoryRule(
        setting="mem_fraction",
        share=fixed_share(0.9),
        source="lightllm/server/api_cli.py, mem_fraction",
    ),
)

FASTDEPLOY = ServedSystem(
    name="FastDeploy 2",
    token_budget=always(8192),
    num_sequences=always(8),
    source=(
        "fastdeploy/engine/args_utils.py (8192 with ENABLE_V1_KVCACHE_SCHEDULER) and "
        "docs/parameters.md, max_num_seqs"
    ),
    memory=MemoryRule(
        setting="gpu_memory_utilization",
        share=fixed_share(0.9),
        source="docs/parameters.md, gpu_memory_utilization",
    ),
)

# Of systems that size their cache by other rules or by the operator, and of rules of papers.
OTHER_MEMORY = VLLM_MEMORY

DEEPSPEED = ServedSystem(
    name="DeepSpeed-MII",
    token_budget=always(768),
    num_sequences=always(512),
    source="deepspeed/inference/v2/ragged/manager_configs.py, DSStateManagerConfig",
    memory=OTHER_MEMORY,
)

OPENVINO = ServedSystem(
    name="OpenVINO GenAI 2026",
    token_budget=always(256),
    num_sequences=always(256),
    source="openvino/genai/scheduler_config.hpp, max_num_batched_tokens and max_num_seqs",
    memory=OTHER_MEMORY,
)

TRANSFORMERS = ServedSystem(
    name="transformers 5.23",
    token_budget=always(8192),
    num_sequences=always(1024),
    # That 8192 tokens are the upper bound was read for the policy, in cache.py.
    source="generation/continuous_batching/initialization.py, max_requests_per_batch",
    memory=OTHER_MEMORY,
)

NANO_VLLM = ServedSystem(
    name="nano-vLLM of 2026",
    token_budget=always(16384),
    num_sequences=always(512),
    source="nanovllm/config.py, max_num_batched_tokens and max_num_seqs",
    memory=MemoryRule(
        setting="gpu_memory_utilization",
        share=fixed_share(0.9),
        source="nanovllm/config.py, gpu_memory_utilization",
    ),
)

LLAMA_CPP = ServedSystem(
    name="llama.cpp of 2026",
    token_budget=always(512),
    num_sequences=always(4),
    source="common/common.h, n_ubatch, and tools/server/server.cpp, n_parallel where it is auto",
    memory=OTHER_MEMORY,
)

SYSTEMS = (
    *(VLLM, VLLM_V0, VLLM_ASCEND, SGLANG, TENSORRT_LLM, TGI, LMDEPLOY, LMDEPLOY_PYTORCH, LIGHTLLM),
    *(FASTDEPLOY, DEEPSPEED, OPENVINO, TRANSFORMERS, NANO_VLLM, LLAMA_CPP),
)


def setup_of(
    policy: Policy | None, num_sequences: int, max_model_len: int, share: float | None = None
) -> ServerSetup:
    """Return how the system of `policy` is started: with its budget, or for the longest prompt
    where that is not known or cuts no prompt, as vLLM has it. A paper's rule, and none, has vLLM's
    memory.
    """
    rule = OTHER_MEMORY
    budget: object = None
    if policy is not None:
        if policy.system is not None:
            rule = policy.system.memory
        rule = replace(rule, window_pool=policy.window_pool)
        budget = policy.budget
    if not isinstance(budget, int):
        budget = max(max_model_len, WHOLE_PROMPT_TOKENS)
    return ServerSetup(rule, budget, num_sequences, share)
