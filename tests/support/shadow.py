"""A cache that knows what every slot should hold, and an executor and a recorder that check a run
against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from helpers import ScriptedExecutor
from integrity import check_integrity

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import NO_TOKEN, StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler

History = list[int]  # by position: a number for the token there and all before it


def history(prompt: Sequence[int], request_id: int, output_len: int, *, is_shared: bool) -> History:
    """What the slots of a request hold; of two requests equal numbers only for equal beginnings,
    and only if prefixes are shared.
    """
    known = 0 if is_shared else 1 + request_id
    numbers = []
    for token in [*prompt, *(1000 * request_id + k for k in range(output_len))]:
        known = hash((known, token))
        numbers.append(known)
    return numbers


class ShadowCache:
    """What a real cache would hold: a number of `history` in each slot, None where nothing is.

    A chunk must find all of its context before anything of its batch is written, and write to
    blocks that no other sequence holds. A block that was freed holds nothing.
    """

    def __init__(self, scheduler: Scheduler, histories: Sequence[History]) -> None:
        self.scheduler = scheduler
        self.histories = histories
        blocks: BlockManager = scheduler.blocks
        self.size = blocks.block_size
        self.device: list[list[int | None]] = [[None] * self.size for _ in range(blocks.num_blocks)]
        self.host: list[list[int | None]] = [[] for _ in range(blocks.num_host_blocks)]
        self.writes: list[list[tuple[int, int, int]]] = []  # of each batch in flight

    def begin(self, batch: Batch) -> None:
        """Make the batch's copies, and let its chunks read."""
        for is_out, device_block, host_block in batch.copies:
            if is_out:
                self.host[host_block] = list(self.device[device_block])
            else:
                self.device[device_block] = list(self.host[host_block])
        if batch.chunks:  # else copies of what was freed may wait for the next one
            for block in self.scheduler.blocks._free:
                self.device[block] = [None] * self.size
        held = [block for one in self.scheduler.running for block in one.block_ids]
        writes = []
        for sequence, start, num_tokens, _, _ in batch.chunks:
            numbers, block_ids = self.histories[sequence.request.request_id], sequence.block_ids
            read = [number for block in block_ids for number in self.device[block]][:start]
            assert read == numbers[:start], f"{sequence} reads what it did not write"
            for position in range(start, start + num_tokens):
                block = block_ids[position // self.size]
                assert held.count(block) <= 1, f"{sequence} writes to block {block}, not its alone"
                writes.append((block, position % self.size, numbers[position]))
        assert len({write[:2] for write in writes}) == len(writes), "two chunks write to one slot"
        self.writes.append(writes)

    def end(self) -> None:
        """Let what the oldest batch computed be seen."""
        for block, offset, number in self.writes.pop(0):
            self.device[block][offset] = number


class ShadowExecutor(ScriptedExecutor):
    """Batches that are fed on the device are written when they are submitted, those in a pipeline
    when they come out. `caches` are one for each replica.
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

        super().__init__(seconds, capacity, feeds_tokens=feeds_tokens)
        self.caches = caches
        self.knows_tokens = knows_tokens

    def submit(self, batch: Batch) -> None:
        for cache, part in zip(self.caches, batch.parts or (batch,), strict=True):
            cache.begin(part)
            if self.feeds_tokens:
                cache.end()
        super().submit(batch)

    def collect(self) -> StepResult:
        result = super().collect()
        if not self.feeds_tokens:
            for cache in self.caches:
                cache.end()
        if not self.knows_tokens:
            result.token_ids[:] = [NO_TOKEN] * len(result.token_ids)
        return result


class Checker(Ledger):
    """A ledger that checks every iteration and keeps what finished and the sums of all."""

    def __init__(self, *schedulers: Scheduler) -> None:
        super().__init__()
        self.schedulers = schedulers
        self.finished: list[SequenceState] = []
        self.num_tokens = self.num_hits = self.num_emits = 0

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        super().record(result, finished)
        batch = result.batch
        for scheduler, part in zip(self.schedulers, batch.parts or (batch,), strict=True):
            check_batch(part, scheduler)
            check_integrity(scheduler.blocks, scheduler.running, scheduler.swapped)
            idle = [*scheduler.waiting, *scheduler.swapped]
            assert not any(sequence.block_ids for sequence in idle)
        self.finished += finished
        self.num_tokens += batch.num_tokens
        self.num_hits += batch.prefix_hit_tokens
        self.num_emits += batch.num_emits
        assert len(self._iterations) < 5000, "sequences evict one another and none gets done"


def check_batch(batch: Batch, scheduler: Scheduler) -> None:
    """Raise AssertionError unless `batch` keeps its limits and sums up its chunks."""
    chunks, policy = batch.chunks, scheduler.policy
    assert len({chunk.sequence for chunk in chunks}) == len(chunks) <= scheduler.batch_size
    assert all(chunk.num_tokens > 0 for chunk in chunks)
    prompts = [chunk for chunk in chunks if not chunk.is_decode]
    decodes = [chunk for chunk in chunks if chunk.is_decode]
    pairs = [range(chunk.start + 1, chunk.start + chunk.num_tokens + 1) for chunk in prompts]
    assert (len(prompts), len(decodes)) == (batch.num_prefills, batch.num_decode_tokens)
    assert batch.num_prefill_tokens == sum(chunk.num_tokens for chunk in prompts)
    assert batch.prefill_kv_tokens == sum(chunk.start + chunk.num_tokens for chunk in prompts)
    assert batch.decode_kv_tokens == sum(chunk.start + 1 for chunk in decodes)
    assert batch.prefill_query_key_pairs == sum(map(sum, pairs))
    if policy.budget is not None and (policy.is_capped or decodes):
        budget = policy.budget + (len(decodes) if policy.decodes_on_top else 0)
        assert batch.num_tokens <= max(budget, len(decodes))


def as_array(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)
