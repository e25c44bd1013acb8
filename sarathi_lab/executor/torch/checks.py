"""What the settings of torch refuse of one another, of the device and of a model."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from sarathi_lab.config.checked import check_fields
from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.torch import device as devices
from sarathi_lab.executor.torch.kernel_selection import FIX, require_isa
from sarathi_lab.executor.torch.ranks.launched import by_torchrun, check_size
from sarathi_lab.executor.torch.settings import INT8, TorchSettings
from sarathi_lab.model import fp8
from sarathi_lab.model.spec import ModelSpec, WeightDtype


def check_settings(backend: TorchSettings) -> None:
    """Raise UserError for settings that do not go together, or not with the device."""
    check_fields(backend, "executor.")
    _check_device(backend)
    if backend.dtype == INT8:
        _check_int8(backend)
    _check_ranks(backend)
    require_isa(backend.isa, is_wanted=backend.wants_native)
    _check_of_kernels(backend)


def _check_device(backend: TorchSettings) -> None:
    """Raise UserError for what is there on another kind of device only."""
    is_cpu = backend.torch_device.type == "cpu"
    if devices.require_threads("executor.threads", backend.threads) is not None and not is_cpu:
        raise UserError(
            f"executor.threads={backend.threads} is for a CPU, the device is "
            f"{backend.device_name}; leave it out"
        )
    if backend.profile == "nvtx" and is_cpu:
        raise UserError(
            "executor.profile=nvtx names ranges of a GPU, the device is a CPU; use operations or "
            "trace"
        )
    if backend.kernels == "native" and not is_cpu:
        raise UserError(
            f"executor.kernels=native needs a CPU, the device is {backend.device_name}; use "
            "triton or auto"
        )
    # Triton's interpreter needs no GPU.
    is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if backend.kernels == "triton" and is_cpu and not is_interpreting:
        raise UserError(f"executor.kernels=triton needs a GPU, the device is a CPU; {FIX}")


def _check_int8(backend: TorchSettings) -> None:
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


def _check_of_kernels(backend: TorchSettings) -> None:
    """Raise UserError for settings of Triton's kernels where these do not run."""
    for name in () if backend.uses_kernels else ("overlap", "cuda_graphs", "hybrid"):
        if (value := getattr(backend, name)) != getattr(type(backend), name):
            device = "cuda" if backend.uses_gpus else "cpu"
            raise UserError(
                f"executor.{name}={value} is for Triton's kernels, which do not run here (device "
                f"{device}, executor.kernels={backend.kernels}); leave it out"
            )


def _check_ranks(backend: TorchSettings) -> None:
    """Raise UserError for what several ranks do not have, or GPUs that are not there."""
    count, ranks = backend.ranks.num_devices, backend.ranks
    if count == 1:
        if (timeout := backend.rank_timeout) != type(backend).rank_timeout:
            raise UserError(
                f"executor.rank_timeout={timeout} is for several ranks, not one device; leave it "
                "out, or add executor.tensor_parallel or executor.pipeline_parallel"
            )
        return
    if backend.profile != "none":
        raise UserError(
            f"executor.profile={backend.profile} looks into one device, not {ranks.description}; "
            "leave it out"
        )
    if backend.weights != "auto" and ranks.tensor > 1:
        raise UserError(
            f"executor.weights={backend.weights} has scales of whole rows, which "
            f"executor.tensor_parallel={ranks.tensor} cuts; use executor.pipeline_parallel"
        )
    if not backend.uses_gpus or by_torchrun():
        return
    if (there := torch.cuda.device_count()) < count:
        raise UserError(
            f"executor.tensor_parallel={ranks.tensor} times executor.pipeline_parallel="
            f"{ranks.pipeline} needs {count} GPUs, and {there} are here; use fewer, several "
            "machines by torchrun, or device=cpu"
        )


def in_weights(backend: TorchSettings, spec: ModelSpec) -> ModelSpec:
    """`spec` with weights as `backend` has them. Raises UserError for what can't run."""
    spec.require_runnable()
    weights: WeightDtype = "int8" if backend.dtype == INT8 else backend.weights
    setting = "dtype=int8" if weights == "int8" else f"executor.weights={weights}"
    reason = None
    if weights == "fp8":
        sizes = [(one.in_features, one.out_features) for one in spec.layer_linears]
        reason = fp8.why_not(sizes, backend.torch_device, backend.torch_dtype)
    if weights != "auto" and spec.num_experts:
        reason = f"model {spec.name} is a mixture of experts"
    if reason is not None:
        fix = setting.partition("=")[0] + ("=bfloat16" if weights == "int8" else "=auto")
        raise UserError(f"{setting} does not run here: {reason}; use {fix}")
    return replace(spec, weight_dtype=weights)


def check_split(backend: TorchSettings, spec: ModelSpec) -> None:
    """Raise UserError for a model that does not come apart, or torchrun's other ranks."""
    backend.ranks.check(spec)
    check_size(backend.ranks.num_devices)


def require_one_device(backend: object, what: str) -> None:
    """Raise UserError for several ranks, where `what` looks into a device."""
    if (count := getattr(backend, "num_devices", 1)) > 1:
        raise UserError(
            f"{what} looks into one device, not {count}; leave out executor.tensor_parallel and "
            "executor.pipeline_parallel"
        )
