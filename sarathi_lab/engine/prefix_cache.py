"""Prefix caching: full blocks of the KV cache are looked up by their tokens, and shared."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import CachedRun, SequenceState

PREFIX_ID_TOKENS = 512  # tokens of one of `Request.prefix_ids`, as in Mooncake's traces


class Hit(NamedTuple):
    """The first `num_blocks` blocks of a cached run, equal to those of a waiting sequence."""

    run: CachedRun
    num_blocks: int


class PrefixCache:
    """Index of the contents of blocks of `block_size` tokens, kept by a `BlockManager`.

    A block's key is a 64-bit hash of its tokens and of the key before it, as in early vLLM: equal
    keys mean equal tokens from the start on. A block can be shared once it is computed (`publish`).
    Blocks without a holder stay until room is needed; the least recently used are evicted first,
    the last blocks of a sequence before its first.

    Blocks are indexed by runs, as in SGLang's radix tree. A key is cached if a run begins with it,
    or if it follows the key before it in that key's run.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.runs: dict[int, CachedRun] = {}  # by their first keys
        # Runs without a holder, oldest first: their blocks count as free.
        self.unused: OrderedDict[CachedRun, None] = OrderedDict()
        self.num_unused = 0  # blocks of these
        # The last answer of `find`, as the first waiting sequence is looked up in every iteration.
        self._last_sequence: SequenceState | None = None
        self._last_hits: list[Hit] = []

    def find(self, sequence: SequenceState) -> list[Hit]:
        """Find the cached prefix of `sequence`, all but one token at most."""
        if sequence is not self._last_sequence:
            self._last_sequence, self._last_hits = sequence, []
        elif self._last_hits:
            self._last_hits.pop()  # it may have grown
        num_full = (sequence.num_known - 1) // self.block_size
        keys, at = self._keys_of(sequence, num_full), num_found(self._last_hits)
        while at < num_full and (run := self.runs.get(keys[at])) is not None:
            alike = _num_alike(run, keys, at, num_full)
            self._last_hits.append(Hit(run, alike))
            at += alike
        return self._last_hits.copy()

    def num_taken(self, found: Sequence[Hit]) -> int:
        """Blocks of `found` without a holder, which are no longer free once shared."""
        return num_found([hit for hit in found if not hit.run.holders])

    def share(self, sequence: SequenceState, found: Sequence[Hit]) -> None:
        """Let `sequence`, which holds no block, hold the result of `find`."""
        self._last_sequence = None  # runs are cut
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
        """Cache the computed full blocks of `sequence`, of equal blocks the first.

        The last generated token may be known to the device only (`Executor.feeds_tokens`), so a
        block that ends in it waits for the next token; on every executor, so that schedules are
        equal.
        """
        num_computed, at = sequence.num_computed, sequence.num_published
        num_full = (num_computed - (num_computed > sequence.request.prompt_len)) // self.block_size
        if num_full <= at:
            return
        keys = self._keys_of(sequence, num_full)
        at += self._num_following(sequence, keys, at, num_full)
        begun = self.runs.keys() & keys[at:num_full]  # mostly none
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
        """Release all blocks of `sequence`; returns uncached ones, the last first."""
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
        """Evict `num_blocks` blocks without a holder, and return them."""
        evicted: list[int] = []
        self.num_unused -= num_blocks
        while (left := num_blocks - len(evicted)) > 0:
            run = next(iter(self.unused))
            if any(run is hit.run for hit in self._last_hits):
                self._last_sequence = None
            evicted += run.block_ids[: -left - 1 : -1]
            if left >= len(run.keys):
                del self.unused[run], self.runs[run.keys[0]]
            else:
                del run.keys[-left:], run.block_ids[-left:]
        return evicted

    def _num_following(self, sequence: SequenceState, keys: list[int], start: int, end: int) -> int:
        """Count the keys `start` to `end` that follow the key before them in its run."""
        runs = sequence.cached_runs
        if start == 0 or (runs and runs[-1].keys[-1] == keys[start - 1]):
            return 0  # its last run ends there
        for first in range(start - 1, -1, -1):
            if (run := self.runs.get(keys[first])) is not None:
                return max(0, _num_alike(run, keys, first, end) - (start - first))
        return 0

    def add(self, sequence: SequenceState, keys: list[int], start: int, end: int) -> None:
        """Cache the blocks `start` to `end` of `sequence`: in its last run, if they follow it and
        it has no other holder.
        """
        runs = sequence.cached_runs
        is_next = start > 0 and runs and runs[-1].keys[-1] == keys[start - 1]
        if not is_next or len(runs[-1].holders) > 1:
            runs.append(CachedRun([sequence]))
            self.runs[keys[start]] = runs[-1]
        runs[-1].keys += keys[start:end]
        runs[-1].block_ids += sequence.block_ids[start:end]

    def _cut(self, run: CachedRun, num_blocks: int) -> CachedRun:
        """Split the first `num_blocks` off `run`, with the same holders, and return them as a run,
        which is not in `unused` even without holders.
        """
        first = CachedRun(run.holders.copy(), run.keys[:num_blocks], run.block_ids[:num_blocks])
        del run.keys[:num_blocks], run.block_ids[:num_blocks]
        self.runs[first.keys[0]], self.runs[run.keys[0]] = first, run
        for holder in first.holders:
            holder.cached_runs.insert(holder.cached_runs.index(run), first)
        return first

    def _keys_of(self, sequence: SequenceState, num_blocks: int) -> list[int]:
        """Return the keys of at least the first `num_blocks` blocks, full ones of known tokens."""
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
        """Make more keys of a prompt without tokens: for the blocks of one of its `prefix_ids`, or
        behind these for blocks unique to the request. After the first they count up.
        """
        keys, size, request = sequence.block_keys, self.block_size, sequence.request
        start, pieces = len(keys) * size, request.prefix_ids
        num_identified = min(request.prompt_len, len(pieces) * PREFIX_ID_TOKENS)
        before = keys[-1] if keys else 0
        if start + size > num_identified:
            first = before + 1 if start > num_identified else hash((before, request.request_id))
            keys.extend(range(first, first + num_blocks - len(keys)))
            return
        piece, end = start // PREFIX_ID_TOKENS, -(-(start + size) // PREFIX_ID_TOKENS)
        first = hash((before, pieces[piece:end]))
        alike = min((piece + 1) * PREFIX_ID_TOKENS, num_identified) // size - len(keys)
        keys.extend(range(first, first + max(1, alike)))


def num_found(found: Sequence[Hit]) -> int:
    """Count the blocks of `found`."""
    return sum(hit.num_blocks for hit in found)


def _num_alike(run: CachedRun, keys: list[int], start: int, end: int) -> int:
    """Count the equal keys of `run` and the keys `start` to `end`, all before the first difference
    (equal keys have equal keys before them).
    """
    pairs = range(min(len(run.keys), end - start))
    return bisect_left(pairs, True, key=lambda at: run.keys[at] != keys[start + at])


def _tokens(sequence: SequenceState, start: int, end: int) -> bytes:
    """Tokens `start` to `end`; a number unique to the request for uncomputed ones."""
    request = sequence.request
    assert request.prompt_token_ids is not None
    prompt = np.asarray(request.prompt_token_ids[start:end], dtype=np.int32)
    first, last = (max(0, at - request.prompt_len) for at in (start, end))
    generated = sequence.output_token_ids[first:last]
    placeholder = NO_TOKEN - 1 - request.request_id
    known = [placeholder if token == NO_TOKEN else token for token in generated]
    return prompt.tobytes() + array("i", known).tobytes()
