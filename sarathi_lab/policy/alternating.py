"""Servers that run prompts and decodes by turns, or can: TGI v3, LightLLM and LMDeploy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from sarathi_lab.config.checked import flag, number, require_order, whole
from sarathi_lab.engine.policy import Policy, check_budget
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import systems
from sarathi_lab.policy.vllm import at_most


@dataclass
class _Pauses:
    waiting_tokens: int = 0  # decode steps since prompts paused them
    decodes_next: bool = False


@dataclass(frozen=True)
class TGI(Policy):
    """With `chunking`, decodes and prompts share `max_batch_prefill_tokens`, the last prompt taking
    exactly the rest.

    Without, whole prompts run alone, followed by a step of all decodes. While decodes run, new
    prompts pause them only if at least `waiting_served_ratio` times as many fit as are running, or
    after `max_waiting_tokens` decode steps. A request reserves cache for its whole output.

    Read in `backends/v3/src/backend.rs` and `queue.rs` (`next_batch`), defaults in the launcher's
    reference: ratio 0.3 (1.2 in older versions), 20 tokens; `max_batch_prefill_tokens` is the
    longest input plus 50 there. Deviations: the budget is not rounded up to whole blocks; in a
    chunked batch a running prompt takes its part of it before a new one.
    """

    name = "tgi"
    system = systems.TGI
    budget_field = "max_batch_prefill_tokens"
    max_batch_prefill_tokens: int = 256
    chunking: bool = flag(True)
    waiting_served_ratio: float = number(0.3, minimum=0, fix="use a number such as 0.3")
    max_waiting_tokens: int = whole(20, minimum=0, fix="use a number of decode steps such as 20")
    reserve = "total"

    def check(self, batch_size: int, max_model_len: int) -> None:
        if not self.chunking:
            reason = "without chunking a prompt may not fit; raise it, or use chunking=true"
            self.check_longest("max_batch_prefill_tokens", max_model_len, reason)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self.max_batch_prefill_tokens
        if self.chunking:
            scheduler.add_decodes(batch)
            scheduler.continue_prefills(batch, budget)
            scheduler.admit(batch, budget)
            return
        state = scheduler.state(_Pauses)
        pauses = bool(scheduler.running)
        # Between two pauses there is a step of decodes, so that prompts can't stop them for ever.
        must_decode = pauses and state.decodes_next
        if not must_decode and self._may_pause(scheduler):
            scheduler.admit(batch, budget, uncut=True)
        if batch.chunks:
            state.waiting_tokens = 1
            state.decodes_next = pauses
            return
        scheduler.add_decodes(batch)
        if batch.chunks:
            state.waiting_tokens += 1
            state.decodes_next = False

    def _may_pause(self, scheduler: Scheduler) -> bool:
        """Whether enough whole prompts fit now, or what is running has decoded for long."""
        if scheduler.state(_Pauses).waiting_tokens >= self.max_waiting_tokens:
            return True
        prompts = scheduler.with_room(scheduler.batch_size)
        totals = accumulate(sequence.num_pending for sequence in prompts)
        num_fitting = sum(total <= self.max_batch_prefill_tokens for total in totals)
        return num_fitting >= int(len(scheduler.running) * self.waiting_served_ratio)


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
    `batch_max_tokens`, and the estimated peak of cached tokens (`_peak`) is below the cache.

    Read in `req_queue/chunked_prefill/impl.py`, `core/objs/req.py` and
    `mode_backend/chunked_prefill/impl.py` of 2025; defaults there: 6 turns, pieces of 4096 tokens,
    `batch_max_tokens` twice that plus 256. Deviations: prompts are not delayed by as many turns
    again; outputs count in full, as in its busy state; there is no estimate while nothing runs, so
    that a request as large as the cache starts.
    """

    name = "lightllm"
    system = systems.LIGHTLLM
    budget_field = "batch_max_tokens"
    batch_max_tokens: int = 256
    chunked_prefill_size: int | None = whole(None, minimum=1, fix=_HALF)
    router_max_wait_tokens: int = whole(6, minimum=1, fix="use a number of turns such as 6")
    reserve = "chunk"

    def check(self, batch_size: int, max_model_len: int) -> None:
        reason = f", so a long prompt could never start; {_HALF}"
        require_order(self, "chunked_prefill_size", "batch_max_tokens", reason)

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        check_budget("batch_max_tokens", self.batch_max_tokens, max(2, batch_size))

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        state = scheduler.state(_Turns)
        if state.has_decoded:  # the second half of a turn
            state.has_decoded = False
            self._run_prompts(batch, scheduler)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            state.has_decoded = bool(batch.chunks)
        if not batch.chunks:
            self._run_prompts(batch, scheduler)

    def _run_prompts(self, batch: Batch, scheduler: Scheduler) -> None:
        """Continue prompts, and begin new ones in the turns that may."""
        state = scheduler.state(_Turns)
        piece = self._piece
        blocks = scheduler.blocks
        may_begin = state.turn % self.router_max_wait_tokens == 0 or not scheduler.running
        # Decodes count here with the token that they take in the next forward.
        needed = sum(min(sequence.num_pending, piece) for sequence in scheduler.running)
        scheduler.continue_prefills(batch, self.batch_max_tokens, size=at_most(piece))
        loads = [self._load(sequence) for sequence in scheduler.running]
        capacity = blocks.num_blocks * blocks.block_size
        state.turn += 1
        while may_begin and scheduler.waiting:
            sequence = scheduler.waiting[0]
            num_tokens = min(sequence.num_pending, piece)
            needed += num_tokens
            if needed > self.batch_max_tokens:
                return
            loads.append(self._load(sequence))
            peak = _peak(loads) + len(loads) * blocks.state_tokens
            if scheduler.running and peak >= capacity:
                return
            if not scheduler.enter(batch, sequence, num_tokens):
                return
            state.turn = 1

    @property
    def _piece(self) -> int:
        return self.chunked_prefill_size or self.batch_max_tokens // 2

    def _load(self, sequence: SequenceState) -> tuple[int, int]:
        """How many turns a request will live, and how many tokens it holds."""
        request = sequence.request
        num_known = sequence.num_known
        turns_of_prompt = -(-(num_known - sequence.num_computed) // self._piece)
        turns_of_output = request.output_len - len(sequence.output_token_ids)
        num_turns = turns_of_prompt + turns_of_output - 1  # the last chunk gives a token, too
        num_held = max(num_known, sequence.num_computed) + 1
        return max(0, num_turns) + _SPARE_TOKENS, num_held


def _peak(loads: list[tuple[int, int]]) -> int:
    """The most tokens of cache ever held, if each request grows by one a turn until its end: with
    the longest remaining life first, the largest over i of (life of the i-th) x i + tokens held by
    the first i.
    """
    peak = 0
    held = 0
    for count, (life, tokens) in enumerate(sorted(loads, reverse=True), start=1):
        held += tokens
        # When the i-th ends, the first i have all grown by its life; the others have ended.
        peak = max(peak, life * count + held)
    return peak


@dataclass(frozen=True)
class LMDeploy(Policy):
    """TurboMind: all decodes, then up to `max_prefill_token_num` tokens of prompts on top; the last
    one may be cut.

    So an iteration has at most `max_prefill_token_num` plus the batch, the size of the engine's
    buffers (`max_forward_token_num`). Blocks are reserved for whole prompts. Its default is 8192.
    Deviation: the newest sequence is evicted; the engine also keeps blocks of idle sessions.
    """

    name = "lmdeploy"
    system = systems.LMDEPLOY
    budget_field = "max_prefill_token_num"
    decodes_on_top = True
    max_prefill_token_num: int = whole(256, minimum=1, fix="use a number of tokens such as 256")
    reserve = "prompt"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        budget = batch.num_tokens + self.max_prefill_token_num
        scheduler.continue_prefills(batch, budget)
        scheduler.admit(batch, budget)


@dataclass
class _Steps:
    num_decodes: int = 0  # steps in a row while others wait
    was_piece: bool = False  # whether the last iteration was a piece of a long prompt


@dataclass(frozen=True)
class LMDeployPytorch(Policy):
    """LMDeploy's PyTorch engine: prompts or decodes, never both.

    While requests wait, decodes go on until `prefill_interval` steps have passed, the waiting ones
    have `max_prefill_token_num` tokens together, or less than half of the batch is running; then
    whole prompts run, up to that many tokens. A longer one is cut into pieces of that size, which
    run alone and by turns with decode steps; its end may share an iteration with others, and one
    such prompt is under way at a time.

    Read in `pytorch/engine/inputs_maker.py` (`do_prefill_default`) of 2026, whose interval is 16.
    Deviation: no shorter prompt overtakes a long one that is under way or next.
    """

    name = "lmdeploy_pytorch"
    system = systems.LMDEPLOY_PYTORCH
    budget_field = "max_prefill_token_num"
    max_prefill_token_num: int = 256
    prefill_interval: int = whole(16, minimum=0, fix="use a number of decode steps such as 16")
    reserve = "prompt"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        state = scheduler.state(_Steps)
        if self._is_turn_of_prompts(scheduler):
            self._add_prompts(batch, scheduler)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            if batch.chunks:
                # Only decodes that keep prompts waiting count.
                state.num_decodes += 1
                if not scheduler.waiting:
                    state.num_decodes = 0
                state.was_piece = False
                return
            self._add_prompts(batch, scheduler)
        if batch.chunks:
            state.num_decodes = 0
            state.was_piece = not batch.num_emits

    def _is_turn_of_prompts(self, scheduler: Scheduler) -> bool:
        budget = self.max_prefill_token_num
        state = scheduler.state(_Steps)
        under_way = scheduler.idle_prefills
        if under_way:  # pieces of a long prompt and decode steps take turns; its end need not
            return under_way[0].num_pending <= budget or not state.was_piece
        if not scheduler.waiting:
            return False
        if state.num_decodes >= self.prefill_interval:
            return True
        if len(scheduler.running) < scheduler.batch_size / 2:
            return True
        totals = accumulate(sequence.num_pending for sequence in scheduler.waiting)
        return any(total >= budget for total in totals)

    def _add_prompts(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self.max_prefill_token_num

        def size(sequence: SequenceState, budget_left: int) -> int:
            """All of a prompt, or the first piece of one that is too long for any batch, alone."""
            is_whole = budget_left == sequence.num_pending
            is_alone = sequence.num_pending > budget and not batch.chunks
            return budget_left if is_whole or is_alone else 0

        scheduler.continue_prefills(batch, budget, max_prefills=1)
        scheduler.admit(batch, budget, size=size)
