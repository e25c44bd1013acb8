"""LightLLM's router and its chunked-prefill backend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from sarathi_lab.config.checked import require_order, whole
from sarathi_lab.engine.policy import Policy, check_budget
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy.vllm import at_most

_SPARE_TOKENS = 6  # what the original adds to each request's expected output, ADDED_OUTPUT_LEN
_HALF = "use null for half of batch_max_tokens"


@dataclass
class _Turns:
    turn: int = 0  # since new prompts began
    has_decoded: bool = False  # prompts are next


@dataclass(frozen=True)
class LightLLM(Policy):
    """Two forwards in turn, never mixed: all decodes, then the prompts that have begun.

    Each prompt gets at most `chunked_prefill_size` tokens of a forward (None: half of
    `batch_max_tokens`). Every `router_max_wait_tokens`-th turn, or when nothing runs, new ones
    begin in order, while the first pieces of all prompts and the decodes are at most
    `batch_max_tokens`, and the estimated peak of cached tokens is below the cache: with requests
    sorted by remaining life, longest first, the largest over i of (life of the i-th) x i + tokens
    held by the first i.

    Read in `req_queue/chunked_prefill/impl.py`, `core/objs/req.py` and
    `mode_backend/chunked_prefill/impl.py` of 2025; defaults there: 6 turns, pieces of 4096 tokens,
    `batch_max_tokens` twice that plus 256. Deviations: prompts are not delayed by as many turns
    again; outputs count in full, as in its busy state; there is no estimate while nothing runs, so
    that a request as large as the cache starts.
    """

    name = "lightllm"
    budget_field = "batch_max_tokens"
    batch_max_tokens: int = 256
    chunked_prefill_size: int | None = whole(None, minimum=1, fix=_HALF)
    router_max_wait_tokens: int = whole(6, minimum=1, fix="use a number of turns such as 6")
    reserve = "chunk"

    def check(self, batch_size: int, max_model_len: int) -> None:
        why = f", so a long prompt could never start; {_HALF}"
        require_order(self, "chunked_prefill_size", "batch_max_tokens", why)

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        check_budget("batch_max_tokens", self.batch_max_tokens, max(2, batch_size))

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        state = scheduler.state(_Turns)
        if state.has_decoded:  # the second half of a turn
            state.has_decoded = False
            self._run_prompts(batch, scheduler)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            scheduler.swap_in(batch, self.batch_max_tokens)
            state.has_decoded = bool(batch.chunks)
        if not batch.chunks:
            self._run_prompts(batch, scheduler)

    def _run_prompts(self, batch: Batch, scheduler: Scheduler) -> None:
        """Continue prompts, and begin new ones in the turns that may."""
        state, piece = scheduler.state(_Turns), self._piece
        may_begin = state.turn % self.router_max_wait_tokens == 0 or not scheduler.running
        needed = sum(min(sequence.num_pending, piece) for sequence in scheduler.running)
        scheduler.continue_prefills(batch, self.batch_max_tokens, size=at_most(piece))
        loads = [self._load(sequence) for sequence in scheduler.running]
        capacity = scheduler.blocks.num_blocks * scheduler.blocks.block_size
        state.turn += 1
        while may_begin and scheduler.waiting and not scheduler.swapped:
            sequence = scheduler.waiting[0]
            num_tokens = min(sequence.num_pending, piece)
            needed += num_tokens
            loads.append(self._load(sequence))
            if (scheduler.running and _peak(loads) >= capacity) or needed > self.batch_max_tokens:
                return
            if not scheduler.enter(batch, sequence, num_tokens):
                return
            state.turn = 1

    @property
    def _piece(self) -> int:
        return self.chunked_prefill_size or self.batch_max_tokens // 2

    def _load(self, sequence: SequenceState) -> tuple[int, int]:
        """How many turns a request will live, and how many tokens it holds."""
        request, num_known = sequence.request, sequence.num_known
        turns_of_prompt = -(-(num_known - sequence.num_computed) // self._piece)
        left = turns_of_prompt + request.output_len - len(sequence.output_token_ids) - 1
        return max(0, left) + _SPARE_TOKENS, max(num_known, sequence.num_computed) + 1


def _peak(loads: list[tuple[int, int]]) -> int:
    """The most tokens of cache ever held, if each request grows by one a turn until its end."""
    loads = sorted(loads, reverse=True)
    lives, tokens = zip(*loads, strict=True)
    held = zip(lives, accumulate(tokens), strict=True)
    return max(life * number + total for number, (life, total) in enumerate(held, 1))
