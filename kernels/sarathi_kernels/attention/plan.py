"""What the attention kernels need to know of one iteration: worked out once, read by every layer.

All tensors are int32 and lie on the device. Their sizes may exceed what the iteration has (CUDA
graphs replay fixed shapes): entries of sequence -1 are padding, for which kernels do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING = -1
Ints = NDArray[np.integer]
# Queries of one tile of a chunk, and what a row of it costs: a quarter more in a small tile, as
# half as many share what the loop does for a tile of keys. (Matrix cycles and issue slots of the
# compiled loops, one after the other, give from 1.17 on sm_90 to 1.32 on sm_80.)
ROW_COST = {64: 1.25, 128: 1.0}
TILE_ROWS = tuple(ROW_COST)
# Parts of decodes' contexts. Estimates, not measured: two programs a multiprocessor read as fast as
# the memory gives, more of them only take turns; a program starts in the time in which it would
# read PROGRAM_TOKENS, and the reduction's launch takes as long as REDUCTION_TOKENS of each.
PROGRAMS_PER_SM = 2
MAX_WAVES = 12  # of programs beyond one for each decode: what a plan has room for
PROGRAM_TOKENS = 16
REDUCTION_TOKENS = 64
PART_TOKENS = 256  # a part has a multiple of these, and begins at one: no tile of keys is larger
MAX_PARTS = 64  # of one context
PARTS_OF_LONGEST = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_PARTS])


@dataclass(frozen=True)
class AttentionPlan:
    """Packed sequences of one iteration: where their queries and their cached tokens are, and how
    work is divided.

    A sequence with one new token is a decode, any other is cut into tiles of `tile_rows` queries;
    both attend causally to the first `kv_lens` cached tokens of their sequence, the new ones
    included (they are in the cache).
    """

    query_starts: Tensor  # [num_sequences + 1] packed row of each sequence's first query
    kv_lens: Tensor  # [num_sequences]
    block_table: Tensor  # [num_sequences, max_blocks] cache blocks that hold the context, in order
    # [num_tiles, 2] sequence, and first query of the tile counted from its first new token
    tiles: Tensor
    decodes: Tensor  # [num_decodes] sequence
    # [num_parts, 4] sequence, first and last + 1 of the cached tokens that separate programs
    # attend to, and 1 if the decode has other parts, too
    parts: Tensor
    # [num_reductions, 3] sequence, its first part and number of parts, of decodes with several; has
    # no row where no decode may have several
    reductions: Tensor
    tile_rows: int

    @property
    def num_tiles(self) -> int:
        """Tiles of queries, padding included."""
        return len(self.tiles)

    @property
    def num_decodes(self) -> int:
        """Decodes, padding included."""
        return len(self.decodes)

    @property
    def num_parts(self) -> int:
        """Parts of the decodes' contexts, padding included."""
        return len(self.parts)


@dataclass(frozen=True)
class Waves:
    """Programs of a launch that works on tiles and on parts of decodes' contexts, in waves of
    `size` that are all of one kind.
    """

    size: int
    of_tiles: int
    of_parts: int

    @property
    def num_programs(self) -> int:
        """Programs of all waves, those without work in the last of each kind included."""
        return (self.of_tiles + self.of_parts) * self.size


def interleave(num_tile_programs: int, num_part_programs: int, num_sms: int) -> Waves:
    """Waves of one program for each multiprocessor.

    Where each multiprocessor holds two programs, it gets one from each of two waves: a tile and a
    decode. If kinds took turns program by program, those with even numbers would get tiles alone.
    """
    return Waves(
        size=num_sms,
        of_tiles=-(-num_tile_programs // num_sms),
        of_parts=-(-num_part_programs // num_sms),
    )


def tiles_of(query_lens: Sequence[int], tile_rows: int) -> NDArray[np.int32]:
    """(sequence, first query) of every tile of the sequences with more than one new token,
    [num_tiles, 2].
    """
    tiles: list[tuple[int, int]] = []
    for sequence, num_queries in enumerate(query_lens):
        if num_queries <= 1:
            continue
        for first_query in range(0, num_queries, tile_rows):
            tiles.append((sequence, first_query))
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)


def choose_tile_rows(num_prefill_tokens: int, num_heads: int, num_sms: int) -> int:
    """The rows for which the multiprocessor with most tiles has least to do; the larger of equals.

    Tiles count as equally long and a multiprocessor works on two as long as on one after the other:
    an H100 takes 512 tokens of 40 heads in three waves of small tiles, 81 % of them filled, instead
    of two of large ones, 61 % filled.
    """

    def cost(rows: int) -> float:
        num_tiles = -(-num_prefill_tokens // rows)
        num_waves = -(-num_tiles * num_heads // num_sms)
        return num_waves * rows * ROW_COST[rows]

    return min(reversed(TILE_ROWS), key=cost)


def room_for_parts(num_decodes: int, num_kv_heads: int, longest: int, num_sms: int) -> int:
    """Parts that a plan of so many decodes has at most; more than `num_decodes` where contexts of
    up to `longest` tokens may be split.
    """
    if num_decodes == 0 or longest <= PART_TOKENS:
        return num_decodes
    num_programs = MAX_WAVES * PROGRAMS_PER_SM * num_sms
    return num_decodes + -(-num_programs // num_kv_heads)


def choose_part_tokens(
    lengths: NDArray[np.int64], num_kv_heads: int, num_sms: int, max_parts: int
) -> int:
    """Tokens of a part such that contexts of these `lengths` take the least time, if each of
    PROGRAMS_PER_SM programs on every multiprocessor takes the next part when it is done with one.

    Parts of equal length end in whole waves; otherwise no program waits longer than for one part
    (Graham's bound of list scheduling).
    """
    longest = int(lengths.max())
    # Candidates: the sizes that cut the longest context into so many parts.
    multiples = -(-longest // (PARTS_OF_LONGEST * PART_TOKENS))
    sizes = multiples * PART_TOKENS  # [candidates]
    parts_of_each = -(-lengths // sizes[:, None])  # [candidates, contexts]
    num_parts = parts_of_each.sum(1)
    # Every part is a program for each KV head; a wave has as many as run at a time.
    waves_a_part = num_kv_heads / (PROGRAMS_PER_SM * num_sms)
    waves = num_parts * waves_a_part
    largest = np.minimum(sizes, longest)
    # Both in tokens that a program reads one after another; the smaller bound holds.
    in_waves = np.ceil(waves) * largest
    by_graham = lengths.sum() * waves_a_part + largest
    cost = np.minimum(in_waves, by_graham) + waves * PROGRAM_TOKENS
    is_split = num_parts > len(lengths)
    cost[is_split] += REDUCTION_TOKENS
    lacks_room = num_parts > max_parts
    lacks_room[0] = False  # undivided contexts always have room
    cost[lacks_room] = np.inf
    return int(sizes[cost.argmin()])


def divide(
    sequences: Ints, kv_lens: Ints, part_tokens: int, window: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`parts` and `reductions` of decodes, the longest first: the last to be begun are short."""
    first_keys = _first_keys(kv_lens, window)
    lengths = kv_lens - first_keys
    # By decode, the longest first:
    order = np.argsort(-lengths, kind="stable")
    counts = -(-lengths[order] // part_tokens)
    first_parts = np.cumsum(counts) - counts
    is_split = counts > 1
    # By part: the decode that it belongs to, in this order and in that of the arguments.
    decode = np.repeat(np.arange(len(counts)), counts)
    owner = order[decode]
    number = np.arange(len(decode)) - first_parts[decode]  # among the parts of its decode
    parts = np.empty((len(decode), 4), dtype=np.int32)
    parts[:, 0] = sequences[owner]
    parts[:, 1] = first_keys[owner] + number * part_tokens
    parts[:, 2] = np.minimum(parts[:, 1] + part_tokens, kv_lens[owner])
    parts[:, 3] = is_split[decode]
    columns = [sequences[order], first_parts, counts]
    reductions = np.stack(columns, axis=1)[is_split]
    return parts, reductions.astype(np.int32)


def with_parts_of(
    plan: AttentionPlan, part_tokens: int, window: int | None = None
) -> AttentionPlan:
    """`plan` with parts of so many tokens, to compare or test; copies from and to the device."""
    device = plan.decodes.device
    sequences = plan.decodes[plan.decodes >= 0]
    kv_lens = plan.kv_lens[sequences].cpu().numpy()
    parts, reductions = divide(sequences.cpu().numpy(), kv_lens, part_tokens, window)
    return replace(
        plan,
        parts=torch.from_numpy(parts).to(device),
        reductions=torch.from_numpy(reductions).to(device),
    )


def plan_parts(
    sequences: Ints,
    kv_lens: Ints,
    num_kv_heads: int,
    num_sms: int,
    max_parts: int,
    window: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`parts`, at most `max_parts`, and `reductions` of the decodes of `sequences`, which see the
    newest `window` of so many cached tokens.
    """
    if len(sequences) == 0:
        return np.empty((0, 4), np.int32), np.empty((0, 3), np.int32)
    lengths = kv_lens - _first_keys(kv_lens, window)
    part_tokens = int(lengths.max())
    if max_parts > len(sequences):
        part_tokens = choose_part_tokens(lengths, num_kv_heads, num_sms, max_parts)
    return divide(sequences, kv_lens, part_tokens, window)


def _first_keys(kv_lens: Ints, window: int | None) -> Ints:
    """Where the parts of contexts begin: in front of what the newest token sees."""
    if window is None:
        return np.zeros_like(kv_lens)
    hidden = np.maximum(kv_lens - window, 0)
    return hidden // PART_TOKENS * PART_TOKENS


def make_plan(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    blocks: Sequence[Sequence[int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    num_sms: int,
    device: torch.device,
    sliding_window: int | None = None,
) -> AttentionPlan:
    """The plan of sequences with so many new and visible tokens, whose contexts lie in so many
    cache `blocks`.

    Raises ValueError unless 1 <= query_lens <= kv_lens. The engine packs the same into one buffer.
    """
    for num_queries, kv_len in zip(query_lens, kv_lens, strict=True):
        if not 1 <= num_queries <= kv_len:
            raise ValueError(f"{num_queries} queries cannot be the newest of {kv_len} tokens")
    num_prefill_tokens = sum(n for n in query_lens if n > 1)
    is_decode = np.array(query_lens) == 1
    decodes = np.flatnonzero(is_decode)
    contexts = np.array(kv_lens)[is_decode]
    longest = int(contexts.max(initial=0))
    max_parts = room_for_parts(len(decodes), num_kv_heads, longest, num_sms)
    parts, reductions = plan_parts(
        decodes, contexts, num_kv_heads, num_sms, max_parts, sliding_window
    )
    tile_rows = choose_tile_rows(num_prefill_tokens, num_heads, num_sms)
    most_blocks = max(map(len, blocks), default=1)
    table = np.full((len(blocks), most_blocks), PADDING, dtype=np.int32)
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = ids

    def on_device(values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(device)

    return AttentionPlan(
        query_starts=on_device(np.concatenate(([0], np.cumsum(query_lens)))),
        kv_lens=on_device(kv_lens),
        block_table=on_device(table),
        tiles=on_device(tiles_of(query_lens, tile_rows)),
        decodes=on_device(decodes),
        parts=on_device(parts),
        reductions=on_device(reductions),
        tile_rows=tile_rows,
    )
