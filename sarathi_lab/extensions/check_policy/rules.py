"""The rules that each batch and the cache must keep, checked in every iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.check_policy.queues import Case

MAX_ITERATIONS = 5000  # of a run of a few short requests
# What a batch counts of its chunks, each by itself.
SUMS = (
    "num_prefills",
    "num_decode_tokens",
    "num_prefill_tokens",
    "prefill_kv_tokens",
    "decode_kv_tokens",
)
Schedule = list[list[tuple[int, int, int]]]  # by iteration: request, start and tokens of each chunk


class PolicyFault(UserError):
    """Violation of a rule of `check_policy`.

    Args:
        rule: Its name.
        how: What breaks it.
        case: The queue and the engine that show it; None where the caller knows them.
    """

    def __init__(self, rule: str, how: str, case: Case | None = None) -> None:
        message = f"{rule}: {how}"
        if case:
            message += f"; seen with {case}"
        super().__init__(message)
        self.rule = rule
        self.how = how
        self.case = case


def hold(condition: bool, rule: str, how: str) -> None:
    """Raise PolicyFault unless the condition holds."""
    if not condition:
        raise PolicyFault(rule, how)


class Checker(Ledger):
    """Ledger that checks every iteration, and records the schedule and what finished."""

    def __init__(self, *schedulers: Scheduler) -> None:
        super().__init__()
        self.schedulers = schedulers
        self.finished: list[SequenceState] = []
        self.schedule: Schedule = []

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        super().record(result, finished)
        batches = self.batches(result.batch)
        for scheduler, batch in zip(self.schedulers, batches, strict=True):
            check_batch(batch, scheduler)
            self.check_cache(scheduler)
        rows = []
        for chunk in result.batch.chunks:
            request_id = chunk.sequence.request.request_id
            rows.append((request_id, chunk.start, chunk.num_tokens))
        self.schedule.append(rows)
        self.finished += finished
        hold(len(self.schedule) < MAX_ITERATIONS, "progress", "sequences evict one another")

    def batches(self, batch: Batch) -> Sequence[Batch]:
        """The batch of each scheduler."""
        return (batch,)

    def check_cache(self, scheduler: Scheduler) -> None:
        check_blocks(scheduler.blocks, scheduler.running)


def check_batch(batch: Batch, scheduler: Scheduler) -> None:
    """Raise PolicyFault unless `batch` keeps its limits and sums up its chunks."""
    chunks = batch.chunks
    sequences = {chunk.sequence for chunk in chunks}
    num_sequences = len(sequences)
    # A set holds a sequence once.
    hold(num_sequences == len(chunks), "batch", "a sequence is in it twice")
    how = f"it has {num_sequences} sequences, where batch={scheduler.batch_size}"
    hold(num_sequences <= scheduler.batch_size, "batch", how)
    for chunk in chunks:
        hold(chunk.num_tokens > 0, "batch", "a chunk has no tokens")
    _check_sums(batch)
    _check_budget(batch, scheduler)


def _check_sums(batch: Batch) -> None:
    num_decodes = sum(chunk.is_decode for chunk in batch.chunks)
    how = f"num_decodes is {batch.num_decodes}, its chunks make {num_decodes}; use Batch.add"
    hold(batch.num_decodes == num_decodes, "batch", how)
    of_chunks = Batch()  # with the sums alone
    for chunk in batch.chunks:
        end = chunk.start + chunk.num_tokens
        if chunk.is_decode:
            of_chunks.num_decode_tokens += chunk.num_tokens
            of_chunks.decode_kv_tokens += end
        else:
            of_chunks.num_prefills += 1
            of_chunks.num_prefill_tokens += chunk.num_tokens
            of_chunks.prefill_kv_tokens += end
    # Drafts that are no longer in their chunks, and were computed all the same.
    rejected = batch.num_draft_tokens - batch.num_accepted_tokens
    of_chunks.num_decode_tokens += rejected
    of_chunks.decode_kv_tokens += rejected
    for name in SUMS:
        read = attrgetter(name)
        counted = read(batch)
        summed = read(of_chunks)
        how = f"{name} is {counted}, its chunks make {summed}; use Batch.add"
        hold(counted == summed, "batch", how)


def _check_budget(batch: Batch, scheduler: Scheduler) -> None:
    policy = scheduler.policy
    budget = policy.budget
    num_decodes = batch.num_decodes
    # A sequence that comes back to its cached tokens looks like a decode beside whole prompts.
    is_cut = num_decodes > 0 and scheduler.blocks.prefix is None
    if budget is None or not (policy.is_capped or is_cut):
        return
    how = (
        f"a batch has {batch.num_tokens} tokens, {num_decodes} of them decodes, where "
        f"{budget} are allowed"
    )
    if policy.decodes_on_top and batch.num_decode_tokens:
        how += " for prompts"
        budget += batch.num_decode_tokens
    # Decodes are never cut: more of them than the budget are a batch of their own.
    hold(batch.num_tokens <= max(budget, num_decodes), "budget", how)


def check_blocks(blocks: BlockManager, sequences: Iterable[SequenceState]) -> None:
    """Raise PolicyFault unless every block of a cache without shared prefixes is free or held by
    one of `sequences`, also of a pool for windows, and these hold as many as they have computed.
    """
    held: list[int] = []
    pool = blocks.window_pool
    num_of_windows = pool.num_free
    for sequence in sequences:
        held += sequence.block_ids
        num_of_windows += pool.held_by(sequence)
        room = len(sequence.block_ids) * blocks.block_size
        how = f"{sequence} has computed tokens for which it holds no block"
        hold(room >= sequence.num_computed, "blocks", how)
    num_held = len(held)
    num_distinct = len(set(held))
    hold(num_distinct == num_held, "blocks", "two sequences hold a block")
    num_blocks = num_held + blocks.num_free
    how = f"{num_held} held + {blocks.num_free} free blocks are not the {blocks.num_blocks} blocks"
    hold(num_blocks == blocks.num_blocks, "blocks", how)
    how = f"{num_of_windows} held and free blocks are not the {pool.num_blocks} of the pool for "
    how += "windows"
    hold(num_of_windows == pool.num_blocks, "blocks", how)
    hold(pool.num_free >= 0, "blocks", "the pool for windows holds more than it has")
