"""Refusals of settings and models, and selection of what computes: Triton, C++ or torch."""

from __future__ import annotations

from functools import cache

import torch

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.build import NEEDED, NotBuilt
from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Backend
from sarathi_lab.executor.placement import place
from sarathi_lab.model import native_operations
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer

FIX = "use executor.kernels=torch"
ISAS = ("auto", *NEEDED)


def require_computed(spec: ModelSpec) -> None:
    """Raise UserError for a model or a cache that is computed by vLLM alone."""
    spec.require_runnable()
    reason = ""
    if spec.num_experts:
        reason = f"model {spec.name} is a mixture of experts"
    if spec.kv_dtype != "auto":
        reason = f"cache.dtype={spec.kv_dtype} is a cache in 8 bits"
    if reason:
        raise UserError(
            f"{reason}, which executor=torch does not compute; use executor=vllm or "
            "executor=simulated"
        )


def require_one_stage(backend: Backend, what: str) -> None:
    """Raise UserError for a pipeline, where `what` times single iterations."""
    if backend.num_stages > 1:
        raise UserError(
            f"{what} times iterations of one stage, not of {backend.num_stages}; leave out "
            "executor.pipeline_parallel"
        )


def require_supported(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError unless kernels run on `device` and take the model's heads and `dtype`."""
    try:
        from sarathi_kernels.attention.support import check_supported
        from sarathi_kernels.runtime.support import probe, require_chip
    except ImportError as error:
        raise UserError(f"Triton is not installed ({error}); {FIX}") from None
    try:
        check_supported(spec.head_size, dtype, block_size=1)  # blocks of any size will do
        require_chip(chip_of(device))
        if device.type == "cuda":
            probe(device)
    except ValueError as error:
        raise UserError(f"model {spec.name}: {error}; {FIX}") from None


def use_triton(model: Transformer, hybrid: Hybrid) -> None:
    """Let Triton compute all but the matrix products of `model`."""
    from sarathi_lab.model.kernel_operations import KernelOperations

    model.operations = KernelOperations(model.spec, model.inverse_frequencies, hybrid)


@cache
def why_not_built(isa: str) -> str | None:
    """Return why the C++ of the instructions `isa` can't be built; None if it can."""
    try:
        library.load(isa)
    except NotBuilt as error:
        return str(error)
    return None


def use_native(model: Transformer, *, isa: str = "auto") -> None:
    """Let C++ compute `model`, each iteration in one call."""
    library.start(torch.get_num_threads(), isa=isa)
    library.place(*place(torch.get_num_threads()))
    operations = native_operations.NativeOperations(model)
    model.operations = operations
    model.whole_pass = operations.whole_pass
