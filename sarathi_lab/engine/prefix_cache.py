"""Prefix caching: full blocks of the KV cache are found by their tokens, and shared."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import SequenceState

PREFIX_ID_TOKENS = 512  # that one of `Request.prefix_ids` stands for, as in Mooncake's traces


class PrefixCache:
    """Which blocks of `block_size` tokens hold what; a `BlockManager` tells it who takes and who
    frees them.

    A block's key is a hash of its own tokens and of the key before it, of 64 bits, as was vLLM's at
    first: equal keys mean equal tokens from the start on. A block can be shared once it is computed
    (`publish`). What nobody holds stays until room is needed; then goes what was in use the longest
    time ago, of a sequence its last blocks first.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[int, int] = {}  # by key
        self._keys: dict[int, int] = {}  # by block, of those published
        self._num_sharers: dict[int, int] = {}  # by block: holders beside the first, if any
        # Published blocks that nobody holds, oldest first: they count as free.
        self.unused: OrderedDict[int, None] = OrderedDict()
        # What was found for whom, as the first that waits is asked for in every iteration.
        self._asked: SequenceState | None = None
        self._found: dict[int, None] = {}

    def find(self, sequence: SequenceState) -> list[int]:
        """Blocks that hold the first tokens of `sequence`, leaving it one token at least."""
        if sequence is not self._asked:
            self._asked, self._found = sequence, {}
        num_full = (sequence.num_known - 1) // self.block_size
        keys, block_of = self._keys_of(sequence, num_full), self._blocks.get
        for index in range(len(self._found), num_full):
            block = block_of(keys[index])
            if block is None:
                break
            self._found[block] = None
        return list(self._found)

    def num_taken(self, found: Iterable[int]) -> int:
        """How many fewer blocks are free once `found` are shared: those that nobody holds yet."""
        return sum(map(self.unused.__contains__, found))

    def share(self, sequence: SequenceState, found: list[int]) -> None:
        """Let `sequence`, which holds no block, hold those that `find` gave."""
        for block in found:
            if block in self.unused:
                del self.unused[block]
            else:
                self._num_sharers[block] = self._num_sharers.get(block, 0) + 1
        sequence.block_ids.extend(found)
        first = found[0] if found else 0
        sequence.blocks_are_neighbours = found == list(range(first, first + len(found)))
        sequence.num_published = len(found)

    def publish(self, sequence: SequenceState) -> None:
        """Let others share the full blocks of `sequence` that are computed; the first of equal ones
        stands for all.

        The last generated token may be known to the device only (`Executor.feeds_tokens`), so a
        block that ends in it waits for the next token. So it does where all are known: schedules
        shall not depend on the executor.
        """
        num_computed, first = sequence.num_computed, sequence.num_published
        num_full = (num_computed - (num_computed > sequence.request.prompt_len)) // self.block_size
        if num_full <= first:
            return
        keys = self._keys_of(sequence, num_full)[first:num_full]
        pairs = zip(keys, sequence.block_ids[first:num_full], strict=True)
        new = {key: block for key, block in pairs if key not in self._blocks}
        self._blocks.update(new)
        self._keys.update(zip(new.values(), new, strict=True))
        sequence.num_published = num_full

    def release(self, sequence: SequenceState) -> list[int]:
        """Let go of all blocks of `sequence`; returns those left empty, the last first."""
        empty = []
        for block in reversed(sequence.block_ids):
            if block not in self._keys:
                empty.append(block)
            elif num_sharers := self._num_sharers.pop(block, 0):
                if num_sharers > 1:
                    self._num_sharers[block] = num_sharers - 1
            else:
                self.unused[block] = None
        sequence.num_published = 0
        return empty

    def evict(self, num_blocks: int) -> list[int]:
        """Forget `num_blocks` of the blocks that nobody holds, and return them."""
        evicted = [self.unused.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in evicted:
            del self._blocks[self._keys.pop(block)]
        if not self._found.keys().isdisjoint(evicted):
            self._asked = None
        return evicted

    def _keys_of(self, sequence: SequenceState, num_blocks: int) -> list[int]:
        """The keys of the first `num_blocks` blocks at least, full ones of known tokens."""
        keys, size = sequence.block_keys, self.block_size
        if len(keys) < num_blocks and sequence.request.prompt_token_ids is not None:
            content = _tokens(sequence, len(keys) * size, num_blocks * size)
            width = len(content) // (num_blocks - len(keys))
            key = keys[-1] if keys else 0
            for at in range(0, len(content), width):
                key = hash((key, content[at : at + width]))
                keys.append(key)
        while len(keys) < num_blocks:
            self._extend(sequence, num_blocks)
        return keys

    def _extend(self, sequence: SequenceState, num_blocks: int) -> None:
        """Make more keys where nobody knows the tokens: of the blocks of one piece of the prompt,
        or of those that are told by the request alone. After the first they count up.
        """
        keys, size, request = sequence.block_keys, self.block_size, sequence.request
        start, pieces = len(keys) * size, request.prefix_ids
        num_told = min(request.prompt_len, len(pieces) * PREFIX_ID_TOKENS)
        before = keys[-1] if keys else 0
        if start + size > num_told:
            first = before + 1 if start > num_told else hash((before, request.request_id))
            keys.extend(range(first, first + num_blocks - len(keys)))
            return
        piece, end = start // PREFIX_ID_TOKENS, -(-(start + size) // PREFIX_ID_TOKENS)
        first = hash((before, pieces[piece:end]))
        alike = min((piece + 1) * PREFIX_ID_TOKENS, num_told) // size - len(keys)
        keys.extend(range(first, first + max(1, alike)))


def _tokens(sequence: SequenceState, start: int, end: int) -> bytes:
    """Tokens `start` to `end`; the request's own number for those that nobody knows."""
    request = sequence.request
    assert request.prompt_token_ids is not None
    prompt = np.asarray(request.prompt_token_ids[start:end], dtype=np.int32)
    generated = sequence.output_token_ids[
        max(0, start - request.prompt_len) : max(0, end - request.prompt_len)
    ]
    own = NO_TOKEN - 1 - request.request_id
    known = [own if token == NO_TOKEN else token for token in generated]
    return prompt.tobytes() + array("i", known).tobytes()
