"""The C++ of each set of instructions computes what the others do: those of this CPU, and NEON by a
cross-compiler and qemu's user mode, where these are installed.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

from sarathi_kernels.cpu import build, library
from sarathi_kernels.cpu.packing import pack_linear
from sarathi_kernels.runtime.testing import relative_error
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.profiling import Shape, batch_of
from sarathi_lab.model.weights import Int8Linear, load_model

DOTS = "armv8.2-a+dotprod"  # NEON's own products of four numbers, which not all of it has
DRIVER = __file__.replace("test_instruction_sets.py", "instruction_sets.cpp")
NEON = ("aarch64-linux-gnu-g++", "qemu-aarch64")
ROW = 98  # logits and the likeliest token
NUM_ROWS = 12  # chunk and decode, of float32 and bfloat16, with caches of 16 or 32 bits, int8, fp8
PRODUCT = (19, 100, 70)  # in int8: rows, inputs, results


def int8_product() -> tuple[bytes, np.ndarray]:
    """Its sizes, packed weight and rows, and what plain torch makes of them."""
    generator = torch.Generator().manual_seed(2)
    rows, in_features, out_features = PRODUCT
    linear = torch.nn.Linear(in_features, out_features, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(out_features, in_features, generator=generator))
    own = Int8Linear(linear)
    packed = pack_linear(own.weight.detach(), None, own.scales.detach())
    x = torch.randn(rows, in_features, generator=generator)
    parts = (torch.tensor(PRODUCT), packed.weight, packed.scales, packed.sums, x)
    return b"".join(part.numpy().tobytes() for part in parts), own(x).numpy()


def results(isa: str, folder, *target: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, tokens and exponentials; the test is skipped where `isa` can't run. Of products in
    int8 it asserts that they are torch's.
    """
    is_here = isa != "neon" and build.NEEDED[isa] <= build.cpu_flags()
    compiler, qemu = (shutil.which(name) for name in NEON)
    if not is_here and (isa != "neon" or not (compiler and qemu)):
        pytest.skip(f"this machine does not run {isa}")
    program = folder / isa
    target = (*target, *(build.targets(isa) if is_here else ()))
    options = ["-O0", "-std=c++20", "-pthread", f"-I{build.SOURCE.parent}", DRIVER, "-o", program]
    subprocess.run([shutil.which("g++") if is_here else compiler, *target, *options], check=True)
    command = [program] if is_here else [qemu, "-L", "/usr/aarch64-linux-gnu", program]
    given, product = int8_product()
    done = subprocess.run(command, input=given, capture_output=True, check=True)
    found = np.frombuffer(done.stdout, "f4")
    np.testing.assert_array_equal(found[: product.size], product.ravel())
    found = found[product.size :]
    rows = found[: NUM_ROWS * ROW].reshape(NUM_ROWS, ROW)
    return rows[:, :-1], rows[:, -1], found[NUM_ROWS * ROW :]


@pytest.mark.parametrize("target", [[], [f"-march={DOTS}"]])
def test_neon_agrees_with_this_cpu(target, tmp_path):
    """On one model's chunk and decode; test_native has this CPU's against torch."""
    logits, tokens, exponentials = results("neon", tmp_path, *target)
    expected = results(build.instruction_set(), tmp_path)
    errors = np.abs(logits - expected[0]).max(axis=1) / np.abs(expected[0]).max(axis=1)
    in_float32 = np.arange(NUM_ROWS) % 4 < 2
    assert errors[in_float32].max() < 3e-6
    assert errors[~in_float32].max() < 2e-2  # some round inputs of products, others do not
    assert (tokens == expected[1])[in_float32].all()
    assert np.isfinite(exponentials).all()
    np.testing.assert_allclose(exponentials, expected[2], rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_forced_set_computes_what_another_does(dtype, bound, kv_dtype):
    """Of two that this CPU has."""
    if not build.NEEDED["avx512"] | build.NEEDED["avx2"] <= build.cpu_flags():
        pytest.skip("this CPU has no choice")
    spec, logits = replace(load_option("model", "tiny"), kv_dtype=kv_dtype), []
    for isa in ("avx512", "avx2"):
        library.start(torch.get_num_threads(), isa=isa)
        assert library.load() is library.load(isa)
        model = load_model(spec, None, torch.device("cpu"), dtype, seed=0)
        backend.use_native(model, isa=isa)
        executor = TorchExecutor(model, num_blocks=4, block_size=16)
        batch = batch_of(executor, Shape(1, 37, 0))
        logits.append(model(executor.packed(batch), executor.cache).float())
    library.start(torch.get_num_threads())
    assert relative_error(logits[1], logits[0]) < bound
