"""The lab's scheduler as the one that decides in vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler as LabScheduler
from sarathi_lab.extensions.vllm_server.limits import require_room


@dataclass(eq=False, repr=False, kw_only=True)
class Decider(LabScheduler):
    """Scheduler of the lab whose decisions vLLM's follows.

    Batches have at most `most_tokens` tokens, where prompts are cut by policies that cut any. What
    has all its tokens keeps its blocks until `drop`, as in vLLM. With `is_async` the last token of
    an evicted sequence may be on its way, so that it does not return in the same iteration.
    """

    most_tokens: int
    is_async: bool
    admits: bool = True  # false while the server pauses
    evicted: set[SequenceState] = field(default_factory=set)  # until vLLM has evicted them

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cuts = self.policy.budget_field is not None
        require_room(self.policy, self.most_tokens, self.batch_size, self.max_model_len)

    def enter(self, batch: Batch, sequence: SequenceState, num_tokens: int) -> bool:
        is_barred = not self.admits or (self.is_async and sequence in self.evicted)
        fewest_tokens = num_tokens
        if self.cuts:
            fewest_tokens = 1
        if is_barred or self._room(batch) < fewest_tokens:
            return False
        return super().enter(batch, sequence, num_tokens)

    def put(self, batch: Batch, sequence: SequenceState, num_tokens: int) -> None:
        # `_room` keeps a token for this sequence, too.
        super().put(batch, sequence, min(num_tokens, self._room(batch) + 1))

    def _room(self, batch: Batch) -> int:
        """Tokens that `batch` has left beside one for each running sequence that may join it."""
        if self.policy.is_capped:
            return self.most_tokens
        num_waiting = len(self.running) - len(batch)
        return self.most_tokens - batch.num_tokens - num_waiting

    def preempt(self, sequence: SequenceState) -> None:
        self.evicted.add(sequence)
        super().preempt(sequence)

    def leave(self, sequence: SequenceState) -> None:
        sequence.in_flight = True

    def drop(self, sequence: SequenceState) -> None:
        """Forget a sequence that is finished or aborted."""
        super().leave(sequence)
