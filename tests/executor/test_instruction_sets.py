"""The C++ of each set of instructions computes what the others do: those of this CPU, and NEON by a
cross-compiler and qemu's user mode, where these are installed.
"""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
import torch

from sarathi_kernels.cpu import build, library
from sarathi_kernels.runtime.testing import relative_error
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.weights import load_model

DOTS = "armv8.2-a+dotprod"  # NEON's own products of four numbers, which not all of it has
DRIVER = __file__.replace("test_instruction_sets.py", "instruction_sets.cpp")
NEON = ("aarch64-linux-gnu-g++", "qemu-aarch64")
ROW = 98  # logits and the likeliest token
NUM_ROWS = 4  # chunk and decode, of float32 and bfloat16


def results(isa: str, folder, *target: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, tokens and exponentials; the test is skipped where `isa` can't run."""
    is_here = isa != "neon" and build.NEEDED[isa] <= build.cpu_flags()
    compiler, qemu = (shutil.which(name) for name in NEON)
    if not is_here and (isa != "neon" or not (compiler and qemu)):
        pytest.skip(f"this machine does not run {isa}")
    program = folder / isa
    target = (*target, *(build.targets(isa) if is_here else ()))
    options = ["-O0", "-std=c++20", "-pthread", f"-I{build.SOURCE.parent}", DRIVER, "-o", program]
    subprocess.run([shutil.which("g++") if is_here else compiler, *target, *options], check=True)
    command = [program] if is_here else [qemu, "-L", "/usr/aarch64-linux-gnu", program]
    done = subprocess.run(command, capture_output=True, check=True)
    found = np.frombuffer(done.stdout, "f4")
    rows = found[: NUM_ROWS * ROW].reshape(NUM_ROWS, ROW)
    return rows[:, :-1], rows[:, -1], found[NUM_ROWS * ROW :]


@pytest.mark.parametrize("target", [[], [f"-march={DOTS}"]])
def test_neon_agrees_with_this_cpu(target, tmp_path):
    """On one model's chunk and decode; test_native has this CPU's against torch."""
    logits, tokens, exponentials = results("neon", tmp_path, *target)
    expected = results(build.instruction_set(), tmp_path)
    errors = np.abs(logits - expected[0]).max(axis=1) / np.abs(expected[0]).max(axis=1)
    in_float32 = np.arange(NUM_ROWS) < 2
    assert errors[in_float32].max() < 3e-6
    assert errors[~in_float32].max() < 2e-2  # some round inputs of products, others do not
    assert (tokens == expected[1])[in_float32].all()
    assert np.isfinite(exponentials).all()
    np.testing.assert_allclose(exponentials, expected[2], rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_a_forced_set_computes_what_another_does(dtype, bound):
    """Of two that this CPU has."""
    if not build.NEEDED["avx512"] | build.NEEDED["avx2"] <= build.cpu_flags():
        pytest.skip("this CPU has no choice")
    spec, logits = load_option("model", "tiny"), []
    for isa in ("avx512", "avx2"):
        library.start(torch.get_num_threads(), isa=isa)
        assert library.load() is library.load(isa)
        model = load_model(spec, None, torch.device("cpu"), dtype, seed=0)
        backend.use_native(model, isa=isa)
        executor = TorchExecutor(model, num_blocks=4, block_size=16)
        batch = make_batch(prefill_tokens=37, emits=True, blocks=BlockManager(4, 16))
        logits.append(model(executor.packed(batch), executor.cache).float())
    library.start(torch.get_num_threads())
    assert relative_error(logits[1], logits[0]) < bound
