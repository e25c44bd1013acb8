"""A model of the cache, an executor and a ledger that check any run of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from helpers import ScriptedExecutor, tokens_of
from integrity import check_integrity

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import NO_TOKEN, StepResult
from sarathi_lab.engine.request import Batch, Chunk, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions import check_policy as check
from sarathi_lab.extensions.check_policy import hold
from sarathi_lab.extensions.cluster.lockstep import LockstepBatch
from sarathi_lab.extensions.speculation import Assumed, Drafts, Drawn

History = list[int]  # by position: a number for the token there and all before it


def history(prompt: Sequence[int], request_id: int, output_len: int, *, is_shared: bool) -> History:
    """Return the numbers of a request's slots; two requests have equal ones only for equal
    prefixes, and only if prefixes are shared.
    """
    known = 0 if is_shared else 1 + request_id
    numbers = []
    for token in [*prompt, *(1000 * request_id + k for k in range(output_len))]:
        known = hash((known, token))
        numbers.append(known)
    return numbers


class ShadowCache:
    """Model of a cache: each slot has a number of `history`, None where it is empty.

    A chunk must find all of its context before anything of its batch is written, and write to
    blocks that no other sequence holds; or, if the policy `shares_at_once`, before anything of
    later chunks is, and to blocks of the same tokens. Freed blocks are empty; rejected drafts leave
    -1.
    """

    def __init__(self, scheduler: Scheduler, histories: Sequence[History]) -> None:
        self.scheduler = scheduler
        self.histories = histories
        blocks: BlockManager = scheduler.blocks
        self.size = blocks.block_size
        self.device: list[list[int | None]] = [[None] * self.size for _ in range(blocks.num_blocks)]
        self.writes: list[list[tuple[int, int, int | None]]] = []  # of each batch in flight

    def begin(self, batch: Batch) -> None:
        """Check what the batch's chunks read."""
        for block in self.scheduler.blocks.empty:
            self.device[block] = [None] * self.size
        held = Counter(block for one in self.scheduler.running for block in one.block_ids)
        writes, at_once = [], self.scheduler.policy.shares_at_once
        for chunk in batch.chunks:
            sequence, start, num_tokens, _, _ = chunk
            numbers, block_ids = self.histories[sequence.request.request_id], sequence.block_ids
            read = [number for block in block_ids for number in self.device[block]][:start]
            hold(read == numbers[:start], "blocks", f"{sequence} reads what it did not write")
            for position in range(start, start + num_tokens):
                how = f"{sequence} writes token {position}, for which it holds no block"
                hold(position // self.size < len(block_ids), "blocks", how)
                block = block_ids[position // self.size]
                how = f"{sequence} writes to block {block}, which others hold, too"
                is_same = at_once and self.have_same(block, position, numbers[position])
                hold(held[block] <= 1 or is_same, "blocks", how)
                number = self.number(chunk, position)
                writes.append((block, position % self.size, number))
                if at_once:
                    self.device[block][position % self.size] = number
        places = {write[:2] for write in writes}
        hold(len(places) == len(writes), "blocks", "two chunks write to one slot")
        self.writes.append(writes)

    def have_same(self, block: int, position: int, number: int) -> bool:
        """Return whether the token of all that hold `block` has this number."""
        holders = [one for one in self.scheduler.running if block in one.block_ids]
        return all(self.histories[o.request.request_id][position] == number for o in holders)

    def number(self, chunk: Chunk, position: int) -> int:
        """Return the number that `chunk` writes at `position`."""
        drafts = chunk.sequence.draft_token_ids[: position - chunk.start] if chunk.is_decode else ()
        return -1 if -9 in drafts else self.histories[chunk.sequence.request.request_id][position]

    def end(self) -> None:
        """Apply the writes of the oldest batch."""
        for block, offset, number in self.writes.pop(0):
            self.device[block][offset] = number


class ShadowExecutor:
    """Scripted executor over `caches`, one a replica; it emits `tokens_of` its chunks, or none.

    Batches that are fed on the device are written when they are submitted, those in a pipeline when
    they come out, unless the policy follows them up.
    """

    def __init__(
        self,
        caches: Sequence[ShadowCache],
        capacity: int = 1,
        *,
        feeds_tokens: bool = False,
        knows_tokens: bool = True,
    ) -> None:
        def seconds(batch: Batch) -> float:
            return 0.5 + 0.1 * batch.num_tokens

        self.executor = ScriptedExecutor(seconds, capacity, feeds_tokens=feeds_tokens)
        self.caches = caches
        self.knows_tokens = knows_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def _writes_at_once(self, cache: ShadowCache) -> bool:
        """Return whether the next batch sees the writes of one in flight."""
        policy = cache.scheduler.policy
        return self.executor.feeds_tokens or policy.follows_up or policy.shares_at_once

    def submit(self, batch: Batch) -> None:
        parts = batch.of_replicas if isinstance(batch, LockstepBatch) else (batch,)
        for cache, part in zip(self.caches, parts, strict=True):
            cache.begin(part)
            if self._writes_at_once(cache):
                cache.end()
        self.executor.submit(batch)

    def collect(self) -> StepResult:
        result = self.executor.collect()
        for cache in self.caches:
            if not self._writes_at_once(cache):
                cache.end()
        emitting = (chunk for chunk in result.batch.chunks if chunk.emits_token)
        token_ids = [token for chunk in emitting for token in tokens_of(chunk)]
        if not self.knows_tokens:
            token_ids = [NO_TOKEN] * len(token_ids)
        return replace(result, token_ids=token_ids)


class CountingScheduler(Scheduler):
    """Counts the tokens that have to be computed again."""

    num_lost = 0

    def preempt(self, sequence: SequenceState) -> None:
        num_computed = sequence.num_computed
        super().preempt(sequence)
        if not sequence.is_finished:
            self.num_lost += num_computed - sequence.num_computed


class Checker(check.Checker):
    """Checker that also sums the tokens of all batches."""

    num_tokens = num_hits = num_emits = 0

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        super().record(result, finished)
        for scheduler in self.schedulers:
            hold(
                not any(one.block_ids for one in scheduler.waiting),
                "blocks",
                "waiting sequences hold blocks",
            )
        batch = result.batch
        num_rejected = batch.num_draft_tokens - batch.num_accepted_tokens
        self.num_tokens += batch.num_tokens - num_rejected
        self.num_hits += batch.prefix_hit_tokens
        self.num_emits += batch.num_emits - num_rejected

    def batches(self, batch: Batch) -> Sequence[Batch]:
        return batch.of_replicas if isinstance(batch, LockstepBatch) else (batch,)

    def check_cache(self, scheduler: Scheduler) -> None:
        check_integrity(scheduler.blocks, scheduler.running)


def check_books(
    requests: Sequence[Request],
    schedulers: Sequence[CountingScheduler],
    checker: Checker,
    *,
    knows_tokens: bool = True,
) -> None:
    """Raise PolicyFault unless all were served, nothing is left, and the tokens add up."""
    done = {one.request.request_id: one for one in checker.finished}
    missing = len(requests) - len(done)
    hold(len(done) == len(checker.finished), "progress", "a request is finished twice")
    hold(missing == 0, "progress", f"{missing} requests are not served")
    for i, one in done.items():
        output_len, what = requests[i].output_len, f"request {i}"
        tokens = [1000 * i + k if knows_tokens else NO_TOKEN for k in range(output_len)]
        hold(one.output_token_ids == tokens, "order", f"{what} has tokens {one.output_token_ids}")
        check_tokens(one)
    for scheduler in schedulers:
        hold(not scheduler.has_work, "progress", "sequences are left")
        is_free = scheduler.blocks.num_free == scheduler.blocks.num_blocks
        hold(is_free, "blocks", "blocks are held after the last request")
    emitted = sum(request.output_len for request in requests)
    hold(checker.num_emits == emitted, "order", f"{checker.num_emits} tokens, not {emitted}")
    needed = sum(request.total_len - 1 for request in requests)
    needed += sum(scheduler.num_lost for scheduler in schedulers)
    computed = checker.num_tokens + checker.num_hits
    hold(computed == needed, "order", f"{computed} tokens were computed or cached, not {needed}")


def check_tokens(sequence: SequenceState) -> None:
    """Raise PolicyFault unless a finished sequence has its tokens one after the other."""
    request, times = sequence.request, sequence.token_times
    how = f"request {request.request_id} has its tokens at {times}"
    hold(len(times) == request.output_len and times == sorted(times), "order", how)
    first = sequence.first_scheduled_time
    how = f"request {request.request_id} runs at {first}, before it came or after its token"
    is_after = first is not None and request.arrival_time <= first < times[0]
    hold(is_after, "order", how)


class Telling(Assumed):
    """Drafts of `tokens_of` where they are right, else -9."""

    def drafts(self, request: Request) -> Drafts:
        return TellingDrafts(super().drafts(request).are_right)


class TellingDrafts(Drawn):
    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        at = len(sequence.output_token_ids)
        first, right = 1000 * sequence.request.request_id + at, self.are_right[at : at + most]
        return [first + i if is_right else -9 for i, is_right in enumerate(right)]


def as_array(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)
