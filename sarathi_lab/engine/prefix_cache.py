"""Prefix caching: full blocks of the KV cache are looked up by their tokens, and shared."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import SequenceState


class PrefixCache:
    """Index of the contents of blocks of `block_size` tokens, kept by a `BlockManager`.

    A block's key is a 64-bit hash of its tokens and of the key before it, as in early vLLM: equal
    keys mean equal tokens from the start on. A block can be shared once it is computed (`publish`).
    Blocks without a holder stay until room is needed; the least recently used are evicted first,
    the last blocks of a sequence before its first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[int, int] = {}  # cached blocks by their keys
        self.num_holders = [0] * num_blocks  # of each block that is cached
        # Cached blocks without a holder, oldest first, which count as free.
        self.unused: OrderedDict[int, None] = OrderedDict()
        self._keys = [0] * num_blocks  # of each block that is cached
        # The last answer of `find`, as the first waiting sequence is looked up in every iteration.
        self._last: tuple[SequenceState | None, list[int]] = (None, [])

    def find(self, sequence: SequenceState) -> list[int]:
        """Return the cached blocks at the start of `sequence`, all but one token at most."""
        last_sequence, cached = self._last
        if sequence is not last_sequence:
            cached = []
        # What was cached at its start is still there, as `evict` and `withdraw` forget the answer:
        # only blocks behind it may have been published since.
        # The last token must be computed: logits behind it choose the next one.
        num_tokens = sequence.num_known - 1
        num_full = num_tokens // self.block_size
        keys = self._keys_of(sequence, num_full)
        new_keys = keys[len(cached) : num_full]
        for key in new_keys:
            block = self.blocks.get(key)
            if block is None:
                break
            cached.append(block)
        self._last = (sequence, cached)
        return cached

    def share(self, sequence: SequenceState, cached: list[int]) -> None:
        """Let `sequence`, which holds no block, hold the result of `find`."""
        # What has a holder again can't be evicted.
        without_holder = self.unused.keys() & cached
        for block in without_holder:
            del self.unused[block]
        for block in cached:
            self.num_holders[block] += 1
        sequence.block_ids += cached
        sequence.num_published = len(cached)

    def publish(self, sequence: SequenceState, num_tokens: int | None = None) -> None:
        """Cache the full blocks of the first `num_tokens` tokens of `sequence` (None: those that
        are computed), of equal blocks the first.

        The last generated token may be known to the device only (`Executor.feeds_tokens`), so a
        block that ends in it waits for the next token; on every executor, so that schedules are
        equal.
        """
        if num_tokens is None:
            num_tokens = sequence.num_computed
        if num_tokens > sequence.request.prompt_len:
            num_tokens -= 1  # without the last generated token
        num_full = num_tokens // self.block_size
        start = sequence.num_published
        if num_full <= start:
            return
        keys = self._keys_of(sequence, num_full)
        new_keys = keys[start:num_full]
        new_blocks = sequence.block_ids[start:]  # the last may not be full
        for key, block in zip(new_keys, new_blocks, strict=False):
            if key not in self.blocks:
                self.blocks[key] = block
                self._keys[block] = key
                self.num_holders[block] = 1
        sequence.num_published = num_full

    def withdraw(self, sequence: SequenceState) -> None:
        """Take back what was cached of blocks that `sequence` alone holds and has not computed."""
        self._last = (None, [])
        num_full = sequence.num_computed // self.block_size
        uncomputed = sequence.block_ids[num_full : sequence.num_published]
        for block in uncomputed:
            if self.num_holders[block]:
                self.num_holders[block] = 0
                del self.blocks[self._keys[block]]
        sequence.num_published = min(sequence.num_published, num_full)

    def release(self, sequence: SequenceState) -> list[int]:
        """Release all blocks of `sequence`; returns uncached ones, the last first."""
        uncached: list[int] = []
        # The last block first, so that it is evicted before those that it builds on.
        for block in reversed(sequence.block_ids):
            num_holders = self.num_holders[block]
            if num_holders == 0:
                uncached.append(block)
                continue
            num_others = num_holders - 1
            self.num_holders[block] = num_others
            if num_others == 0:
                self.unused[block] = None
        sequence.num_published = 0
        return uncached

    def evict(self, num_blocks: int) -> list[int]:
        """Evict `num_blocks` blocks without a holder, and return them."""
        self._last = (None, [])
        evicted = []
        for _ in range(num_blocks):
            block, _ = self.unused.popitem(last=False)  # the oldest
            evicted.append(block)
            del self.blocks[self._keys[block]]
        return evicted

    def _keys_of(self, sequence: SequenceState, num_blocks: int) -> list[int]:
        """Return the keys of at least the first `num_blocks` blocks, full ones of known tokens."""
        keys = sequence.block_keys
        num_keys = len(keys)
        if num_keys >= num_blocks:
            return keys
        request = sequence.request
        if request.prompt_token_ids is None:  # tokens like those of no other request
            first = hash((0, request.request_id))
            keys.extend(range(first + num_keys, first + num_blocks))
            return keys
        start = num_keys * self.block_size
        end = num_blocks * self.block_size
        content = known_tokens(sequence, start, end).tobytes()
        num_new = num_blocks - num_keys
        num_bytes = len(content) // num_new  # of a block
        key = keys[-1] if keys else 0
        for offset in range(0, len(content), num_bytes):
            content_of_block = content[offset : offset + num_bytes]
            key = hash((key, content_of_block))
            keys.append(key)
        return keys


def known_tokens(
    sequence: SequenceState, start: int = 0, end: int | None = None
) -> NDArray[np.int32]:
    """Tokens `start` to `end` of prompt and output (None: all); a number unique to the request
    stands for uncomputed ones.
    """
    request = sequence.request
    assert request.prompt_token_ids is not None, "the request has tokens"
    if end is None:
        end = sequence.num_known
    prompt_tokens = request.prompt_token_ids[start:end]
    prompt = np.asarray(prompt_tokens, dtype=np.int32)
    first_output = max(0, start - request.prompt_len)
    end_of_output = max(0, end - request.prompt_len)
    output_tokens = sequence.output_token_ids[first_output:end_of_output]
    output = np.asarray(output_tokens, dtype=np.int32)
    # No two requests share a block that ends in a token which is still to be computed.
    placeholder = NO_TOKEN - 1 - request.request_id
    output[output == NO_TOKEN] = placeholder
    return np.concatenate([prompt, output])
