"""Paged accounting of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sarathi_lab.engine.prefix_cache import PrefixCache
from sarathi_lab.engine.request import Chunk, SequenceState
from sarathi_lab.engine.window_blocks import WindowPool, extra_blocks
from sarathi_lab.model.layers import CachedWindow, Window


@dataclass(eq=False)
class BlockManager:
    """Assigns the blocks of a cache, by whose numbers the executor finds them: paged attention, as
    in vLLM.

    Attributes:
        num_blocks: Of the whole cache.
        block_size: Tokens of a block.
        shares_prefixes: Sequences share the blocks of equal prefixes (`prefix`).
        state_blocks: Blocks that each sequence holds besides, for states of layers without a cache
            of tokens.
        window: What some layers see of a context. A sequence holds more blocks for them until the
            window is full; what leaves it comes back for the sequence's next tokens. Where windows
            have a pool of their own (`window_pool`), a sequence needs room in both; shared prefixes
            save none of it.
    """

    num_blocks: int
    block_size: int
    shares_prefixes: bool = field(default=False, kw_only=True)
    state_blocks: int = field(default=0, kw_only=True)
    window: CachedWindow | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._extra_blocks = extra_blocks(self.state_blocks, self.window, self.block_size)
        # The most blocks that one token more can need.
        steps = [after - before for before, after in pairwise(self._extra_blocks)]
        self._most_a_token = 1 + max(steps, default=0)
        self.window_pool = WindowPool(
            self.window, self.num_blocks, self.block_size, self.state_blocks
        )
        self.prefix: PrefixCache | None = None
        if self.shares_prefixes:
            self.prefix = PrefixCache(self.num_blocks, self.block_size)
        # Empty blocks, popped from the end. Those that no sequence has held yet are counted alone:
        # a card has millions for a small model, and to list them takes a second.
        self._returned: list[int] = []
        self._num_untouched = self.num_blocks

    @property
    def empty(self) -> list[int]:
        """All empty blocks, of which the last is the next that is handed out."""
        first_untouched = self.num_blocks - self._num_untouched
        untouched = range(first_untouched, self.num_blocks)
        return [*reversed(untouched), *self._returned]

    @property
    def num_free(self) -> int:
        """Blocks that are empty, or cached without a holder."""
        num_empty = len(self._returned) + self._num_untouched
        if self.prefix is None:
            return num_empty
        return num_empty + len(self.prefix.unused)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def attention_window(self) -> Window | None:
        """The window of some of the layers, if there is one."""
        return None if self.window is None else self.window.window

    @property
    def state_tokens(self) -> int:
        """Tokens that the blocks of one sequence's states could hold."""
        return self.state_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds."""
        num_blocks = -(-num_tokens // self.block_size)
        if num_blocks < len(self._extra_blocks):
            return num_blocks + self._extra_blocks[num_blocks]
        return num_blocks + self._extra_blocks[-1]

    def extra_tokens(self, num_tokens: float) -> int:
        """Tokens that the blocks of a sequence of `num_tokens` could hold, beside its own."""
        num_own = math.ceil(num_tokens / self.block_size)
        num_extra = self.blocks_for(num_own * self.block_size) - num_own
        return num_extra * self.block_size

    def tokens_of(self, num_blocks: int) -> int:
        """Return the most tokens of a sequence that holds `num_blocks`; below 0 if its states lack
        room.
        """
        beyond_window = num_blocks - self._extra_blocks[-1]
        fills_window = beyond_window >= len(self._extra_blocks)
        if self.window is None or fills_window:
            return beyond_window * self.block_size
        # The inverse of `blocks_for` within the window.
        without_states = num_blocks - self.state_blocks
        held_for_each = 1 + self.window.share_of_blocks  # block of tokens
        within = math.floor(without_states / held_for_each)
        return within * self.block_size

    def room_for(self, num_tokens: int) -> int:
        """Blocks of a cache that holds a sequence of `num_tokens`, in the pool of windows, too."""
        num_blocks = self.blocks_for(num_tokens)
        pool = self.window_pool
        num_of_pool = pool.held_with(num_blocks)
        if num_of_pool == 0:
            return num_blocks
        beside_pool = math.floor(num_of_pool / pool.blocks_per_cache_block)
        room = max(num_blocks, beside_pool)
        # The pool has whole blocks, so that the quotient may be one too few.
        while pool.size_beside(room) < num_of_pool:
            room += 1
        return room

    def window_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds in the windows' pool; 0 without one."""
        num_blocks = self.blocks_for(num_tokens)
        return self.window_pool.held_with(num_blocks)

    def watermark_blocks(self, watermark: float) -> int:
        """Blocks that admission leaves free, the share `watermark` of all."""
        return int(watermark * self.num_blocks)

    def can_hold(self, num_tokens: int, watermark: float = 0.0) -> bool:
        """Whether a new sequence of `num_tokens` tokens fits and leaves the `watermark` free."""
        num_blocks = self.blocks_for(num_tokens)
        num_of_pool = self.window_pool.held_with(num_blocks)
        if num_of_pool > self.window_pool.num_free:
            return False
        num_needed = num_blocks + self.watermark_blocks(watermark)
        return num_needed <= self.num_free

    def has_room_for_all(self, num_decodes: int) -> bool:
        """Whether so many sequences could hold one token more, with any blocks that they hold.

        No sequence is looked at, so that False may be wrong.
        """
        pool = self.window_pool
        if pool.blocks_of_window and num_decodes > pool.num_free:
            return False
        num_needed = num_decodes * self._most_a_token
        return num_needed <= self.num_free

    def num_missing(self, sequence: SequenceState, num_tokens: int) -> int:
        """Blocks that `sequence` needs in addition to hold `num_tokens` tokens."""
        num_blocks = self.blocks_for(num_tokens)
        num_held = len(sequence.block_ids)
        return max(0, num_blocks - num_held)

    def have_room(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether all `sequences` can hold their known tokens at a time."""
        num_missing = 0
        for sequence in sequences:
            num_missing += self.num_missing(sequence, sequence.num_known)
        if num_missing > self.num_free:
            return False
        return self.have_room_in_windows(sequences)

    def have_room_in_windows(self, sequences: Iterable[SequenceState], num_more: int = 0) -> bool:
        """Whether the windows' pool has room for `sequences` with `num_more` tokens each."""
        pool = self.window_pool
        if pool.blocks_of_window == 0:
            return True
        num_missing = 0
        for sequence in sequences:
            num_tokens = sequence.num_known + num_more
            num_in_cache = self.num_missing(sequence, num_tokens)
            num_held = len(sequence.block_ids)
            num_missing += pool.missing(num_held, num_held + num_in_cache)
        return num_missing <= pool.num_free

    def num_slots(self, sequence: SequenceState) -> int:
        """Tokens that `sequence` could compute next without an eviction."""
        num_blocks = self.num_free + len(sequence.block_ids)
        pool = self.window_pool
        num_of_pool = pool.num_free + pool.held_by(sequence)
        if num_of_pool < pool.blocks_of_window:  # its window can't fill
            num_with_window = self.state_blocks + num_of_pool
            num_blocks = min(num_blocks, num_with_window)
        num_tokens = self.tokens_of(num_blocks)
        return num_tokens - sequence.num_computed

    def grow(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Let `sequence` hold `num_tokens` tokens; False, with nothing changed, if it can't."""
        block_ids = sequence.block_ids
        num_held = len(block_ids)
        num_blocks = self.blocks_for(num_tokens)
        num_missing = num_blocks - num_held
        if num_missing <= 0:
            return True  # mostly: tokens come one at a time
        pool = self.window_pool
        num_of_pool = pool.missing(num_held, num_blocks)
        if num_of_pool > pool.num_free:
            return False
        num_lacking = num_missing - len(self._returned)
        if num_lacking > 0 and not self._list_more(num_lacking):
            return False
        # The last block first: neighbours of a fresh cache, in their order.
        next_blocks = self._returned[-num_missing:]
        del self._returned[-num_missing:]
        block_ids.extend(reversed(next_blocks))
        pool.num_free -= num_of_pool
        return True

    def _list_more(self, number: int) -> bool:
        """List `number` more empty blocks: those that no sequence has held yet, and for the rest
        cached ones; False, with nothing changed, if there are too few.
        """
        num_touched = min(number, self._num_untouched)
        num_to_evict = number - num_touched
        if num_to_evict > 0:
            if self.prefix is None or num_to_evict > len(self.prefix.unused):
                return False
            evicted = self.prefix.evict(num_to_evict)
            self._returned.extend(evicted)
        # At the start, to be handed out last: a fresh cache hands out neighbours, 0 and 1.
        first = self.num_blocks - self._num_untouched
        touched = range(first, first + num_touched)
        self._returned[:0] = reversed(touched)
        self._num_untouched -= num_touched
        return True

    def look_up(self, sequence: SequenceState) -> SequenceState:
        """Count the cached tokens of a waiting `sequence` as computed, and return it."""
        if self.prefix is not None:
            cached = self.prefix.find(sequence)
            sequence.num_computed = len(cached) * self.block_size
        return sequence

    def warm(self, sequence: SequenceState) -> None:
        """Let the cache have the full blocks of a prompt that no sequence holds, as if it had been
        computed before; nothing without a prefix cache, or where it does not fit.
        """
        num_tokens = sequence.request.prompt_len
        if self.prefix is None or not self.grow(sequence, num_tokens):
            return
        sequence.num_computed = num_tokens
        self.prefix.publish(sequence)
        self.free(sequence)

    def publish(self, chunks: Sequence[Chunk]) -> None:
        """Make the full blocks of `chunks` available to other sequences."""
        if self.prefix is None:
            return
        for sequence, start, num_tokens, is_decode, _ in chunks:
            # Most chunks are decodes, few of which fill a block.
            is_within_block = is_decode and num_tokens == 1 and start % self.block_size != 0
            if not is_within_block or sequence.num_published == 0:
                self.prefix.publish(sequence)

    def fits(self, sequence: SequenceState, num_tokens: int, watermark: float = 0.0) -> bool:
        """Whether there is room for a sequence.

        Args:
            sequence: It holds blocks or, while it waits, shares those of its cached prefix.
            num_tokens: Of the sequence in all.
            watermark: Share of all blocks that stays free.
        """
        num_taken = self.num_missing(sequence, num_tokens)
        num_held = len(sequence.block_ids)
        num_held_after = num_held + num_taken
        num_of_pool = self.window_pool.missing(num_held, num_held_after)
        if num_of_pool > self.window_pool.num_free:
            return False
        if self.prefix is not None and not sequence.block_ids:
            shared = self.prefix.find(sequence)
            # A shared block is not taken, unless it has no holder yet and counts as free.
            without_holder = self.prefix.unused.keys() & shared
            num_with_holder = len(shared) - len(without_holder)
            num_taken -= num_with_holder
        num_needed = num_taken + self.watermark_blocks(watermark)
        return num_needed <= self.num_free

    def admit(self, sequence: SequenceState, num_tokens: int, watermark: float = 0.0) -> bool:
        """Give a new sequence its cached prefix and room for more.

        Args:
            sequence: It holds no blocks.
            num_tokens: Of the sequence in all.
            watermark: Share of all blocks that stays free.

        Returns:
            False, with nothing changed, if blocks are short.
        """
        if not self.fits(sequence, num_tokens, watermark):
            return False
        if self.prefix is not None:
            cached = self.prefix.find(sequence)
            self.prefix.share(sequence, cached)
            self.window_pool.num_free -= self.window_pool.held_by(sequence)
        return self.grow(sequence, num_tokens)

    def free(self, sequence: SequenceState) -> None:
        """Take back all blocks of `sequence`, except shared ones."""
        self.window_pool.num_free += self.window_pool.held_by(sequence)
        if self.prefix is None:
            self._returned += sequence.block_ids[::-1]  # so that they are handed out in their order
        else:
            self._returned += self.prefix.release(sequence)
        sequence.block_ids.clear()
