"""What several ranks can't do, refused before any of them is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.torch.ranks.launched import by_torchrun, check_size
from sarathi_lab.model.spec import ModelSpec

if TYPE_CHECKING:
    from sarathi_lab.executor.torch.backend import TorchBackend


def check_ranks(backend: TorchBackend) -> None:
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


def check_split(backend: TorchBackend, spec: ModelSpec) -> None:
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
