"""A GPU or a Triton that can't run the kernels is refused in one line, before anything is
loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sarathi_kernels.runtime.chip import CHIPS, Chip
from sarathi_kernels.runtime.support import probe, require_chip

KERNELS = Path(__file__).parents[2] / "kernels"


def test_chips_that_kernels_are_compiled_for_are_supported() -> None:
    for chip in CHIPS.values():
        require_chip(chip)


def test_an_older_gpu_is_refused_by_name_and_capability() -> None:
    turing = Chip(75, num_sms=40, shared_memory=65_536)
    message = (
        r"^Tesla T4 has compute capability 7\.5; the Triton kernels need 8\.0 \(Ampere\) or newer$"
    )
    with pytest.raises(ValueError, match=message):
        require_chip(turing, "Tesla T4")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU"
)
def test_probe_passes_in_the_interpreter() -> None:
    probe(torch.device("cpu"))


@pytest.mark.gpu
def test_probe_passes_on_a_gpu() -> None:
    probe(torch.device("cuda"))


def test_a_triton_that_is_missing_or_fails_gives_one_line_with_its_cause() -> None:
    """In a process without the interpreter."""
    code = """
import sys
import torch
from sarathi_kernels.runtime.support import probe
sys.modules["triton"] = None
for _ in range(2):
    try:
        probe(torch.device("cpu"))
    except ValueError as error:
        print(error)
    sys.modules.pop("triton", None)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(KERNELS), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    missing, failing = done.stdout.splitlines()
    assert missing.startswith("Triton can't compile and run a kernel on cpu (ModuleNotFoundError: ")
    assert failing.startswith("Triton can't compile and run a kernel on cpu (RuntimeError: ")
    assert "active drivers" in failing  # Triton's own words


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU"
)
def test_a_kernel_that_does_not_do_its_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sarathi_kernels.runtime.support.launch", lambda *arguments: None)
    with pytest.raises(ValueError, match=r"^Triton's kernel on cpu gave 21 for 42$"):
        probe(torch.device("cpu"))
