"""vLLM's schedulers, v0 without and with chunked prefill and v1, and nano-vLLM's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter

from sarathi_lab.config.checked import (
    checked,
    flag,
    number,
    refuse_unread,
    require_order,
    whole,
)
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.queues import LOOKAHEAD, Test, by_priority
from sarathi_lab.engine.request import Batch, Chunk, SequenceState
from sarathi_lab.engine.scheduler import Scheduler, Size
from sarathi_lab.policy import systems

VERSIONS = ("0.32", "0.33")  # of vLLM, between which rules of v1 changed


def rules_of(version: str) -> str:
    """Return which of VERSIONS has the rules of a vLLM such as "0.19.1"; the newest, if unknown."""
    major_and_minor = re.findall(r"\d+", version)[:2]
    # As numbers: as texts, "9" would be above "33".
    numbers = tuple(map(int, major_and_minor))
    is_older = len(numbers) == 2 and numbers < (0, 33)
    return VERSIONS[0] if is_older else VERSIONS[-1]


def require_version(name: str, value: object) -> None:
    """Raise UserError for a `value` of the field `name` that is none of VERSIONS."""
    require_one_of(name, str(value), VERSIONS)  # YAML reads it as a number


# Fields of several systems.
partial_prefills = partial(whole, 1, minimum=1, fix="use 1 for one prompt at a time")
threshold = partial(whole, 0, minimum=0, fix="use a number of tokens, or 0 for the default")
whole_budget = partial(whole, None, minimum=1, fix="use null for max(max_model_len, 2048)")


@dataclass(frozen=True)
class PrefillFirst(Policy):
    """vLLM v0's default: a batch is whole prompts only, as long as any fit, else decodes only.

    What is evicted is computed again, v0's rule for requests of one sequence. Its other mode
    (`preemption_mode=swap`) moved their cache to host memory, and admitted no prompt until all were
    back; no server in use has it, nor has the lab.

    `max_num_batched_tokens=None` is that system's max(max_model_len, 2048). With `delay_factor` f >
    0, prompts wait until the oldest has waited f times the last prompt iteration's duration, or
    nothing is running.
    """

    name = "prefill_first"
    system = systems.VLLM_V0
    max_num_batched_tokens: int | None = whole_budget()
    delay_factor: float = number(0.0, minimum=0, fix="use 0 to never delay prompts")
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_whole_prompts(self, max_model_len)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if self._may_admit(scheduler):
            budget = self.max_num_batched_tokens or max(scheduler.max_model_len, 2048)
            scheduler.admit(batch, budget, uncut=True)
        if not batch.chunks:
            scheduler.add_decodes(batch)

    def _may_admit(self, scheduler: Scheduler) -> bool:
        if not scheduler.waiting or not scheduler.running or self.delay_factor == 0:
            return True
        oldest = min(sequence.request.arrival_time for sequence in scheduler.waiting)
        waited = scheduler.now - oldest
        return waited > self.delay_factor * scheduler.last_prompt_latency


@dataclass(frozen=True)
class VllmV0Chunked(Policy):
    """vLLM v0 with `enable_chunked_prefill`: decodes, then running prompts, then new ones.

    Up to `max_num_partial_prefills` prompts share `max_num_batched_tokens` equally. If these are
    several, at most `max_long_partial_prefills` of them lack more than
    `long_prefill_token_threshold` tokens (0: 4 % of the model length); shorter ones overtake. A
    batch has its prompts in front.

    Read in `SchedulerConfig` and `_schedule_chunked_prefill` of vLLM 0.8. Unlike there, none is
    admitted in an iteration that preempted, and of waiting prompts the next `queues.LOOKAHEAD` are
    tried, not all. What is evicted is computed again, never moved to host memory (`PrefillFirst`).
    """

    name = "vllm_v0_chunked"
    system = systems.VLLM_V0
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
            reason = " on one prompt at a time; add max_num_partial_prefills=2 or more, or use 0"
            refuse_unread(self, ["long_prefill_token_threshold"], reason)
        if self.max_num_partial_prefills > self.max_num_batched_tokens:
            raise UserError(
                f"max_num_partial_prefills={self.max_num_partial_prefills} leaves each less than a "
                f"token of max_num_batched_tokens={self.max_num_batched_tokens}; lower it"
            )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self.max_num_batched_tokens
        limit = self.max_num_partial_prefills
        joining = self._joining(scheduler) if limit > 1 else []
        num_sharing = min(limit, len(scheduler.idle_prefills) + len(joining))
        size = at_most(budget // max(1, num_sharing))
        scheduler.add_decodes(batch, budget)
        scheduler.continue_prefills(batch, budget, size=size)
        if not scheduler.has_preempted:
            pass_over: Test | None = None
            if limit > 1:
                pass_over = _none_of(joining)
            scheduler.admit(batch, budget, size=size, pass_over=pass_over)
        batch.chunks.sort(key=lambda chunk: chunk.is_decode)

    def _joining(self, scheduler: Scheduler) -> list[SequenceState]:
        """Waiting prompts, of long ones as many as may be prefilled beside those that run."""
        above = long_from(self.long_prefill_token_threshold, scheduler)
        num_long = sum(sequence.num_pending > above for sequence in scheduler.idle_prefills)
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

    Prompts and decodes are treated alike: each takes what it lacks, but beside others no more than
    `long_prefill_token_threshold` (0: no limit) at a time; `_adaptive` raises that to an equal
    share of the budget. None is admitted in an iteration that preempted, nor beside
    `max_num_active_seqs` others (None: as many as run). Blocks are taken chunk by chunk, but
    `scheduler_reserve_full_isl` admits a prompt only if all of it fits.
    `enable_chunked_prefill=False` admits prompts only if they fit the rest of the budget. With a
    `prefill_schedule_interval` prompts wait for so many iterations after the last with a prompt
    while any decodes, unless that left some waiting; replicas in lockstep take them in every so
    many of their common iterations. The last admitted is evicted first, or by priority the least
    urgent, even if it is in the batch, or has its last token on the way. With two batches in flight
    places and blocks are free again when a last token is back (vLLM's `AsyncScheduler`).

    Names, defaults and rule are those of `SchedulerConfig` and `Scheduler.schedule` in vLLM 0.33;
    `experiments/sarathi_serve/policies` lists since when, and what differs. With `version` 0.32
    nothing more runs beside a request that was evicted for itself, and the interval counts
    iterations since the engine was idle, as that version's data-parallel engines do; others have
    none.
    """

    name = "vllm_v1"
    system = systems.VLLM
    budget_field = "max_num_batched_tokens"
    keeps_order = True
    leaves_with_output = True
    shares_at_once = True
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = threshold()
    scheduler_reserve_full_isl: bool = flag(True)
    enable_chunked_prefill: bool = flag(True)
    watermark: float = 0.0
    long_prefill_token_threshold_adaptive: bool = flag(False)
    max_num_active_seqs: int | None = whole(None, minimum=1, fix="use null for no further limit")
    prefill_schedule_interval: int = whole(1, minimum=1, fix="use 1 for every iteration")
    version: str = checked(require_version, VERSIONS[-1])
    reserve = "chunk"

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_threshold(self.long_prefill_token_threshold, max_model_len)
        if not self.long_prefill_token_threshold:
            reason = " without long_prefill_token_threshold; add it"
            refuse_unread(self, ["long_prefill_token_threshold_adaptive"], reason)
        if not self.enable_chunked_prefill:
            check_whole_prompts(self, max_model_len)

    @property
    def is_older(self) -> bool:
        """Whether `version` has the rules before 0.33."""
        return str(self.version) != VERSIONS[-1]

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        size = self.size(batch, scheduler)
        interval = self.prefill_schedule_interval
        if interval == 1:
            self._fill(batch, scheduler, size)
            return
        # One iteration in `interval` takes prompts; replicas that step together agree on which.
        cadence: Cadence
        if self.is_older or scheduler.shared_step is not None:
            cadence = scheduler.state(SharedCadence)
        else:
            cadence = scheduler.state(Cadence)
        is_open = cadence.takes_prompts(interval, scheduler)
        if not is_open:
            size = cadence.without_prompts(size)
        self._fill(batch, scheduler, size, is_open)
        cadence.record(batch, scheduler, is_open)

    def size(self, batch: Batch, scheduler: Scheduler) -> Size:
        """Make the limit of a sequence's tokens."""
        limit = self.long_prefill_token_threshold
        budget = self.max_num_batched_tokens
        number = len(scheduler.running) + len(scheduler.waiting)
        if limit == 0 or number <= 1:
            return at_most(budget)
        if self.long_prefill_token_threshold_adaptive:
            limit = max(limit, budget // number)  # an equal share of the budget, if that is more
        return at_most(limit)

    def _fill(self, batch: Batch, scheduler: Scheduler, size: Size, is_open: bool = True) -> None:
        self._continue(batch, scheduler, size)
        if not scheduler.waiting or scheduler.has_preempted:
            return
        pass_over = None
        if scheduler.awaited:
            pass_over = scheduler.awaited.__contains__
        scheduler.admit(
            batch,
            self.max_num_batched_tokens,
            size=self._whole(size),
            may_enter=self._admission(scheduler, is_open),
            pass_over=pass_over,
        )

    def _continue(self, batch: Batch, scheduler: Scheduler, size: Size) -> None:
        """Take the running sequences in their order, until one finds no room in the cache, though
        it is not the one to be evicted.
        """
        budget = self.max_num_batched_tokens
        make_room = partial(evict_last, batch, scheduler)
        idle = scheduler.running.idle
        if self.prefill_schedule_interval == 1:
            num_decodes = scheduler.add_first_decodes(batch, idle, budget)
            idle = idle[num_decodes:]
        for sequence in idle:
            budget_left = min(sequence.num_pending, budget - batch.num_tokens)
            if budget_left <= 0 or len(batch.chunks) >= scheduler.batch_size:
                return
            if not sequence.is_running:
                continue  # evicted by an earlier one
            num_tokens = size(sequence, budget_left)
            if num_tokens == 0 or scheduler.take(batch, sequence, num_tokens, make_room):
                continue
            # By priority others may follow one that was evicted for itself, and have its blocks.
            if sequence.is_running or self.is_older:
                return

    def for_stages(self, num_sequences: int, num_stages: int) -> tuple[Policy, int]:
        # vLLM lets one batch have all sequences, and limits those of all stages instead.
        num_active = self.max_num_active_seqs or num_sequences
        return replace(self, max_num_active_seqs=num_active), num_sequences

    def _admission(self, scheduler: Scheduler, is_open: bool) -> Test:
        """Make the test of the next waiting sequence; if not `is_open`, only for a last token."""
        limit = self.max_num_active_seqs or scheduler.max_num_seqs
        fits = fits_whole(scheduler)
        must_fit = self.scheduler_reserve_full_isl
        running = scheduler.running

        def may_enter(sequence: SequenceState) -> bool:
            has_slot = len(running) < limit
            # Between the turns of prompts only a last token enters.
            is_admitted = is_open or sequence.num_pending == 1
            if not has_slot or not is_admitted:
                return False
            return not must_fit or fits(sequence)

        return may_enter

    def _whole(self, size: Size) -> Size:
        """Limit `size` without chunking: 0 for a prompt that would be cut."""
        if self.enable_chunked_prefill:
            return size

        def size_uncut(sequence: SequenceState, budget_left: int) -> int:
            if size(sequence, sequence.num_pending) > budget_left:
                return 0
            return size(sequence, budget_left)

        return size_uncut


@dataclass(eq=False)
class Cadence:
    """State of `prefill_schedule_interval` in an engine by itself: iterations so far and the last
    of them with a prompt, sequences whose last chunk was cut, and whether the last iteration that
    took prompts left some waiting.
    """

    number: int = 0
    newest_prompt: int | None = None  # the number of that iteration
    cut: set[SequenceState] = field(default_factory=set)
    is_short: bool = False

    def takes_prompts(self, interval: int, scheduler: Scheduler) -> bool:
        """Return whether the next iteration takes prompts."""
        is_due = self.is_due(interval, scheduler)
        return is_due or self.is_short or self.cut.issuperset(scheduler.running)

    def is_due(self, interval: int, scheduler: Scheduler) -> bool:
        """Return whether the interval is over."""
        return self.newest_prompt is None or self.number - self.newest_prompt >= interval

    def without_prompts(self, size: Size) -> Size:
        """Limit sequences whose prompt is not computed to no token."""

        def without(sequence: SequenceState, room: int) -> int:
            if sequence in self.cut:
                return 0
            return size(sequence, room)

        return without

    def record(self, batch: Batch, scheduler: Scheduler, is_open: bool) -> None:
        """Count an iteration."""
        if any(self._is_prompt(chunk) for chunk in batch.chunks):
            self.newest_prompt = self.number
        self.number += self.counts(batch)
        # After `_is_prompt`, which reads what was cut before this iteration.
        for chunk in batch.chunks:
            if chunk.emits_token:
                self.cut.discard(chunk.sequence)
            else:
                self.cut.add(chunk.sequence)
        if is_open and not scheduler.has_preempted:
            self.is_short = bool(scheduler.waiting)

    def counts(self, batch: Batch) -> bool:
        """Return whether an iteration that runs `batch` is counted."""
        return bool(batch.chunks)

    def _is_prompt(self, chunk: Chunk) -> bool:
        """Return whether `chunk` is of a prompt. The last token of one that is cached is not."""
        return chunk.num_tokens > 1 or not chunk.emits_token or chunk.sequence in self.cut


@dataclass(eq=False)
class SharedCadence(Cadence):
    """State of a `prefill_schedule_interval` of data-parallel engines, which count iterations
    together, also empty ones, since all were idle.
    """

    newest: int = -1  # sequence that waited then, by which an idle engine is recognised

    def is_due(self, interval: int, scheduler: Scheduler) -> bool:
        waiting = scheduler.waiting
        if not scheduler.running and all(sequence.order > self.newest for sequence in waiting):
            self.number = 0
        self.newest = max([self.newest, *(sequence.order for sequence in waiting)])
        number = self.number
        if scheduler.shared_step is not None:
            number = scheduler.shared_step
        return number % interval == 0

    def counts(self, batch: Batch) -> bool:
        return True


def evict_last(
    batch: Batch, scheduler: Scheduler, sequence: SequenceState, num_tokens: int
) -> bool:
    """Grow `sequence` to `num_tokens`, evicting the last of the running, or by priority the least
    urgent, from the batch, too; False: it can't run now.
    """
    if scheduler.blocks.grow(sequence, num_tokens):
        return True  # as nearly always
    running = scheduler.running
    last: Callable[[Sequence[SequenceState]], SequenceState] = itemgetter(-1)
    if running.rank is by_priority:
        last = partial(max, key=by_priority)
    while not scheduler.blocks.grow(sequence, num_tokens):
        batched = {chunk.sequence for chunk in batch.chunks}
        candidates = [
            candidate
            for candidate in running
            if not candidate.in_flight or candidate.is_finished or candidate in batched
        ]
        victim = last(candidates)
        if victim is sequence and victim is not last(running):
            return False  # it waits for those in flight, as in `Scheduler.make_room`
        if victim in batched:
            batch.remove(victim)
            if scheduler.blocks.prefix is not None:
                scheduler.blocks.prefix.withdraw(victim)
        scheduler.preempt(victim)
        if victim is sequence:
            return False
    return True


@dataclass(frozen=True)
class NanoVllm(Policy):
    """Prompts first, within `max_num_batched_tokens`, of which only the first may be cut; decodes
    if there are none.

    The default is that of nano-vLLM's `Config` in 2026, whose `max_num_seqs` does not limit running
    sequences as `batch` does.
    """

    name = "nano_vllm"
    system = systems.NANO_VLLM
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 16384
    reserve = "prompt"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        def size(sequence: SequenceState, budget_left: int) -> int:
            # The first may be cut; later ones only if they take just what is left.
            is_first = not batch.chunks
            if is_first or budget_left == sequence.num_pending:
                return budget_left
            return 0

        scheduler.continue_prefills(batch, self.max_num_batched_tokens, size=size)
        scheduler.admit(batch, self.max_num_batched_tokens, size=size)
        if not batch.chunks:
            scheduler.add_decodes(batch)


def at_most(num_tokens: int) -> Size:
    """At most `num_tokens` tokens of a sequence at a time."""
    return lambda sequence, budget_left: min(budget_left, num_tokens)


def _none_of(sequences: Sequence[SequenceState]) -> Test:
    return lambda sequence: sequence not in sequences


def fits_whole(scheduler: Scheduler) -> Test:
    """Make a test whether the cache has room for all known tokens of a sequence."""
    blocks = scheduler.blocks
    watermark = scheduler.policy.watermark
    return lambda sequence: blocks.fits(sequence, sequence.num_known, watermark)


def long_from(num_tokens: int, scheduler: Scheduler) -> int:
    """Tokens above which a prompt is long; 0 stands for 4 % of the model length."""
    return num_tokens or int(0.04 * scheduler.max_model_len)


def check_whole_prompts(policy: Policy, max_model_len: int) -> None:
    """Raise UserError for `max_num_batched_tokens` that the longest prompt does not fit uncut."""
    reason = "a prompt that is never cut may not fit; raise it, or use a policy that chunks"
    policy.check_longest("max_num_batched_tokens", max_model_len, reason)


def check_threshold(num_tokens: int, max_model_len: int) -> None:
    """Raise UserError for a length of long prompts that no prompt can exceed."""
    if num_tokens >= max_model_len:
        raise UserError(
            f"long_prefill_token_threshold={num_tokens} has no effect, as max_model_len="
            f"{max_model_len}; use a number of tokens below it, or 0 for the default"
        )
