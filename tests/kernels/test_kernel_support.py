"""A GPU or a Triton that can't run the kernels is refused in one line, before anything is
loaded.
"""

from __future__ import annotations

import pytest
import torch

from sarathi_kernels.runtime.chip import CHIPS, Chip
from sarathi_kernels.runtime.support import probe, require_chip


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


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU"
)
def test_a_kernel_that_does_not_do_its_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sarathi_kernels.runtime.support.launch", lambda *arguments: None)
    with pytest.raises(ValueError, match=r"^Triton's kernel on cpu gave 21 for 42$"):
        probe(torch.device("cpu"))
