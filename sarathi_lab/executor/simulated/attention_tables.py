"""One layer's attention by measured tables: of the model's shape, or of the nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.interpolation import (
    Costs,
    GridInterpolation,
    RatioInterpolation,
    make_grid,
    nearest_shape,
)
from sarathi_lab.executor.simulated.kernel_times import CallTimes, Heads
from sarathi_lab.executor.tables import SHAPE, batches_of, rows_of_heads

PREFILL = ("prefill_chunk", "kv_prefill")
DECODE = ("n_decode", "kv_decode")
PROMPTS = ("num_prefills", "prefill_chunk")  # of tables with several shapes
# Weights of a distance between shapes, in doublings of KV heads: of query heads per KV head, of the
# head size, of having a single KV head, for which kernels are different.
GROUP_WEIGHT = 10.0
HEAD_WEIGHT = 100.0
SINGLE_WEIGHT = 4.0

Seconds = Callable[[Batch], float]
Point = Callable[[Batch], list[float]]  # values of the columns PREFILL, of DECODE, or of both


@dataclass(frozen=True)
class AttentionTable:
    """Seconds of prompts and of decodes in separate calls, and of `both` in one, where rows have
    it, else by the ratio that `formula` has.

    Rows on a full grid are interpolated linearly along its axes; a point outside takes the nearest
    edge's time, scaled by the formula. Other rows get fitted `Costs`: fixed, per token, per causal
    query-key pair and per cached token of a prompt; per cached token, per mean context, per decode
    and fixed for decodes. Rows of other shapes give the formula's ratios (`_by_ratios`).

    Chunks of different lengths and contexts count as one chunk of as many tokens and causal
    query-key pairs, or of as many pairs where no chunk is so short; decodes as equal ones of the
    mean context.
    """

    prefill: Seconds
    decode: Seconds
    both: Seconds | None
    formula: AnalyticOperations
    shapes: Sequence[Heads] | None = None  # of the rows, where `prefill` and `decode` are ratios

    def times(self, batch: Batch, in_one_call: bool) -> CallTimes:
        """Compute the seconds of prompts and of decodes; `in_one_call`, decodes count as what they
        add to the prompts.
        """
        prefill = decode = 0.0
        if batch.num_prefill_tokens:
            prefill = self.prefill(batch)
        if batch.num_decodes:
            decode = self.decode(batch)
        has_both = in_one_call and batch.num_prefill_tokens and batch.num_decodes
        if has_both and self.both is not None:  # seconds, as no table of ratios has `both`
            both = self.both(batch)
            return min(prefill, both), max(0.0, both - prefill)
        if self.shapes is None and not has_both:
            return prefill, decode
        computed_prefill, computed_decode = self.formula.separate_attention(batch)
        if self.shapes is not None:  # `prefill` and `decode` are ratios
            prefill *= computed_prefill
            decode *= computed_decode
        if has_both:
            separate = computed_prefill + computed_decode
            hybrid = self.formula.hybrid_attention(batch)
            slowdown = hybrid / separate
            decode = max(0.0, slowdown * (prefill + decode) - prefill)
        return prefill, decode


def attention_table(rows: pd.DataFrame, formula: AnalyticOperations) -> AttentionTable:
    """Make the table of measured calls.

    Args:
        rows: Of `tables.FILES`, with `seconds`.
        formula: Has the model's shape, and computes what no row has.

    Returns:
        The table of the formula's shape, if rows have it and some of them a context; else that of
        the nearest shape. Rows without shapes count as of the formula's.
    """
    own_rows = rows_of_heads(rows, formula.heads)
    if SHAPE[0] in rows and not own_rows.kv_prefill.max() > 0:  # also of NaN, without any rows
        return _by_ratios(rows, formula)
    rows = own_rows
    has_prompt = rows.prefill_chunk > 0
    has_decodes = rows.n_decode > 0
    prompts = rows[~has_decodes]
    decodes = rows[~has_prompt]
    prefill = _by_rows(
        prompts,
        PREFILL,
        _chunk,
        _count_prefills,
        formula,
    )
    decode = _by_rows(
        decodes,
        DECODE,
        _decodes,
        _count_decodes,
        formula,
    )
    both = None
    mixed = rows[has_prompt & has_decodes]
    if not mixed.empty:
        columns = (*PREFILL, *DECODE)
        grid = make_grid(mixed, columns)
        if grid is not None:
            both = _by_grid(grid, columns, lambda batch: _chunk(batch) + _decodes(batch), formula)
    return AttentionTable(prefill, decode, both, formula)


Features = tuple[float, ...]  # what the cost of a call is counted by


def _by_rows(
    rows: pd.DataFrame,
    columns: tuple[str, str],
    point_of: Point,
    count: Callable[[Batch], Features],
    formula: AnalyticOperations,
) -> Seconds:
    """Make the function of seconds by a grid over `columns`, or by costs of the features; what
    these leave is interpolated by the first size of a point.
    """
    grid = make_grid(rows, columns)
    if grid is not None:
        return _by_grid(grid, columns, point_of, formula)
    features = np.array([count(batch) for batch in batches_of(rows)])
    number = rows[columns[0]].to_numpy(float)
    measured_seconds = rows.seconds.to_numpy(float)
    costs = Costs(features, number, measured_seconds)

    def seconds(batch: Batch) -> float:
        size = batch.num_decodes if columns == DECODE else batch.num_prefill_tokens
        return costs.time(size, *count(batch))

    return seconds


def _count_prefills(batch: Batch) -> Features:
    """Count prefills: one call, tokens, query-key pairs and cached tokens."""
    tokens = batch.num_prefill_tokens
    return (1.0, tokens, batch.prefill_query_key_pairs, batch.prefill_kv_tokens)


def _count_decodes(batch: Batch) -> Features:
    """Count decodes: cached tokens, mean context, decodes and one call. Where all decodes of a
    table have the same context, time that does not grow with their number is taken as the latency
    of reading one context, not as a launch, which overlaps earlier operations.
    """
    cached = batch.decode_kv_tokens
    number = batch.num_decodes
    return (cached, cached / number, number, 1.0)


def _by_grid(
    grid: GridInterpolation,
    columns: Sequence[str],
    point_of: Point,
    formula: AnalyticOperations,
) -> Seconds:
    """Make the function of seconds by a grid over `columns`, at the `point_of` a batch: outside it
    its nearest edge's, scaled by the formula's ratio.
    """

    def seconds(batch: Batch) -> float:
        point = point_of(batch)
        edge = grid.clamp(point)
        time = grid.at(edge)
        if edge == point:
            return time
        return time * (computed(point) / computed(edge))

    def computed(point: Sequence[float]) -> float:
        sizes = dict(zip(columns, point, strict=True))
        return formula.attention.uniform(**sizes)

    return seconds


def _chunk(batch: Batch) -> list[float]:
    tokens, before = equivalent_chunk(batch.num_prefill_tokens, batch.prefill_query_key_pairs)
    return [tokens, before]


def _decodes(batch: Batch) -> list[float]:
    return [batch.num_decodes, batch.decode_kv_tokens / batch.num_decodes]


# -- tables of other shapes ------------------------------------------------------------------------


def _by_ratios(rows: pd.DataFrame, formula: AnalyticOperations) -> AttentionTable:
    """Make the table of rows of several shapes, none of which may be the formula's: the formula's
    seconds times the ratio of measured to computed ones, of prompts without a context by number and
    length, of decodes by number and context.

    The ratios are those of the nearest shape, first in head size, then in query heads per KV head.
    A batch with other KV heads counts as proportionally more or fewer sequences: a call's work is
    sequences times KV heads. Prompts of different lengths count as equal ones of as many tokens and
    causal query-key pairs; chunks behind a context as one prompt of as many pairs.
    """
    if "num_prefills" not in rows:
        rows = rows.assign(num_prefills=1)
    has_prompt = rows.prefill_chunk > 0
    has_context = rows.kv_prefill > 0
    has_decodes = rows.n_decode > 0
    prompts = rows[has_prompt & ~has_context & ~has_decodes]
    decodes = rows[~has_prompt]
    prefill, prompt_shapes = _ratios(prompts, PROMPTS, _prompts, formula)
    decode, decode_shapes = _ratios(decodes, DECODE, _decodes, formula)
    return AttentionTable(
        prefill,
        decode,
        None,
        formula,
        [*prompt_shapes, *decode_shapes],
    )


def _prompts(batch: Batch) -> list[float]:
    number, length = equivalent_prompts(batch.num_prefill_tokens, batch.prefill_query_key_pairs)
    return [number, length]


def _ratios(
    rows: pd.DataFrame,
    columns: tuple[str, str],
    point_of: Point,
    formula: AnalyticOperations,
) -> tuple[Seconds, list[Heads]]:
    """Make the function of ratios of the nearest shape by number and size, 1 without rows; and
    return the shape.
    """
    if rows.empty:
        return lambda batch: 1.0, []
    nearest, calls = nearest_shape(rows, SHAPE, partial(_distance, formula.heads))
    shape = Heads(*nearest)
    spec = replace(formula.spec, **shape._asdict())
    attention = AnalyticOperations(spec, formula.hardware, formula.dtype_bytes).attention
    sizes = calls[[*PREFILL, *DECODE, "num_prefills"]]
    computed = []
    for call in sizes.itertuples(index=False):
        computed.append(attention.uniform(*call))
    numbers, sizes_of_each = columns
    measured_over_computed = calls.seconds / computed
    ratios = RatioInterpolation(calls[numbers], calls[sizes_of_each], measured_over_computed)
    share = formula.heads.num_kv_heads / shape.num_kv_heads

    def ratio(batch: Batch) -> float:
        number, size = point_of(batch)
        return ratios.ratio(number * share, size)

    return ratio, [shape]


def _distance(heads: Heads, other: tuple[int, ...]) -> float:
    """Compute how far times of `other` are from those of `heads`, in doublings of KV heads."""
    other_heads = Heads(*other)
    has_single = heads.num_kv_heads == 1
    other_has_single = other_heads.num_kv_heads == 1
    group = heads.num_heads / heads.num_kv_heads
    other_group = other_heads.num_heads / other_heads.num_kv_heads
    distance = _doublings(heads.num_kv_heads, other_heads.num_kv_heads)
    if has_single != other_has_single:
        distance += SINGLE_WEIGHT
    distance += GROUP_WEIGHT * _doublings(group, other_group)
    distance += HEAD_WEIGHT * _doublings(heads.head_size, other_heads.head_size)
    return distance


def _doublings(size: float, other_size: float) -> float:
    return abs(math.log2(size / other_size))


def equivalent_chunk(tokens: int, pairs: int) -> CallTimes:
    """Compute the chunk (tokens, cached tokens before it) of as many tokens and causal query-key
    pairs; if whole prompts are shorter than that, the prompt of as many pairs.
    """
    before = pairs / tokens - (tokens + 1) / 2
    if before < 0:
        return _prompt_of(pairs), 0.0
    return tokens, before


def equivalent_prompts(tokens: int, pairs: int) -> CallTimes:
    """Compute number and length of equal prompts of as many tokens and causal query-key pairs; if
    these would be longer than the tokens (they have a context), of one prompt of as many pairs.
    """
    # n prompts of length l have n l tokens and n l (l + 1) / 2 pairs: l + 1 is twice their ratio.
    length = 2 * pairs / tokens - 1
    if length > tokens:
        return 1.0, _prompt_of(pairs)
    number = tokens / length
    return number, length


def _prompt_of(pairs: int) -> float:
    """Compute the length of a prompt of as many causal query-key pairs."""
    # n tokens have n (n + 1) / 2 pairs.
    root = math.sqrt(1 + 8 * pairs)
    return (root - 1) / 2
