"""What a backend refuses, and the interface of the module that runs several devices."""

from __future__ import annotations

from dataclasses import replace

import torch

from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.torch.device import has_fast_path
from sarathi_lab.model.eight_bit import why_not_fp8
from sarathi_lab.model.spec import ModelSpec, WeightDtype

INT8 = "int8"  # dtype of products alone, beside bfloat16


def check_int8(
    weights: WeightDtype, tensor_parallel: int, uses_gpus: bool, uses_kernels: bool
) -> None:
    """Raise UserError where products in int8 do not run."""
    for fails, reason, fix in (
        (uses_gpus, "it needs a CPU", "use executor.weights=fp8 or dtype=bfloat16"),
        (uses_kernels, "Triton has no int8 products", "use executor.kernels=auto"),
        (
            weights != "auto",
            f"executor.weights={weights} is another type of the same weights",
            "leave one of them out",
        ),
        (
            tensor_parallel > 1,
            f"executor.tensor_parallel={tensor_parallel} cuts the rows of its scales",
            "use executor.pipeline_parallel or dtype=bfloat16",
        ),
    ):
        if fails:
            raise UserError(f"dtype=int8 does not run here: {reason}; {fix}")


def with_weights(
    spec: ModelSpec, weights: WeightDtype, device: torch.device, dtype: torch.dtype
) -> ModelSpec:
    """Return `spec` with the weight type `weights`. Raises UserError if it can't run."""
    spec.require_runnable()
    setting = "dtype=int8" if weights == "int8" else f"executor.weights={weights}"
    reason = None
    if weights == "fp8":
        sizes = [(one.in_features, one.out_features) for one in spec.layer_linears]
        reason = why_not_fp8(sizes, device, dtype)
    if weights != "auto" and spec.num_experts:
        reason = f"model {spec.name} is a mixture of experts"
    if reason is not None:
        fix = setting.partition("=")[0] + ("=bfloat16" if weights == "int8" else "=auto")
        raise UserError(f"{setting} does not run here: {reason}; use {fix}")
    return replace(spec, weight_dtype=weights)


def cautions_of(
    weights: WeightDtype,
    dtype: tuple[str, torch.dtype],
    why_not_native: str | None,
    on_cpu: bool,
    by_torch: bool,
) -> list[str]:
    """Return what slows products of `weights` down, in a type that is given with its name."""
    cautions, (name, torch_dtype) = [], dtype
    if why_not_native is not None:
        cautions.append(f"plain torch computes this, not C++: {why_not_native}")
    if on_cpu and by_torch and not has_fast_path(torch_dtype):
        cautions.append(f"torch has no fast {name} on this CPU; dtype=float32 may well be faster")
    if weights == "fp8" and on_cpu:
        cautions.append("a CPU emulates products in 8 bits: their numbers, not their speed")
    elif weights == "fp8":
        cautions.append(f"the roofline is that of products in {name}, not in 8 bits")
    elif weights == "int8" and by_torch:
        cautions.append("plain torch emulates products in int8: their numbers, not their speed")
    return cautions


def require_one_device(backend: object, what: str) -> None:
    """Raise UserError for several ranks, where `what` measures one device."""
    if (count := getattr(backend, "num_devices", 1)) > 1:
        raise UserError(
            f"{what} looks into one device, not {count}; leave out executor.tensor_parallel and "
            "executor.pipeline_parallel"
        )
