"""The lab's own rule from measured kernels: decodes ride on chunks until their caches are large."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.config.checked import whole
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.scheduler import Scheduler

FIX = "use the tokens of all decodes' caches, or 0 for decodes that never ride"


@dataclass
class _Turns:
    is_prompts: bool = False  # the next turn, while decodes go by themselves


@dataclass(frozen=True)
class RidingLimit(Policy):
    """Sarathi-Serve, whose decodes ride on a chunk while their caches have `most_riding_tokens` at
    most; past that, decodes and a chunk take turns, each in a batch of its own.

    One attention call over both reads a decode's keys once for each query head and does not split
    them, so that from some number of decodes times context on riding costs more than a batch of
    its own (experiments/lab/piggyback_boundary). Where prompts and decodes have a call each, riding
    always pays, and this is Sarathi-Serve with a limit that only costs.
    """

    name = "riding_limit"
    budget_field = "chunk"
    chunk: int = 256
    most_riding_tokens: int = whole(65536, minimum=0, fix=FIX)
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        cached_tokens = sum(decode.num_computed for decode in scheduler.idle_decodes)
        turns = scheduler.state(_Turns)
        rides = cached_tokens <= self.most_riding_tokens
        if rides or not turns.is_prompts:
            scheduler.add_decodes(batch)
        has_decodes = bool(batch.chunks)
        if rides or not has_decodes:
            scheduler.continue_prefills(batch, self.chunk)
            scheduler.admit(batch, self.chunk)
        if not batch.chunks:  # no prompt could take its turn
            scheduler.add_decodes(batch)
        turns.is_prompts = not rides and has_decodes
