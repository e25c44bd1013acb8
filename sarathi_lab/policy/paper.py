"""The policies of the SARATHI paper (arXiv 2308.16369): SARATHI, request-level batching, Orca."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sarathi_lab.config.checked import whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.scheduler import Scheduler


def _max_prefills() -> Any:
    return whole(1, minimum=1, fix="use null for no limit", optional=True)


@dataclass(frozen=True)
class RequestLevel(Policy):
    """Request-level batching (FasterTransformer): prefill a batch, decode it to its end."""

    name = "request_level"
    reserve: Reserve = "max_model_len"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if scheduler.has_idle_running:
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
        return max(self.max_prefills, self.min_decodes) if self.max_prefills else None

    def check(self, batch_size: int, max_model_len: int) -> None:
        if self.min_decodes > max(1, batch_size - 1):
            raise UserError(
                f"min_decodes={self.min_decodes} exceeds the {batch_size - 1} decodes that fit "
                f"beside a prompt in a batch of {batch_size}, so none would ever be cut; lower it, "
                "or use policy=orca"
            )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        missing = self.min_decodes - scheduler.num_idle_decodes(self.min_decodes)
        if missing > 0 and not scheduler.swapped:
            scheduler.continue_prefills(batch, max_prefills=missing)
            scheduler.admit(batch, max_prefills=missing)
            if batch.chunks:
                return
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.chunk, self.max_prefills)
        scheduler.admit(batch, self.chunk, self.max_prefills)
