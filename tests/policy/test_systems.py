"""The served systems' defaults: by device where the system chooses so, stated for every policy."""

from __future__ import annotations

import pytest

from sarathi_lab.config.instantiate import class_of, option_files, read_option
from sarathi_lab.engine.served_system import CacheRoom, ServedSystem, ServingDevice
from sarathi_lab.policy.systems import GIB, LMDEPLOY, SGLANG, SYSTEMS, VLLM

A100 = ServingDevice("NVIDIA A100-SXM4-80GB", 81920 * 2**20)
H100 = ServingDevice("h100", 81559 * 2**20)
L40S = ServingDevice("l40s", 46068 * 2**20)
RTX_4090 = ServingDevice("rtx-4090", 24564 * 2**20)
B200 = ServingDevice("b200", 180 * GIB)
ROOM = CacheRoom(400_000, 8192)

OF_PAPERS = {  # and of proposals that no server has
    *("request_level", "orca", "sarathi", "sarathi_serve", "sarathi_serve_dynamic"),
    *("hybrid_only", "chunked_only", "dynamic_chunks", "lars", "preflow"),
    *("highest_response_ratio", "shortest_remaining", "reserve_for_short", "short_request_first"),
    *("slo_budget", "niyama", "lprs", "riding_limit"),
}


def test_a_policy_names_its_system_or_is_of_a_paper() -> None:
    systems = {}
    for name, path in option_files("policy").items():
        node = read_option("policy", path)
        systems[name] = class_of({"policy": node}, "policy").system  # type: ignore[attr-defined]
    assert {name for name, system in systems.items() if system is None} == OF_PAPERS
    assert {system for system in systems.values() if system is not None} == set(SYSTEMS)


@pytest.mark.parametrize(
    ("device", "budget", "sequences", "sglang", "lmdeploy"),
    [
        (A100, 2048, 256, 8192, 384),
        (H100, 8192, 1024, 8192, 1024),
        (L40S, 2048, 256, 4096, 128),
        (RTX_4090, 2048, 256, 2048, 128),
        (B200, 8192, 1024, 16384, 128),
    ],
)
def test_defaults_follow_the_device(
    device: ServingDevice, budget: int, sequences: int, sglang: int, lmdeploy: int
) -> None:
    assert (VLLM.token_budget(device), VLLM.num_sequences(device, ROOM)) == (budget, sequences)
    assert SGLANG.token_budget(device) == sglang
    assert LMDEPLOY.num_sequences(device, ROOM) == lmdeploy


def test_sglang_admits_by_its_cache() -> None:
    """From 2,048 to 4,096 sequences, of two tokens at least."""
    rooms = [(400_000, 8192), (400_000, 131_072), (40_000, 8192), (1000, 8192)]
    numbers = [SGLANG.num_sequences(H100, CacheRoom(*room)) for room in rooms]
    assert numbers == [4096, 2048, 2500, 500]


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: str(system.name))
def test_a_default_budget_has_room_for_the_default_sequences(system: ServedSystem) -> None:
    assert system.source
    for device in (A100, H100, L40S, RTX_4090, B200):
        room = CacheRoom(cache_tokens=device.memory_bytes // 2 // 131_072, context_len=131_072)
        assert system.num_sequences(device, room) <= system.token_budget(device)
