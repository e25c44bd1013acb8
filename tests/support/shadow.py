"""The rules of `sarathi_lab.api.rules` over scripted executors, shared prefixes included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from helpers import ScriptedExecutor
from integrity import check_integrity

from sarathi_lab.api import rules
from sarathi_lab.api.rules import ShadowCache
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.scheduler import Scheduler


class ShadowExecutor(rules.ShadowExecutor):
    """A scripted one over caches; its iterations take longer with more tokens."""

    def __init__(
        self,
        caches: Sequence[ShadowCache],
        capacity: int = 1,
        *,
        feeds_tokens: bool = False,
        knows_tokens: bool = True,
    ) -> None:
        def seconds(batch: Batch) -> float:
            return 0.5 + 0.1 * batch.num_tokens

        scripted = ScriptedExecutor(seconds, capacity, feeds_tokens=feeds_tokens)
        super().__init__(scripted, caches, knows_tokens=knows_tokens)


class Checker(rules.Checker):
    """One that knows of prefixes and of host memory."""

    def check_cache(self, scheduler: Scheduler) -> None:
        check_integrity(scheduler.blocks, scheduler.running, scheduler.swapped)


def as_array(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)
