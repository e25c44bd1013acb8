"""What is known of a batch between its submission and its collection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.torch.watching import Mark


class InFlight(NamedTuple):
    """A submitted batch: its time on the device, until when the host `launched` it, its tokens on
    their way, and what else its `StepResult` has.
    """

    batch: Batch
    start: Mark
    end: Mark
    launched: float
    token_ids: Tensor
    known: Mapping[str, Any]
