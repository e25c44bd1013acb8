"""Whether torchrun has started this process, and as which of its ranks; knows nothing of torch."""

from __future__ import annotations

import os

from sarathi_lab.config.errors import UserError


def by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_follower() -> bool:
    """Whether torchrun started it to follow rank 0, which alone reads the command line."""
    return by_torchrun() and os.environ["RANK"] != "0"


def check_size(num_devices: int) -> None:
    """Raise UserError where torchrun has started another number of ranks."""
    if by_torchrun() and (size := int(os.environ["WORLD_SIZE"])) != num_devices:
        raise UserError(
            f"torchrun started {size} ranks, but executor.tensor_parallel times "
            f"executor.pipeline_parallel is {num_devices}; use torchrun --nproc-per-node "
            f"{num_devices}, or leave torchrun out"
        )
