"""What the attention kernels need to know of one iteration: worked out once, read by every layer.

All tensors are int32 and lie on the device. Their sizes may exceed what the iteration has (CUDA
graphs replay fixed shapes): entries of sequence -1 are padding, for which kernels do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING = -1
# Queries of one tile of a chunk, and what a row of it costs: a quarter more in a small tile, as
# half as many share what the loop does for a tile of keys. (Matrix cycles and issue slots of the
# compiled loops, one after the other, give from 1.17 on sm_90 to 1.32 on sm_80.)
ROW_COST = {64: 1.25, 128: 1.0}
TILE_ROWS = tuple(ROW_COST)
# cached tokens that a part of a decode's context has at least: less costs more in reduction
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


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
    tile_rows: int
    num_splits: (
        int  # parts of a decode's context, of equal length, each worked on by programs of its own
    )

    @property
    def num_tiles(self) -> int:
        """Tiles of queries, padding included."""
        return len(self.tiles)

    @property
    def num_decodes(self) -> int:
        """Decodes, padding included."""
        return len(self.decodes)


def tiles_of(query_lens: Sequence[int], tile_rows: int) -> NDArray[np.int32]:
    """(sequence, first query) of every tile of the sequences with more than one new token,
    [num_tiles, 2].
    """
    tiles = [
        (sequence, first)
        for sequence, num_queries in enumerate(query_lens)
        if num_queries > 1
        for first in range(0, num_queries, tile_rows)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)


def choose_tile_rows(num_prefill_tokens: int, num_heads: int, num_sms: int) -> int:
    """The rows for which the multiprocessor with most tiles has least to do; the larger of equals.

    Tiles count as equally long and a multiprocessor works on two as long as on one after the other:
    an H100 takes 512 tokens of 40 heads in three waves of small tiles, 81 % of them filled, instead
    of two of large ones, 61 % filled.
    """

    def cost(rows: int) -> float:
        programs = -(-num_prefill_tokens // rows) * num_heads
        return -(-programs // num_sms) * rows * ROW_COST[rows]

    return min(reversed(TILE_ROWS), key=cost)


def choose_num_splits(num_decodes: int, num_kv_heads: int, longest: int, num_sms: int) -> int:
    """Parts of the longest context such that two programs a multiprocessor have work; 1 if the
    batch does that.
    """
    if num_decodes == 0:
        return 1
    wanted = -(-2 * num_sms // (num_decodes * num_kv_heads))
    return max(1, min(wanted, longest // MIN_SPLIT_TOKENS, MAX_SPLITS))


def make_plan(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    blocks: Sequence[Sequence[int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    num_sms: int,
    device: torch.device,
) -> AttentionPlan:
    """The plan of sequences with so many new and visible tokens, whose contexts lie in so many
    cache `blocks`.

    Raises ValueError unless 1 <= query_lens <= kv_lens. The engine packs the same into one buffer
    of its own.
    """
    for num_queries, kv_len in zip(query_lens, kv_lens, strict=True):
        if not 1 <= num_queries <= kv_len:
            raise ValueError(f"{num_queries} queries cannot be the newest of {kv_len} tokens")
    num_prefill_tokens = sum(n for n in query_lens if n > 1)
    decodes = [sequence for sequence, n in enumerate(query_lens) if n == 1]
    tile_rows = choose_tile_rows(num_prefill_tokens, num_heads, num_sms)
    table = np.full((len(blocks), max(map(len, blocks), default=1)), PADDING, dtype=np.int32)
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
        tile_rows=tile_rows,
        num_splits=choose_num_splits(
            len(decodes), num_kv_heads, max((kv_lens[s] for s in decodes), default=0), num_sms
        ),
    )
