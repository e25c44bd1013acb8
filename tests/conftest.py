"""How tests run on this machine: offline, kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("WANDB_MODE", "offline")  # no test talks to a server
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when a kernel is defined, so before its module is imported


# What runs on the GPU where there is one, and in the interpreter elsewhere.
KERNEL_TESTS = {
    "test_activation_and_sampling_kernels",
    "test_attention_kernels",
    "test_fused_kernels",
    "test_hybrid_attention",
    "test_kernel_executor",
    "test_nll",
    "test_quantized_kernels",
    "test_tiled_matmul",
}


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only a GPU can show; with a GPU, count all tests of kernels as such."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.stem in KERNEL_TESTS:
                item.add_marker(pytest.mark.gpu)
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
