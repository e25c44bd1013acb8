"""Prefix caching: full blocks of the KV cache are found by their tokens, and shared."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import SequenceState

PREFIX_ID_TOKENS = 512  # that one of `Request.prefix_ids` stands for, as in Mooncake's traces
KEY_BYTES = 16


class PrefixCache:
    """Which blocks of `block_size` tokens hold what; a `BlockManager` tells it who takes and who
    frees them.

    A block's key is a hash of its own tokens and of the key before it, as in vLLM: equal keys mean
    equal tokens from the start on. A block can be shared once it is computed (`publish`). What
    nobody holds stays until room is needed; then goes what was in use the longest time ago, of a
    sequence its last blocks first.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[bytes, int] = {}  # by key
        self._keys: dict[int, bytes] = {}  # by block, of those published
        self._num_holders: dict[int, int] = {}  # by block, of those published
        # Published blocks that nobody holds, oldest first: they count as free.
        self.unused: OrderedDict[int, None] = OrderedDict()

    def find(self, sequence: SequenceState) -> list[int]:
        """Blocks that hold the first tokens of `sequence`, leaving it one token at least."""
        found = []
        for i in range((sequence.num_known - 1) // self.block_size):
            block = self._blocks.get(self._key(sequence, i))
            if block is None:
                break
            found.append(block)
        return found

    def num_taken(self, found: Iterable[int]) -> int:
        """How many fewer blocks are free once `found` are shared: those that nobody holds yet."""
        return sum(block in self.unused for block in found)

    def share(self, sequence: SequenceState, found: list[int]) -> None:
        """Let `sequence`, which holds no block, hold those that `find` gave."""
        for block in found:
            self._num_holders[block] += 1
            self.unused.pop(block, None)
        sequence.block_ids.extend(found)
        sequence.blocks_are_neighbours = all(b == a + 1 for a, b in pairwise(found))
        sequence.num_published = len(found)

    def publish(self, sequence: SequenceState) -> None:
        """Let others share the full blocks of `sequence` that are computed; the first of equal ones
        stands for all.

        The last generated token may be known to the device only (`Executor.feeds_tokens`), so a
        block that ends in it waits for the next token. So it does where all are known: schedules
        shall not depend on the executor.
        """
        num_computed = sequence.num_computed
        num_full = (num_computed - (num_computed > sequence.request.prompt_len)) // self.block_size
        for i in range(sequence.num_published, num_full):
            key, block = self._key(sequence, i), sequence.block_ids[i]
            if key not in self._blocks:
                self._blocks[key], self._keys[block], self._num_holders[block] = block, key, 1
        sequence.num_published = max(sequence.num_published, num_full)

    def release(self, sequence: SequenceState) -> list[int]:
        """Let go of all blocks of `sequence`; returns those left empty, the last first."""
        empty = []
        for block in reversed(sequence.block_ids):
            if block not in self._num_holders:
                empty.append(block)
                continue
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self.unused[block] = None
        sequence.num_published = 0
        return empty

    def evict(self, num_blocks: int) -> list[int]:
        """Forget `num_blocks` of the blocks that nobody holds, and return them."""
        evicted = [self.unused.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in evicted:
            del self._num_holders[block]
            del self._blocks[self._keys.pop(block)]
        return evicted

    def _key(self, sequence: SequenceState, index: int) -> bytes:
        """The key of one full block of known tokens, made after those before it."""
        keys = sequence.block_keys
        while len(keys) <= index:
            start = len(keys) * self.block_size
            content = _content(sequence, start, start + self.block_size)
            before = keys[-1] if keys else b""
            keys.append(blake2b(before + content, digest_size=KEY_BYTES).digest())
        return keys[index]


def _content(sequence: SequenceState, start: int, end: int) -> bytes:
    """What tells tokens `start` to `end` from others behind the same tokens: their ids; or the ids
    of their pieces of the prompt; or, where nobody knows more, whose they are.
    """
    request = sequence.request
    prompt_len, token_ids = request.prompt_len, request.prompt_token_ids
    generated = sequence.output_token_ids[max(0, start - prompt_len) : max(0, end - prompt_len)]
    if token_ids is not None and NO_TOKEN not in generated:
        prompt = np.asarray(token_ids[start : min(end, prompt_len)], dtype=np.int32)
        return b"tokens" + prompt.tobytes() + np.asarray(generated, dtype=np.int32).tobytes()
    pieces = request.prefix_ids[start // PREFIX_ID_TOKENS : -(-end // PREFIX_ID_TOKENS)]
    if token_ids is None and end <= min(prompt_len, len(request.prefix_ids) * PREFIX_ID_TOKENS):
        return f"pieces {pieces}".encode()
    return f"request {request.request_id}".encode()
