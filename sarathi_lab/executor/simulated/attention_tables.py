"""One layer's attention by the rows of a table: prompts, decodes, and both in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.interpolation import Costs, Grid, costs_error, grid_of

Floats = NDArray[np.float64]
PREFILL, DECODE = ("prefill_chunk", "kv_prefill"), ("n_decode", "kv_decode")
# Seconds of equal chunks (tokens, cached tokens before each) and decodes (number, tokens each), and
# of how many chunks.
Formula = Callable[[float, float, float, float, int], float]


class AttentionTable:
    """Seconds of attention over a batch, through the `rows` (`tables.FILES`, with `seconds`).

    Where the rows are a full grid they are interpolated linearly along its axes; a point outside
    takes the nearest edge's time, scaled by `formula`. Where they are not, costs are fitted to them
    (`Costs`): fixed, per token, per causal query-key pair and per cached token of a prompt; per
    cached token, per mean context, per decode and fixed of decodes. These costs are the formula,
    too, where there is none.

    Chunks of different lengths and contexts are taken for one chunk of as many tokens and causal
    query-key pairs, or of as many pairs where no chunk is so short; decodes for equal ones of the
    mean context.
    """

    def __init__(self, rows: pd.DataFrame, formula: Formula | None = None) -> None:
        prompts, decodes = rows[rows.n_decode == 0], rows[rows.prefill_chunk == 0]
        mixed = rows[(rows.n_decode > 0) & (rows.prefill_chunk > 0)]
        self._prompts = _Part(prompts, PREFILL, _prefill_features)
        self._decodes = _Part(decodes, DECODE, _decode_features)
        self._mixed = grid_of(mixed, (*PREFILL, *DECODE)) if len(mixed) else None
        self._formula = formula or self._fitted

    @property
    def has_mixed(self) -> bool:
        """Whether there are times of prompts and decodes in one call."""
        return self._mixed is not None

    @property
    def errors(self) -> dict[str, float]:
        """Mean relative error of rows left out."""
        errors = {"prefill_attention": self._prompts.error, "decode_attention": self._decodes.error}
        return errors | ({"mixed_attention": self._mixed.error} if self._mixed else {})

    def times(self, batch: Batch, in_one_call: bool) -> tuple[float, float]:
        """Seconds of prompts and of decodes. `in_one_call` the second is what decodes add to the
        call over both; where no row is of such calls, by the formula's ratio.
        """
        tokens, decodes = batch.num_prefill_tokens, batch.num_decodes
        context = batch.decode_kv_tokens / decodes if decodes else 0.0
        prefill = self._prefill(batch) if tokens else 0.0
        if not decodes:
            return prefill, 0.0
        if not tokens or not in_one_call:
            return prefill, self._decode(decodes, context)
        point = (*equivalent_chunk(tokens, batch.prefill_query_key_pairs), decodes, context)
        if self._mixed is not None:
            both = self._on(self._mixed, point)
        else:
            apart = self._at(point[:2], is_decode=False) + self._at(point[2:], is_decode=True)
            both = (prefill + self._decode(decodes, context)) * self._at(point, False) / apart
        return min(prefill, both), max(0.0, both - prefill)

    def _prefill(self, batch: Batch) -> float:
        tokens, pairs = batch.num_prefill_tokens, batch.prefill_query_key_pairs
        if self._prompts.grid is None:
            return self._prompts.costs.time(tokens, 1.0, tokens, pairs, batch.prefill_kv_tokens)
        return self._on(self._prompts.grid, equivalent_chunk(tokens, pairs))

    def _decode(self, decodes: int, context: float) -> float:
        if self._decodes.grid is None:
            return self._decodes.fitted(decodes, context)
        return self._on(self._decodes.grid, (decodes, context), is_decode=True)

    def _on(self, grid: Grid, point: tuple[float, ...], is_decode: bool = False) -> float:
        """Seconds at `point`, or at the nearest edge, scaled by the formula's ratio of the two."""
        edge = grid.inside(point)
        seconds = grid.time(edge)
        if edge == list(point):
            return seconds
        return seconds * self._at(point, is_decode) / self._at(edge, is_decode)

    def _at(self, point: Sequence[float], is_decode: bool) -> float:
        """By formula, where a point is of prompts alone, decodes alone, or both."""
        chunk, before, decodes, context = (
            point if len(point) == 4 else (0.0, 0.0, *point) if is_decode else (*point, 0.0, 0.0)
        )
        return self._formula(chunk, before, decodes, context, 1)

    def _fitted(
        self, chunk: float, before: float, decodes: float, context: float, num_chunks: int
    ) -> float:
        prefill = self._prompts.fitted(chunk, before) if chunk else 0.0
        return prefill + (self._decodes.fitted(decodes, context) if decodes else 0.0)


def sums_of(
    chunk: float, before: float, decodes: float, context: float, num_chunks: int = 1
) -> Batch:
    """What formulas read of a batch of equal chunks and equal decodes, these as sums alone."""
    tokens, start = round(chunk), round(before)
    batch = make_batch(prefill_tokens=tokens, start=start, num_prefills=num_chunks)
    batch.num_decode_tokens, batch.decode_kv_tokens = round(decodes), round(decodes * context)
    return batch


def equivalent_chunk(tokens: int, pairs: int) -> tuple[float, float]:
    """The chunk (tokens, cached tokens before it) of as many tokens and causal query-key pairs; if
    whole prompts are shorter than that, the prompt of as many pairs.
    """
    before = pairs / tokens - (tokens + 1) / 2
    if before >= 0:
        return tokens, before
    return (math.sqrt(1 + 8 * pairs) - 1) / 2, 0.0


class _Part:
    """Rows of two columns, on their grid if they have one, and the costs that are fitted to them
    all.
    """

    def __init__(
        self, rows: pd.DataFrame, columns: tuple[str, str], features: Callable[..., tuple[Any, ...]]
    ) -> None:
        rows = rows.sort_values(list(columns))
        self._features = features
        sizes = [rows[column].to_numpy(float) for column in columns]
        columns_of = np.broadcast_arrays(*features(*sizes))
        self._table = np.stack(columns_of, axis=-1), sizes[0], rows.seconds.to_numpy(float)
        self.costs = Costs(*self._table)
        self.grid = grid_of(rows, columns)

    @property
    def error(self) -> float:
        return self.grid.error if self.grid else costs_error(*self._table)

    def fitted(self, size: float, cached: float) -> float:
        return self.costs.time(size, *self._features(size, cached))


def _prefill_features(tokens: Any, before: Any) -> tuple[Any, ...]:
    """Of prefills, arrays or plain numbers: one, tokens, query-key pairs and cached tokens read."""
    return 1.0, tokens, tokens * before + tokens * (tokens + 1) / 2, before + tokens


def _decode_features(decodes: Any, context: Any) -> tuple[Any, ...]:
    """Of decodes, arrays or plain numbers: cached tokens read, their mean, decodes, and one.

    Where all decodes of a table see the same context, what does not grow with their number is taken
    for the latency of walking along it: launching overlaps with the operations before.
    """
    return decodes * context, context, decodes, 1.0
