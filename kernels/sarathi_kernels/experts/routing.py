"""Which experts each token goes to, and in what order: the tokens of one expert together, in tiles
that belong to one expert each, so that a product of all experts is one launch.

Sizes follow from the number of tokens alone, whatever they chose: nothing waits for the device, and
CUDA graphs can capture it. No atomics: the same logits give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.runtime.checks import require_dtype
from sarathi_kernels.runtime.launch import launch

ROWS_PER_PROGRAM = 4
PAIRS_PER_STEP = 4096
MIN_BINS = 32  # of a histogram: a warp's
UNUSED = -1  # a tile that no expert needs


@dataclass(frozen=True)
class Routing:
    """Pairs of a token and one of its experts, numbered token by token; `order` lists them expert
    by expert, each from the first row of a tile on. Rows that are no pair have the number of pairs.
    """

    chosen: Tensor  # [num_tokens, top_k] int32: experts, the likeliest first
    shares: Tensor  # [num_tokens, top_k] float32
    order: Tensor  # [num_tiles * tile_rows] int32, undefined in tiles that are UNUSED
    tile_experts: Tensor  # [num_tiles] int32: expert, or UNUSED
    tile_rows: int


def route(logits: Tensor, top_k: int, *, normalised: bool, tile_rows: int) -> Routing:
    """Route each row of `logits` [num_tokens, num_experts] to its `top_k` largest, the first of
    equals, with their shares of the softmax over all, or over those chosen if `normalised`.

    A logit that is not a number counts as largest, and spoils the row's shares. Raises ValueError
    for an unknown dtype or shape.
    """
    require_dtype("routing", logits)
    if logits.dim() != 2 or logits.stride(1) != 1 or not 0 < top_k <= logits.shape[1]:
        raise ValueError(
            f"routing to {top_k} takes [tokens, experts] with contiguous rows, not "
            f"{tuple(logits.shape)} of {logits.stride()}"
        )
    num_tokens, num_experts = logits.shape
    pairs = num_tokens * top_k
    filled = min(pairs, num_experts)  # at most so many last tiles, each with a row or more
    num_tiles = (pairs + filled * (tile_rows - 1)) // tile_rows
    chosen, order, tile_experts = (
        torch.empty(sizes, device=logits.device, dtype=torch.int32)
        for sizes in ((num_tokens, top_k), (num_tiles * tile_rows,), (num_tiles,))
    )
    shares = torch.empty((num_tokens, top_k), device=logits.device, dtype=torch.float32)
    if pairs == 0:
        return Routing(chosen, shares, order, tile_experts, tile_rows)
    launch(
        choose_kernel,
        (triton.cdiv(num_tokens, ROWS_PER_PROGRAM),),
        logits,
        chosen,
        shares,
        num_tokens,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        COLUMNS=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        TOP_COLUMNS=triton.next_power_of_2(top_k),
        NORMALISED=normalised,
        ROWS=ROWS_PER_PROGRAM,
        num_warps=1,
    )
    launch(
        order_kernel,
        (num_experts,),
        chosen,
        order,
        tile_experts,
        pairs,
        num_tiles,
        BINS=max(MIN_BINS, triton.next_power_of_2(num_experts)),
        UNUSED=UNUSED,
        TILE_ROWS=tile_rows,
        BLOCK=PAIRS_PER_STEP,
        num_warps=8,
    )
    return Routing(chosen, shares, order, tile_experts, tile_rows)


@triton.jit(do_not_specialize=["num_tokens"])
def choose_kernel(
    logits: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    num_tokens: tl.tensor,
    row_stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_COLUMNS: tl.constexpr,
    NORMALISED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """The largest of ROWS rows, one after the other."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column, place = tl.arange(0, COLUMNS)[None, :], tl.arange(0, TOP_COLUMNS)[None, :]
    is_column = column < NUM_EXPERTS
    inside = (row < num_tokens) & is_column
    x = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    key = tl.where(x == x, x, float("inf"))
    is_left = is_column & (row >= 0)
    experts = tl.zeros([ROWS, TOP_COLUMNS], tl.int32)
    parts = tl.zeros([ROWS, TOP_COLUMNS], tl.float32)
    first = tl.zeros([ROWS, 1], tl.float32)
    for number in tl.static_range(TOP_K):
        best = tl.max(tl.where(is_left, key, float("-inf")), axis=1)[:, None]
        expert = tl.min(tl.where(is_left & (key == best), column, COLUMNS), axis=1)[:, None]
        logit = tl.sum(tl.where(column == expert, x, 0.0), axis=1)[:, None]
        if number == 0:
            first = logit
        experts = tl.where(place == number, expert, experts)
        parts = tl.where(place == number, tl.exp(logit - first), parts)
        is_left &= column != expert
    total = tl.sum(parts, axis=1)[:, None]
    if not NORMALISED:
        total = tl.sum(tl.where(is_column, tl.exp(x - first), 0.0), axis=1)[:, None]
    at = row * TOP_K + place
    mask = (row < num_tokens) & (place < TOP_K)
    tl.store(chosen + at, experts, mask=mask)
    tl.store(shares + at, parts / total, mask=mask)


@triton.jit(do_not_specialize=["pairs", "num_tiles"])
def order_kernel(
    chosen: tl.tensor,
    order: tl.tensor,
    tile_experts: tl.tensor,
    pairs: tl.tensor,
    num_tiles: tl.tensor,
    BINS: tl.constexpr,
    UNUSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The pairs of one expert, behind the tiles of all experts before it."""
    expert = tl.program_id(0)
    lane, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, BLOCK):
        mask = lane < pairs - first
        counts += tl.histogram(tl.load(chosen + first + lane, mask=mask, other=0), BINS, mask)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    before = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    end = before + tl.sum(tl.where(bins == expert, tiles, 0), axis=0)
    place = before * TILE_ROWS
    for first in range(0, pairs, BLOCK):
        pair = first + lane
        is_own = tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert
        rank = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(order + place + rank - 1, pair, mask=is_own)
        place += tl.max(rank, axis=0)
    padding = tl.arange(0, TILE_ROWS)
    unfilled = place + padding
    tl.store(order + unfilled, pairs + 0 * padding, mask=unfilled < end * TILE_ROWS)
    # The last expert leaves word of the tiles that nobody needs.
    is_last = expert == tl.num_programs(0) - 1
    for first in range(before, tl.where(is_last, num_tiles, end), BINS):
        tile = first + bins
        owner = tl.where(tile < end, expert, UNUSED)
        tl.store(tile_experts + tile, owner, mask=(tile < end) | (is_last & (tile < num_tiles)))
