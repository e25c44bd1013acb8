"""What the chosen experts make of each token: a product of all experts is one launch, whose
programs take tiles of rows of one expert each (`routing.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.experts.routing import Routing, route
from sarathi_kernels.runtime.checks import require_dtype
from sarathi_kernels.runtime.chip import chip_of
from sarathi_kernels.runtime.launch import launch


class Tile(NamedTuple):
    """A program computes `m` x `n` elements of a product, `k` columns and rows at a time."""

    m: int
    n: int
    k: int


# By the rows that an expert has in the mean: the last takes all.
TILES = (Tile(16, 128, 128), Tile(64, 128, 64), Tile(128, 128, 64))
MAX_STAGES = 4
COLUMNS_PER_PROGRAM = 1024
MOST_ELEMENTS = 2**31  # offsets within a tensor have 32 bits


def mixture_of_experts(
    hidden: Tensor,  # [num_tokens, hidden_size], rows of any stride
    router_logits: Tensor,  # [num_tokens, num_experts]
    gate_up: Tensor,  # [num_experts, 2 size, hidden_size], gates first
    down: Tensor,  # [num_experts, hidden_size, size]
    *,
    top_k: int,
    normalised: bool,
) -> Tensor:
    """The sum of what each token's `top_k` experts, with SiLU, make of it, weighted by their shares
    (`route`); a new [num_tokens, hidden_size].

    Sums are float32; what lies between the two products, and each expert's weighted result, are
    rounded to the dtype of `hidden`. The same inputs give the same bits. Raises ValueError for
    dtypes or shapes that do not match.
    """
    _check(hidden, router_logits, gate_up, down, top_k)
    num_tokens, hidden_size = hidden.shape
    num_experts, _, size = down.shape
    out = torch.empty((num_tokens, hidden_size), device=hidden.device, dtype=hidden.dtype)
    if num_tokens == 0:
        return out
    pairs = num_tokens * top_k
    tile = choose_tile(pairs, num_experts)
    routing = route(router_logits, top_k, normalised=normalised, tile_rows=tile.m)
    raised, results = (
        torch.empty((pairs, width), device=hidden.device, dtype=hidden.dtype)
        for width in (size, hidden_size)
    )
    options = _options(hidden, tile)
    num_tiles = len(routing.tile_experts)
    launch(
        expert_up_kernel,
        (num_tiles * triton.cdiv(2 * size, tile.n),),
        hidden,
        gate_up,
        raised,
        *_places(routing),
        pairs,
        size,
        hidden_size,
        hidden.stride(0),
        TOP_K=top_k,
        **options,
    )
    launch(
        expert_down_kernel,
        (num_tiles * triton.cdiv(hidden_size, tile.n),),
        raised,
        down,
        results,
        *_places(routing),
        routing.shares,
        pairs,
        hidden_size,
        size,
        **options,
    )
    launch(
        combine_kernel,
        (num_tokens, triton.cdiv(hidden_size, COLUMNS_PER_PROGRAM)),
        results,
        out,
        hidden_size,
        TOP_K=top_k,
        BLOCK=COLUMNS_PER_PROGRAM,
        num_warps=4,
    )
    return out


def mixture_reference(
    hidden: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    top_k: int,
    normalised: bool,
) -> Tensor:
    """`mixture_of_experts` in plain torch and the dtype of `hidden`: every expert for every token,
    weighted by zero where it was not chosen.
    """
    shares = router_logits.to(hidden.dtype).softmax(dim=1)
    chosen = shares.topk(top_k, dim=1)
    weights = torch.zeros_like(shares).scatter(1, chosen.indices, chosen.values)
    if normalised:
        weights /= weights.sum(dim=1, keepdim=True)
    gate, up = torch.einsum("th,eoh->eto", hidden, gate_up).chunk(2, dim=2)
    raised = torch.nn.functional.silu(gate) * up
    return torch.einsum("te,eti,ehi->th", weights, raised, down)


def choose_tile(pairs: int, num_experts: int) -> Tile:
    """The tile for so many pairs of token and expert: it follows from the batch's size alone."""
    mean = pairs / num_experts
    return next((tile for tile in TILES if mean <= tile.m), TILES[-1])


def _options(hidden: Tensor, tile: Tile) -> dict[str, Any]:
    stage = (tile.m + tile.n) * tile.k * hidden.element_size()
    return {
        "TILE_M": tile.m,
        "TILE_N": tile.n,
        "TILE_K": tile.k,
        "num_warps": 4 if tile.m < TILES[-1].m else 8,
        "num_stages": max(1, min(MAX_STAGES, chip_of(hidden.device).shared_memory // stage)),
        "is_hot": hidden.dtype != torch.float32,  # see `tiled_matmul`
        "uses_tensor_cores": True,
    }


def _places(routing: Routing) -> tuple[Tensor, Tensor]:
    return routing.order, routing.tile_experts


def _check(hidden: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> None:
    require_dtype("a mixture of experts", hidden, gate_up, down)
    if down.dim() != 3 or hidden.dim() != 2 or hidden.stride(1) != 1:
        raise ValueError(
            f"tokens {tuple(hidden.shape)} and weights {tuple(down.shape)} are not [tokens, "
            "hidden_size] with contiguous rows and [experts, hidden_size, size]"
        )
    num_experts, hidden_size, size = down.shape
    expected = (num_experts, 2 * size, hidden_size), (len(hidden), num_experts)
    if (gate_up.shape, logits.shape) != expected or hidden.shape[1] != hidden_size:
        raise ValueError(
            f"tokens {tuple(hidden.shape)}, logits {tuple(logits.shape)} and weights "
            f"{tuple(gate_up.shape)} do not match {tuple(down.shape)}"
        )
    if not gate_up.is_contiguous() or not down.is_contiguous():
        raise ValueError("the weights of experts lie in one piece")
    if len(hidden) * top_k * max(size, hidden_size) >= MOST_ELEMENTS:
        raise ValueError(
            f"{len(hidden)} tokens of {hidden_size} entries by {top_k} experts are more than "
            "offsets of 32 bits reach; take smaller batches"
        )


@triton.jit(do_not_specialize=["pairs"])
def expert_up_kernel(
    x: tl.tensor,
    gate_up: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    tile_experts: tl.tensor,
    pairs: tl.tensor,
    size: tl.tensor,
    depth: tl.tensor,
    x_stride: tl.tensor,
    TOP_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
) -> None:
    """SiLU(gate) * up of one tile: half of its columns are gates, half what they scale."""
    HALF: tl.constexpr = TILE_N // 2
    # Columns first: rows of one expert follow each other, and find its weights in the L2 cache.
    across = tl.cdiv(size, HALF)
    tile, first_column = tl.program_id(0) // across, tl.program_id(0) % across * HALF
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    pair = tl.load(order + tile * TILE_M + tl.arange(0, TILE_M))[:, None]
    column = first_column + tl.arange(0, HALF)[None, :]
    step = tl.arange(0, TILE_K)
    is_row, is_column = pair < pairs, column < size
    weight = gate_up + expert.to(tl.int64) * 2 * size * depth
    x_offsets, offsets = pair // TOP_K * x_stride + step[None, :], column * depth + step[:, None]
    gate = tl.zeros([TILE_M, HALF], tl.float32)
    up = tl.zeros([TILE_M, HALF], tl.float32)
    for first in range(0, depth, TILE_K):
        left = tl.load(x + x_offsets, mask=is_row & (step[None, :] < depth - first), other=0.0)
        inside = (step[:, None] < depth - first) & is_column
        gates = tl.load(weight + offsets, mask=inside, other=0.0)
        ups = tl.load(weight + size * depth + offsets, mask=inside, other=0.0)
        gate = tl.dot(left, gates, gate, input_precision="ieee")
        up = tl.dot(left, ups, up, input_precision="ieee")
        x += TILE_K
        weight += TILE_K
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + pair * size + column, y.to(out.dtype.element_ty), mask=is_row & is_column)


@triton.jit(do_not_specialize=["pairs"])
def expert_down_kernel(
    x: tl.tensor,
    down: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    tile_experts: tl.tensor,
    shares: tl.tensor,
    pairs: tl.tensor,
    size: tl.tensor,
    depth: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
) -> None:
    """One tile of results, each row times its share; rows stay in the order of pairs."""
    across = tl.cdiv(size, TILE_N)
    tile, first_column = tl.program_id(0) // across, tl.program_id(0) % across * TILE_N
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    pair = tl.load(order + tile * TILE_M + tl.arange(0, TILE_M))[:, None]
    column = first_column + tl.arange(0, TILE_N)[None, :]
    step = tl.arange(0, TILE_K)
    is_row, is_column = pair < pairs, column < size
    weight = down + expert.to(tl.int64) * size * depth
    x_offsets, offsets = pair * depth + step[None, :], column * depth + step[:, None]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, depth, TILE_K):
        left = tl.load(x + x_offsets, mask=is_row & (step[None, :] < depth - first), other=0.0)
        inside = (step[:, None] < depth - first) & is_column
        total = tl.dot(
            left, tl.load(weight + offsets, mask=inside, other=0.0), total, input_precision="ieee"
        )
        x += TILE_K
        weight += TILE_K
    total *= tl.load(shares + pair, mask=is_row, other=0.0)
    tl.store(out + pair * size + column, total.to(out.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def combine_kernel(
    results: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The sum of one token's results, in the order of its experts' shares."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOP_K):
        at = (token * TOP_K + number) * size + column
        total += tl.load(results + at, mask=mask).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=mask)
