"""llama.cpp's server."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.config.checked import whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.scheduler import Scheduler


@dataclass
class _Round:
    left: int = 0  # tokens of prompts


@dataclass(frozen=True)
class LlamaCpp(Policy):
    """Rounds of `n_batch` tokens: all decodes, then prompts in order, computed in iterations of
    `n_ubatch` tokens.

    A round is one `llama_decode`, fixed when it begins. Decodes are in its first piece and have
    their next token only in the next round, so they wait for up to `n_batch` tokens of prompts. The
    lab's batch is the number of parallel slots, each with cache for the longest request, as
    `--parallel` shares the context.

    Defaults of the server of 2026 are 2048 and 512. Deviation: tokens are emitted at the end of
    their piece, not of their round, so first tokens are early; the time between tokens is the same.
    """

    name = "llama_cpp"
    budget_field = "n_ubatch"
    n_ubatch: int = 512
    n_batch: int = whole(2048, minimum=1, fix="use a number of tokens such as 2048")
    reserve = "max_model_len"

    def check(self, batch_size: int, max_model_len: int) -> None:
        if self.n_batch < self.n_ubatch:
            raise UserError(
                f"n_batch={self.n_batch} is below n_ubatch={self.n_ubatch}, its piece; raise "
                "n_batch"
            )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        state = scheduler.state(_Round)
        if state.left:
            self._add_piece(batch, scheduler)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            entering = scheduler.upcoming(scheduler.max_num_seqs - len(scheduler.running))
            wanted = sum(one.num_pending for one in [*scheduler.idle_prefills, *entering])
            state.left = min(self.n_batch - batch.num_tokens, wanted)
            self._add_piece(batch, scheduler)

    def _add_piece(self, batch: Batch, scheduler: Scheduler) -> None:
        """Fill `batch` up to `n_ubatch` tokens with what is left of the round's prompts."""
        state = scheduler.state(_Round)
        budget = min(self.n_ubatch, batch.num_tokens + state.left)
        scheduler.continue_prefills(batch, budget)
        scheduler.admit(batch, budget)
        state.left = state.left - batch.num_prefill_tokens if batch.num_tokens == budget else 0
