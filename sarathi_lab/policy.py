"""Scheduling policies: each a small frozen dataclass whose `fill` is a few lines over the scheduler's moves.

A dataclass's fields are its configuration (`conf/policy/*.yaml`). Fields that policies share:
`reserve` is how much KV cache admission sets aside ("max_model_len", the whole "prompt", or just the first
"chunk"); `watermark` is the share of the cache that admission leaves free; `max_prefills` is how many prompts may
run in one batch (None: no limit). All numbers of tokens are per iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, get_args

from sarathi_lab.errors import UserError, require_int, require_number, require_one_of

if TYPE_CHECKING:
    from sarathi_lab.request import Batch
    from sarathi_lab.scheduler import Scheduler

Reserve = Literal["max_model_len", "prompt", "chunk"]


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    @property
    def name(self) -> str: ...

    @property
    def reserve(self) -> Reserve: ...

    @property
    def watermark(self) -> float: ...

    def validate(self, batch_size: int, max_model_len: int) -> None:
        """Raise UserError for parameters that cannot work with this batch size and model length."""
        ...

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        """Put this iteration's work into the empty `batch`."""
        ...


@dataclass(frozen=True)
class RequestLevel:
    """Request-level batching (FasterTransformer), the paper's baseline: prefill a batch, decode it to its end."""

    name: ClassVar[str] = "request_level"
    watermark: ClassVar[float] = 0.0
    reserve: Reserve = "max_model_len"

    def validate(self, batch_size: int, max_model_len: int) -> None:
        _check_reserve(self.reserve)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if scheduler.has_idle_running:
            scheduler.add_decodes(batch)
        else:
            scheduler.admit(batch)


@dataclass(frozen=True)
class Orca:
    """Iteration-level batching (Orca, OSDI '22): whole prompts join the ongoing decodes.

    `max_prefills=1` is the paper's "Orca best", one new prompt an iteration. None admits all that fit; if all
    requests then start together they end together, the paper's "Orca worst".
    """

    name: ClassVar[str] = "orca"
    watermark: ClassVar[float] = 0.0
    max_prefills: int | None = 1
    reserve: Reserve = "max_model_len"

    def validate(self, batch_size: int, max_model_len: int) -> None:
        _check_reserve(self.reserve)
        _check_max_prefills(self.max_prefills)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.add_decodes(batch)
        scheduler.admit(batch, max_prefills=self.max_prefills)


@dataclass(frozen=True)
class PrefillFirst:
    """vLLM v0's default: a batch is whole prompts only, as long as any fit, else decodes only.

    `max_num_batched_tokens=None` is that system's max(max_model_len, 2048). With `delay_factor` f > 0, prompts wait
    until the oldest has waited f times the last prompt iteration's duration, or nothing is running.
    """

    name: ClassVar[str] = "prefill_first"
    max_num_batched_tokens: int | None = None
    delay_factor: float = 0.0
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def validate(self, batch_size: int, max_model_len: int) -> None:
        _check_reserve(self.reserve)
        _check_watermark(self.watermark)
        require_number("delay_factor", self.delay_factor, minimum=0, fix="use 0 to never delay prompts")
        if self.max_num_batched_tokens is None:
            return
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, "use null for max(max_model_len, 2048)")
        if self.max_num_batched_tokens < max_model_len:
            raise UserError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_model_len={max_model_len}: a "
                "prompt that is never cut may not fit; raise it, or use a policy that chunks"
            )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if self._may_admit(scheduler):
            budget = self.max_num_batched_tokens or max(scheduler.max_model_len, 2048)
            scheduler.admit(batch, budget, whole=True)
        if not batch.chunks:
            scheduler.add_decodes(batch)

    def _may_admit(self, scheduler: Scheduler) -> bool:
        if not scheduler.waiting or not scheduler.running or self.delay_factor == 0:
            return True
        waited = scheduler.now - min(sequence.request.arrival_time for sequence in scheduler.waiting)
        return waited > self.delay_factor * scheduler.last_prompt_latency


@dataclass(frozen=True)
class Sarathi:
    """Decode-maximal batching (SARATHI, section 4.2): all decodes plus one chunk of one prompt, `chunk` tokens in all.

    The chunk is `chunk` minus the decodes, so a full batch is a multiple of the matrix tile. Chunking stops when fewer
    than `min_decodes` decodes are there to piggyback: they wait, and as many prompts as are missing run whole, alone.
    So 0 always cuts, 1 stops when no decode is left, and batch - 1 lets decodes ride in full batches only, which is
    how the paper counts them: its figures need it past the optimal P:D. `max_prefills` is for batches with a cut.
    """

    name: ClassVar[str] = "sarathi"
    watermark: ClassVar[float] = 0.0
    chunk: int = 256
    min_decodes: int = 1
    max_prefills: int | None = 1
    reserve: Reserve = "max_model_len"

    def validate(self, batch_size: int, max_model_len: int) -> None:
        _check_reserve(self.reserve)
        _check_max_prefills(self.max_prefills)
        _check_chunk(self.chunk, batch_size)
        require_int("min_decodes", self.min_decodes, 0, "use 1 to cut while decodes ride along, 0 to always cut")
        if self.min_decodes > max(1, batch_size - 1):
            raise UserError(
                f"min_decodes={self.min_decodes} exceeds the {batch_size - 1} decodes that fit beside a prompt in a "
                f"batch of {batch_size}, so none would ever be cut; lower it, or use policy=orca"
            )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        missing = self.min_decodes - scheduler.num_idle_decodes
        if missing > 0:
            scheduler.continue_prefills(batch, max_prefills=missing)
            scheduler.admit(batch, max_prefills=missing)
            if batch.chunks:
                return
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.chunk, self.max_prefills)
        scheduler.admit(batch, self.chunk, self.max_prefills)


@dataclass(frozen=True)
class SarathiServe:
    """Sarathi-Serve (OSDI '24): decodes first, then running prompts, then new ones, within `chunk` tokens."""

    name: ClassVar[str] = "sarathi_serve"
    chunk: int = 256
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def validate(self, batch_size: int, max_model_len: int) -> None:
        _check_reserve(self.reserve)
        _check_watermark(self.watermark)
        _check_chunk(self.chunk, batch_size)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.chunk)
        scheduler.admit(batch, self.chunk)


def _check_chunk(chunk: int, batch_size: int) -> None:
    require_int("chunk", chunk, 1, "use a number of tokens such as 256, or auto with executor=simulated")
    if chunk < batch_size:
        raise UserError(
            f"chunk={chunk} is smaller than the {batch_size - 1} decodes and 1 prompt token that a batch of "
            f"{batch_size} must carry; use chunk>={batch_size} or a smaller batch"
        )


def _check_max_prefills(max_prefills: int | None) -> None:
    if max_prefills is not None:
        require_int("max_prefills", max_prefills, 1, "use null for no limit")


def _check_watermark(watermark: float) -> None:
    fix = "use a share of the cache, a number from 0 to below 1"
    if require_number("watermark", watermark, minimum=0, fix=fix) >= 1:
        raise UserError(f"watermark={watermark} is not below 1; {fix}")


def _check_reserve(reserve: str) -> None:
    require_one_of("reserve", reserve, get_args(Reserve))
