"""The policies of two papers: SARATHI (arXiv 2308.16369) with request-level batching and Orca, and
Sarathi-Serve (OSDI '24, arXiv 2403.02310) with its dynamic chunks and its ablation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil

from sarathi_lab.config.checked import require_order, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.engine.policy import Policy, Reserve, check_budget
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler

TURNS = "use a number of iterations such as 4"
_max_prefills = partial(whole, 1, minimum=1, fix="use null for no limit", optional=True)


@dataclass(frozen=True)
class RequestLevel(Policy):
    """Request-level batching (FasterTransformer): prefill a batch, decode it to its end."""

    name = "request_level"
    reserve: Reserve = "max_model_len"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        # A batch is decoded to its end before the next begins.
        if scheduler.running.idle:
            scheduler.add_decodes(batch)
        else:
            scheduler.admit(batch)


@dataclass(frozen=True)
class Orca(Policy):
    """Iteration-level batching (Orca, OSDI '22): whole prompts join the ongoing decodes.

    `max_prefills=1` is the paper's "Orca best", one new prompt an iteration. None admits all that
    fit; if all requests then start together they end together, the paper's "Orca worst".
    """

    name = "orca"
    max_prefills: int | None = _max_prefills()
    reserve: Reserve = "max_model_len"

    @property
    def most_prefills(self) -> int | None:
        return self.max_prefills

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.add_decodes(batch)
        scheduler.admit(batch, max_prefills=self.max_prefills)


@dataclass(frozen=True)
class Sarathi(Policy):
    """Decode-maximal batching (SARATHI, section 4.2): all decodes plus one chunk of one prompt,
    `chunk` tokens in all.

    The chunk is `chunk` minus the decodes, so a full batch is a multiple of the matrix tile. With
    fewer than `min_decodes` decodes to piggyback there is no chunking: they wait, and as many whole
    prompts as are missing run alone. So 0 always cuts, 1 stops when no decode is left, and batch -
    1 piggybacks decodes in full batches only, as the paper counts them: its figures need this past
    the optimal P:D. `max_prefills` is for batches with a cut.
    """

    name = "sarathi"
    budget_field = "chunk"
    chunk: int = 256
    min_decodes: int = whole(
        1, minimum=0, fix="use 1 to cut while decodes ride along, 0 to always cut"
    )
    max_prefills: int | None = _max_prefills()
    reserve: Reserve = "max_model_len"

    @property
    def is_capped(self) -> bool:
        return not self.min_decodes

    @property
    def most_prefills(self) -> int | None:
        if not self.max_prefills:
            return None
        return max(self.max_prefills, self.min_decodes)

    def check(self, batch_size: int, max_model_len: int) -> None:
        if self.min_decodes > max(1, batch_size - 1):
            raise UserError(
                f"min_decodes={self.min_decodes} exceeds the {batch_size - 1} decodes that fit "
                f"beside a prompt in a batch of {batch_size}, so none would ever be cut; lower it, "
                "or use policy=orca"
            )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        missing = self.min_decodes - scheduler.num_idle_decodes(self.min_decodes)
        if missing > 0:  # whole prompts, as no decode would ride along
            scheduler.continue_prefills(batch, max_prefills=missing)
            scheduler.admit(batch, max_prefills=missing)
            if batch.chunks:
                return
        # Decodes first, so that the chunk takes what they leave of the tile (section 4.4).
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.chunk, self.max_prefills)
        scheduler.admit(batch, self.chunk, self.max_prefills)


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
        # The order is the rule: no prompt stalls a decode, no new one a prompt that has begun.
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

    @property
    def smallest_budget(self) -> int:
        return self.low_chunk_size

    @cached_property
    def chunk_sizes(self) -> list[int]:
        """Tokens of an iteration up to a prompt of each stage, the first stage's first."""
        low = self.low_chunk_size
        stages = self.chunk_schedule_stages
        step = (self.high_chunk_size - low) / max(1, stages - 1)
        sizes = [int(low + step * i) for i in reversed(range(stages))]
        return [round(size / CHUNK_MULTIPLE) * CHUNK_MULTIPLE for size in sizes]

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_budget("low_chunk_size", self.low_chunk_size, batch_size)
        sizes = {"low_chunk_size": self.low_chunk_size, "high_chunk_size": self.high_chunk_size}
        for name, size in sizes.items():
            if size % CHUNK_MULTIPLE:
                raise UserError(f"{name}={size} is not a multiple of {CHUNK_MULTIPLE}; use one")
        require_order(self, "low_chunk_size", "high_chunk_size", "; lower it")
        require_int(
            "chunk_schedule_max_tokens",
            self.chunk_schedule_max_tokens,
            self.chunk_schedule_stages,
            "use the length of a long prompt",
        )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        tokens_per_stage = ceil(self.chunk_schedule_max_tokens / self.chunk_schedule_stages)

        def size(sequence: SequenceState, budget_left: int) -> int:
            last_stage = self.chunk_schedule_stages - 1
            stage = min(sequence.num_computed // tokens_per_stage, last_stage)
            # The size of a stage is of the iteration, decodes included.
            return min(budget_left, self.chunk_sizes[stage] - batch.num_tokens)

        scheduler.sort_running()
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.high_chunk_size, size=size)
        scheduler.admit(batch, self.high_chunk_size, size=size)


@dataclass
class _Turns:
    is_decodes: bool = False  # the next iteration
    ran_prompts: bool = False  # in the last one
    num_iterations: int = 0  # of the turn


@dataclass(frozen=True)
class ChunkedOnly(Policy):
    """Sarathi-Serve's ablation `simple_chunking`: chunks of prompts in turn with decodes, never
    mixed. The other ablation, whole prompts mixed with decodes, is policy=hybrid_only.

    A turn of prompts continues running ones within `chunk_size` tokens, and admits only without
    them. The default is that of `SimpleChunkingSchedulerConfig`. An empty turn is skipped (there it
    is an empty iteration). Longer turns are the lab's: of `chunks_per_turn` iterations of prompts,
    and of `decodes_per_turn` of decodes.
    """

    name = "chunked_only"
    budget_field = "chunk_size"
    chunk_size: int = 512
    chunks_per_turn: int = whole(1, minimum=1, fix=TURNS)
    decodes_per_turn: int = whole(1, minimum=1, fix=TURNS)
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
            self._count(state, ran_prompts=batch.num_prefills > 0)

    def _count(self, state: _Turns, *, ran_prompts: bool) -> None:
        """Count an iteration of the turn, and begin the other's if it was the last."""
        if ran_prompts != state.ran_prompts:
            state.num_iterations = 0
        state.num_iterations += 1
        state.ran_prompts = ran_prompts
        length = self.chunks_per_turn if ran_prompts else self.decodes_per_turn
        is_over = state.num_iterations >= length
        # Decodes are next behind the last chunk of a turn, and while their own turn goes on.
        state.is_decodes = ran_prompts == is_over

    def _prefill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.continue_prefills(batch, self.chunk_size)
        if not batch.chunks:
            scheduler.admit(batch, self.chunk_size)
