"""Blocks of layers that see a window of a context: some of the cache's, or a pool of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sarathi_lab.engine.request import SequenceState
from sarathi_lab.model.layers import CachedWindow


def extra_blocks(state_blocks: int, window: CachedWindow | None, block_size: int) -> list[int]:
    """List the blocks that a sequence holds in addition to a block for each `block_size` tokens.

    Args:
        state_blocks: For the states of a sequence.
        window: Takes its share of blocks for each block of tokens, until it is full.
        block_size: Tokens of a block.

    Returns:
        By the number of blocks of tokens; the last entry is that of all longer sequences.
    """
    if window is None:
        return [state_blocks]
    extra = []
    for num_of_tokens in range(window.num_blocks(block_size) + 1):
        num_of_window = math.ceil(window.share_of_blocks * num_of_tokens)
        extra.append(state_blocks + num_of_window)
    return extra


class WindowPool:
    """A pool of blocks for layers with a window alone, as in SGLang: without one it has no blocks,
    and needs none.

    A sequence holds as many of its blocks as of the cache's, until its window is full.

    Attributes:
        blocks_per_cache_block: Of the pool, for each block of the cache; 0 without a pool.
        blocks_of_window: Blocks that a full window holds; 0 without a pool.
        num_blocks: Of the whole pool.
        num_free: Of these, those that no sequence holds.
    """

    def __init__(
        self, window: CachedWindow | None, num_blocks: int, block_size: int, state_blocks: int
    ) -> None:
        """Make the pool beside a cache of `num_blocks`, `state_blocks` of which each sequence holds
        for its states.
        """
        self.blocks_per_cache_block = 0.0
        self.blocks_of_window = 0
        if window is not None and window.pool is not None:
            self.blocks_per_cache_block = window.pool
            self.blocks_of_window = window.num_blocks(block_size)
        self.num_blocks = self.size_beside(num_blocks)
        self.num_free = self.num_blocks
        self._state_blocks = state_blocks

    def size_beside(self, num_blocks: int) -> int:
        """Return the blocks of the pool beside a cache of `num_blocks`."""
        return int(self.blocks_per_cache_block * num_blocks)

    def held_with(self, num_blocks: int) -> int:
        """Return the blocks of the pool that a sequence with `num_blocks` of the cache holds."""
        if self.blocks_of_window == 0:
            return 0
        num_of_tokens = max(0, num_blocks - self._state_blocks)
        return min(num_of_tokens, self.blocks_of_window)

    def held_by(self, sequence: SequenceState) -> int:
        """Return the blocks of the pool that `sequence` holds."""
        return self.held_with(len(sequence.block_ids))

    def missing(self, num_held: int, num_blocks: int) -> int:
        """Return the blocks of the pool that a sequence needs to grow from `num_held` blocks of the
        cache to `num_blocks`.
        """
        if self.blocks_of_window == 0:  # mostly, and a batch of decodes asks for each
            return 0
        return self.held_with(num_blocks) - self.held_with(num_held)

    def has_room_for_window(self, begun: Iterable[SequenceState]) -> bool:
        """Whether the whole window of a new sequence has room, when the windows of `begun` ones
        have filled.
        """
        if self.blocks_of_window == 0:
            return True
        needed = self.blocks_of_window
        for sequence in begun:
            needed += self.blocks_of_window - self.held_by(sequence)
        return needed <= self.num_free
