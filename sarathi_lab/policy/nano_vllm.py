"""nano-vLLM, vLLM's rule in a thousand lines."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler


@dataclass(frozen=True)
class NanoVllm(Policy):
    """Prompts first, within `max_num_batched_tokens`, of which only the first may be cut; decodes
    if there are none.

    The default is that of nano-vLLM's `Config` in 2026. Its `max_num_seqs` limits a batch, `batch`
    here also what runs. It has no swapping; what is swapped out comes back beside the decodes, and
    before anyone is admitted.
    """

    name = "nano_vllm"
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 16384
    reserve = "prompt"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        def size(sequence: SequenceState, left: int) -> int:
            return left if not batch.chunks or left == sequence.num_pending else 0

        scheduler.continue_prefills(batch, self.max_num_batched_tokens, size=size)
        if not scheduler.swapped:
            scheduler.admit(batch, self.max_num_batched_tokens, size=size)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            scheduler.swap_in(batch, self.max_num_batched_tokens)
