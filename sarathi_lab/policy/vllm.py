"""vLLM's schedulers, v0 without and with chunked prefill and v1, and nano-vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sarathi_lab.config.checked import flag, number, refuse_unread, require_order, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.queues import LOOKAHEAD, Test
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler, Size

# Fields of several systems.
partial_prefills = partial(whole, 1, minimum=1, fix="use 1 for one prompt at a time")
threshold = partial(whole, 0, minimum=0, fix="use a number of tokens, or 0 for the default")
whole_budget = partial(whole, None, minimum=1, fix="use null for max(max_model_len, 2048)")


@dataclass(frozen=True)
class PrefillFirst(Policy):
    """vLLM v0's default: a batch is whole prompts only, as long as any fit and none is swapped out,
    else decodes only.

    `max_num_batched_tokens=None` is that system's max(max_model_len, 2048). With `delay_factor` f >
    0, prompts wait until the oldest has waited f times the last prompt iteration's duration, or
    nothing is running.
    """

    name = "prefill_first"
    max_num_batched_tokens: int | None = whole_budget()
    delay_factor: float = number(0.0, minimum=0, fix="use 0 to never delay prompts")
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_whole_prompts(self, max_model_len)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if not scheduler.swapped and self._may_admit(scheduler):
            budget = self.max_num_batched_tokens or max(scheduler.max_model_len, 2048)
            scheduler.admit(batch, budget, whole=True)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            scheduler.swap_in(batch)

    def _may_admit(self, scheduler: Scheduler) -> bool:
        if not scheduler.waiting or not scheduler.running or self.delay_factor == 0:
            return True
        oldest = min(sequence.request.arrival_time for sequence in scheduler.waiting)
        waited = scheduler.now - oldest
        return waited > self.delay_factor * scheduler.last_prompt_latency


@dataclass(frozen=True)
class VllmV0Chunked(Policy):
    """vLLM v0 with `enable_chunked_prefill`: decodes, then running prompts, then swapped ones, then
    new ones.

    Up to `max_num_partial_prefills` prompts share `max_num_batched_tokens` equally. If these are
    several, at most `max_long_partial_prefills` of them lack more than
    `long_prefill_token_threshold` tokens (0: 4 % of the model length); shorter ones overtake. A
    batch has its prompts in front.

    Read in `SchedulerConfig` and `_schedule_chunked_prefill` of vLLM 0.8. Unlike there, none is
    admitted in an iteration that preempted, or while a sequence is swapped out; of waiting prompts
    the next `queues.LOOKAHEAD` are tried, not all.
    """

    name = "vllm_v0_chunked"
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 2048
    max_num_partial_prefills: int = partial_prefills()
    max_long_partial_prefills: int = partial_prefills()
    long_prefill_token_threshold: int = threshold()
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def check(self, batch_size: int, max_model_len: int) -> None:
        require_order(self, "max_long_partial_prefills", "max_num_partial_prefills", "; lower it")
        check_threshold(self.long_prefill_token_threshold, max_model_len)
        if self.max_num_partial_prefills == 1:
            why = " on one prompt at a time; add max_num_partial_prefills=2 or more, or use 0"
            refuse_unread(self, ["long_prefill_token_threshold"], why)
        if self.max_num_partial_prefills > self.max_num_batched_tokens:
            raise UserError(
                f"max_num_partial_prefills={self.max_num_partial_prefills} leaves each less than a "
                f"token of max_num_batched_tokens={self.max_num_batched_tokens}; lower it"
            )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        budget, most = self.max_num_batched_tokens, self.max_num_partial_prefills
        joining = self._joining(scheduler) if most > 1 else []
        num_sharing = min(most, len(scheduler.idle_prefills) + len(joining))
        size = at_most(budget // max(1, num_sharing))
        scheduler.add_decodes(batch, budget)
        scheduler.continue_prefills(batch, budget, size=size)
        if not scheduler.has_preempted:
            pass_over = None if most == 1 else lambda one: one not in joining
            scheduler.admit(batch, budget, size=size, pass_over=pass_over)
        batch.chunks.sort(key=lambda chunk: chunk.is_decode)

    def _joining(self, scheduler: Scheduler) -> list[SequenceState]:
        """Waiting prompts, of long ones as many as may be prefilled beside those that run."""
        above = long_from(self.long_prefill_token_threshold, scheduler)
        num_long = sum(one.num_pending > above for one in scheduler.idle_prefills)
        joining = []
        for sequence in scheduler.upcoming(LOOKAHEAD):
            is_long = sequence.num_pending > above
            if not is_long or num_long < self.max_long_partial_prefills:
                joining.append(sequence)
                num_long += is_long
        return joining


@dataclass(frozen=True)
class VllmV1(Policy):
    """vLLM v1: running sequences in the order they run in, then waiting ones, within
    `max_num_batched_tokens`.

    Prompts and decodes are treated alike: each takes what it lacks, but no more than
    `long_prefill_token_threshold` (0: no limit) at a time, and one that can't take anything is
    passed over. None is admitted in an iteration that preempted. Blocks are taken chunk by chunk,
    but `scheduler_reserve_full_isl` admits a prompt only if all of it fits.
    `enable_chunked_prefill=False` admits prompts only if they fit the rest of the budget.

    Names and defaults are those of `SchedulerConfig` in vLLM of mid-2026. The last to arrive is
    evicted first, there the last to be admitted (they differ after a preemption); a sequence in the
    batch is never evicted, which vLLM does by priority.
    """

    name = "vllm_v1"
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = threshold()
    scheduler_reserve_full_isl: bool = flag(True)
    enable_chunked_prefill: bool = flag(True)
    watermark: float = 0.0
    reserve = "chunk"

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_threshold(self.long_prefill_token_threshold, max_model_len)
        if not self.enable_chunked_prefill:
            check_whole_prompts(self, max_model_len)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        size = self.size(batch, scheduler)
        scheduler.share(batch, scheduler.running.idle, self.max_num_batched_tokens, size)
        if not scheduler.has_preempted:
            size, budget = self._whole(size), self.max_num_batched_tokens
            may_enter = fits_whole(scheduler) if self.scheduler_reserve_full_isl else None
            scheduler.admit(batch, budget, size=size, may_enter=may_enter)

    def size(self, batch: Batch, scheduler: Scheduler) -> Size:
        """Make the limit of a sequence's tokens."""
        return at_most(self.long_prefill_token_threshold or self.max_num_batched_tokens)

    def _whole(self, size: Size) -> Size:
        """Limit `size` without chunking: 0 for a prompt that would be cut."""
        if self.enable_chunked_prefill:
            return size
        return lambda one, left: size(one, left) if size(one, one.num_pending) <= left else 0


@dataclass(frozen=True)
class NanoVllm(Policy):
    """Prompts first, within `max_num_batched_tokens`, of which only the first may be cut; decodes
    if there are none.

    The default is that of nano-vLLM's `Config` in 2026, whose `max_num_seqs` does not limit running
    sequences as `batch` does. Without swapping there; here swapped sequences return beside decodes.
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


def at_most(num_tokens: int) -> Size:
    """At most `num_tokens` tokens of a sequence at a time."""
    return lambda sequence, left: min(left, num_tokens)


def fits_whole(scheduler: Scheduler) -> Test:
    """Make a test whether the cache has room for all known tokens of a sequence."""
    blocks = scheduler.blocks
    spared = blocks.watermark_blocks(scheduler.policy.watermark)
    return lambda one: blocks.num_missing(one, one.num_known) + spared <= blocks.num_free


def long_from(num_tokens: int, scheduler: Scheduler) -> int:
    """Tokens above which a prompt is long; 0 stands for 4 % of the model length."""
    return num_tokens or int(0.04 * scheduler.max_model_len)


def check_whole_prompts(policy: Policy, max_model_len: int) -> None:
    """Raise UserError for `max_num_batched_tokens` that the longest prompt does not fit uncut."""
    why = "a prompt that is never cut may not fit; raise it, or use a policy that chunks"
    policy.check_longest("max_num_batched_tokens", max_model_len, why)


def check_threshold(num_tokens: int, max_model_len: int) -> None:
    """Raise UserError for a length of long prompts that no prompt can exceed."""
    if num_tokens >= max_model_len:
        raise UserError(
            f"long_prefill_token_threshold={num_tokens} has no effect, as max_model_len="
            f"{max_model_len}; use a number of tokens below it, or 0 for the default"
        )
