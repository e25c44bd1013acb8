"""Kernels that the compile checks must let pass or catch. Run as a script: a JSON object of what
they said, on stdout.

It runs in a process of its own, as kernels defined under TRITON_INTERPRET can't be compiled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels import compilation
from sarathi_kernels.compilation import (
    compile_all,
    compile_unit,
    judged,
    launches_of_models,
    unit_of,
)
from sarathi_kernels.runtime.chip import CHIPS
from sarathi_kernels.runtime.launch import launch, recorded
from sarathi_kernels.runtime.support import probe


@triton.jit
def add_one(x, y, num_elements, scale, extra, BLOCK: tl.constexpr):
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + elements, mask=elements < num_elements) * scale + 1.0
    if extra is not None:
        value += tl.load(extra)
    tl.store(y + elements, value, mask=elements < num_elements)


@triton.jit
def product(a, b, c, stride, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, stride, K):
        left = tl.load(a + rows[:, None] * stride + k + inner[None, :])
        right = tl.load(b + (k + inner)[:, None] * stride + columns[None, :])
        acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(c + rows[:, None] * stride + columns[None, :], acc.to(c.dtype.element_ty))


def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def launch_add_one(
    x: Tensor, num_elements: int, extra: Tensor | None = None, **flags: bool
) -> None:
    launch(add_one, (1,), x, meta(64), num_elements, 0.5, extra, BLOCK=64, **flags)


def launch_product(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    stages: int = 2,
    warps: int = 4,
) -> None:
    a, b, c = (meta(1024, 1024, dtype=dtype) for _ in range(3))
    launch(
        product, (1,), a, b, c, 1024, M=m, N=n, K=k, num_stages=stages, num_warps=warps,
        is_hot=True, uses_tensor_cores=True,
    )  # fmt: skip


ALL, SMALL, HOPPER = (80, 89, 90, 100, 120), (80, 89), (90,)
CASES: dict[str, tuple[tuple[int, ...], Callable[[], None]]] = {  # on which chips what is launched
    "elementwise, tensor cores wanted": (
        HOPPER,
        lambda: launch_add_one(meta(64), 64, uses_tensor_cores=True),
    ),
    "product": (ALL, lambda: launch_product(64, 64, 64)),
    "product in fp32": (HOPPER, lambda: launch_product(32, 32, 32, dtype=torch.float32)),
    "much shared memory": (SMALL, lambda: launch_product(128, 128, 128, stages=3, warps=8)),
    "spills": (HOPPER, lambda: launch_product(64, 128, 16, warps=1)),
    "does not compile": (HOPPER, lambda: launch_product(128, 100, 64)),
}


def rows() -> dict[str, dict[int, tuple[str, bool]]]:
    """Lines, and whether all is well, by case and capability."""
    made: dict[str, dict[int, tuple[str, bool]]] = {name: {} for name in CASES}
    for name, (capabilities, case) in CASES.items():
        for capability in capabilities:
            chip = CHIPS[capability]
            with recorded(chip) as recording:
                case()
            compilation._units[:] = [unit_of(recording.launches[0], chip)]
            made[name][capability] = judged(0)
    return made


def refusals() -> list[str]:
    """What a probe says where Triton is missing, and where it has no GPU."""
    lines = []
    for changes in ({"triton": None}, {}):
        with patch.dict(sys.modules, changes):
            try:
                probe(torch.device("cpu"))
            except ValueError as error:
                lines.append(str(error))
    return lines


def is_what_a_launch_compiles() -> bool:
    """Whether Triton's own launcher, on a driver that claims such a GPU, takes the very code that
    was compiled.
    """
    with recorded(CHIPS[90]) as recording:
        launch_add_one(meta(64)[1:], 48)
        launch_product(64, 64, 64)
    units = [unit_of(each, CHIPS[90]) for each in recording.launches]
    ahead = []
    triton.knobs.compilation.listener = lambda **event: ahead.append(event["metadata"]["hash"])
    for unit in units:
        compile_unit(unit)
    stub = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: units[0].target,
    )
    triton.runtime.driver.set_active(stub)
    launched = [
        each.kernel.run(*each.arguments, grid=(1,), warmup=True, **each.options)
        for each in recording.launches
    ]
    return [kernel.hash for kernel in launched] == ahead[: len(units)]


def models() -> list[tuple[str, bool]]:
    """A line on every kernel at models' sizes, for one chip."""
    compile_all([unit_of(each, CHIPS[90]) for each in launches_of_models(CHIPS[90])])
    return list(map(judged, range(len(compilation._units))))


def keys() -> list[list[str]]:
    """What is compiled for 48, 18 and 529 tokens."""
    by_tokens = []
    for chunk in (31, 1, 512):
        units = [unit_of(each, CHIPS[90]) for each in launches_of_models(CHIPS[90], chunk)]
        by_tokens.append(sorted({unit.source.hash() for unit in units}))
    return by_tokens


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parts = (refusals, rows, models, keys, is_what_a_launch_compiles)
    print(json.dumps({part.__name__: part() for part in parts}))
