"""Loads a model on the campaign's device, with a cache as large as is wanted or as fits."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import torch

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.tasks.gpu.context import Context

BLOCK_SIZE = 16  # tokens, the lab's default


def load(
    context: Context,
    spec: ModelSpec,
    *,
    kv_tokens: int,
    batch_size: int,
    longest: int,
    backend: TorchBackend | None = None,
) -> tuple[TorchBackend, TorchExecutor]:
    """The backend, and the executor of `spec` with random weights and room for `kv_tokens` if the
    device has it.

    Unless `backend` is given it is the usual one of the device. Iterations may have as many tokens
    as the cache. Raises UserError if the weights do not fit.
    """
    backend = backend or TorchBackend(device=context.device)
    backend.check(spec, BLOCK_SIZE)
    context.say(f"loading {spec.name} in {backend.dtype_name}")
    sizes = Sizes(
        num_blocks=math.ceil(kv_tokens / BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        batch_size=batch_size,
        max_model_len=longest,
        max_batch_tokens=kv_tokens,
    )
    try:
        executor = backend.build(spec, None, sizes)
    except RunError as error:
        context.say(f"{error}; trying with all the memory there is, what needs more is left out")
        executor = None
    if executor is None:  # outside the handler, whose traceback would keep the first model
        gc.collect()
        if context.device != "cpu":
            torch.cuda.empty_cache()
        executor = backend.build(
            spec, None, replace(sizes, max_batch_tokens=longest, fills_memory=True)
        )
    context.say(
        f"loaded after {context.elapsed:.1f} s, cache of {executor.num_blocks * BLOCK_SIZE} tokens"
    )
    return backend, executor
