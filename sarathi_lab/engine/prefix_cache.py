"""Prefix caching: full blocks of the KV cache are found by their tokens, and shared."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import CachedRun, SequenceState

PREFIX_ID_TOKENS = 512  # that one of `Request.prefix_ids` stands for, as in Mooncake's traces


class Hit(NamedTuple):
    """The first `num_blocks` blocks of a cached run, which are those of a sequence that waits."""

    run: CachedRun
    num_blocks: int


class PrefixCache:
    """Which blocks of `block_size` tokens hold what; a `BlockManager` tells it who takes and who
    frees them.

    A block's key is a hash of its own tokens and of the key before it, of 64 bits, as was vLLM's at
    first: equal keys mean equal tokens from the start on. A block can be shared once it is computed
    (`publish`). What nobody holds stays until room is needed; then goes what was in use the longest
    time ago, of a sequence its last blocks first.

    The books are kept by runs of blocks, as in SGLang's radix tree, not by blocks. A key is cached
    if a run begins with it, or if it follows the key before it in the run of that one.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.runs: dict[int, CachedRun] = {}  # by their first keys
        # Runs that nobody holds, oldest first: their blocks count as free.
        self.unused: OrderedDict[CachedRun, None] = OrderedDict()
        self.num_unused = 0  # blocks of these
        # What was found for whom, as the first that waits is asked for in every iteration.
        self._asked: SequenceState | None = None
        self._found: list[Hit] = []

    def find(self, sequence: SequenceState) -> list[Hit]:
        """What is cached of the first tokens of `sequence`, leaving it one token at least."""
        if sequence is not self._asked:
            self._asked, self._found = sequence, []
        elif self._found:
            self._found.pop()  # it may have grown
        num_full = (sequence.num_known - 1) // self.block_size
        keys, at = self._keys_of(sequence, num_full), num_found(self._found)
        while at < num_full and (run := self.runs.get(keys[at])) is not None:
            alike = _num_alike(run, keys, at, num_full)
            self._found.append(Hit(run, alike))
            at += alike
        return self._found.copy()

    def num_taken(self, found: Sequence[Hit]) -> int:
        """How many fewer blocks are free once `found` are shared: those that nobody holds yet."""
        return num_found([hit for hit in found if not hit.run.holders])

    def share(self, sequence: SequenceState, found: Sequence[Hit]) -> None:
        """Let `sequence`, which holds no block, hold what `find` gave."""
        self._asked = None  # runs are cut
        block_ids = sequence.block_ids
        for run, num_blocks in found:
            if not run.holders:
                self.num_unused -= num_blocks
            held = self._cut(run, num_blocks) if num_blocks < len(run.keys) else run
            self.unused.pop(held, None)
            held.holders.append(sequence)
            sequence.cached_runs.append(held)
            block_ids.extend(held.block_ids)
        first = block_ids[0] if block_ids else 0
        sequence.blocks_are_neighbours = block_ids == list(range(first, first + len(block_ids)))
        sequence.num_published = len(block_ids)

    def publish(self, sequence: SequenceState) -> None:
        """Let others share the full blocks of `sequence` that are computed; the first of equal ones
        stands for all.

        The last generated token may be known to the device only (`Executor.feeds_tokens`), so a
        block that ends in it waits for the next token. So it does where all are known: schedules
        shall not depend on the executor.
        """
        num_computed, at = sequence.num_computed, sequence.num_published
        num_full = (num_computed - (num_computed > sequence.request.prompt_len)) // self.block_size
        if num_full <= at:
            return
        keys = self._keys_of(sequence, num_full)
        at += self._num_following(sequence, keys, at, num_full)
        begun = self.runs.keys() & keys[at:num_full]  # as a rule nothing is cached
        while at < num_full:
            if keys[at] in begun:
                at += _num_alike(self.runs[keys[at]], keys, at, num_full)
            else:
                others = range(at, num_full) if begun else ()
                end = next((each for each in others if keys[each] in begun), num_full)
                self.add(sequence, keys, at, end)
                at = end
        sequence.num_published = num_full

    def release(self, sequence: SequenceState) -> list[int]:
        """Let go of all blocks of `sequence`; returns those left empty, the last first."""
        runs = sequence.cached_runs
        for run in reversed(runs):
            run.holders.remove(sequence)
            if not run.holders:
                self.unused[run] = None
                self.num_unused += len(run.keys)
        cached = {block for run in runs for block in run.block_ids}
        runs.clear()
        sequence.num_published = 0
        return [block for block in reversed(sequence.block_ids) if block not in cached]

    def evict(self, num_blocks: int) -> list[int]:
        """Forget `num_blocks` of the blocks that nobody holds, and return them."""
        evicted: list[int] = []
        self.num_unused -= num_blocks
        while (left := num_blocks - len(evicted)) > 0:
            run = next(iter(self.unused))
            if any(run is hit.run for hit in self._found):
                self._asked = None
            evicted += run.block_ids[: -left - 1 : -1]
            if left >= len(run.keys):
                del self.unused[run], self.runs[run.keys[0]]
            else:
                del run.keys[-left:], run.block_ids[-left:]
        return evicted

    def _num_following(self, sequence: SequenceState, keys: list[int], start: int, end: int) -> int:
        """How many of the keys `start` to `end` follow the one before them in its run."""
        runs = sequence.cached_runs
        if start == 0 or (runs and runs[-1].keys[-1] == keys[start - 1]):
            return 0  # as its own run ends there
        for first in range(start - 1, -1, -1):
            if (run := self.runs.get(keys[first])) is not None:
                return max(0, _num_alike(run, keys, first, end) - (start - first))
        return 0

    def add(self, sequence: SequenceState, keys: list[int], start: int, end: int) -> None:
        """Cache the blocks `start` to `end` of `sequence`: in its last run, if these follow there
        and nobody else holds it.
        """
        runs = sequence.cached_runs
        is_next = start > 0 and runs and runs[-1].keys[-1] == keys[start - 1]
        if not is_next or len(runs[-1].holders) > 1:
            runs.append(CachedRun([sequence]))
            self.runs[keys[start]] = runs[-1]
        runs[-1].keys += keys[start:end]
        runs[-1].block_ids += sequence.block_ids[start:end]

    def _cut(self, run: CachedRun, num_blocks: int) -> CachedRun:
        """Make the first `num_blocks` of `run` a run of their own in front of it, with the same
        holders, and return it; nobody holding them, it is not in `unused`.
        """
        first = CachedRun(run.holders.copy(), run.keys[:num_blocks], run.block_ids[:num_blocks])
        del run.keys[:num_blocks], run.block_ids[:num_blocks]
        self.runs[first.keys[0]], self.runs[run.keys[0]] = first, run
        for holder in first.holders:
            holder.cached_runs.insert(holder.cached_runs.index(run), first)
        return first

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


def num_found(found: Sequence[Hit]) -> int:
    """Blocks of all of `found`."""
    return sum(hit.num_blocks for hit in found)


def _num_alike(run: CachedRun, keys: list[int], start: int, end: int) -> int:
    """How many keys `run` has in common with the keys `start` to `end`. If one is equal, all before
    it are.
    """
    pairs = range(min(len(run.keys), end - start))
    return bisect_left(pairs, True, key=lambda at: run.keys[at] != keys[start + at])


def _tokens(sequence: SequenceState, start: int, end: int) -> bytes:
    """Tokens `start` to `end`; the request's own number for those that nobody knows."""
    request = sequence.request
    assert request.prompt_token_ids is not None
    prompt = np.asarray(request.prompt_token_ids[start:end], dtype=np.int32)
    first, last = (max(0, at - request.prompt_len) for at in (start, end))
    generated = sequence.output_token_ids[first:last]
    own = NO_TOKEN - 1 - request.request_id
    known = [own if token == NO_TOKEN else token for token in generated]
    return prompt.tobytes() + array("i", known).tobytes()
