"""Refusals of settings and models, and selection of what computes: Triton, C++ or torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.build import NEEDED, NotBuilt
from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.placement import place
from sarathi_lab.model import native_operations
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.spec import ModelSpec, WeightDtype
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import Fp8Linear, why_not_fp8

INT8 = "int8"  # dtype of products alone, beside bfloat16
FIX = "use executor.kernels=torch"
ISAS = ("auto", *NEEDED)


def check_int8(weights: WeightDtype, uses_gpus: bool, uses_kernels: bool) -> None:
    """Raise UserError where products in int8 do not run."""
    if uses_gpus:
        reason = "it needs a CPU; use executor.weights=fp8 or dtype=bfloat16"
    elif uses_kernels:
        reason = "Triton has no int8 products; use executor.kernels=auto"
    elif weights != "auto":
        reason = f"executor.weights={weights} is another type of the same weights; leave one out"
    else:
        return
    raise UserError(f"dtype=int8 does not run here: {reason}")


def with_weights(
    spec: ModelSpec, weights: WeightDtype, device: torch.device, dtype: torch.dtype
) -> ModelSpec:
    """Return `spec` with the weight type `weights`. Raises UserError if it can't run."""
    spec.require_runnable()
    if spec.num_experts:
        raise UserError(
            f"model {spec.name} is a mixture of experts, which executor=torch does not compute; "
            "use executor=vllm or executor=simulated"
        )
    sizes = [(one.in_features, one.out_features) for one in spec.layer_linears]
    reason = why_not_fp8(sizes, device, dtype) if weights == "fp8" else None
    if reason is not None:
        name, fix = ("dtype", "bfloat16") if weights == "int8" else ("executor.weights", "auto")
        raise UserError(f"{name}={weights} does not run here: {reason}; use {name}={fix}")
    return replace(spec, weight_dtype=weights)


def cautions_of(
    weights: WeightDtype, dtype: str, why_not_native: str | None, on_cpu: bool, by_torch: bool
) -> list[str]:
    """Return what slows products of `weights` down, in the type `dtype`."""
    cautions = []
    if why_not_native is not None:
        cautions.append(f"plain torch computes this, not C++: {why_not_native}")
    if weights == "fp8" and on_cpu:
        cautions.append("a CPU emulates products in 8 bits: their numbers, not their speed")
    elif weights == "fp8":
        cautions.append(f"the roofline is that of products in {dtype}, not in 8 bits")
    elif weights == "int8" and by_torch:
        cautions.append("plain torch emulates products in int8: their numbers, not their speed")
    return cautions


def require_one_stage(backend: Any, what: str) -> None:
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
    from sarathi_kernels.elementwise.quantized_rows import quantize_rows
    from sarathi_lab.model.kernel_operations import KernelOperations

    model.operations = KernelOperations(model.spec, model.inverse_frequencies, hybrid)
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.quantize_rows = quantize_rows


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
