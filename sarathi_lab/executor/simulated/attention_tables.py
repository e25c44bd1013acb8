"""One layer's attention by measured tables: of the model's shape, or of the nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.interpolation import (
    Costs,
    Grid,
    RatioGrid,
    make_grid,
    nearest_shape,
)
from sarathi_lab.executor.simulated.kernel_times import Heads
from sarathi_lab.executor.tables import SHAPE

PREFILL, DECODE = ("prefill_chunk", "kv_prefill"), ("n_decode", "kv_decode")
# Weights of a distance between shapes, in doublings of KV heads: of query heads per KV head, of the
# head size, of having a single KV head, for which kernels are different.
GROUP_WEIGHT, HEAD_WEIGHT, SINGLE_WEIGHT = 10.0, 100.0, 4.0

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

    def times(self, batch: Batch, in_one_call: bool) -> tuple[float, float]:
        """Compute the seconds of prompts and of decodes; `in_one_call`, decodes count as what they
        add to the prompts.
        """
        prefill = self.prefill(batch) if batch.num_prefill_tokens else 0.0
        decode = self.decode(batch) if batch.num_decodes else 0.0
        has_both = in_one_call and batch.num_prefill_tokens and batch.num_decodes
        computed = (0.0, 0.0)
        if self.shapes is not None or (has_both and self.both is None):
            computed = self.formula.separate_attention(batch)
        if self.shapes is not None:  # ratios
            prefill, decode = prefill * computed[0], decode * computed[1]
        if has_both:
            if self.both is not None:
                both = self.both(batch)
                return min(prefill, both), max(0.0, both - prefill)
            slowdown = self.formula.hybrid_attention(batch) / sum(computed)
            decode = max(0.0, slowdown * (prefill + decode) - prefill)
        return prefill, decode


def attention_table(rows: pd.DataFrame, formula: AnalyticOperations) -> AttentionTable:
    """Make the table of `rows` (`tables.FILES`, with `seconds`) of the formula's shape, if there
    are such with contexts or mixed batches, else of the nearest; of all rows if they have none.
    """
    if SHAPE[0] in rows:
        same = rows[(rows[list(SHAPE)] == list(formula.heads)).all(axis=1)]
        if not (same.kv_prefill > 0).any():
            return _by_ratios(rows, formula)
        rows = same
    chunk, before, decodes, context = (rows[name] for name in (*PREFILL, *DECODE))
    rows = rows.assign(  # as in a batch
        num_prefill_tokens=chunk,
        prefill_query_key_pairs=chunk * before + chunk * (chunk + 1) / 2,
        prefill_kv_tokens=before + chunk,
        num_decodes=decodes,
        decode_kv_tokens=decodes * context,
    )
    mixed = rows[(decodes > 0) & (chunk > 0)]
    both = make_grid(mixed, (*PREFILL, *DECODE)) if len(mixed) else None
    return AttentionTable(
        _function_of(rows[decodes == 0], PREFILL, _chunk, _prefill_features, formula),
        _function_of(rows[chunk == 0], DECODE, _decodes, _decode_features, formula),
        None if both is None else _by_grid(both, (*PREFILL, *DECODE), _chunk_and_decodes, formula),
        formula,
    )


def _function_of(
    rows: pd.DataFrame,
    columns: tuple[str, str],
    point_of: Point,
    features_of: Callable[[Any], tuple[Any, ...]],
    formula: AnalyticOperations,
) -> Seconds:
    """Make the function of seconds by a grid over `columns`, or by costs of the features."""
    if grid := make_grid(rows, columns):
        return _by_grid(grid, columns, point_of, formula)
    sizes, *features = np.broadcast_arrays(*features_of(rows))
    costs = Costs(np.stack(features, axis=-1).astype(float), sizes, rows.seconds.to_numpy(float))
    return lambda batch: costs.time(*features_of(batch))


def _prefill_features(of: Any) -> tuple[Any, ...]:
    """Size and features of a batch's prefills, or of all rows."""
    tokens = of.num_prefill_tokens
    return tokens, 1.0, tokens, of.prefill_query_key_pairs, of.prefill_kv_tokens


def _decode_features(of: Any) -> tuple[Any, ...]:
    """Size and features of decodes. Where all decodes of a table have the same context, time that
    does not grow with their number is taken as the latency of reading one context, not as a launch,
    which overlaps earlier operations.
    """
    cached, number = of.decode_kv_tokens, of.num_decodes
    return number, cached, cached / number, number, 1.0


def _by_grid(
    grid: Grid, columns: Sequence[str], point_of: Point, formula: AnalyticOperations
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
        by_formula: Any = formula.attention.uniform
        computed, of_edge = (
            by_formula(**dict(zip(columns, sizes, strict=True))) for sizes in (point, edge)
        )
        return time * float(computed / of_edge)

    return seconds


def _chunk(batch: Batch) -> list[float]:
    return [*equivalent_chunk(batch.num_prefill_tokens, batch.prefill_query_key_pairs)]


def _decodes(batch: Batch) -> list[float]:
    return [batch.num_decodes, batch.decode_kv_tokens / batch.num_decodes]


def _chunk_and_decodes(batch: Batch) -> list[float]:
    return _chunk(batch) + _decodes(batch)


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
    prompts = rows[(rows.prefill_chunk > 0) & (rows.kv_prefill == 0) & (rows.n_decode == 0)]
    decodes = rows[rows.prefill_chunk == 0]
    prefill, of_prompts = _ratios(prompts, ("num_prefills", "prefill_chunk"), _prompts, formula)
    decode, of_decodes = _ratios(decodes, DECODE, _decodes, formula)
    return AttentionTable(prefill, decode, None, formula, [*of_prompts, *of_decodes])


def _prompts(batch: Batch) -> list[float]:
    return [*equivalent_prompts(batch.num_prefill_tokens, batch.prefill_query_key_pairs)]


def _ratios(
    rows: pd.DataFrame, columns: tuple[str, str], point_of: Point, formula: AnalyticOperations
) -> tuple[Seconds, list[Heads]]:
    """Make the function of ratios of the nearest shape by number and size, 1 without rows; and
    return the shape.
    """
    if rows.empty:
        return lambda batch: 1.0, []
    nearest, rows = nearest_shape(rows, SHAPE, partial(_distance, formula.heads))
    shape = Heads(*nearest)
    spec = replace(formula.spec, **shape._asdict())
    of_shape = AnalyticOperations(spec, formula.hardware, formula.dtype_bytes).attention
    sizes: Any = rows[[*PREFILL, *DECODE, "num_prefills"]].to_dict("records")
    computed = [of_shape.uniform(**of) for of in sizes]
    first, second = columns
    grid = RatioGrid(rows[first], rows[second], rows.seconds / computed)
    share = formula.heads.num_kv_heads / shape.num_kv_heads

    def ratio(batch: Batch) -> float:
        number, size = point_of(batch)
        return grid.ratio(number * share, size)

    return ratio, [shape]


def _distance(one: Heads, other: tuple[int, ...]) -> float:
    """Compute how far times of `other` are from those of `one`, in doublings of KV heads."""
    num_heads, num_kv_heads, head_size = other
    group, other_group = one.num_heads / one.num_kv_heads, num_heads / num_kv_heads
    return (
        abs(math.log2(one.num_kv_heads / num_kv_heads))
        + SINGLE_WEIGHT * ((one.num_kv_heads == 1) != (num_kv_heads == 1))
        + GROUP_WEIGHT * abs(math.log2(group / other_group))
        + HEAD_WEIGHT * abs(math.log2(one.head_size / head_size))
    )


def equivalent_chunk(tokens: int, pairs: int) -> tuple[float, float]:
    """Compute the chunk (tokens, cached tokens before it) of as many tokens and causal query-key
    pairs; if whole prompts are shorter than that, the prompt of as many pairs.
    """
    before = pairs / tokens - (tokens + 1) / 2
    return (tokens, before) if before >= 0 else (_prompt_of(pairs), 0.0)


def equivalent_prompts(tokens: int, pairs: int) -> tuple[float, float]:
    """Compute number and length of equal prompts of as many tokens and causal query-key pairs; if
    these would be longer than the tokens (they have a context), of one prompt of as many pairs.
    """
    length = 2 * pairs / tokens - 1
    return (tokens / length, length) if length <= tokens else (1.0, _prompt_of(pairs))


def _prompt_of(pairs: int) -> float:
    """Compute the length of a prompt of as many causal query-key pairs."""
    return (math.sqrt(1 + 8 * pairs) - 1) / 2
