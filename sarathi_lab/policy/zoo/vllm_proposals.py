"""Rules proposed for vLLM: P-PAS+, limits on chunks, and orders by what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from sarathi_lab.config.checked import number, one_of, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.queues import LOOKAHEAD
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler, Size
from sarathi_lab.policy.vllm import VllmV1
from sarathi_lab.policy.zoo.prompts import PPas

CacheOrder = Literal["residual", "affinity"]


@dataclass(frozen=True)
class PPasPlus(PPas):
    """P-PAS, whose cap also holds while a single running prompt with at least
    `large_prefill_threshold` tokens left is beside two or more decodes.

    Rule and default are those of the patch for vLLM 0.27.1 in TimoSaemann/ppas-vllm, whose cap
    counts decodes, too. There it is 1,280 tokens of 16,384.
    """

    name = "p_pas_plus"
    large_prefill_threshold: int = whole(65536, minimum=1, fix="use tokens such as 65536")

    def presses(self, num_decodes: int, running: Sequence[SequenceState], num_waiting: int) -> bool:
        if super().presses(num_decodes, running, num_waiting):
            return True
        is_large = len(running) == 1 and running[0].num_pending >= self.large_prefill_threshold
        return num_decodes >= 2 and is_large


@dataclass
class Deferrals:
    """Iterations so far, and the first in which each prompt was deferred, by request."""

    iteration: int = 0
    first: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MinPrefillChunk(VllmV1):
    """vLLM v1 that defers chunks of less than `min_prefill_chunk` tokens while any decodes, until
    the prompts that lack less together have as many, or one was deferred for
    `max_prefill_chunk_delay_steps` iterations (vLLM pull request 54145).

    The rule is that of its author's comment in pull request 54627. Both defaults are assumed;
    `min_prefill_chunk=None` is a quarter of the budget.
    """

    name = "min_prefill_chunk"
    min_prefill_chunk: int | None = whole(
        None, minimum=1, fix="use null for a quarter of max_num_batched_tokens"
    )
    max_prefill_chunk_delay_steps: int = whole(8, minimum=1, fix="use iterations such as 8")

    def check(self, batch_size: int, max_model_len: int) -> None:
        super().check(batch_size, max_model_len)
        if self.least > self.max_num_batched_tokens - batch_size + 1:
            raise UserError(
                f"min_prefill_chunk={self.least} leaves max_num_batched_tokens="
                f"{self.max_num_batched_tokens} no room beside a batch of {batch_size}; lower it"
            )

    @property
    def least(self) -> int:
        """The tokens below which a chunk is small."""
        return self.min_prefill_chunk or max(1, self.max_num_batched_tokens // 4)

    def size(self, batch: Batch, scheduler: Scheduler) -> Size:
        take = super().size(batch, scheduler)
        state = scheduler.state(Deferrals)
        least = self.least
        state.iteration += 1
        prompts = [*scheduler.idle_prefills, *scheduler.upcoming(LOOKAHEAD)]
        small = [sequence.num_pending for sequence in prompts if sequence.num_pending < least]
        has_decodes = any(sequence.is_decoding for sequence in scheduler.running)
        if sum(small) >= least or not has_decodes:
            return take

        def size(sequence: SequenceState, budget_left: int) -> int:
            wanted = take(sequence, budget_left)
            request = sequence.request.request_id
            first = state.first.get(request, state.iteration)
            is_late = state.iteration - first >= self.max_prefill_chunk_delay_steps
            if sequence.is_decoding or wanted >= least or is_late:
                state.first.pop(request, None)
                return wanted
            state.first[request] = first
            return 0

        return size


@dataclass(frozen=True)
class InterPrefillBudget(VllmV1):
    """vLLM v1 whose batches take no further prompt from `inter_prefill_budget` tokens of prompts
    on, as those before it already occupy the device (vLLM pull request 33743, from its
    description); its default is the length of that example.
    """

    name = "inter_prefill_budget"
    inter_prefill_budget: int = whole(1024, minimum=1, fix="use tokens such as 1024")

    def size(self, batch: Batch, scheduler: Scheduler) -> Size:
        take = super().size(batch, scheduler)

        def size(sequence: SequenceState, budget_left: int) -> int:
            is_full = batch.num_prefill_tokens >= self.inter_prefill_budget
            if is_full and not sequence.is_decoding:
                return 0
            return take(sequence, budget_left)

        return size


@dataclass(frozen=True)
class CacheAware(VllmV1):
    """vLLM v1 that orders waiting prompts by what the prefix cache has of them.

    - "residual": the fewest uncached blocks first (residual-aware shortest job first, vLLM pull
      request 51375).
    - "affinity": the longest cached prefix first (vLLM RFC 42185).

    Preempted sequences come before all, then those older than `max_wait` seconds, both by arrival.
    The RFC states no age. Of waiting prompts the next `queues.LOOKAHEAD` are ordered.
    """

    name = "cache_aware"
    order: CacheOrder = one_of("residual", valid=get_args(CacheOrder))
    max_wait: float = number(10.0, above=0, fix="use seconds such as 10")

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        upcoming = scheduler.upcoming(LOOKAHEAD)
        ahead = sorted(upcoming, key=lambda sequence: self.rank(sequence, scheduler))
        for position, sequence in enumerate(ahead):
            scheduler.waiting[position] = sequence
        super().fill(batch, scheduler)

    def rank(self, sequence: SequenceState, scheduler: Scheduler) -> tuple[int, int, int]:
        """The rank of a waiting sequence, with its cached tokens as computed; lowest first."""
        if sequence.num_preemptions:
            return 0, 0, sequence.order
        if scheduler.now - sequence.request.arrival_time > self.max_wait:
            return 1, 0, sequence.order
        if self.order == "affinity":
            return 2, -sequence.num_computed, sequence.order
        return 2, sequence.num_pending // scheduler.blocks.block_size, sequence.order
