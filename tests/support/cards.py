"""GPUs that are not there, as far as the checks of a command ask torch and vLLM for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sarathi_kernels.runtime import chip, support
from sarathi_lab.executor import device as devices
from sarathi_lab.executor.vllm import workers as vllm

CONTEXT_BYTES = 0.5e9  # that the driver and torch take before a model


@dataclass(frozen=True)
class Card:
    """A GPU: its memory as torch.cuda reports it, and its chip."""

    name: str
    memory_bytes: float
    capability: tuple[int, int]
    num_sms: int
    shared_memory: int  # bytes of a block at most


# Memory: conf/hardware/*.yaml, which state sources; of the RTX 5090, L4 and A10 what nvidia-smi
# shows (32,607, 23,034 and 23,028 MiB) less 0.5e9 bytes, about what the driver keeps.
CARDS = (
    Card("NVIDIA H100 80GB HBM3", 85.0e9, (9, 0), 132, 232_448),
    Card("NVIDIA A100-SXM4-80GB", 85.1e9, (8, 0), 108, 166_912),
    Card("NVIDIA A100-SXM4-40GB", 42.3e9, (8, 0), 108, 166_912),
    Card("NVIDIA GeForce RTX 5090", 33.7e9, (12, 0), 170, 101_376),
    Card("NVIDIA GeForce RTX 4090", 25.25e9, (8, 9), 128, 101_376),
    Card("NVIDIA L4", 23.7e9, (8, 9), 58, 101_376),
    Card("NVIDIA A10", 23.6e9, (8, 6), 72, 101_376),
)


@contextmanager
def card_present(card: Card, vllm_version: str) -> Iterator[None]:
    """Within, torch sees one idle `card`, and a vLLM of a version for CUDA is installed. Nothing
    can be computed or allocated there.
    """
    free = int(card.memory_bytes - CONTEXT_BYTES)
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=int(card.memory_bytes),
        multi_processor_count=card.num_sms,
        shared_memory_per_block_optin=card.shared_memory,
        uuid="GPU-0",
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "mem_get_info": (free, int(card.memory_bytes)),
        "get_device_name": card.name,
        "get_device_capability": card.capability,
        "get_device_properties": properties,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
        patch.setattr(devices, "prepare_memory", lambda device: None)
        patch.setattr(support, "doubled", lambda device: 2 * support.PROBED)
        for name, content in _vllm_modules(vllm_version).items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        _forget_cached()
        try:
            yield
        finally:
            _forget_cached()


def _vllm_modules(version: str) -> dict[str, dict[str, Any]]:
    """Return what checks import of vLLM, by module."""
    names = ["quantization", "attention_backend", "kv_cache_dtype", "gpu_memory_utilization"]
    arguments = make_dataclass("EngineArgs", [(name, Any, None) for name in names])
    return {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cuda")},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": arguments},
    }


def _forget_cached() -> None:
    chip._cuda_chip.cache_clear()
    vllm.version.cache_clear()
