"""Loads a model on the campaign's device, with a cache as large as is wanted or as fits."""

from __future__ import annotations

import math

import torch

from sarathi_lab.campaign.context import Context
from sarathi_lab.errors import UserError
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.torch_executor.backend import USABLE_MEMORY, TorchBackend
from sarathi_lab.torch_executor.device import free_memory_bytes
from sarathi_lab.torch_executor.executor import TorchExecutor

BLOCK_SIZE = 16  # tokens, the lab's default
FEWEST_TOKENS = 64  # of a cache that is worth measuring with


def load(context: Context, spec: ModelSpec, kv_tokens: int, batch_size: int) -> tuple[TorchBackend, TorchExecutor]:
    """The backend and the executor of `spec` with random weights, and room for `kv_tokens` if the device has it."""
    backend = TorchBackend(device=context.device)
    tokens = min(kv_tokens, _room(backend, spec, context))
    backend.check(spec, tokens)
    if tokens < kv_tokens:
        context.say(f"cache of {tokens} instead of {kv_tokens} tokens: what needs more is left out")
    context.say(f"loading {spec.name} in {backend.dtype_name}")
    num_blocks = tokens // BLOCK_SIZE
    executor = backend.build(spec, None, num_blocks=num_blocks, block_size=BLOCK_SIZE, batch_size=batch_size)
    context.say(f"loaded after {context.elapsed:.1f} s")
    return backend, executor


def _room(backend: TorchBackend, spec: ModelSpec, context: Context) -> int:
    """Tokens that a cache may hold beside the weights."""
    free = USABLE_MEMORY * free_memory_bytes(torch.device(context.device))
    left = free - spec.weight_bytes(backend.dtype_bytes)
    tokens = math.floor(left / spec.kv_bytes_per_token(backend.dtype_bytes)) // BLOCK_SIZE * BLOCK_SIZE
    if tokens < FEWEST_TOKENS:
        weights = spec.weight_bytes(backend.dtype_bytes)
        raise UserError(
            f"model {spec.name} needs {weights / 1e9:.1f} GB for weights, {backend.device_name} has "
            f"{free / 1e9:.1f} GB for weights and cache; it can't be measured here, use a GPU with more memory"
        )
    return tokens
