"""Scheduler state: queues, cache, and the bookkeeping of batches and drafts."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import NO_TOKEN, Backend, StepResult
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.queues import (
    QueueOrder,
    RunningSequences,
    WaitingQueue,
    by_arrival,
    by_priority,
    make_queue,
)
from sarathi_lab.engine.request import Batch, Chunk, Queues, Request, SequenceState

if TYPE_CHECKING:  # which is a subclass of `SchedulerState`
    from sarathi_lab.engine.scheduler import Scheduler


class Drafter:
    """The drafts of one scheduler's decodes; this one has none."""

    def add_drafts(self, batch: Batch, first: int, scheduler: Scheduler) -> None:
        """Let decodes of `batch` from chunk `first` on carry drafts, of the tokens that its policy
        and the cache of `scheduler` have left.
        """

    def verify(self, result: StepResult) -> list[int]:
        """Cut the decodes of a finished batch to their right drafts; returns one token for each
        emitting chunk (none where they are not computed).
        """
        return result.token_ids


class Speculation:
    """Settings of speculative decoding; this one is without drafts."""

    tokens: int = 0  # the most drafts of a decode

    def drafter(self) -> Drafter:
        """Make the drafter of a new scheduler."""
        return Drafter()

    def describe(self) -> str:
        """Describe the drafts; empty without any."""
        return ""

    def check(self, backend: Backend) -> None:
        """Raise UserError for a device that has no use for the drafts."""


NO_SPECULATION = Speculation()
# What helps a request that does not fit the cache.
LARGER_CACHE = "raise cache.num_blocks, or use auto for what the served system leaves to it"

State = TypeVar("State")


@dataclass(eq=False, repr=False)
class SchedulerState:
    """State of a `Scheduler`: which sequences wait or run, and what changes of them when a batch
    begins and ends.
    """

    policy: Policy
    blocks: BlockManager
    _: KW_ONLY
    batch_size: int
    max_model_len: int
    num_micro_batches: int = 1
    queue_order: QueueOrder = "fcfs"
    speculation: Speculation = NO_SPECULATION
    aligns_chunks: bool = False

    next_time: ClassVar[float] = math.inf  # of the next event besides arrivals and batches: none

    def __post_init__(self) -> None:
        self.policy.validate(self.batch_size, self.max_model_len)
        if self.aligns_chunks and self.policy.budget_field is None:
            raise UserError(
                f"cache.align_chunks=true: policy {self.policy.name} cuts no prompts; use "
                "cache.align_chunks=false"
            )
        self.max_num_seqs = self.batch_size * self.num_micro_batches
        self.shared_step: int | None = None  # the iteration of replicas that step together
        self.drafter = self.speculation.drafter()
        self.has_drafts = self.speculation.tokens > 0  # spares a call for each decode
        self.waiting: WaitingQueue = make_queue(self.queue_order)
        is_ranked = self.queue_order == "priority"
        self.running = RunningSequences(by_priority if is_ranked else by_arrival)
        self._states: dict[type, Any] = {}  # of the policy, by class
        # Only of a policy that `leaves_with_output`: batches that were advanced and have not come
        # back, oldest first, and evicted sequences with the newest of these that has a token of
        # theirs. They are not admitted before it is back.
        self.ahead: list[Batch] = []
        self.awaited: dict[SequenceState, Batch] = {}
        self.now = 0.0  # seconds, when this iteration began
        self.last_prompt_latency = 0.0  # seconds of the last iteration with prompts
        self.num_preemptions = 0
        self.preempted_before = 0  # num_preemptions when this iteration began
        self._num_added = 0

    def state(self, kind: type[State]) -> State:
        """State that the policy keeps between iterations: `kind()` at first."""
        if kind not in self._states:
            self._states[kind] = kind()
        return self._states[kind]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_preempted(self) -> bool:
        """Whether a sequence was preempted in this iteration."""
        return self.num_preemptions > self.preempted_before

    @property
    def idle_decodes(self) -> list[SequenceState]:
        """Running sequences whose next token could be decoded now, oldest first."""
        return [sequence for sequence in self.running.idle if sequence.is_decoding]

    def num_idle_decodes(self, limit: int) -> int:
        """Count `idle_decodes`, no further than `limit`."""
        decodes = (
            sequence for sequence in self.running if not sequence.in_flight and sequence.is_decoding
        )
        return sum(1 for _ in islice(decodes, limit))

    @property
    def idle_prefills(self) -> list[SequenceState]:
        """Running sequences whose prompt could be continued now, oldest first."""
        return [sequence for sequence in self.running.idle if not sequence.is_decoding]

    def upcoming(self, num_sequences: int) -> list[SequenceState]:
        """The next waiting sequences, in the order of admission."""
        return [
            self.blocks.look_up(sequence)
            for sequence in islice(self.waiting, max(0, num_sequences))
        ]

    def add(self, request: Request) -> SequenceState:
        """Queue a request. Raises UserError for one that could never finish."""
        self.check_fits(request)
        sequence = SequenceState(request, order=self._num_added)
        self._num_added += 1
        self.waiting.append(sequence)
        return sequence

    def warm(self, request: Request) -> None:
        """Let the prefix cache have a prompt, as if it had been computed before."""
        self.blocks.warm(SequenceState(request, order=0))

    def check_fits(self, request: Request) -> None:
        """Raise UserError if model or cache are too small for `request`, even alone."""
        named = (
            f"request {request.request_id} of {request.prompt_len} + {request.output_len} tokens"
        )
        if request.total_len > self.max_model_len:
            raise UserError(
                f"{named} exceeds max_model_len={self.max_model_len}; raise it or shorten the "
                "request"
            )
        # It must fit alone, with all of its tokens and what its admission leaves free.
        blocks = self.blocks
        reserved = self.policy.reserved_tokens(request, request.total_len, self.max_model_len)
        needed = blocks.blocks_for(max(request.total_len, reserved))
        needed += blocks.watermark_blocks(self.policy.watermark)
        if needed > blocks.num_blocks:
            states = f" ({blocks.state_blocks} for its states)" if blocks.state_blocks else ""
            raise UserError(
                f"{named} can never fit the KV cache: policy {self.policy.name} needs {needed} "
                f"blocks of {blocks.block_size} tokens{states}, num_blocks={blocks.num_blocks}; "
                f"{LARGER_CACHE}"
            )

    def advance(self, batch: Batch) -> None:
        """Record what is known of a batch before it ran: how far its sequences come, and which are
        finished. Their next tokens are counted, and filled in by `update`.

        With an executor that feeds the tokens of one batch to the next, this is done at submission,
        so that the next batch can be made while this one runs.
        """
        self._count(batch)
        if self.policy.leaves_with_output:
            self.ahead.append(batch)
            for sequence in batch.finished:
                sequence.in_flight = True  # until it leaves, so that nothing more is scheduled
        else:
            self._dismiss(batch.finished)
        batch.queues = self._queues()

    def update(self, result: StepResult) -> list[SequenceState]:
        """Record a finished batch (and `advance`, if not done); returns finished sequences."""
        batch = result.batch
        token_ids = self.drafter.verify(result)
        if batch.queues is None:
            self._count(batch)
            self._dismiss(batch.finished)
            batch.queues = self._queues()
        elif self.policy.leaves_with_output:
            self._return(batch)
        emitting = [chunk for chunk in batch.chunks if chunk.emits_token]
        for chunk in emitting:
            chunk.sequence.token_times.append(result.end)
        if token_ids:  # empty in simulations
            for chunk, token_id in zip(emitting, token_ids, strict=True):
                sequence, start, num_tokens, _, _ = chunk
                # `output_index` is inlined, as each token of a run passes here.
                index = start + num_tokens - sequence.request.prompt_len
                sequence.output_token_ids[index] = token_id
        if batch.num_prefills:
            self.last_prompt_latency = result.end - result.start
        return batch.finished

    def _count(self, batch: Batch) -> None:
        """Count the tokens of a batch as computed, and list which sequences it finishes."""
        chunks = batch.chunks
        if self.policy.follows_up:  # `schedule` committed the others
            chunks = [chunk for chunk in chunks if chunk.emits_token]
        batch.finished += self.commit(chunks)

    def _queues(self) -> Queues:
        return Queues(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks_used=self.blocks.num_used,
            num_preemptions=self.num_preemptions,
        )

    def _return(self, batch: Batch) -> None:
        """Let the finished sequences of a batch that was made ahead leave, as it is back."""
        self.ahead.remove(batch)
        returned = [sequence for sequence, newest in self.awaited.items() if newest is batch]
        for sequence in returned:
            del self.awaited[sequence]
        self._dismiss(batch.finished)
        batch.queues = self._queues()

    def _dismiss(self, finished: list[SequenceState]) -> None:
        for sequence in finished:
            self.leave(sequence)

    def leave(self, sequence: SequenceState) -> None:
        """Forget a sequence that has all its tokens, and free its blocks."""
        if sequence.is_running:
            self.blocks.free(sequence)
            self.running.leave(sequence)
        else:
            self.waiting.remove(sequence)  # evicted while its last token was on its way

    def await_output(self, sequence: SequenceState) -> None:
        """Keep an evicted `sequence` from admission until its batches are back."""
        for batch in self.ahead:
            if any(chunk.sequence is sequence for chunk in batch.chunks):
                self.awaited[sequence] = batch

    def commit(self, chunks: list[Chunk]) -> list[SequenceState]:
        """Count `chunks` as computed, with their next tokens yet unknown; their sequences are no
        longer in flight. Returns those that have all their tokens.
        """
        finished = []
        for sequence, start, num_tokens, _, emits_token in chunks:
            sequence.in_flight = False
            sequence.num_computed = start + num_tokens
            if emits_token:
                token_ids = sequence.output_token_ids
                token_ids.append(NO_TOKEN)
                if len(token_ids) >= sequence.request.output_len:
                    finished.append(sequence)
        self.blocks.publish(chunks)
        return finished
