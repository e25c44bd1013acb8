"""One recorded launch compiled for a GPU that need not be there, what the code uses, and what is
wrong with it.

Signature, constants and attributes come from Triton's binder, so that what is compiled is what
the launch would compile; Triton caches it (TRITON_CACHE_DIR), and the launch on such a GPU finds it
there.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from sarathi_kernels.runtime.chip import Chip
from sarathi_kernels.runtime.launch import Launch

WARP_SIZE = 32
TENSOR_MEMORY_COLUMNS = 512  # of a multiprocessor from sm_100 on
REGISTERS = 65_536  # of a multiprocessor, handed out to warps in multiples of 256
RESERVED_BYTES = 1024  # of shared memory, for each block; a multiprocessor has it beside a block's
WGMMA_ROWS = 64  # rows of the smallest product that the four warps of a warp group do together
WGMMA_WARPS = 4
HALF_TYPES = ("f16", "bf16")
MATRIX_INSTRUCTIONS = {
    "wgmma": "wgmma.mma_async",
    "tcgen05": "tcgen05.mma",
    "mma": "mma.sync",
}  # name: as in PTX


@dataclass(frozen=True)
class Source:
    """What `triton.compile` takes for one launch; equal `key`s compile to equal code."""

    source: ASTSource
    target: GPUTarget
    options: Any  # CUDAOptions
    configuration: str  # constants, dtypes, warps and stages, to read

    @property
    def key(self) -> str:
        return f"{self.target.arch}-{self.source.hash()}-{self.options.hash()}"


@dataclass(frozen=True)
class Dot:
    """A `tl.dot` of the kernel: rows of its result, and the element type of its operands as Triton
    names it.
    """

    rows: int
    dtype: str


@dataclass(frozen=True)
class Compiled:
    """What the machine code of a launch uses, by thread (registers, spilled bytes) and by block
    (the rest).
    """

    registers: int
    spill_bytes: int  # the stack frame, where Triton's kernels keep nothing but spilled registers
    shared_memory: int  # bytes
    tensor_memory: int  # columns of 512, sm_100 only
    threads: int
    instructions: frozenset[str]  # names of MATRIX_INSTRUCTIONS
    dots: tuple[Dot, ...]


def source_of(launch: Launch, capability: int) -> Source:
    """What the launch would compile on a GPU of that capability. Raises ValueError under
    TRITON_INTERPRET.
    """
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise ValueError(
            f"{kernel} is a {type(kernel).__name__}, not a compiled kernel; unset TRITON_INTERPRET"
        )
    target = GPUTarget("cuda", capability, WARP_SIZE)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    named = {  # JITFunction.run adds the two, and they are part of the cache's key
        **launch.options,
        "debug": kernel.debug or triton.knobs.runtime.debug,
        "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
    }
    bound, specialization, rest = binder(*launch.arguments, **named)
    options, signature, constants, attributes = kernel._pack_args(
        backend, named, bound, specialization, rest
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return Source(
        source,
        target,
        options,
        _configuration_text(kernel, signature, constants, attributes, options),
    )


def _configuration_text(
    kernel: JITFunction[Any],
    signature: dict[str, Any],
    constants: dict[Any, Any],
    attributes: Any,
    options: Any,
) -> str:
    """Element types, constants, and of the other arguments those that are not what one expects:
    aligned, 32 bits.
    """
    dtypes = dict.fromkeys(
        t for s in signature.values() for t in re.findall(r"[*<]((?:bf|fp)\d+|[iu]8)", str(s))
    )
    words = ["/".join(dtypes)]
    for index, (param, (name, kind)) in enumerate(
        zip(kernel.params, signature.items(), strict=True)
    ):
        if kind == "constexpr":
            words.append(f"{name}={constants[(index,)]}")
        elif (
            not attributes.get((index,))
            and not param.do_not_specialize
            and not str(kind).startswith("fp")
        ):
            words.append(f"{name}:{'unaligned' if str(kind).startswith('*') else kind}")
        elif str(kind) in ("*i64", "i64"):
            words.append(f"{name}:{kind}")
    words += [f"warps={options.num_warps}", f"stages={options.num_stages}"]
    return " ".join(word for word in words if word)


def compile_source(source: Source) -> Compiled:
    """Compile it, or take it from Triton's cache. Raises what Triton raises."""
    kernel = triton.compile(source.source, target=source.target, options=source.options.__dict__)
    cubin = kernel.metadata_group[f"{kernel.name}.cubin"]
    registers, stack = _resource_usage(cubin)
    ptx = kernel.asm["ptx"]
    return Compiled(
        registers=registers,
        spill_bytes=stack,
        shared_memory=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
        threads=_threads(ptx),
        instructions=frozenset(
            name for name, text in MATRIX_INSTRUCTIONS.items() if text in _without_wgmma(ptx, name)
        ),
        dots=_dots(kernel.asm["ttir"]),
    )


def _without_wgmma(ptx: str, name: str) -> str:
    """The text to look for an instruction in: `wgmma.mma_async.sync` is no `mma.sync`."""
    return re.sub(r"wgmma\.\S+", "", ptx) if name == "mma" else ptx


def _resource_usage(cubin: str) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, a thread: what the packaged cuobjdump reads
    from the file.
    """
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    usages = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if not usages:
        raise ValueError(f"{tool} printed no resource usage for {cubin}: {text!r}")
    return max(int(r) for r, _, _ in usages), max(
        int(stack) + int(local) for _, stack, local in usages
    )


def _threads(ptx: str) -> int:
    """Threads of a block, those of specialised warps included (num_warps does not count them in
    every version).
    """
    found = re.search(r"\.(?:reqntid|maxntid) (\d+)", ptx)
    if found is None:
        raise ValueError("the PTX does not say how many threads a block has")
    return int(found.group(1))


def _dots(ttir: str) -> tuple[Dot, ...]:
    """The distinct matrix products that the kernel asks for, whatever instructions they become."""
    found = re.findall(
        r"tt\.dot .*: tensor<[\dx]+x(\w+)>.* -> tensor<(?:\d+x)?(\d+)x\d+x\w+>", ttir
    )
    return tuple(
        sorted(
            {Dot(int(rows), dtype) for dtype, rows in found}, key=lambda dot: (dot.rows, dot.dtype)
        )
    )


def check(compiled: Compiled, launch: Launch, chip: Chip) -> list[str]:
    """What is wrong with the code of a launch on `chip`, one clear line each; empty where nothing
    is.
    """
    complaints = []
    if launch.is_hot and compiled.spill_bytes:
        complaints.append(f"{compiled.spill_bytes} bytes of registers spill in a hot kernel")
    if compiled.shared_memory > chip.shared_memory:
        complaints.append(
            f"{compiled.shared_memory} bytes of shared memory, a block may use {chip.shared_memory}"
        )
    if compiled.tensor_memory > TENSOR_MEMORY_COLUMNS:
        complaints.append(
            f"{compiled.tensor_memory} columns of tensor memory, there are {TENSOR_MEMORY_COLUMNS}"
        )
    resident = programs_per_sm(compiled, chip)
    if 0 < resident < launch.programs_per_sm:  # what does not fit at all is complained of above
        complaints.append(
            f"a multiprocessor holds {resident} programs at a time, not {launch.programs_per_sm}"
        )
    if launch.uses_tensor_cores:
        complaints += _tensor_core_complaints(compiled, chip)
    return complaints


def programs_per_sm(compiled: Compiled, chip: Chip) -> int:
    """How many programs a multiprocessor of `chip` holds at a time, by registers and memory."""
    registers = -(-compiled.registers // 8) * 8 * compiled.threads
    shared_memory = (chip.shared_memory + RESERVED_BYTES) // (
        compiled.shared_memory + RESERVED_BYTES
    )
    tensor_memory = TENSOR_MEMORY_COLUMNS // max(1, compiled.tensor_memory)
    return min(REGISTERS // registers, shared_memory, tensor_memory)


def _tensor_core_complaints(compiled: Compiled, chip: Chip) -> list[str]:
    """Products of 16-bit types must be matrix instructions, on Hopper Hopper's where the tile has
    rows enough.
    """
    if not compiled.dots:
        return ["has no tl.dot"]
    halves = [
        dot for dot in compiled.dots if dot.dtype in HALF_TYPES
    ]  # "ieee" products of fp32 have no instruction
    if not halves:
        return []
    if not compiled.instructions:
        return ["no matrix instruction in the code"]
    if not chip.is_hopper:
        return []
    large = [
        dot
        for dot in halves
        if dot.rows >= WGMMA_ROWS and compiled.threads >= WGMMA_WARPS * WARP_SIZE
    ]
    if large and "wgmma" not in compiled.instructions:
        return ["no wgmma in the code"]
    if len(large) == len(compiled.dots) and "mma" in compiled.instructions:
        return ["a product is mma.sync instead of wgmma"]
    return []
