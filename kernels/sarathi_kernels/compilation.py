"""Compile kernels for GPUs that need not be there, and check the code.

    python -m sarathi_kernels.compilation [--capability 90]    # at the sizes of models
    make gpu_launches      # the launches of all tests that run on a GPU, which --launches reads

What is compiled is what a launch would compile, by Triton's binder. Each line has the registers of
a thread, the shared memory of a block, the matrix instructions, and how many programs a
multiprocessor holds at a time. The exit code is 1 if registers spill in a hot kernel, a product has
no tensor cores, or a multiprocessor holds fewer programs than a kernel counts on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from sarathi_kernels.attention.hybrid import Variant, hybrid_attention
from sarathi_kernels.attention.plan import TILE_ROWS, make_plan
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.norm import NormKind, add_norm
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store
from sarathi_kernels.elementwise.sampling import greedy
from sarathi_kernels.runtime.chip import CHIPS, Chip
from sarathi_kernels.runtime.launch import Launch, recorded

WARP_SIZE = 32
REGISTERS = 65_536  # of a multiprocessor
RESERVED_BYTES = 1024  # of shared memory for each block, beside what a block may use
TENSOR_MEMORY_COLUMNS = 512  # of a multiprocessor from sm_100 on
WGMMA_ROWS = 64  # of the smallest product that the four warps of a warp group do together
MATRIX_INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
# Heads, KV heads, tokens of the context: LLaMA-13B as the paper has it, and one with groups.
MODELS = ((40, 40, 1024), (32, 8, 4096))


@dataclass(frozen=True)
class Unit:
    """One compilation: a launch on a chip, and what Triton makes of it."""

    launch: Launch
    chip: Chip
    source: ASTSource
    target: GPUTarget
    options: Any  # CUDAOptions


@dataclass(frozen=True)
class Code:
    """What the machine code of a unit uses."""

    registers: int  # of a thread, as the spilled bytes
    spill_bytes: int
    shared_memory: int
    tensor_memory: int  # columns
    threads: int
    instructions: frozenset[str]
    dots: frozenset[tuple[str, int]]  # types and rows of products


def unit_of(launch: Launch, chip: Chip) -> Unit:
    """What `launch` would compile on `chip`."""
    kernel, target = launch.kernel, GPUTarget("cuda", chip.capability, WARP_SIZE)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    named = {  # JITFunction.run adds the two, and they are part of the cache's key
        **launch.options,
        "debug": kernel.debug or triton.knobs.runtime.debug,
        "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
    }
    bound, specialization, rest = bind(*launch.arguments, **named)
    options, *arguments = kernel._pack_args(backend, named, bound, specialization, rest)
    return Unit(launch, chip, ASTSource(kernel, *arguments), target, options)


def compile_unit(unit: Unit) -> Code:
    """Compile it, or take it from Triton's cache. Raises what Triton raises."""
    kernel = triton.compile(unit.source, target=unit.target, options=unit.options.__dict__)
    cubin = kernel.metadata_group[f"{kernel.name}.cubin"]
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
    usage = subprocess.check_output(command, text=True)
    registers, stack, local = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)[0]
    ptx = kernel.asm["ptx"].replace("wgmma.mma_async.sync", "wgmma.mma_async")  # no mma.sync
    dot = r"tt\.dot .*: tensor<[\dx]+x(\w+)>.* -> tensor<(\d+)x\d+x\w+>"
    return Code(
        registers=int(registers),
        spill_bytes=int(stack) + int(local),
        shared_memory=kernel.metadata.shared,
        tensor_memory=kernel.metadata.tmem_size or 0,
        threads=int(re.findall(r"\.(?:reqntid|maxntid) (\d+)", ptx)[0]),
        instructions=frozenset(name for name, op in MATRIX_INSTRUCTIONS.items() if op in ptx),
        dots=frozenset((dtype, int(rows)) for dtype, rows in re.findall(dot, kernel.asm["ttir"])),
    )


def programs_per_sm(code: Code, chip: Chip) -> int:
    """How many programs a multiprocessor of `chip` holds at a time, by registers and memory."""
    registers = -(-code.registers // 8) * 8 * code.threads
    shared_memory = (chip.shared_memory + RESERVED_BYTES) // (code.shared_memory + RESERVED_BYTES)
    tensor_memory = TENSOR_MEMORY_COLUMNS // max(1, code.tensor_memory)
    return min(REGISTERS // registers, shared_memory, tensor_memory)


def complaints_of(code: Code, launch: Launch, chip: Chip) -> Iterator[str]:
    """What is wrong with the code of a launch on `chip`."""
    if launch.is_hot and code.spill_bytes:
        yield f"{code.spill_bytes} bytes of registers spill in a hot kernel"
    resident = programs_per_sm(code, chip)
    if resident < launch.programs_per_sm:
        yield f"a multiprocessor holds {resident} programs at a time, not {launch.programs_per_sm}"
    if launch.uses_tensor_cores and not code.dots:
        yield "has no tl.dot"
    rows = [rows for dtype, rows in code.dots if dtype in ("f16", "bf16")]
    if not launch.uses_tensor_cores or not rows:
        return  # products of float32 have no matrix instruction
    if not code.instructions:
        yield "no matrix instruction in the code"
    elif chip.is_hopper and max(rows) >= WGMMA_ROWS and code.threads >= 4 * WARP_SIZE:
        if "wgmma" not in code.instructions:
            yield "no wgmma in the code"
        elif min(rows) >= WGMMA_ROWS and "mma" in code.instructions:
            yield "a product is mma.sync instead of wgmma"


def launches_of_models(chip: Chip, chunk: int = 512) -> Iterator[Launch]:
    """What a chunk and 17 decodes launch in a layer, on tensors without data."""
    lengths, num_tokens, device = [chunk, *[1] * 17], chunk + 17, torch.device("meta")
    meta = partial(torch.empty, dtype=torch.bfloat16, device=device)
    for (num_heads, num_kv_heads, context), tile_rows in product(MODELS, TILE_ROWS):
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "num_sms": chip.num_sms}
        blocks = [[0] * (context // 16)] * len(lengths)
        plan = make_plan(lengths, [context] * len(lengths), blocks, **heads, device=device)
        plan = replace(plan, tile_rows=tile_rows)
        qkv = meta(num_tokens, num_heads + 2 * num_kv_heads, 128)
        cache, slots = meta(9, 16, num_kv_heads, 128), meta(num_tokens, dtype=torch.int32)
        angles = meta(num_tokens, 1, 64, dtype=torch.float32)
        hidden, wide = meta(num_tokens, num_heads * 128), meta(num_tokens, num_heads * 1024)
        with recorded(chip) as recording:
            query = rotate_and_store(qkv, angles, angles, slots, cache, cache, num_heads)
            attend = partial(hybrid_attention, query, cache, cache, plan, 0.1)
            for variant in get_args(Variant):
                attend(variant=variant, out=meta(query.shape))
            for kind in get_args(NormKind):
                add_norm(hidden, hidden, hidden[0], None, 1e-5, kind)
            gated_activation(wide, "silu")
            activation_(wide, "gelu")
            greedy(meta(18, 32_000))
        yield from recording.launches


@contextmanager
def recording_to(path: Path, capability: int) -> Iterator[None]:
    """Do launches as on a chip of that capability, and in the end write each once for `read`."""
    with recorded(CHIPS[capability], runs=True) as recording:
        yield
    lines = []  # with what Triton specialises pointers by: whether they are aligned to 16 bytes
    for launch in recording.launches:
        arguments = [
            [str(x.dtype), x.data_ptr() % 16 > 0] if isinstance(x, Tensor) else x
            for x in launch.arguments
        ]
        name = [launch.kernel.fn.__module__, launch.kernel.fn.__name__]
        lines.append(json.dumps([*name, arguments, launch.options, launch.uses_tensor_cores]))
    path.write_text("".join(f"{line}\n" for line in dict.fromkeys(lines)))


def read(path: Path) -> Iterator[Launch]:
    """Yield each launch; those on float16, which the interpreter knows, on bfloat16, too. Registers
    of the tests' awkward sizes may spill, and their grids don't matter.
    """

    def made(dtype: str, is_unaligned: bool) -> Tensor:
        name = dtype.removeprefix("torch.")
        return torch.empty(2, dtype=getattr(torch, name), device="meta")[int(is_unaligned) :]

    for line in path.read_text().splitlines():
        for text in dict.fromkeys((line, line.replace(".float16", ".bfloat16"))):
            module, name, arguments, options, uses_tensor_cores = json.loads(text)
            kernel = getattr(import_module(module), name)
            values = tuple(made(*x) if isinstance(x, list) else x for x in arguments)
            yield Launch(kernel, (1,), values, options, False, uses_tensor_cores)


_units: list[Unit] = []  # of forked workers, to which kernels can't be sent


def judged(index: int) -> tuple[str, bool]:
    """A line on a unit, and whether all is well with it."""
    unit = _units[index]
    head = f"sm_{unit.chip.capability:<4}{unit.source.name:<26}"
    try:
        code = compile_unit(unit)
    except Exception as error:  # of Triton's many kinds none may lose the other lines
        return f"{head}does not compile: {type(error).__name__}: {error}", False
    complaints = "; ".join(complaints_of(code, unit.launch, unit.chip))
    usage = f"{code.registers:>4}{code.shared_memory:>8}  {'+'.join(sorted(code.instructions)):<14}"
    return f"{head}{usage}{programs_per_sm(code, unit.chip):>3}  {complaints}", not complaints


def compile_all(units: Sequence[Unit]) -> bool:
    """Print a line on each distinct unit; return whether all is well with them."""
    distinct = {(unit.target, unit.source.hash(), unit.options.hash()): unit for unit in units}
    _units[:] = distinct.values()
    is_well = True
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        for line, is_right in pool.map(judged, range(len(_units))):
            print(line, flush=True)
            is_well &= is_right
    return is_well


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if nothing is wrong, and 1 with complaints."""
    parser = argparse.ArgumentParser(prog="python -m sarathi_kernels.compilation")
    parser.add_argument("--capability", type=int, action="append", choices=list(CHIPS))
    parser.add_argument("--launches", type=Path, metavar="FOLDER", help="of CAPABILITY.jsonl")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler; unset it")
    units = []
    for capability in options.capability or CHIPS:
        chip, launches = CHIPS[capability], launches_of_models(CHIPS[capability])
        if options.launches is not None:
            launches = read(options.launches / f"{capability}.jsonl")
        units += [unit_of(launch, chip) for launch in launches]
    return 0 if compile_all(units) else 1


if __name__ == "__main__":
    sys.exit(main())
