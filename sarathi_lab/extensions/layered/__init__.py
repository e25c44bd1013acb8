"""Layered prefill (arXiv 2510.08055): prompts advance by groups of layers, not by tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from sarathi_lab.config.checked import whole
from sarathi_lab.config.errors import require_int
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.request import Batch, Layers
from sarathi_lab.engine.scheduler import Scheduler


@dataclass
class _Pass:
    """Groups of layers of the current pass, and how many are passed."""

    num_groups: int = 1
    num_passed: int = 0


@dataclass(frozen=True)
class LayeredPrefill(Policy):
    """Decodes pass all layers in every iteration, prompts one group of them; the next group is the
    next iteration's. So the weights of a layer are read once for a prompt, not once for a chunk.

    Without a prompt halfway, running prompts and then waiting ones begin a pass of up to
    `max_num_batched_tokens` tokens together; a longer prompt goes on in the next. The layers come
    in as many groups as the pass has times `chunk` tokens, so that an iteration computes about as
    much as with chunks of that size, or in `groups`; at most one by one.

    Names are those of the paper's implementation (scale-snu/layered-prefill), which takes a power
    of two of groups, up to 16, and defaults to no size; its README's are the defaults here.
    """

    name = "layered_prefill"
    budget_field = "chunk"
    in_layers = True
    chunk: int = 512
    max_num_batched_tokens: int = whole(8192, minimum=1, fix="use the length of a long prompt")
    groups: int | None = whole(None, minimum=1, fix="use null, or a number such as 16")
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    @property
    def is_capped(self) -> bool:
        """False, as a group of layers computes whole prompts."""
        return False

    @property
    def most_prompt_tokens(self) -> int:
        return self.max_num_batched_tokens

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        """Any positive number is valid, as decodes don't count."""
        require_int("chunk", self.chunk, 1, "use a number of tokens such as 512")

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        state = scheduler.state(_Pass)
        for sequence in scheduler.idle_prefills:
            if sequence.num_halfway:
                scheduler.take(batch, sequence, sequence.num_halfway)
        if batch.num_prefills:
            # No other prompt is swapped in while some are halfway.
            scheduler.swap_in(batch, size=lambda one, left: left if one.is_decoding else 0)
        else:
            state.num_groups, state.num_passed = self._begin(batch, scheduler), 0
        if batch.num_prefills and state.num_groups > 1:
            num_layers = scheduler.num_layers
            start = num_layers * state.num_passed // state.num_groups
            state.num_passed += 1
            stop = num_layers * state.num_passed // state.num_groups
            batch.restrict_to(Layers(start, stop, num_layers))

    def _begin(self, batch: Batch, scheduler: Scheduler) -> int:
        """Start a pass of prompts; returns its groups of layers."""
        most = batch.num_tokens + self.max_num_batched_tokens
        scheduler.continue_prefills(batch, most)
        scheduler.admit(batch, most)
        wanted = self.groups or ceil(batch.num_prefill_tokens / self.chunk)
        return max(1, min(wanted, scheduler.num_layers))
