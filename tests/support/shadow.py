"""The rules of `rules` over scripted executors, shared prefixes included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import rules
from helpers import ScriptedExecutor
from integrity import check_integrity

from sarathi_lab.engine.request import Batch, Chunk, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.speculation import Assumed, AssumedDrafter


class Telling(Assumed):
    """Drafts that are tokens: those of `tokens_of` where they are right."""

    def drafter(self) -> AssumedDrafter:
        return TellingDrafter(self)


class TellingDrafter(AssumedDrafter):
    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        first = 1000 * sequence.request.request_id + len(sequence.output_token_ids)
        known = self.known(sequence, most)
        return [first + i if right else -9 for i, right in enumerate(known)]


class ShadowCache(rules.ShadowCache):
    """One in which drafts that are wrong leave what nobody may read."""

    def number(self, chunk: Chunk, position: int) -> int:
        drafts = chunk.sequence.draft_token_ids[: position - chunk.start] if chunk.is_decode else ()
        return -1 if -9 in drafts else super().number(chunk, position)


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
