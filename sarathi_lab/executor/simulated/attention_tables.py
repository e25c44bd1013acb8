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
    Floats,
    Grid,
    RatioGrid,
    make_grid,
    nearest_shape,
)
from sarathi_lab.executor.simulated.kernel_times import Heads
from sarathi_lab.executor.tables import SHAPE

PREFILL, DECODE = ("prefill_chunk", "kv_prefill"), ("n_decode", "kv_decode")
OF_PREFILL, OF_DECODE, OF_BOTH = slice(0, 2), slice(2, 4), slice(0, 4)  # of (*PREFILL, *DECODE)
# Weights of a distance between shapes, in doublings of KV heads: of query heads per KV head, of the
# head size, of having a single KV head, for which kernels are different.
GROUP_WEIGHT, HEAD_WEIGHT, SINGLE_WEIGHT = 10.0, 100.0, 4.0

Seconds = Callable[[Batch], float]


@dataclass(frozen=True)
class AttentionTable:
    """Seconds of prompts and of decodes in separate calls, and of `both` in one, where rows have
    it, else by the ratio that `formula` has. Rows are of `shapes`, if not of the model's.

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
    formula: AnalyticOperations | None
    shapes: Sequence[Heads] = ()

    def times(self, batch: Batch, in_one_call: bool) -> tuple[float, float]:
        """Compute the seconds of prompts and of decodes; `in_one_call`, what these add to it."""
        has_both = in_one_call and batch.num_prefill_tokens and batch.num_decodes
        prefill = self.prefill(batch) if batch.num_prefill_tokens else 0.0
        if has_both and self.both is not None:
            both = self.both(batch)
            return min(prefill, both), max(0.0, both - prefill)
        decode = self.decode(batch) if batch.num_decodes else 0.0
        if has_both and self.formula is not None:
            slowdown = self.formula.hybrid_attention(batch)
            slowdown /= sum(self.formula.separate_attention(batch))
            decode = max(0.0, slowdown * (prefill + decode) - prefill)
        return prefill, decode


def attention_table(rows: pd.DataFrame, formula: AnalyticOperations | None) -> AttentionTable:
    """Make the table of `rows` (`tables.FILES`, with `seconds`) of the formula's shape, if there
    are such with contexts or mixed batches, else of the nearest; of all rows if they have none.
    """
    if formula is not None and SHAPE[0] in rows:
        same = rows[(rows[list(SHAPE)] == list(formula.heads)).all(axis=1)]
        if not (same.kv_prefill > 0).any():
            return _by_ratios(rows, formula)
        rows = same
    mixed = rows[(rows.n_decode > 0) & (rows.prefill_chunk > 0)]
    both = make_grid(mixed, (*PREFILL, *DECODE)) if len(mixed) else None
    return AttentionTable(
        _prefill(rows[rows.n_decode == 0], formula),
        _decode(rows[rows.prefill_chunk == 0], formula),
        None if both is None else _on(both, OF_BOTH, formula),
        formula,
    )


def _prefill(rows: pd.DataFrame, formula: AnalyticOperations | None) -> Seconds:
    if grid := make_grid(rows, PREFILL):
        return _on(grid, OF_PREFILL, formula)
    tokens, before = _sizes(rows, PREFILL)
    costs = _costs(
        rows, tokens, 1, tokens, tokens * before + tokens * (tokens + 1) / 2, before + tokens
    )

    def seconds(batch: Batch) -> float:
        tokens, pairs = batch.num_prefill_tokens, batch.prefill_query_key_pairs
        return costs.time(tokens, 1.0, tokens, pairs, batch.prefill_kv_tokens)

    return seconds


def _decode(rows: pd.DataFrame, formula: AnalyticOperations | None) -> Seconds:
    """Make the function of decodes. Where all of a table have the same context, the part that does
    not grow with their number counts as the latency of walking along it, as launches overlap
    earlier operations.
    """
    if grid := make_grid(rows, DECODE):
        return _on(grid, OF_DECODE, formula)
    decodes, context = _sizes(rows, DECODE)
    costs = _costs(rows, decodes, decodes * context, context, decodes, 1)

    def seconds(batch: Batch) -> float:
        number, cached = batch.num_decodes, batch.decode_kv_tokens
        return costs.time(number, cached, cached / number, number, 1.0)

    return seconds


def _sizes(rows: pd.DataFrame, columns: tuple[str, str]) -> tuple[Floats, Floats]:
    first, second = (rows[column].to_numpy(float) for column in columns)
    return first, second


def _costs(rows: pd.DataFrame, sizes: Floats, *features: Floats | int) -> Costs:
    columns = np.broadcast_arrays(*features)
    return Costs(np.stack(columns, axis=-1).astype(float), sizes, rows.seconds.to_numpy(float))


def _on(grid: Grid, axes: slice, formula: AnalyticOperations | None) -> Seconds:
    """Make the function of seconds by a grid with some of the axes (*PREFILL, *DECODE): its
    nearest edge's, scaled by the formula's ratio, outside it.
    """

    def seconds(batch: Batch) -> float:
        point = [0.0, 0.0, 0.0, 0.0]
        if axes is not OF_DECODE:
            pairs = batch.prefill_query_key_pairs
            point[OF_PREFILL] = equivalent_chunk(batch.num_prefill_tokens, pairs)
        if axes is not OF_PREFILL:
            point[OF_DECODE] = batch.num_decodes, batch.decode_kv_tokens / batch.num_decodes
        edge = list(point)
        edge[axes] = grid.clamp(point[axes])
        time = grid.at(edge[axes])
        if edge == point or formula is None:
            return time
        seconds_of = formula.attention.uniform
        return time * seconds_of(point) / seconds_of(edge)

    return seconds


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
    prefill, decode, shapes = formula.prefill_attention, formula.decode_attention, []
    if len(prompts):
        of_prompts, shape = _ratios(prompts, ("num_prefills", "prefill_chunk"), formula)
        shapes.append(shape)

        def prefill(batch: Batch) -> float:
            sizes = equivalent_prompts(batch.num_prefill_tokens, batch.prefill_query_key_pairs)
            return formula.prefill_attention(batch) * of_prompts(*sizes)

    if len(decodes):
        of_decodes, shape = _ratios(decodes, DECODE, formula)
        shapes.append(shape)

        def decode(batch: Batch) -> float:
            context = batch.decode_kv_tokens / batch.num_decodes
            return formula.decode_attention(batch) * of_decodes(batch.num_decodes, context)

    return AttentionTable(prefill, decode, None, formula, shapes)


def _ratios(
    rows: pd.DataFrame, columns: tuple[str, str], formula: AnalyticOperations
) -> tuple[Callable[[float, float], float], Heads]:
    """Make the function of ratios of the nearest shape by number and size; and return the shape."""
    heads = formula.heads
    nearest, rows = nearest_shape(rows, SHAPE, partial(_distance, heads))
    shape = Heads(*nearest)
    spec = replace(formula.spec, **shape._asdict())
    of_shape = AnalyticOperations(spec, formula.hardware, formula.dtype_bytes).attention
    sizes = rows[[*PREFILL, *DECODE, "num_prefills"]].to_numpy(int).tolist()
    computed = [of_shape.uniform(size[:4], size[4]) for size in sizes]
    number, size = _sizes(rows, columns)
    grid, share = (
        RatioGrid(number, size, rows.seconds / computed),
        heads.num_kv_heads / shape.num_kv_heads,
    )
    return lambda number, size: grid.ratio(number * share, size), shape


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
