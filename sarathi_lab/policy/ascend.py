"""The schedulers of vLLM-Ascend, for Huawei's NPUs, and the dynamic batch's table of times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sarathi_lab.config.checked import flag, number, refuse_unread, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.paths import readable
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.queues import Test
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import systems
from sarathi_lab.policy.vllm import (
    VllmV1,
    at_most,
    check_threshold,
    check_whole_prompts,
    fits_whole,
    long_from,
    threshold,
    whole_budget,
)

BUDGET_MULTIPLE = 256  # tokens, required by ModelArts
SMALLEST_CONTEXT = 128  # tokens


@dataclass(frozen=True)
class AscendV09(Policy):
    """AscendScheduler of vLLM-Ascend 0.9.1: whole prompts first, else decodes; with chunks it is
    vLLM v1's.

    A waiting prompt that does not fit the rest of `max_num_batched_tokens` (None:
    max(max_model_len, 2048)) or of the cache above the `watermark` is passed over; the next
    `queues.LOOKAHEAD` are tried, not all. With `enable_chunked_prefill` (off by default there) the
    budget is a multiple of 256 tokens, as ModelArts requires.
    """

    name = "ascend_v0_9"
    system = systems.VLLM_ASCEND
    budget_field = "max_num_batched_tokens"
    keeps_order = shares_at_once = True
    max_num_batched_tokens: int | None = whole_budget()
    enable_chunked_prefill: bool = flag(False)
    watermark: float = 0.01
    reserve = "prompt"

    def reserved_tokens(self, request: Request, num_known: int, max_model_len: int) -> int:
        return 0 if self.enable_chunked_prefill else num_known

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        if not self.enable_chunked_prefill:
            check_whole_prompts(self, max_model_len)
            return
        remedy = f"use a multiple of {BUDGET_MULTIPLE}"
        budget = self.max_num_batched_tokens
        number = require_int("max_num_batched_tokens", budget, BUDGET_MULTIPLE, remedy)
        if number % BUDGET_MULTIPLE:
            raise UserError(
                f"max_num_batched_tokens={budget} is refused by the NPU's kernels; {remedy}"
            )
        self._chunked.validate(batch_size, max_model_len)

    @cached_property
    def _chunked(self) -> VllmV1:
        budget = self.max_num_batched_tokens
        assert budget is not None
        return VllmV1(budget, scheduler_reserve_full_isl=False, watermark=self.watermark)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if self.enable_chunked_prefill:
            self._chunked.fill(batch, scheduler)
            return
        # Without chunks prompts come first, and an iteration has prompts or decodes.
        scheduler.admit(batch, pass_over=self._is_barred(batch, scheduler))
        if not batch.chunks:
            scheduler.add_decodes(batch)

    def _is_barred(self, batch: Batch, scheduler: Scheduler) -> Test:
        # vLLM's default without chunks, which the longest prompt fits into.
        budget = self.max_num_batched_tokens or max(scheduler.max_model_len, 2048)
        fits = fits_whole(scheduler)

        def is_barred(sequence: SequenceState) -> bool:
            is_too_long = batch.num_tokens + sequence.num_pending > budget
            return is_too_long or not fits(sequence)

        return is_barred


@dataclass(frozen=True)
class Ascend(AscendV09):
    """AscendScheduler of vLLM-Ascend 0.11: as 0.9.1, with a limit on long prompts.

    An iteration takes at most `max_long_partial_prefills` whole prompts longer than
    `long_prefill_token_threshold` tokens (0: 4 % of the model length); others overtake them. With
    `enable_chunked_prefill` the threshold is vLLM v1's. Its phase of prefills before any decode
    (`enable_pd_transfer`), which is off by default there, is not modelled.
    """

    name = "ascend"
    max_long_partial_prefills: int | None = whole(
        None, minimum=1, fix="use null for no limit (0 would never run a long prompt)"
    )
    long_prefill_token_threshold: int = threshold()

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_threshold(self.long_prefill_token_threshold, max_model_len)
        if self.enable_chunked_prefill:
            reason = " with enable_chunked_prefill=true; drop one of them"
            refuse_unread(self, ["max_long_partial_prefills"], reason)
        elif not self.max_long_partial_prefills:
            reason = " without max_long_partial_prefills; add it"
            refuse_unread(self, ["long_prefill_token_threshold"], reason)

    @cached_property
    def _chunked(self) -> VllmV1:
        limit = self.long_prefill_token_threshold
        return replace(super()._chunked, long_prefill_token_threshold=limit)

    def _is_barred(self, batch: Batch, scheduler: Scheduler) -> Test:
        does_not_fit = super()._is_barred(batch, scheduler)
        limit = self.max_long_partial_prefills
        if limit is None:
            return does_not_fit
        above = max(1, long_from(self.long_prefill_token_threshold, scheduler))

        def is_too_long(sequence: SequenceState) -> bool:
            num_long = sum(chunk.num_tokens > above for chunk in batch.chunks)
            return num_long >= limit and sequence.num_pending > above

        return lambda sequence: does_not_fit(sequence) or is_too_long(sequence)


@dataclass(frozen=True)
class AscendDynamic(Policy):
    """Ascend's dynamic batch (vLLM-Ascend 0.13 to 0.18): the largest budget whose iteration meets
    an SLO by a table.

    Decodes first, then prompts in order of arrival. Beside decodes the budget is that of
    `ProfileTable.budget` for their number and mean context and `slo_limits_for_dynamic_batch`
    (milliseconds); without decodes or such rows it is `max_num_batched_tokens`.

    `profile_table` is a CSV file with the columns chunk_size, d_num, ctx_len and cost, as of Ascend
    910B3 there; None: from the device's cost model. Keys of the table are searched in ascending
    order (there in a set's order), and `max_num_batched_tokens` is never exceeded (there a larger
    row is taken).
    """

    name = "ascend_dynamic"
    system = systems.VLLM_ASCEND
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 2048
    slo_limits_for_dynamic_batch: float = number(
        50.0,
        above=0,
        fix="use the milliseconds that an iteration may take, or policy=vllm_v1 for no limit",
    )
    profile_table: str | ProfileTable | None = None
    long_prefill_token_threshold: int = threshold()
    watermark: float = 0.0
    reserve = "chunk"

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_threshold(self.long_prefill_token_threshold, max_model_len)
        if self.profile_table is None:
            raise UserError(
                "policy=ascend_dynamic needs profile_table here, as a measured device has no cost "
                f"model; name a CSV file with the columns {', '.join(Row._fields)}, such as "
                "vLLM-Ascend's"
            )
        _ = self._table  # read it before anything runs

    def on_device(
        self, predictor: Callable[[], Predictor | None], batch_size: int, max_model_len: int
    ) -> AscendDynamic:
        if self.profile_table is not None:
            return self
        iteration_time = predictor()
        if iteration_time is None:
            return self
        table = make_profile_table(iteration_time, batch_size, max_model_len)
        return replace(self, profile_table=table)

    @property
    def _table(self) -> ProfileTable:
        table = self.profile_table
        return table if isinstance(table, ProfileTable) else read_profile_table(str(table))

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self._budget(scheduler)
        size = at_most(self.long_prefill_token_threshold or self.max_num_batched_tokens)
        scheduler.add_decodes(batch, budget)
        scheduler.continue_prefills(batch, budget, size=size)
        if not scheduler.has_preempted:
            scheduler.admit(batch, budget, size=size, may_enter=fits_whole(scheduler))

    def _budget(self, scheduler: Scheduler) -> int:
        largest = self.max_num_batched_tokens
        contexts = [sequence.num_known for sequence in scheduler.running if sequence.is_decoding]
        if not contexts:  # no sequence whose next token would be late
            return largest
        mean = sum(contexts) / len(contexts)
        refined = self._table.budget(mean, len(contexts), self.slo_limits_for_dynamic_batch)
        if refined is None:  # the table has no row that meets the objective
            return largest
        return min(refined, largest)


class Row(NamedTuple):
    """An iteration of `chunk_size` tokens, `d_num` of them decodes at `ctx_len`; `cost` in ms."""

    chunk_size: int
    d_num: int
    ctx_len: int
    cost: float


@dataclass(frozen=True)
class ProfileTable:
    """Rows in any order."""

    rows: tuple[Row, ...]

    def budget(self, context: float, num_decodes: int, slo: float) -> int | None:
        """The most tokens of an iteration within `slo` milliseconds, with `num_decodes` decodes of
        `context` tokens, both rounded up to rows within `slo`; None without such a row.
        """
        chunk_sizes, contexts, counts = _within(self, slo)
        at = bisect_left(contexts, context)
        by = bisect_left(counts, num_decodes)
        if at == len(contexts) or by == len(counts):
            return None
        return chunk_sizes.get((contexts[at], counts[by]))


def make_profile_table(
    iteration_time: Callable[[Batch], float], batch_size: int, max_model_len: int
) -> ProfileTable:
    """Make the table by `iteration_time` (seconds of a batch), up to `batch_size` decodes of
    `max_model_len`, for decodes and the first tokens of one prompt.

    Chunk sizes are 2^k and 3 * 2^k tokens from 16, up to two of the longest sequences; numbers of
    decodes and contexts are powers of two.
    """
    largest = max(2048, 2 * max_model_len)
    sizes = [size << k for k in range(largest.bit_length()) for size in (16, 24)]
    shapes = product(
        _doublings(SMALLEST_CONTEXT, max_model_len),
        _doublings(1, batch_size),
        sorted(size for size in sizes if size <= largest),
    )
    rows = []
    for context, num_decodes, size in shapes:
        prefill_tokens = size - num_decodes
        if prefill_tokens > 0:
            batch = make_batch(
                prefill_tokens=prefill_tokens, num_decodes=num_decodes, context=context
            )
            milliseconds = 1e3 * iteration_time(batch)
            rows.append(Row(size, num_decodes, context, milliseconds))
    return ProfileTable(tuple(rows))


@lru_cache(maxsize=8)
def read_profile_table(path: str) -> ProfileTable:
    """Read the table in the CSV file `path`. Raises UserError without one."""
    needed = list(Row._fields)
    remedy = f"use a CSV file with the columns {', '.join(needed)}, such as vLLM-Ascend's"
    with readable(f"profile_table={path}", remedy, KeyError):
        table = pd.read_csv(Path(path))[needed]
        counts = needed[:-1]  # all columns but the time
        table = table.astype(dict.fromkeys(counts, int))
        rows = tuple(map(Row._make, table.itertuples(index=False)))
    if not rows:
        raise UserError(f"profile_table={path} has no rows; {remedy}")
    return ProfileTable(rows)


@lru_cache(maxsize=64)
def _within(
    table: ProfileTable, slo: float
) -> tuple[dict[tuple[int, int], int], list[int], list[int]]:
    """The largest chunk within `slo` by (context, decodes), and both keys ascending."""
    chunk_sizes = {}
    # By chunk size, so that of equal decodes the largest chunk is what remains.
    for row in sorted(table.rows):
        if row.cost <= slo:
            chunk_sizes[row.ctx_len, row.d_num] = row.chunk_size
    contexts = {context for context, _ in chunk_sizes}
    counts = {num_decodes for _, num_decodes in chunk_sizes}
    return chunk_sizes, sorted(contexts), sorted(counts)


def _doublings(start: int, end: int) -> list[int]:
    """`start` times powers of two, up to the first that is not below `end`."""
    values = [start]
    while values[-1] < end:
        values.append(2 * values[-1])
    return values
