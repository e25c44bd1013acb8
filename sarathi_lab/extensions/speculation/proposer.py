"""The drafter of a scheduler: adds drafts to the decodes of a batch, and verifies them.

A decode with k drafts is a chunk of 1 + k tokens with logits of every row. Drafts are right if the
rows before them sample the same tokens; the first row behind them gives one token more. The cache
of wrong drafts is overwritten, as positions are counted from computed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sarathi_lab.engine.executor import NO_TOKEN, StepResult
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.engine.speculation import Drafter
from sarathi_lab.extensions.speculation.drafts import Drafts


class Proposer(Drafter):
    """A drafter whose drafts are tokens of the batch as in vLLM, so that less of the budget remains
    for prompts.

    Args:
        max_drafts: The most drafts of a decode.
        make_drafts: What drafts the tokens of a request, called once for each.
    """

    def __init__(self, max_drafts: int, make_drafts: Callable[[Request], Drafts]) -> None:
        self._max_drafts = max_drafts
        self._make_drafts = make_drafts
        self._drafts: dict[int, Drafts] = {}  # of unfinished requests, by their ids

    def drafts_of(self, request: Request) -> Drafts:
        number = request.request_id
        if number not in self._drafts:
            self._drafts[number] = self._make_drafts(request)
        return self._drafts[number]

    def add_drafts(self, batch: Batch, first: int, scheduler: Scheduler) -> None:
        """Add drafts that leave a token of the budget to every sequence that may still join the
        batch, go no further than the request's last token, and evict no sequence.
        """
        policy = scheduler.policy
        budget = policy.budget
        if policy.decodes_on_top:
            budget = None
        num_unfinished = len(scheduler.running) + len(scheduler.waiting)
        largest_batch = min(scheduler.batch_size, num_unfinished)
        reserved = max(0, largest_batch - len(batch))  # tokens, one a sequence
        for index in range(first, len(batch)):
            sequence, num_computed, _, is_decode, _ = batch.chunks[index]
            if not is_decode:
                continue
            num_slots = scheduler.blocks.num_slots(sequence)
            # One of the slots is for the decode's token itself.
            limit = min(_num_missing(sequence), self._max_drafts, num_slots - 1)
            if budget is not None:
                num_free = budget - batch.num_tokens - reserved
                limit = min(limit, num_free)
            if limit <= 0:
                continue
            drafter = self.drafts_of(sequence.request)
            drafts = drafter.propose(sequence, limit)
            if not drafts:
                continue
            num_cached = num_computed + 1 + len(drafts)
            if scheduler.blocks.grow(sequence, num_cached):
                _append(batch, index, drafts)

    def verify(self, result: StepResult) -> list[int]:
        batch = result.batch
        tokens = result.token_ids
        if not batch.num_draft_tokens:
            return tokens
        # The samples of a batch follow one another: a row for each draft, and one behind them.
        row = 0
        last_tokens: list[int] = []
        for index, chunk in enumerate(batch.chunks):
            if not chunk.emits_token:
                continue
            sequence = chunk.sequence
            request = sequence.request
            num_rows = chunk.num_rows
            end = row + num_rows
            sampled = tokens[row:end]
            row = end
            if num_rows > 1:
                drafter = self.drafts_of(request)
                number = drafter.num_accepted(sequence, sampled)
                accepted = sampled[:number]
                if not accepted:  # a simulation samples no tokens
                    accepted = [NO_TOKEN] * number
                sequence.output_token_ids += accepted
                sequence.token_times += [result.end] * number
                sequence.draft_token_ids = ()
                batch.replace_chunk(index, chunk._replace(num_tokens=1 + number))
                batch.num_accepted_tokens += number
                sampled = sampled[number : number + 1]
            last_tokens += sampled
            if _num_missing(sequence) <= 0:  # it ends with this batch
                self._drafts.pop(request.request_id, None)
        return last_tokens


def _num_missing(sequence: SequenceState) -> int:
    """Count the output tokens of `sequence` behind the next one."""
    num_outputs = len(sequence.output_token_ids)
    num_missing = sequence.request.output_len - num_outputs
    return num_missing - 1


def _append(batch: Batch, index: int, drafts: Sequence[int]) -> None:
    """Append `drafts` to a decode of `batch`; they attend to one another and its context."""
    chunk = batch.chunks[index]
    number = len(drafts)
    chunk.sequence.draft_token_ids = drafts
    batch.replace_chunk(index, chunk._replace(num_tokens=1 + number))
    batch.num_draft_tokens += number
    batch.num_decode_tokens += number
    batch.decode_kv_tokens += number
    batch.num_emits += number
