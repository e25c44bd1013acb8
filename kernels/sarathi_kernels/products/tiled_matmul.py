"""A matrix product of chosen tile sizes, to study what a partly filled tile costs; the engine's own
are cuBLAS's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sarathi_kernels.runtime.checks import require_dtype
from sarathi_kernels.runtime.chip import Chip, chip_of
from sarathi_kernels.runtime.launch import launch

GROUP_ROWS = (
    8  # rows of tiles worked on together, so that their part of `b` is still in the L2 cache
)
MAX_STAGES = 4
DESCRIPTOR_ALIGNMENT = (
    16  # bytes, of the addresses and row strides that the tensor memory accelerator takes
)


@dataclass(frozen=True)
class Tile:
    """A program computes `m` x `n` elements of the product, `k` columns of `a` and rows of `b` at a
    time.
    """

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


TILES = (Tile(64, 128, 64), Tile(128, 128, 64), Tile(128, 256, 64))


def tiled_matmul(
    a: Tensor,  # [M, K], rows of any stride
    b: Tensor,  # [K, N], rows of any stride
    tile: Tile,
    *,
    num_warps: int | None = None,
    num_stages: int | None = None,
    use_descriptors: bool | None = None,
) -> Tensor:
    """The product of `a` and `b`, a new [M, N]; sums are float32, and products of float32 are not
    rounded to TF32.

    With `use_descriptors` tiles are copied by the tensor memory accelerator of sm_90 and later, in
    a persistent grid; else by each thread's own loads. By default what the chip, the dtype and the
    alignment allow. Raises ValueError for shapes, dtypes or tiles that do not match, or descriptors
    where they cannot be used.
    """
    _check(a, b, tile)
    rows, columns = a.shape[0], b.shape[1]
    out = torch.empty((rows, columns), device=a.device, dtype=a.dtype)
    if out.numel() == 0 or a.shape[1] == 0:
        return out.zero_()
    chip = chip_of(a.device)
    reason = _why_no_descriptors(chip, a, b, out)
    if use_descriptors and reason:
        raise ValueError(f"tensor descriptors cannot be used: {reason}")
    by_descriptor = not reason if use_descriptors is None else use_descriptors
    options = {
        "num_warps": num_warps or (4 if tile.m * tile.n <= 64 * 128 else 8),
        "num_stages": num_stages or _stages_that_fit(chip, tile, a.element_size(), by_descriptor),
        "is_hot": a.dtype
        != torch.float32,  # whose products take no tensor cores, and more registers than there are
        "uses_tensor_cores": True,
    }
    _launch_by_descriptor(chip, a, b, out, tile, options) if by_descriptor else _launch(
        a, b, out, tile, options
    )
    return out


def _launch(a: Tensor, b: Tensor, out: Tensor, tile: Tile, options: dict[str, Any]) -> None:
    (rows, depth), columns = a.shape, b.shape[1]
    launch(
        tiled_matmul_kernel,
        (triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),),
        a,
        b,
        out,
        rows,
        columns,
        depth,
        a.stride(0),
        b.stride(0),
        TILE_M=tile.m,
        TILE_N=tile.n,
        TILE_K=tile.k,
        GROUP=GROUP_ROWS,
        **options,
    )


def _launch_by_descriptor(
    chip: Chip, a: Tensor, b: Tensor, out: Tensor, tile: Tile, options: dict[str, Any]
) -> None:
    (rows, depth), columns = a.shape, b.shape[1]
    num_tiles = triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n)
    launch(
        persistent_matmul_kernel,
        (min(num_tiles, chip.num_sms),),
        TensorDescriptor(a, list(a.shape), list(a.stride()), [tile.m, tile.k]),
        TensorDescriptor(b, list(b.shape), list(b.stride()), [tile.k, tile.n]),
        TensorDescriptor(out, list(out.shape), list(out.stride()), [tile.m, tile.n]),
        rows,
        columns,
        depth,
        TILE_M=tile.m,
        TILE_N=tile.n,
        TILE_K=tile.k,
        GROUP=GROUP_ROWS,
        **options,
    )


def _check(a: Tensor, b: Tensor, tile: Tile) -> None:
    require_dtype("tiled_matmul", a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{tuple(a.shape)} cannot be multiplied by {tuple(b.shape)}")
    if a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError(f"rows must be contiguous; the strides are {a.stride()} and {b.stride()}")
    if any(size < 16 or size & (size - 1) for size in (tile.m, tile.n, tile.k)):
        raise ValueError(f"a tile's sizes are powers of two from 16 on, not {tile}")


def _why_no_descriptors(chip: Chip, *matrices: Tensor) -> str:
    if chip.capability < 90:
        return f"sm_{chip.capability} has no tensor memory accelerator"
    if matrices[0].dtype == torch.float32:
        return "they feed tensor cores, which exact products of float32 do not use"
    for matrix in matrices:
        if (
            matrix.data_ptr() % DESCRIPTOR_ALIGNMENT
            or matrix.stride(0) * matrix.element_size() % DESCRIPTOR_ALIGNMENT
        ):
            return f"rows of {tuple(matrix.shape)} are not aligned to {DESCRIPTOR_ALIGNMENT} bytes"
    return ""


def _stages_that_fit(chip: Chip, tile: Tile, element_size: int, by_descriptor: bool) -> int:
    """Steps of loads in flight; by descriptor, the tile's results leave through shared memory
    meanwhile.
    """
    free = chip.shared_memory - (tile.m * tile.n * element_size if by_descriptor else 0)
    stages = free // ((tile.m + tile.n) * tile.k * element_size)
    return max(1, min(MAX_STAGES, stages))


@triton.jit
def _tile_of(
    index: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Row and column of a tile: down the GROUP rows of a group, then on to the next column."""
    tiles_down, tiles_across = tl.cdiv(rows, TILE_M), tl.cdiv(columns, TILE_N)
    group = index // (GROUP * tiles_across)
    height = tl.minimum(tiles_down - group * GROUP, GROUP)
    within = index % (GROUP * tiles_across)
    return group * GROUP + within % height, within // height


@triton.jit
def tiled_matmul_kernel(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One tile of the product."""
    tile_row, tile_column = _tile_of(tl.program_id(0), rows, columns, TILE_M, TILE_N, GROUP)
    # One 64-bit address a tile and 32-bit offsets within it: 64-bit offsets take registers that the
    # sums need.
    row, column, step = (
        tl.arange(0, TILE_M)[:, None],
        tl.arange(0, TILE_N)[None, :],
        tl.arange(0, TILE_K),
    )
    first_row, first_column = (tile_row * TILE_M).to(tl.int64), (tile_column * TILE_N).to(tl.int64)
    is_row, is_column = row < rows - first_row, column < columns - first_column
    a_tile, b_tile = a + first_row * a_stride, b + first_column
    a_offsets, b_offsets = row * a_stride + step[None, :], step[:, None] * b_stride + column
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, depth, TILE_K):
        left = tl.load(a_tile + a_offsets, mask=is_row & (step[None, :] < depth - first), other=0.0)
        right = tl.load(
            b_tile + b_offsets, mask=(step[:, None] < depth - first) & is_column, other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
        a_tile += TILE_K
        b_tile += TILE_K * b_stride
    at = out + first_row * columns + first_column + row * columns + column
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def persistent_matmul_kernel(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Every so many'th tile of the product; what lies outside a matrix is read as zero and not
    written.
    """
    # Not specialized by warp: on Hopper Triton fails to with descriptors made by the host (triton
    # issue 11587).
    num_tiles = tl.cdiv(rows, TILE_M) * tl.cdiv(columns, TILE_N)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_row, tile_column = _tile_of(tile, rows, columns, TILE_M, TILE_N, GROUP)
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for first in tl.range(0, depth, TILE_K):
            left = a.load([tile_row * TILE_M, first])
            right = b.load([first, tile_column * TILE_N])
            total = tl.dot(left, right, total)
        out.store([tile_row * TILE_M, tile_column * TILE_N], total.to(out.dtype))
