"""Sarathi-Serve (OSDI '24, arXiv 2403.02310), its dynamic chunks and its ablation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from sarathi_lab.config.checked import require_order, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.engine.policy import Policy, Reserve, check_budget
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler

CHUNK_MULTIPLE = 32  # tokens that the chunks of a schedule are a multiple of


@dataclass(frozen=True)
class SarathiServe(Policy):
    """Stall-free batching: decodes, then running prompts, then new ones, within `chunk` tokens."""

    name = "sarathi_serve"
    budget_field = "chunk"
    chunk: int = 256
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.chunk)
        scheduler.admit(batch, self.chunk)


@dataclass(frozen=True)
class SarathiServeDynamic(Policy):
    """Sarathi-Serve with `enable_dynamic_chunking_schedule`: a prompt's chunks shrink as it
    proceeds.

    A prompt begins with `high_chunk_size` tokens of an iteration and ends with `low_chunk_size`, in
    `chunk_schedule_stages` equal steps over its first `chunk_schedule_max_tokens` tokens, as late
    chunks have a long context. Sizes are rounded to multiples of 32.

    Names are those of `SarathiSchedulerConfig`, which has no defaults. A prompt longer than
    `chunk_schedule_max_tokens` fails an assertion there; here it stays in the last stage.
    """

    name = "sarathi_serve_dynamic"
    budget_field = "high_chunk_size"
    high_chunk_size: int = 256
    low_chunk_size: int = 32
    chunk_schedule_max_tokens: int = 1024
    chunk_schedule_stages: int = whole(4, minimum=2, fix="use policy=sarathi_serve for one stage")
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    @cached_property
    def chunk_sizes(self) -> list[int]:
        """Tokens of an iteration up to a prompt of each stage, the first stage's first."""
        low, stages = self.low_chunk_size, self.chunk_schedule_stages
        step = (self.high_chunk_size - low) / max(1, stages - 1)
        sizes = [int(low + step * i) for i in reversed(range(stages))]
        return [round(size / CHUNK_MULTIPLE) * CHUNK_MULTIPLE for size in sizes]

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_budget("low_chunk_size", self.low_chunk_size, batch_size)
        for name in ("low_chunk_size", "high_chunk_size"):
            if getattr(self, name) % CHUNK_MULTIPLE:
                raise UserError(
                    f"{name}={getattr(self, name)} is not a multiple of {CHUNK_MULTIPLE}; use one"
                )
        require_order(self, "low_chunk_size", "high_chunk_size", "; lower it")
        require_int(
            "chunk_schedule_max_tokens",
            self.chunk_schedule_max_tokens,
            self.chunk_schedule_stages,
            "use the length of a long prompt",
        )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        tokens_per_stage = ceil(self.chunk_schedule_max_tokens / self.chunk_schedule_stages)

        def size(sequence: SequenceState, left: int) -> int:
            stage = min(sequence.num_computed // tokens_per_stage, self.chunk_schedule_stages - 1)
            return min(left, self.chunk_sizes[stage] - batch.num_tokens)

        scheduler.sort_running()
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.high_chunk_size, size=size)
        scheduler.admit(batch, self.high_chunk_size, size=size)


@dataclass
class _Turns:
    is_decodes: bool = False  # the next turn


@dataclass(frozen=True)
class ChunkedOnly(Policy):
    """Sarathi-Serve's ablation `simple_chunking`: chunks of prompts in turn with decodes, never
    mixed. The other ablation, whole prompts mixed with decodes, is policy=hybrid_only.

    A turn of prompts continues running ones within `chunk_size` tokens, and admits only without
    them. The default is that of `SimpleChunkingSchedulerConfig`. An empty turn is skipped (there it
    is an empty iteration). Swapped sequences return in a turn of prompts, before admissions.
    """

    name = "chunked_only"
    budget_field = "chunk_size"
    chunk_size: int = 512
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        state = scheduler.state(_Turns)
        is_decode_turn = state.is_decodes
        if not is_decode_turn:
            self._prefill(batch, scheduler)
        if not batch.chunks:
            scheduler.add_decodes(batch)
        if not batch.chunks and is_decode_turn:
            self._prefill(batch, scheduler)
        if batch.chunks:
            state.is_decodes = batch.num_prefills > 0

    def _prefill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.continue_prefills(batch, self.chunk_size)
        if not batch.chunks:
            scheduler.admit(batch, self.chunk_size)
