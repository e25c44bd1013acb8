"""What an engine spends beside its device: scheduling, launching, sampling, handing out tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sarathi_lab.config.checked import check_fields, flag, number
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch

FIX = "use seconds from 0"


@dataclass(frozen=True)
class Host:
    """A serving system's host; `conf/host/*.yaml` gives each figure's source.

    To schedule and launch an iteration takes it `iteration` seconds and `sequence` more for each
    sequence. One that `overlaps` does so while the device runs the iteration before, whose tokens
    it does not wait for (vLLM's asynchronous scheduling). `iteration=None` leaves all of it to the
    hardware's `iteration_overhead`.
    """

    name: str
    iteration: float | None = number(None, minimum=0, fix=FIX)
    sequence: float = number(0.0, minimum=0, fix=FIX)
    overlaps: bool = flag(False)

    def __post_init__(self) -> None:
        check_fields(self, "host.")

    @property
    def is_stated(self) -> bool:
        """Whether it stands in place of the hardware's `iteration_overhead`."""
        return self.iteration is not None

    def seconds(self, batch: Batch) -> float:
        """To schedule and launch `batch`."""
        return (self.iteration or 0.0) + self.sequence * len(batch)

    def exposed(self, batch: Batch, device: float) -> float:
        """Seconds by which an iteration of `device` seconds takes longer, among others alike."""
        host = self.seconds(batch)
        return max(0.0, host - device) if self.overlaps else host


NO_HOST = Host("none")


class OfARun:
    """The hardware or host `auto`: what `task=validate` finds in a run, and nobody else knows.
    Raises UserError, as it can't be made.
    """

    def __init__(self, **named: Any) -> None:
        raise UserError(
            "hardware=auto and host=auto stand for what task=validate finds in a run; name one, "
            "such as hardware=h100 or host=none"
        )
