"""Greedy sampling: the largest logit of every row, found by programs that share the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.runtime.checks import require_dtype
from sarathi_kernels.runtime.chip import chip_of
from sarathi_kernels.runtime.launch import launch

NAN_TOKEN = -2  # "sampled" from a row of which some logit is not a number
COLUMNS_PER_STEP = 2048
PROGRAMS_PER_SM = 2
MAX_PARTS = 256
NO_TOKEN = tl.constexpr(2**31 - 1)  # of a column that is not the largest: above all tokens


def greedy(logits: Tensor) -> Tensor:
    """Token of the largest of `logits` [n, vocab] in every row, [n] int64; the lowest of equals.

    A row that holds a NaN gives NAN_TOKEN. Rows may have any stride. Raises ValueError for an
    unknown dtype or shape.
    """
    require_dtype("greedy", logits)
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"greedy takes [n, vocab] with contiguous rows, not {tuple(logits.shape)}, "
            f"{logits.stride()}"
        )
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, device=logits.device, dtype=torch.int64)
    if num_rows == 0:
        return tokens
    steps = triton.cdiv(vocab, COLUMNS_PER_STEP)
    num_programs = PROGRAMS_PER_SM * chip_of(logits.device).num_sms
    # Few rows would leave most multiprocessors idle: they share the columns of a row, too.
    wanted_parts = triton.cdiv(num_programs, num_rows)
    part_steps = triton.cdiv(steps, min(steps, wanted_parts, MAX_PARTS))
    num_parts = triton.cdiv(steps, part_steps)  # none is empty
    best = torch.empty((num_rows, num_parts), device=logits.device, dtype=torch.float32)
    best_tokens = torch.empty((num_rows, num_parts), device=logits.device, dtype=torch.int32)
    launch(
        best_of_part_kernel,
        (num_rows, num_parts),
        logits,
        best,
        best_tokens,
        logits.stride(0),
        vocab,
        part_steps,
        NAN_TOKEN=NAN_TOKEN,
        BLOCK=COLUMNS_PER_STEP,
        num_warps=8,
    )
    launch(
        best_of_row_kernel,
        (num_rows,),
        best,
        best_tokens,
        tokens,
        num_parts,
        NAN_TOKEN=NAN_TOKEN,
        BLOCK=MAX_PARTS,
        num_warps=1,
    )
    return tokens


def greedy_reference(logits: Tensor) -> Tensor:
    """`greedy` in plain torch."""
    best = logits.float().amax(dim=1, keepdim=True)  # NaN where any logit is
    columns = torch.arange(logits.shape[1], device=logits.device)
    lowest = columns.where(logits == best, logits.shape[1]).amin(dim=1)
    return lowest.where(best[:, 0] == best[:, 0], NAN_TOKEN)


# Not specialized: the number of rows would decide when the engine stops to compile.
@triton.jit(do_not_specialize=["part_steps"])
def best_of_part_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    best_tokens: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    part_steps: tl.tensor,
    NAN_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Largest logit and its lowest token among `part_steps` times BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_start = logits + row * row_stride
    first = part * part_steps * BLOCK
    lane = first + tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    token = lane
    is_nan = tl.zeros([BLOCK], tl.int32)
    for step in range(part_steps):
        column = lane + step * BLOCK
        stored = tl.load(row_start + column, mask=column < vocab, other=float("-inf"))
        x = stored.to(tl.float32)
        # Strictly: of equal logits a lane keeps the first, which is its lowest token.
        is_larger = x > largest
        token = tl.where(is_larger, column, token)
        largest = tl.where(is_larger, x, largest)
        is_nan |= (x != x).to(tl.int32)  # a NaN is never larger, so it is noted apart
    # Of equal logits of several lanes, too, the lowest token wins: samples do not hang on lanes.
    winner = tl.max(largest, axis=0)
    winners = tl.where(largest == winner, token, NO_TOKEN)
    lowest = tl.min(winners, axis=0)
    has_nan = tl.max(is_nan, axis=0) > 0
    at = row * tl.num_programs(1) + part
    tl.store(best + at, winner)
    tl.store(best_tokens + at, tl.where(has_nan, NAN_TOKEN, lowest))


@triton.jit(do_not_specialize=["num_parts"])
def best_of_row_kernel(
    best: tl.tensor,
    best_tokens: tl.tensor,
    tokens: tl.tensor,
    num_parts: tl.tensor,
    NAN_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The best of one row's parts; NAN_TOKEN if any part has it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    mask = part < num_parts
    entry = row * num_parts + part
    x = tl.load(best + entry, mask=mask, other=float("-inf"))
    token = tl.load(best_tokens + entry, mask=mask, other=NO_TOKEN)
    winners = tl.where(x == tl.max(x, axis=0), token, NO_TOKEN)
    lowest = tl.min(winners, axis=0)
    has_nan = tl.min(token, axis=0) == NAN_TOKEN  # below all tokens
    chosen = tl.where(has_nan, NAN_TOKEN, lowest)
    tl.store(tokens + row, chosen.to(tl.int64))
