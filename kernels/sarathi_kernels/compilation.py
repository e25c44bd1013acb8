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
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")  # of cuobjdump
THREADS = re.compile(r"\.(?:reqntid|maxntid) (\d+)")  # of a block, in PTX
DOT = re.compile(r"tt\.dot .*: tensor<[\dx]+x(\w+)>.* -> tensor<(\d+)x\d+x\w+>")  # type, rows
# Heads, KV heads, tokens of the context: LLaMA-13B as the paper has it, and one with groups.
MODELS = ((40, 40, 1024), (32, 8, 4096))
HEAD_SIZE = 128
BLOCK_SIZE = 16
NUM_DECODES = 17  # beside a chunk: a batch of 18, as in the paper


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
    kernel = launch.kernel
    target = GPUTarget("cuda", chip.capability, WARP_SIZE)
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
    registers, stack, local = USAGE.findall(usage)[0]
    ptx = kernel.asm["ptx"].replace("wgmma.mma_async.sync", "wgmma.mma_async")  # no mma.sync
    instructions = {name for name, op in MATRIX_INSTRUCTIONS.items() if op in ptx}
    dots = {(dtype, int(rows)) for dtype, rows in DOT.findall(kernel.asm["ttir"])}
    return Code(
        registers=int(registers),
        spill_bytes=int(stack) + int(local),
        shared_memory=kernel.metadata.shared,
        tensor_memory=kernel.metadata.tmem_size or 0,
        threads=int(THREADS.findall(ptx)[0]),
        instructions=frozenset(instructions),
        dots=frozenset(dots),
    )


def programs_per_sm(code: Code, chip: Chip) -> int:
    """How many programs a multiprocessor of `chip` holds at a time, by registers and memory."""
    registers_of_thread = -(-code.registers // 8) * 8  # they are given out in eights
    by_registers = REGISTERS // (registers_of_thread * code.threads)
    shared_memory = code.shared_memory + RESERVED_BYTES
    by_shared_memory = (chip.shared_memory + RESERVED_BYTES) // shared_memory
    by_tensor_memory = TENSOR_MEMORY_COLUMNS // max(1, code.tensor_memory)
    return min(by_registers, by_shared_memory, by_tensor_memory)


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
    lengths = [chunk, *[1] * NUM_DECODES]
    num_sequences = len(lengths)
    num_tokens = sum(lengths)
    device = torch.device("meta")
    meta = partial(torch.empty, dtype=torch.bfloat16, device=device)
    for (num_heads, num_kv_heads, context), tile_rows in product(MODELS, TILE_ROWS):
        blocks = [0] * (context // BLOCK_SIZE)
        plan = make_plan(
            lengths,
            [context] * num_sequences,
            [blocks] * num_sequences,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_sms=chip.num_sms,
            device=device,
        )
        plan = replace(plan, tile_rows=tile_rows)
        qkv = meta(num_tokens, num_heads + 2 * num_kv_heads, HEAD_SIZE)
        cache = meta(9, BLOCK_SIZE, num_kv_heads, HEAD_SIZE)
        slots = meta(num_tokens, dtype=torch.int32)
        angles = meta(num_tokens, 1, HEAD_SIZE // 2, dtype=torch.float32)
        hidden = meta(num_tokens, num_heads * HEAD_SIZE)
        wide = meta(num_tokens, 8 * num_heads * HEAD_SIZE)  # gates and values, 4 times as wide
        with recorded(chip) as recording:
            query = rotate_and_store(qkv, angles, angles, slots, cache, cache, num_heads)
            attend = partial(hybrid_attention, query, cache, cache, plan, 0.1)
            for variant in get_args(Variant):
                attend(variant=variant, out=meta(query.shape))
            for kind in get_args(NormKind):
                add_norm(hidden, hidden, hidden[0], None, 1e-5, kind)
            gated_activation(wide, "silu")
            activation_(wide, "gelu")
            greedy(meta(num_sequences, 32_000))
        yield from recording.launches


@contextmanager
def recording_to(path: Path, capability: int) -> Iterator[None]:
    """Do launches as on a chip of that capability, and in the end write each once for `read`."""
    with recorded(CHIPS[capability], runs=True) as recording:
        yield
    lines: dict[str, None] = {}
    for launch in recording.launches:
        function = launch.kernel.fn
        arguments = [_recorded(argument) for argument in launch.arguments]
        fields = [function.__module__, function.__name__, arguments]
        lines[json.dumps([*fields, launch.options, launch.uses_tensor_cores])] = None
    path.write_text("".join(f"{line}\n" for line in lines))


def _recorded(argument: object) -> object:
    """Return a tensor as its type, and what Triton specialises pointers by: whether it is off a
    multiple of 16 bytes.
    """
    if isinstance(argument, Tensor):
        return [str(argument.dtype), argument.data_ptr() % 16 > 0]
    return argument


def read(path: Path) -> Iterator[Launch]:
    """Yield each launch; those on float16, which the interpreter knows, on bfloat16, too. Registers
    of the tests' awkward sizes may spill, and their grids don't matter.
    """
    for line in path.read_text().splitlines():
        yield _launch_of(line)
        in_bfloat16 = line.replace(".float16", ".bfloat16")
        if in_bfloat16 != line:
            yield _launch_of(in_bfloat16)


def _launch_of(line: str) -> Launch:
    module, name, arguments, options, uses_tensor_cores = json.loads(line)
    kernel = getattr(import_module(module), name)
    values = tuple(_argument_of(argument) for argument in arguments)
    return Launch(kernel, (1,), values, options, False, uses_tensor_cores)


def _argument_of(recorded: object) -> object:
    """Return a tensor without data for what `_recorded` made of one."""
    if not isinstance(recorded, list):
        return recorded
    name, is_unaligned = recorded
    dtype = getattr(torch, name.removeprefix("torch."))
    return torch.empty(2, dtype=dtype, device="meta")[int(is_unaligned) :]


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
    instructions = "+".join(sorted(code.instructions))
    usage = f"{code.registers:>4}{code.shared_memory:>8}  {instructions:<14}"
    num_programs = programs_per_sm(code, unit.chip)
    return f"{head}{usage}{num_programs:>3}  {complaints}", not complaints


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
        chip = CHIPS[capability]
        if options.launches is None:
            launches = launches_of_models(chip)
        else:
            launches = read(options.launches / f"{capability}.jsonl")
        units += [unit_of(launch, chip) for launch in launches]
    return 0 if compile_all(units) else 1


if __name__ == "__main__":
    sys.exit(main())
