"""Execution of one model by several processes, with tensor and pipeline parallelism."""

import os


def by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
