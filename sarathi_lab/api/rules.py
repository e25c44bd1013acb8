"""What has to hold of a run under any policy: a cache that knows what every slot should hold, and
an executor and a recorder that check a run against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import NO_TOKEN, Executor, StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch, Chunk, Layers, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import Policy

MOST_ITERATIONS = 5000  # of a run of a few short requests
History = list[int]  # by position: a number for the token there and all before it


class RuleBroken(AssertionError):
    """A rule that does not hold, and how it shows."""

    def __init__(self, rule: str, how: str) -> None:
        super().__init__(f"{rule}: {how}")
        self.rule = rule


def hold(is_so: bool, rule: str, how: str) -> None:
    """Raise RuleBroken unless it `is_so`."""
    if not is_so:
        raise RuleBroken(rule, how)


def tokens_of(chunk: Chunk) -> list[int]:
    """The tokens that a chunk's rows emit: each tells whose it is, and which."""
    first = 1000 * chunk.sequence.request.request_id + chunk.output_index - chunk.num_rows
    return [first + row + 1 for row in range(chunk.num_rows)]


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
        self.writes: list[list[tuple[int, int, int | None]]] = []  # of each batch in flight

    def begin(self, batch: Batch) -> None:
        """Make the batch's copies, and let its chunks read."""
        for is_out, device_block, host_block in batch.copies:
            if is_out:
                self.host[host_block] = list(self.device[device_block])
            else:
                self.device[device_block] = list(self.host[host_block])
        if batch.chunks:  # else copies of what was freed may wait for the next one
            for block in self.scheduler.blocks.empty:
                self.device[block] = [None] * self.size
        held = Counter(block for one in self.scheduler.running for block in one.block_ids)
        writes = []
        is_halfway = batch.layers is not None and not batch.layers.is_last
        for chunk in batch.chunks:
            sequence, start, num_tokens, is_decode, _ = chunk
            numbers, block_ids = self.histories[sequence.request.request_id], sequence.block_ids
            read = [number for block in block_ids for number in self.device[block]][:start]
            hold(read == numbers[:start], "blocks", f"{sequence} reads what it did not write")
            for position in range(start, start + num_tokens):
                how = f"{sequence} writes token {position}, for which it holds no block"
                hold(position // self.size < len(block_ids), "blocks", how)
                block = block_ids[position // self.size]
                how = f"{sequence} writes to block {block}, which others hold, too"
                hold(held[block] <= 1, "blocks", how)
                # what is not computed in all layers is of no use to anybody
                number = self.number(chunk, position) if is_decode or not is_halfway else None
                writes.append((block, position % self.size, number))
        places = {write[:2] for write in writes}
        hold(len(places) == len(writes), "blocks", "two chunks write to one slot")
        self.writes.append(writes)

    def number(self, chunk: Chunk, position: int) -> int:
        """What `chunk` writes at `position`."""
        return self.histories[chunk.sequence.request.request_id][position]

    def end(self) -> None:
        """Let what the oldest batch computed be seen."""
        for block, offset, number in self.writes.pop(0):
            self.device[block][offset] = number


class ShadowExecutor:
    """`executor` over `caches`, one for each replica; it emits `tokens_of` its chunks, or none.

    Batches that are fed on the device are written when they are submitted, those in a pipeline when
    they come out, unless the policy follows them up.
    """

    def __init__(
        self, executor: Executor, caches: Sequence[ShadowCache], *, knows_tokens: bool = True
    ) -> None:
        self.executor = executor
        self.caches = caches
        self.knows_tokens = knows_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def _writes_at_once(self, cache: ShadowCache) -> bool:
        """Whether the next batch finds what one in flight writes, as it comes behind it."""
        return self.executor.feeds_tokens or cache.scheduler.policy.follows_up

    def submit(self, batch: Batch) -> None:
        for cache, part in zip(self.caches, batch.parts or (batch,), strict=True):
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
        halfway = Layers(0, sequence.layers_passed, self.num_layers)
        self.num_lost += halfway.of(sequence.num_halfway)
        super().preempt(sequence)
        self.num_lost += num_computed - sequence.num_computed


class Checker(Ledger):
    """A ledger that checks every iteration and keeps what finished and the sums of all."""

    def __init__(self, *schedulers: Scheduler) -> None:
        super().__init__()
        self.schedulers = schedulers
        self.finished: list[SequenceState] = []
        self.num_tokens = self.num_hits = self.num_emits = 0
        # A row (request, start, tokens) for every chunk of every batch.
        self.schedule: list[list[tuple[int, int, int]]] = []

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        super().record(result, finished)
        batch = result.batch
        for scheduler, part in zip(self.schedulers, batch.parts or (batch,), strict=True):
            check_batch(part, scheduler)
            self.check_cache(scheduler)
            idle = [*scheduler.waiting, *scheduler.swapped]
            hold(not any(one.block_ids for one in idle), "blocks", "who waits holds blocks")
        rows = [(c.sequence.request.request_id, c.start, c.num_tokens) for c in batch.chunks]
        self.schedule.append(rows)
        self.finished += finished
        self.num_tokens += batch.num_tokens - batch.num_rejected_tokens
        self.num_hits += batch.prefix_hit_tokens
        self.num_emits += batch.num_emits - batch.num_rejected_tokens
        is_ending = len(self._iterations) < MOST_ITERATIONS
        hold(is_ending, "progress", "sequences evict one another and none gets done")

    def check_cache(self, scheduler: Scheduler) -> None:
        """Raise RuleBroken unless the books of the scheduler's cache are right."""
        check_blocks(scheduler.blocks, scheduler.running)


def check_batch(batch: Batch, scheduler: Scheduler) -> None:
    """Raise RuleBroken unless `batch` keeps its limits and sums up its chunks."""
    chunks, policy = batch.chunks, scheduler.policy
    sequences = {chunk.sequence for chunk in chunks}
    hold(len(sequences) == len(chunks), "batch", "a sequence is in it twice")
    how = f"it has {len(chunks)} sequences, where batch={scheduler.batch_size}"
    hold(len(chunks) <= scheduler.batch_size, "batch", how)
    hold(all(chunk.num_tokens > 0 for chunk in chunks), "batch", "a chunk has no tokens")
    prompts = [chunk for chunk in chunks if not chunk.is_decode]
    decodes = [chunk for chunk in chunks if chunk.is_decode]
    wrong = batch.num_rejected_tokens  # drafts that are no longer of their chunks
    pairs = [range(chunk.start + 1, chunk.start + chunk.num_tokens + 1) for chunk in prompts]
    part = int if batch.layers is None else batch.layers.of
    sums = {
        "num_prefills": len(prompts),
        "num_decodes": len(decodes),
        "num_decode_tokens": sum(chunk.num_tokens for chunk in decodes) + wrong,
        "num_prefill_tokens": sum(part(chunk.num_tokens) for chunk in prompts),
        "prefill_kv_tokens": sum(part(chunk.start + chunk.num_tokens) for chunk in prompts),
        "decode_kv_tokens": sum(chunk.start + chunk.num_tokens for chunk in decodes) + wrong,
        "prefill_query_key_pairs": sum(part(sum(own)) for own in pairs),
    }
    for name, value in sums.items():
        own = getattr(batch, name)
        hold(own == value, "batch", f"{name} is {own}, its chunks make {value}; use Batch.add")
    # A sequence that comes back to its cached tokens looks like a decode beside whole prompts.
    is_cut = bool(decodes) and scheduler.blocks.prefix is None and not policy.in_layers
    budget = policy.budget if isinstance(policy, Policy) else None
    if isinstance(policy, Policy) and budget is not None and (policy.is_capped or is_cut):
        on_top = batch.num_decode_tokens if policy.decodes_on_top else 0
        hold(
            batch.num_tokens <= max(budget + on_top, len(decodes)),
            "budget",
            f"a batch has {batch.num_tokens} tokens, {len(decodes)} of them decodes, where "
            f"{budget} are allowed{' for prompts' if on_top else ''}",
        )


def check_books(
    requests: Sequence[Request],
    schedulers: Sequence[CountingScheduler],
    checker: Checker,
    *,
    knows_tokens: bool = True,
) -> None:
    """Raise RuleBroken unless all were served, nothing is left, and the tokens add up."""
    done = {one.request.request_id: one for one in checker.finished}
    missing = len(requests) - len(done)
    hold(len(done) == len(checker.finished), "progress", "a request is finished twice")
    hold(missing == 0, "progress", f"{missing} requests are not served")
    for i, one in done.items():
        output_len, what = requests[i].output_len, f"request {i}"
        tokens = [1000 * i + k if knows_tokens else NO_TOKEN for k in range(output_len)]
        hold(one.output_token_ids == tokens, "order", f"{what} has tokens {one.output_token_ids}")
        times = one.token_times
        is_sorted = len(times) == len(tokens) and times == sorted(times)
        hold(is_sorted, "order", f"{what} has its tokens at {times}")
        first = one.first_scheduled_time
        is_after = first is not None and one.request.arrival_time <= first < times[0]
        hold(is_after, "order", f"{what} runs at {first}, before it came or after its token")
    for scheduler in schedulers:
        hold(not scheduler.has_work, "progress", "sequences are left that nobody waits for")
        is_free = scheduler.blocks.num_free == scheduler.blocks.num_blocks
        hold(is_free, "blocks", "blocks are held after the last request")
    emitted = sum(request.output_len for request in requests)
    hold(checker.num_emits == emitted, "order", f"{checker.num_emits} tokens, not {emitted}")
    needed = sum(request.total_len - 1 for request in requests)
    needed += sum(scheduler.num_lost for scheduler in schedulers)
    computed = checker.num_tokens + checker.num_hits
    hold(computed == needed, "order", f"{computed} tokens were computed or found, not {needed}")


def check_blocks(blocks: BlockManager, sequences: Iterable[SequenceState]) -> None:
    """Raise RuleBroken unless every block of a cache without shared prefixes is free or held by one
    of `sequences`, who hold as many as they have computed.
    """
    sequences = list(sequences)
    held = [block for sequence in sequences for block in sequence.block_ids]
    hold(len(set(held)) == len(held), "blocks", "two sequences hold a block")
    hold(
        len(held) + blocks.num_free == blocks.num_blocks,
        "blocks",
        f"{len(held)} held + {blocks.num_free} free blocks are not the {blocks.num_blocks} blocks",
    )
    for sequence in sequences:
        has_room = len(sequence.block_ids) * blocks.block_size >= sequence.num_computed
        hold(has_room, "blocks", f"{sequence} has computed more tokens than its blocks hold")
