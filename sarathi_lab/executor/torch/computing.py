"""What computes a model besides plain torch: Triton's kernels on a GPU, C++ on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.build import NEEDED, NotBuilt, instruction_set
from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.executor.torch.placement import place
from sarathi_lab.model import fp8, native_operations
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.spec import ModelSpec, WeightDtype
from sarathi_lab.model.transformer import Transformer

if TYPE_CHECKING:
    from sarathi_lab.executor.torch.backend import TorchBackend

FIX = "use executor.kernels=torch"
ISAS = ("auto", *NEEDED)
INT8 = "int8"  # the dtype whose products alone are in it


def check_int8(backend: TorchBackend) -> None:
    """Raise UserError for what has no products in int8."""
    reason, fix = "", "use dtype=bfloat16"
    if backend.uses_gpus:
        reason = f"a CPU has its products, the device is {backend.device_name}"
        fix = "use executor.weights=fp8 or dtype=bfloat16"
    elif backend.uses_kernels:
        reason, fix = "executor.kernels=triton has no such products", "use executor.kernels=auto"
    elif backend.weights != "auto":
        reason = f"executor.weights={backend.weights} is another type of the same weights"
        fix = "leave one of them out"
    elif backend.tensor_parallel > 1:
        degree = backend.tensor_parallel
        reason = f"scales are of whole rows, which executor.tensor_parallel={degree} cuts"
        fix = "use executor.pipeline_parallel or dtype=bfloat16"
    if reason:
        raise UserError(f"dtype=int8 does not run here: {reason}; {fix}")


def check_of_kernels(backend: TorchBackend) -> None:
    """Raise UserError for settings of Triton's kernels where these do not run."""
    for name in () if backend.uses_kernels else ("overlap", "cuda_graphs", "hybrid"):
        if (value := getattr(backend, name)) != getattr(type(backend), name):
            device = "cuda" if backend.uses_gpus else "cpu"
            raise UserError(
                f"executor.{name}={value} is for Triton's kernels, which do not run here (device "
                f"{device}, executor.kernels={backend.kernels}); leave it out"
            )


def in_weights(
    backend: TorchBackend, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> ModelSpec:
    """`spec` with weights as `backend` has them. Raises UserError for what can't run."""
    spec.require_runnable()
    weights: WeightDtype = "int8" if backend.dtype == INT8 else backend.weights
    setting = "dtype=int8" if weights == "int8" else f"executor.weights={weights}"
    reason = None
    if weights == "fp8":
        sizes = [(one.in_features, one.out_features) for one in spec.layer_linears]
        reason = fp8.why_not(sizes, device, dtype)
    if weights != "auto" and spec.num_experts:
        reason = f"model {spec.name} is a mixture of experts"
    if reason is not None:
        fix = setting.partition("=")[0] + ("=bfloat16" if weights == "int8" else "=auto")
        raise UserError(f"{setting} does not run here: {reason}; use {fix}")
    return replace(spec, weight_dtype=weights)


def require_supported(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError unless kernels run on `device` and take the model's heads and `dtype`."""
    try:
        from sarathi_kernels.attention.support import check_supported
        from sarathi_kernels.runtime.support import probe, require_chip
    except ImportError as error:
        raise UserError(f"Triton is not installed ({error}); {FIX}") from None
    try:
        check_supported(spec.head_size, dtype, block_size=1)  # they take blocks of any size
        require_chip(chip_of(device))
        if device.type == "cuda":
            probe(device)
    except ValueError as error:
        raise UserError(f"model {spec.name}: {error}; {FIX}") from None


def use_triton(model: Transformer, hybrid: Hybrid) -> None:
    """Let kernels do what is between the model's matrix products."""
    from sarathi_lab.model.kernel_operations import KernelOperations

    model.operations = KernelOperations(model.spec, model.inverse_frequencies, hybrid)


def require_isa(isa: str, *, is_wanted: bool) -> None:
    """Raise UserError unless the C++, if it `is_wanted`, can have the instructions `isa` here."""
    require_one_of("executor.isa", isa, ISAS)
    if isa == "auto":
        return
    if not is_wanted:
        raise UserError(f"executor.isa={isa} is for the C++ of a CPU, not used here; leave it out")
    try:
        instruction_set(isa)
    except NotBuilt as error:
        raise UserError(f"executor.isa={isa} does not run here: {error}; use auto") from None


def built_isa(isa: str) -> str | None:
    """Of which instructions the compiled C++ is; None without it."""
    return instruction_set(isa) if why_not_built(isa) is None else None


@cache
def why_not_built(isa: str) -> str | None:
    """Why there is no C++ of the instructions `isa`, found out once; None where there is."""
    try:
        library.load(isa)
    except NotBuilt as error:
        return str(error)
    return None


def use_native(model: Transformer, *, is_whole: bool = True, isa: str = "auto") -> None:
    """Let C++ compute the model by the instructions `isa`, each iteration in one call or, unless
    `is_whole`, in several.
    """
    library.start(torch.get_num_threads(), isa=isa)
    placement = place(torch.get_num_threads())
    library.place(placement.bound, placement.nodes)
    operations = native_operations.NativeOperations(model, is_whole=is_whole)
    model.operations = operations
    model.whole_pass = operations.whole_pass if is_whole else None
