"""The scheduler: which sequences wait or run, and the moves that every policy is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, ClassVar, TypeVar

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import NO_TOKEN, StepResult
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.policy_errors import PolicyRaised, is_own
from sarathi_lab.engine.queues import (
    QueueOrder,
    RunningSequences,
    Test,
    WaitingQueue,
    by_arrival,
    by_priority,
    candidates,
    make_queue,
)
from sarathi_lab.engine.request import Batch, Chunk, Queues, Request, SequenceState
from sarathi_lab.engine.speculation import NO_SPECULATION, Speculation

# What helps a request that does not fit the cache.
LARGER_CACHE = "raise cache.num_blocks, or use auto for what the served system leaves to it"

State = TypeVar("State")
# How many of the tokens that the budget leaves a sequence it takes; 0 passes it over.
Size = Callable[[SequenceState, int], int]


def tokens_to_take(
    sequence: SequenceState, token_budget: int | None, batch: Batch, size: Size | None = None
) -> int:
    """Return the tokens that `sequence` takes now.

    Args:
        sequence: a running or waiting sequence.
        token_budget: the most tokens of the batch; None: no limit.
        batch: what the iteration has so far.
        size: makes a smaller number of what the budget leaves, which is never negative.
    """
    num_tokens = sequence.num_pending
    if token_budget is not None:
        num_tokens = max(0, min(num_tokens, token_budget - batch.num_tokens))
    if size is None:
        return num_tokens
    return size(sequence, num_tokens)


@dataclass(eq=False, repr=False)
class Scheduler:
    """Turns requests into batches: a policy decides the order of the moves, this class makes them.

    A batch carries at most `batch_size` sequences, and the executor keeps `num_micro_batches` of
    them in flight; sequences in flight are never scheduled or evicted. Where the cache is short,
    the newest running sequence is evicted, or with `queue_order="priority"` the newest of the least
    urgent; it waits again, and all its tokens are computed again. Admitted sequences start behind
    their cached tokens.
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
        decodes, _ = self.running.by_phase(only_idle=True)
        return decodes

    def num_idle_decodes(self, limit: int) -> int:
        """Count `idle_decodes`, no further than `limit`."""
        decodes = (
            sequence for sequence in self.running if not sequence.in_flight and sequence.is_decoding
        )
        return sum(1 for _ in islice(decodes, limit))

    @property
    def idle_prefills(self) -> list[SequenceState]:
        """Running sequences whose prompt could be continued now, oldest first."""
        _, prompts = self.running.by_phase(only_idle=True)
        return prompts

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
        num_tokens = max(request.total_len, reserved)
        needed = blocks.blocks_for(num_tokens) + blocks.watermark_blocks(self.policy.watermark)
        if needed > blocks.num_blocks:
            states = f" ({blocks.state_blocks} for its states)" if blocks.state_blocks else ""
            raise UserError(
                f"{named} can never fit the KV cache: policy {self.policy.name} needs {needed} "
                f"blocks of {blocks.block_size} tokens{states}, num_blocks={blocks.num_blocks}; "
                f"{LARGER_CACHE}"
            )
        in_windows = blocks.window_blocks_for(num_tokens)
        if in_windows > blocks.window_pool.num_blocks:
            raise UserError(
                f"{named} can never fit the pool of layers with a window: it needs {in_windows} "
                f"blocks of {blocks.block_size} tokens there, num_blocks={blocks.num_blocks} gives "
                f"it {blocks.window_pool.num_blocks} and {blocks.room_for(num_tokens)} would do; "
                f"{LARGER_CACHE}"
            )

    def schedule(self, now: float) -> Batch | None:
        """Make the next batch at time `now` (seconds), or None if nothing can run."""
        batch = self.step(now)
        # Again with the blocks of a sequence that was evicted for itself, unless more come back
        # with a batch that was made ahead.
        while batch is None and self.has_preempted and not self.ahead:
            batch = self.step(now)
        return batch

    def step(self, now: float) -> Batch | None:
        """Let the policy fill a batch once; None if it takes nothing, though it may preempt."""
        self.now = now
        self.preempted_before = self.num_preemptions
        batch = Batch(window=self.blocks.attention_window)
        if self.running.rank is by_priority and not self.policy.keeps_order:
            self.sort_running()  # urgent sequences choose first, as later ones are evicted
        try:
            self.policy.fill(batch, self)
        except UserError:
            raise
        except Exception as error:
            if is_own(self.policy):
                raise PolicyRaised(self.policy, error) from error
            raise
        if not batch.chunks:
            return None
        if self.policy.follows_up:
            self.commit([chunk for chunk in batch.chunks if not chunk.emits_token])
        return batch

    def add_decodes(self, batch: Batch, token_budget: int | None = None) -> None:
        """Give idle decodes their next token, oldest first, evicting the newest if need be.

        Args:
            batch: What the iteration has so far.
            token_budget: The most tokens of the batch; None: a token for each decode.
        """
        block_size = self.blocks.block_size
        limit = self.batch_size - len(batch)
        if token_budget is not None:
            limit = min(self.batch_size, token_budget) - len(batch)
        decodes: list[SequenceState] = []
        # The oldest first: it is never evicted for a newer one, so that some sequence ends.
        for sequence in self.running.idle:
            if len(decodes) >= limit:
                break
            if not sequence.is_running:
                continue  # evicted by an earlier one
            # `is_decoding` and `num_pending` are inlined, as hundreds of sequences are asked.
            num_computed = sequence.num_computed
            num_generated = len(sequence.output_token_ids)
            num_pending = sequence.request.prompt_len + num_generated - num_computed
            if num_generated == 0 or num_pending != 1:
                continue
            # Its last block has room for the token, unless the block is full.
            is_full = num_computed % block_size == 0
            if is_full and not self.make_room(sequence, num_computed + 1):
                continue
            sequence.in_flight = True  # so that later ones can't evict it
            decodes.append(sequence)
        batch.add_decodes(decodes)
        if self.has_drafts:
            self.drafter.add_drafts(batch, len(batch) - len(decodes), self)

    def add_first_decodes(
        self, batch: Batch, sequences: Sequence[SequenceState], token_budget: int
    ) -> int:
        """Give the decodes in front of the first prompt of `sequences` their next token at once.

        Args:
            batch: what the iteration has so far.
            sequences: idle running sequences, in their order.
            token_budget: the most tokens of the batch.

        Returns:
            How many of `sequences` have one; 0, with nothing changed, where an eviction may be
            needed.
        """
        # Drafts are added, and prefixes published, one sequence after another.
        if self.has_drafts or self.blocks.prefix is not None:
            return 0
        if not self.blocks.has_room_for_all(len(sequences)):
            return 0
        limit = min(token_budget - batch.num_tokens, self.batch_size - len(batch))
        decodes = []
        block_size = self.blocks.block_size
        for sequence in sequences[: max(0, limit)]:
            # `is_decoding` is inlined, as hundreds of sequences are asked.
            num_computed = sequence.num_computed
            num_generated = len(sequence.output_token_ids)
            num_pending = sequence.request.prompt_len + num_generated - num_computed
            if num_generated == 0 or num_pending != 1:
                break
            if num_computed % block_size == 0:
                self.blocks.grow(sequence, num_computed + 1)
            sequence.in_flight = True
            decodes.append(sequence)
        batch.add_decodes(decodes)
        return len(decodes)

    def continue_prefills(
        self,
        batch: Batch,
        token_budget: int | None = None,
        max_prefills: int | None = None,
        size: Size | None = None,
    ) -> None:
        """Continue running prompts, oldest first.

        Args:
            batch: What the iteration has so far.
            token_budget: The most tokens of the batch; None: each prompt whole.
            max_prefills: The most prompts of the batch; None: as many as it has sequences.
            size: Chooses fewer tokens of a sequence than the budget would give it.
        """
        for sequence in self.idle_prefills:
            if not sequence.is_running:
                continue  # evicted by an earlier one
            if self._is_full(batch, max_prefills):
                return
            num_tokens = tokens_to_take(sequence, token_budget, batch)
            if num_tokens == 0:
                return
            if size is not None:
                num_tokens = size(sequence, num_tokens)
            self.take(batch, sequence, num_tokens)

    def share(
        self,
        batch: Batch,
        sequences: Iterable[SequenceState],
        token_budget: int,
        size: Size | None = None,
    ) -> None:
        """Let sequences share a budget in their order. Admission stops at a sequence that does not
        fit the cache and at an eviction.

        Args:
            batch: What the iteration has so far.
            sequences: Idle or waiting ones.
            token_budget: The most tokens of the batch.
            size: Chooses fewer tokens of a sequence than the budget would give it.
        """
        admits = True
        for sequence in sequences:
            num_tokens = tokens_to_take(sequence, token_budget, batch)
            if num_tokens == 0 or len(batch) >= self.batch_size:
                return
            if size is not None:
                num_tokens = size(sequence, num_tokens)
            if sequence.is_running:
                self.take(batch, sequence, num_tokens)
            elif admits and not self.has_preempted:
                if self.aligns_chunks:
                    num_tokens = self.aligned(batch, sequence, num_tokens)
                admits = num_tokens > 0 and self.enter(batch, sequence, num_tokens)

    def take(
        self,
        batch: Batch,
        sequence: SequenceState,
        num_tokens: int,
        make_room: Callable[[SequenceState, int], bool] | None = None,
    ) -> bool:
        """Add tokens of a running sequence, evicting newer ones if need be.

        Args:
            batch: What the iteration has so far.
            sequence: An idle running sequence.
            num_tokens: Its next tokens, fewer where chunks end with blocks.
            make_room: Makes room in the cache so that a sequence can hold so many tokens; None:
                `Scheduler.make_room`.

        Returns:
            False, with nothing added, if it does not fit.
        """
        if make_room is None:
            make_room = self.make_room
        if self.aligns_chunks:
            num_tokens = self.aligned(batch, sequence, num_tokens)
        if num_tokens <= 0:
            return False
        if not make_room(sequence, sequence.num_computed + num_tokens):
            return False
        self.put(batch, sequence, num_tokens)
        if self.has_drafts:
            self.drafter.add_drafts(batch, len(batch) - 1, self)
        return True

    def admit(
        self,
        batch: Batch,
        token_budget: int | None = None,
        max_prefills: int | None = None,
        uncut: bool = False,
        size: Size | None = None,
        may_enter: Test | None = None,
        pass_over: Test | None = None,
    ) -> None:
        """Move waiting sequences to running, in the order of their queue, until one does not fit.

        Args:
            batch: What the iteration has so far.
            token_budget: The most tokens of the batch; None: each prompt whole.
            max_prefills: The most prompts of the batch; None: as many as it has sequences.
            uncut: A prompt enters only if all of it fits the budget.
            size: Chooses fewer tokens of a sequence than the budget would give it.
            may_enter: Ends admission at a sequence by False.
            pass_over: Lets later sequences go first by True, of the next `LOOKAHEAD`.
        """
        for sequence in candidates(self.waiting, pass_over):
            if self._is_full(batch, max_prefills):
                return
            self.blocks.look_up(sequence)  # cached tokens need no budget
            num_tokens = tokens_to_take(sequence, token_budget, batch, size)
            if num_tokens <= 0:
                return
            if uncut and num_tokens < sequence.num_pending:
                return
            if may_enter is not None and not may_enter(sequence):
                return
            if self.aligns_chunks and not uncut and token_budget is not None:
                num_tokens = self.aligned(batch, sequence, num_tokens)
            if num_tokens == 0 or not self.enter(batch, sequence, num_tokens):
                return

    def enter(self, batch: Batch, sequence: SequenceState, num_tokens: int) -> bool:
        """Admit a waiting sequence.

        Args:
            batch: What the iteration has so far.
            sequence: The first of the queue, or one that the policy chose.
            num_tokens: Its first tokens to compute, at most its pending ones.

        Returns:
            False, with nothing changed, if cache or batch is full.
        """
        if not self._has_place(batch):
            return False
        self.blocks.look_up(sequence)
        num_tokens = min(num_tokens, sequence.num_pending)
        needed = self._reserved(sequence, num_tokens)
        if not self.blocks.admit(sequence, needed, self.policy.watermark):
            return False
        self.waiting.remove(sequence)
        self.running.enter(sequence)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = self.now
            sequence.prefix_hit_tokens = sequence.num_computed
        batch.prefix_hit_tokens += sequence.num_computed
        self.put(batch, sequence, num_tokens)
        return True

    def receive(self, sequence: SequenceState) -> bool:
        """Let in a sequence whose cache another engine has computed and sent: it runs from now on.
        False if cache or places are full.
        """
        if len(self.running) >= self.max_num_seqs:
            return False
        needed = self._reserved(sequence, sequence.num_pending)
        # An empty instance takes any sequence that fits, or one as large as the cache never runs.
        watermark = self.policy.watermark if self.running else 0.0
        if not self.blocks.can_hold(needed, watermark):
            return False
        self.blocks.grow(sequence, needed)
        sequence.order = self._num_added
        self._num_added += 1
        self.running.enter(sequence)
        return True

    def aligned(self, batch: Batch, sequence: SequenceState, num_tokens: int) -> int:
        """Cut a chunk where a block ends, as vLLM 0.32 does where states are cached
        (`_mamba_block_aligned_split`): the prompt's last full block ends a chunk, too. Less than a
        block waits, unless no budget has room for a block, or the batch is empty. Prompts that a
        policy admits whole, or enters by itself, are not cut.
        """
        size = self.blocks.block_size
        start = sequence.num_computed
        end = start + num_tokens
        num_known = sequence.num_known
        last_full_block = (num_known - 1) // size * size  # where it ends
        block_end = end // size * size
        fits_budget = size <= (self.policy.budget or num_known)
        if end < num_known and (block_end > start or fits_budget):
            end = block_end
        # A chunk that begins within a block ends with that block.
        if start % size != 0:
            end = min(end, start + size - start % size)
        elif start < last_full_block < end:
            end = last_full_block
        if end > start:
            return end - start
        return 0 if batch.chunks else num_tokens

    def make_room(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Grow `sequence` to `num_tokens`, evicting the newest idle ones; False: it can't run now.

        The newest of all evicts itself. An older one waits for those in flight to return: if it
        evicted itself, too, sequences could evict one another for ever.
        """
        while not self.blocks.grow(sequence, num_tokens):
            victim = max(self.running.idle, key=self.running.rank)
            if victim is sequence:
                newest = max(self.running, key=self.running.rank)
                if sequence is newest:
                    self.preempt(sequence)
                return False
            self.preempt(victim)
        return True

    def preempt(self, sequence: SequenceState) -> None:
        """Take an idle sequence out; it waits in front, and is computed again from its start. One
        that has all its tokens only waits for the last of them.
        """
        self.blocks.free(sequence)
        self.running.leave(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.await_output(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)

    def sort_running(self) -> None:
        """Order running sequences by arrival or urgency, which readmission upsets."""
        self.running.sort_by_rank()

    def with_room(self, num_sequences: int) -> list[SequenceState]:
        """The next waiting sequences, at most so many, that have a place and room in the cache."""
        num_places = self.max_num_seqs - len(self.running)
        blocks = self.blocks
        num_free = blocks.num_free
        num_free_of_windows = blocks.window_pool.num_free
        fitting: list[SequenceState] = []
        for sequence in self.upcoming(min(num_sequences, num_places)):
            num_tokens = self._reserved(sequence, 0)
            num_free -= blocks.blocks_for(num_tokens)
            num_free_of_windows -= blocks.window_blocks_for(num_tokens)
            if num_free < 0 or num_free_of_windows < 0:
                break
            fitting.append(sequence)
        return fitting

    def _reserved(self, sequence: SequenceState, num_tokens: int) -> int:
        """Tokens of cache that `sequence` takes when it enters with `num_tokens` more."""
        reserved = self.policy.reserved_tokens(
            sequence.request, sequence.num_known, self.max_model_len
        )
        return max(sequence.num_computed + num_tokens, reserved)

    def put(self, batch: Batch, sequence: SequenceState, num_tokens: int) -> None:
        """Add `num_tokens` of a running sequence that has room for them."""
        batch.add(sequence, num_tokens)
        prefix = self.blocks.prefix
        if prefix is not None and self.policy.shares_at_once:
            prefix.publish(sequence, sequence.num_computed + num_tokens)

    def _has_place(self, batch: Batch) -> bool:
        """Whether one more sequence may run, in this batch."""
        return len(self.running) < self.max_num_seqs and len(batch) < self.batch_size

    def _is_full(self, batch: Batch, max_prefills: int | None) -> bool:
        has_prefills = max_prefills is not None and batch.num_prefills >= max_prefills
        return has_prefills or len(batch) >= self.batch_size

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
            self._count(batch, result.end)
            self._dismiss(batch.finished)
            batch.queues = self._queues()
        else:
            for chunk in batch.chunks:
                if chunk.emits_token:
                    chunk.sequence.token_times.append(result.end)
            if self.policy.leaves_with_output:
                self._return(batch)
        if token_ids:  # empty in simulations
            emitting = [chunk for chunk in batch.chunks if chunk.emits_token]
            for chunk, token_id in zip(emitting, token_ids, strict=True):
                sequence, start, num_tokens, _, _ = chunk
                # `output_index` is inlined, as each token of a run passes here.
                index = start + num_tokens - sequence.request.prompt_len
                sequence.output_token_ids[index] = token_id
        if batch.num_prefills:
            self.last_prompt_latency = result.end - result.start
        return batch.finished

    def _count(self, batch: Batch, end: float | None = None) -> None:
        """Count the tokens of a batch as computed, and list which sequences it finishes; `end` is
        when it ended (seconds), if it has.
        """
        chunks = batch.chunks
        if self.policy.follows_up:  # `schedule` committed the others
            chunks = [chunk for chunk in chunks if chunk.emits_token]
        batch.finished += self.commit(chunks, end)

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

    def commit(self, chunks: list[Chunk], end: float | None = None) -> list[SequenceState]:
        """Count `chunks` as computed, with their next tokens yet unknown, but for the time `end`
        (seconds) if they have run; their sequences are no longer in flight. Returns those that have
        all their tokens.
        """
        finished = []
        for sequence, start, num_tokens, _, emits_token in chunks:
            sequence.in_flight = False
            sequence.num_computed = start + num_tokens
            if emits_token:
                token_ids = sequence.output_token_ids
                token_ids.append(NO_TOKEN)
                if end is not None:
                    sequence.token_times.append(end)
                if len(token_ids) >= sequence.request.output_len:
                    finished.append(sequence)
        self.blocks.publish(chunks)
        return finished
