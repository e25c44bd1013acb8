"""Detection of torchrun, without torch."""

from __future__ import annotations

import os

from sarathi_lab.config.errors import UserError


def by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def check_size(num_devices: int) -> None:
    """Raise UserError if torchrun started another number of ranks."""
    if by_torchrun() and (size := int(os.environ["WORLD_SIZE"])) != num_devices:
        raise UserError(
            f"torchrun started {size} ranks, but executor.tensor_parallel times "
            f"executor.pipeline_parallel is {num_devices}; use torchrun --nproc-per-node "
            f"{num_devices}, or leave torchrun out"
        )
