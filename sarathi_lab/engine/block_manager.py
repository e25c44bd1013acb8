"""Paged accounting of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sarathi_lab.engine.prefix_cache import PrefixCache
from sarathi_lab.engine.request import Chunk, SequenceState


@dataclass(eq=False)
class BlockManager:
    """Assigns `num_blocks` blocks of `block_size` tokens, which index the executor's cache: paged
    attention, as in vLLM.

    With `shares_prefixes` sequences share the blocks of equal prefixes (`prefix`). Each sequence
    holds `state_blocks` more, of constant number, for states of layers without a cache of tokens.
    """

    num_blocks: int
    block_size: int
    shares_prefixes: bool = field(default=False, kw_only=True)
    state_blocks: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.prefix = (
            PrefixCache(self.num_blocks, self.block_size) if self.shares_prefixes else None
        )
        # Empty blocks, popped from the end, so that a fresh cache hands out neighbours: 0, 1.
        self.empty = list(range(self.num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        """Blocks that are empty, or cached without a holder."""
        return len(self.empty) + (0 if self.prefix is None else len(self.prefix.unused))

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def state_tokens(self) -> int:
        """Tokens that the blocks of one sequence's states could hold."""
        return self.state_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds."""
        return -(-num_tokens // self.block_size) + self.state_blocks

    def watermark_blocks(self, watermark: float) -> int:
        """Blocks that admission leaves free, the share `watermark` of all."""
        return int(watermark * self.num_blocks)

    def can_hold(self, num_tokens: int, watermark: float = 0.0) -> bool:
        """Whether a new sequence of `num_tokens` tokens fits and leaves the `watermark` free."""
        return self.blocks_for(num_tokens) + self.watermark_blocks(watermark) <= self.num_free

    def num_missing(self, sequence: SequenceState, num_tokens: int) -> int:
        """Blocks that `sequence` needs in addition to hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_ids))

    def num_slots(self, sequence: SequenceState) -> int:
        """Tokens that `sequence` could compute next without an eviction."""
        num_blocks = self.num_free + len(sequence.block_ids) - self.state_blocks
        return num_blocks * self.block_size - sequence.num_computed

    def grow(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Let `sequence` hold `num_tokens` tokens; False, with nothing changed, if it can't."""
        held = sequence.block_ids
        missing = -(-num_tokens // self.block_size) + self.state_blocks - len(held)
        if missing <= 0:  # most tokens come one at a time
            return True
        if (short := missing - len(self.empty)) > 0:
            if self.prefix is None or short > len(self.prefix.unused):
                return False
            self.empty.extend(self.prefix.evict(short))
        held.extend(self.empty[: -missing - 1 : -1])
        del self.empty[-missing:]
        return True

    def look_up(self, sequence: SequenceState) -> SequenceState:
        """Count the cached tokens of a waiting `sequence` as computed, and return it."""
        if self.prefix is not None:
            sequence.num_computed = len(self.prefix.find(sequence)) * self.block_size
        return sequence

    def publish(self, chunks: Sequence[Chunk]) -> None:
        """Make the full blocks of `chunks` available to other sequences."""
        if self.prefix is not None:
            for sequence, start, num_tokens, is_decode, _ in chunks:
                # Most chunks are decodes, few of which fill a block.
                is_within = is_decode and num_tokens == 1 and start % self.block_size
                if not is_within or not sequence.num_published:
                    self.prefix.publish(sequence)

    def fits(self, sequence: SequenceState, num_tokens: int, watermark: float = 0.0) -> bool:
        """Whether there is room for `num_tokens` tokens of `sequence` in all, beside those that it
        holds or, while it waits, shares, with the `watermark` free.
        """
        fewer_free = self.num_missing(sequence, num_tokens)
        if self.prefix is not None and not sequence.block_ids:
            found = self.prefix.find(sequence)
            # Of the blocks that it shares those without a holder are no longer free either.
            fewer_free -= len(found) - len(self.prefix.unused.keys() & found)
        return fewer_free + self.watermark_blocks(watermark) <= self.num_free

    def admit(self, sequence: SequenceState, num_tokens: int, watermark: float = 0.0) -> bool:
        """Give a new sequence its cached prefix and room for `num_tokens` tokens in all, with the
        `watermark` free; False, with nothing changed, if blocks are short.
        """
        if not self.fits(sequence, num_tokens, watermark):
            return False
        if self.prefix is not None:
            self.prefix.share(sequence, self.prefix.find(sequence))
        return self.grow(sequence, num_tokens)

    def free(self, sequence: SequenceState) -> None:
        """Take back all blocks of `sequence`, except shared ones."""
        prefix = self.prefix
        self.empty += sequence.block_ids[::-1] if prefix is None else prefix.release(sequence)
        sequence.block_ids.clear()
