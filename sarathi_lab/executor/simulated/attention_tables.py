"""One layer's attention by measured tables: of the model's shape, or of the nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.interpolation import (
    Costs,
    Grid,
    RatioGrid,
    costs_error,
    make_grid,
)
from sarathi_lab.executor.tables import SHAPE

PREFILL, DECODE = ("prefill_chunk", "kv_prefill"), ("n_decode", "kv_decode")
OF_PREFILL, OF_DECODE, OF_BOTH = slice(0, 2), slice(2, 4), slice(0, 4)  # of a point, as below
# Weights of a distance between shapes, in doublings of KV heads: of query heads per KV head, of the
# head size, of having a single KV head, for which kernels are different.
GROUP_WEIGHT, HEAD_WEIGHT, SINGLE_WEIGHT = 10.0, 100.0, 4.0

# Seconds of equal chunks (tokens, cached tokens before each), equal decodes (number, context), and
# the number of chunks. A point is the first four.
Formula = Callable[..., float]


class AttentionTable:
    """Seconds of attention over a batch, through the `rows` (`tables.FILES`, with `seconds`).

    Rows on a full grid are interpolated linearly along its axes; a point outside takes the nearest
    edge's time, scaled by `formula`. Other rows get fitted `Costs`: fixed, per token, per causal
    query-key pair and per cached token of a prompt; per cached token, per mean context, per decode
    and fixed for decodes. These costs are also the formula if there is none.

    Chunks of different lengths and contexts count as one chunk of as many tokens and causal
    query-key pairs, or of as many pairs where no chunk is so short; decodes as equal ones of the
    mean context.
    """

    bases: Sequence[Heads] = ()

    def __init__(self, rows: pd.DataFrame, formula: Formula | None = None) -> None:
        prompts, decodes = rows[rows.n_decode == 0], rows[rows.prefill_chunk == 0]
        mixed = rows[(rows.n_decode > 0) & (rows.prefill_chunk > 0)]
        self._prompts = _Part(prompts, PREFILL, _prefill_features)
        self._decodes = _Part(decodes, DECODE, _decode_features)
        self._mixed = make_grid(mixed, (*PREFILL, *DECODE)) if len(mixed) else None
        self._formula: Formula = formula or self._fitted

    @property
    def has_mixed(self) -> bool:
        """Whether there are times of prompts and decodes in one call."""
        return self._mixed is not None

    @property
    def errors(self) -> dict[str, float]:
        """Mean relative errors of held-out rows."""
        errors = {"prefill_attention": self._prompts.error, "decode_attention": self._decodes.error}
        return errors | ({"mixed_attention": self._mixed.error} if self._mixed else {})

    def times(self, batch: Batch, in_one_call: bool) -> tuple[float, float]:
        """Compute the seconds of prompts and of decodes. `in_one_call` the second is what decodes
        add to the call over both; without rows of such calls, by the formula's ratio.
        """
        tokens, decodes = batch.num_prefill_tokens, batch.num_decodes
        context = batch.decode_kv_tokens / decodes if decodes else 0.0
        prefill = self._prefill(batch) if tokens else 0.0
        if not decodes:
            return prefill, 0.0
        if not (tokens and in_one_call):
            return prefill, self._decode(decodes, context)
        chunk, before = equivalent_chunk(tokens, batch.prefill_query_key_pairs)
        if self._mixed is not None:
            both = self._on(self._mixed, OF_BOTH, (chunk, before, decodes, context))
        else:
            separate = self._formula(chunk, before, 0, 0, 1)
            separate += self._formula(0, 0, decodes, context, 1)
            slowdown = self._formula(chunk, before, decodes, context, 1) / separate
            both = (prefill + self._decode(decodes, context)) * slowdown
        return min(prefill, both), max(0.0, both - prefill)

    def _prefill(self, batch: Batch) -> float:
        tokens, pairs = batch.num_prefill_tokens, batch.prefill_query_key_pairs
        if self._prompts.grid is not None:
            point = (*equivalent_chunk(tokens, pairs), 0.0, 0.0)
            return self._on(self._prompts.grid, OF_PREFILL, point)
        return self._prompts.costs.time(tokens, 1.0, tokens, pairs, batch.prefill_kv_tokens)

    def _decode(self, decodes: int, context: float) -> float:
        if self._decodes.grid is None:
            return self._decodes.fitted(decodes, context)
        return self._on(self._decodes.grid, OF_DECODE, (0.0, 0.0, decodes, context))

    def _on(self, grid: Grid, axes: slice, point: tuple[float, ...]) -> float:
        """Compute the seconds at `point`, whose coordinates `axes` the grid has: interpolated, or
        of the nearest edge, scaled by the formula's ratio of the two.
        """
        edge = list(point)
        edge[axes] = grid.clamp(point[axes])
        seconds = grid.at(edge[axes])
        if edge == list(point):
            return seconds
        return seconds * self._formula(*point, 1) / self._formula(*edge, 1)

    def _fitted(
        self, chunk: float, before: float, decodes: float, context: float, num_chunks: int
    ) -> float:
        prefill = self._prompts.fitted(chunk, before) if chunk else 0.0
        return prefill + (self._decodes.fitted(decodes, context) if decodes else 0.0)


class _Part:
    """Rows of two columns: their grid, if they have one, and the costs fitted to all of them."""

    def __init__(
        self, rows: pd.DataFrame, columns: tuple[str, str], features: Callable[..., tuple[Any, ...]]
    ) -> None:
        rows = rows.sort_values(list(columns))
        self._features = features
        sizes = [rows[column].to_numpy(float) for column in columns]
        broadcast = np.broadcast_arrays(*features(*sizes))
        self._table = np.stack(broadcast, axis=-1), sizes[0], rows.seconds.to_numpy(float)
        self.costs = Costs(*self._table)
        self.grid = make_grid(rows, columns)

    @property
    def error(self) -> float:
        return self.grid.error if self.grid else costs_error(*self._table)

    def fitted(self, size: float, cached: float) -> float:
        return self.costs.time(size, *self._features(size, cached))


def _prefill_features(tokens: Any, before: Any) -> tuple[Any, ...]:
    """Features of prefills, arrays or numbers: one, tokens, query-key pairs, cached tokens read."""
    return 1.0, tokens, tokens * before + tokens * (tokens + 1) / 2, before + tokens


def _decode_features(decodes: Any, context: Any) -> tuple[Any, ...]:
    """Features of decodes, arrays or numbers: cached tokens read, their mean, decodes, and one.

    Where all decodes of a table have the same context, the part that does not grow with their
    number counts as the latency of walking along it, as launches overlap earlier operations.
    """
    return decodes * context, context, decodes, 1.0


class Heads(NamedTuple):
    """Query heads, KV heads and head size, on one device."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def distance(self, other: Heads) -> float:
        """Compute how far times of `other` are from this shape's, in doublings of KV heads."""
        group, other_group = (heads.num_heads / heads.num_kv_heads for heads in (self, other))
        return (
            abs(math.log2(self.num_kv_heads / other.num_kv_heads))
            + SINGLE_WEIGHT * ((self.num_kv_heads == 1) != (other.num_kv_heads == 1))
            + GROUP_WEIGHT * abs(math.log2(group / other_group))
            + HEAD_WEIGHT * abs(math.log2(self.head_size / other.head_size))
        )


class ShapedAttention:
    """Seconds of attention over a batch by tables of several shapes (`rows` with the columns
    `SHAPE`), none of which may be the model's: `formula` times the ratio of measured to computed
    seconds, of prompts without a context by number and length, of decodes by number and context.

    The ratios are those of the nearest shape, first in head size, then in query heads per KV head.
    A batch with other KV heads counts as proportionally more or fewer sequences: a call's work is
    sequences times KV heads. Prompts of different lengths count as equal ones of as many tokens and
    causal query-key pairs; chunks behind a context as one prompt of as many pairs.
    """

    has_mixed = False
    errors: Mapping[str, float] = {}

    def __init__(
        self,
        rows: pd.DataFrame,
        heads: Heads,
        formula: AnalyticOperations,
        formula_of: Callable[[Heads], Formula],
    ) -> None:
        self._formula = formula
        if "num_prefills" not in rows:
            rows = rows.assign(num_prefills=1)
        prompts = rows[(rows.prefill_chunk > 0) & (rows.kv_prefill == 0) & (rows.n_decode == 0)]
        decodes = rows[rows.prefill_chunk == 0]
        self._prompts = self._decodes = None
        if len(prompts):
            columns = ("num_prefills", "prefill_chunk")
            self._prompts = _NearestRatios(
                prompts, columns, heads, formula_of, lambda number, size: (size, 0, 0, 0, number)
            )
        if len(decodes):
            self._decodes = _NearestRatios(
                decodes, DECODE, heads, formula_of, lambda number, size: (0, 0, number, size, 0)
            )

    @property
    def bases(self) -> list[Heads]:
        """Shapes of the rows in use, of prompts and of decodes."""
        return [part.base for part in (self._prompts, self._decodes) if part is not None]

    def times(self, batch: Batch, in_one_call: bool) -> tuple[float, float]:
        """Compute the seconds of prompts and of decodes. `in_one_call` the second is what decodes
        add to the call over both, which is slower than two by the formula's ratio.
        """
        computed = self._formula.separate_attention(batch)
        prefill, decode = computed
        tokens, decodes = batch.num_prefill_tokens, batch.num_decodes
        if tokens and self._prompts is not None:
            prefill *= self._prompts.ratio(
                *equivalent_prompts(tokens, batch.prefill_query_key_pairs)
            )
        if decodes and self._decodes is not None:
            decode *= self._decodes.ratio(decodes, batch.decode_kv_tokens / decodes)
        if not (in_one_call and prefill and decode):
            return prefill, decode
        slowdown = self._formula.hybrid_attention(batch) / sum(computed)
        return prefill, max(0.0, slowdown * (prefill + decode) - prefill)


class _NearestRatios:
    """Ratios of measured to computed seconds of the nearest shape, by number and size."""

    def __init__(
        self,
        rows: pd.DataFrame,
        columns: tuple[str, str],
        heads: Heads,
        formula_of: Callable[[Heads], Formula],
        arguments: Callable[[int, int], tuple[int, ...]],
    ) -> None:
        shape = list(SHAPE)
        shapes = [Heads(*map(int, row)) for row in rows[shape].drop_duplicates().to_numpy()]
        self.base = min(shapes, key=heads.distance)
        self._share = heads.num_kv_heads / self.base.num_kv_heads
        rows = rows[(rows[shape] == list(self.base)).all(axis=1)]
        formula = formula_of(self.base)
        sizes = rows[list(columns)].to_numpy(int).tolist()
        computed = [formula(*arguments(*of)) for of in sizes]
        ratios = rows.assign(ratio=rows.seconds / computed)
        first, second = columns
        self._grid = RatioGrid(ratios.pivot_table(index=first, columns=second, values="ratio"))

    def ratio(self, number: float, size: float) -> float:
        return self._grid.ratio(number * self._share, size)


def uniform_batch(
    chunk: float, before: float, decodes: float, context: float, num_chunks: int = 1
) -> Batch:
    """Make a batch of equal chunks; equal decodes exist only in its sums."""
    tokens, start = round(chunk), round(before)
    batch = make_batch(prefill_tokens=tokens, start=start, num_prefills=num_chunks)
    batch.num_decode_tokens, batch.decode_kv_tokens = round(decodes), round(decodes * context)
    return batch


def equivalent_chunk(tokens: int, pairs: int) -> tuple[float, float]:
    """Compute the chunk (tokens, cached tokens before it) of as many tokens and causal query-key
    pairs; if whole prompts are shorter than that, the prompt of as many pairs.
    """
    before = pairs / tokens - (tokens + 1) / 2
    if before >= 0:
        return tokens, before
    return _prompt_of(pairs), 0.0


def equivalent_prompts(tokens: int, pairs: int) -> tuple[float, float]:
    """Compute number and length of equal prompts of as many tokens and causal query-key pairs; if
    these would be longer than the tokens (they have a context), of one prompt of as many pairs.
    """
    length = 2 * pairs / tokens - 1
    if length <= tokens:
        return tokens / length, length
    return 1.0, _prompt_of(pairs)


def _prompt_of(pairs: int) -> float:
    """Compute the length of a prompt of as many causal query-key pairs."""
    return (math.sqrt(1 + 8 * pairs) - 1) / 2
