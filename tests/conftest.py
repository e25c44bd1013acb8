"""How tests run on this machine: offline, kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("WANDB_MODE", "offline")  # no test talks to a server
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before its module is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only a GPU can show."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
