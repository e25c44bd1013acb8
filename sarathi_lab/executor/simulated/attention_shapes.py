"""One layer's attention by tables of several shapes, none of which may be the model's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.attention_tables import Formula
from sarathi_lab.executor.simulated.interpolation import RatioGrid
from sarathi_lab.executor.tables import SHAPE

# Of a distance between shapes, in doublings of KV heads: of query heads a KV head, of a head, of
# having a single KV head, for which kernels take another way.
GROUP_WEIGHT, HEAD_WEIGHT, SINGLE_WEIGHT = 10.0, 100.0, 4.0


class Heads(NamedTuple):
    """Query heads, KV heads and entries of each, on one device."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def distance(self, other: Heads) -> float:
        """How far times of `other` are from this shape's, in doublings of the KV heads."""
        mine, its = (heads.num_heads / heads.num_kv_heads for heads in (self, other))
        return (
            abs(math.log2(self.num_kv_heads / other.num_kv_heads))
            + SINGLE_WEIGHT * ((self.num_kv_heads == 1) != (other.num_kv_heads == 1))
            + GROUP_WEIGHT * abs(math.log2(mine / its))
            + HEAD_WEIGHT * abs(math.log2(self.head_size / other.head_size))
        )


class ShapedAttention:
    """Seconds of attention over a batch: `formula` times the ratio of measured to computed seconds,
    of prompts without a context by their number and length, of decodes by number and context.

    The ratios are of the table's nearest shape, first in the size of a head, then in the heads of a
    KV head. A batch on other KV heads is taken for as many more or fewer sequences: a call works
    off sequences times KV heads. Prompts of different lengths are taken for equal ones of as many
    tokens and causal query-key pairs; chunks behind a context for one prompt of as many pairs.

    `formula_of` gives the formula of a shape, `rows` have the columns of `SHAPE`.
    """

    def __init__(
        self,
        rows: pd.DataFrame,
        own: Heads,
        formula: AnalyticOperations,
        formula_of: Callable[[Heads], Formula],
    ) -> None:
        self._formula = formula
        prompts = rows[(rows.prefill_chunk > 0) & (rows.kv_prefill == 0) & (rows.n_decode == 0)]
        decodes = rows[rows.prefill_chunk == 0]
        self.bases = {}
        if len(prompts):
            if "num_prefills" not in prompts:
                prompts = prompts.assign(num_prefills=1)
            base, near = _nearest(prompts, own)
            computed = formula_of(base)
            sizes = near[["prefill_chunk", "num_prefills"]].to_numpy(int).tolist()
            by_formula = [computed(chunk, 0, 0, 0, number) for chunk, number in sizes]
            self._prompts = _ratios(near, by_formula, "num_prefills", "prefill_chunk")
            self._prompt_share = own.num_kv_heads / base.num_kv_heads
            self.bases["prefill_attention"] = base
        if len(decodes):
            base, near = _nearest(decodes, own)
            computed = formula_of(base)
            sizes = near[["n_decode", "kv_decode"]].to_numpy(int).tolist()
            by_formula = [computed(0, 0, number, context, 0) for number, context in sizes]
            self._decodes = _ratios(near, by_formula, "n_decode", "kv_decode")
            self._decode_share = own.num_kv_heads / base.num_kv_heads
            self.bases["decode_attention"] = base

    def times(self, batch: Batch, in_one_call: bool) -> tuple[float, float]:
        """Seconds of prompts and of decodes. `in_one_call` the second is what decodes add to the
        call over both, which takes longer than two by as much as the formula says.
        """
        by_formula = self._formula.separate_attention(batch)
        prefill, decode = by_formula
        tokens, decodes = batch.num_prefill_tokens, batch.num_decodes
        if tokens and "prefill_attention" in self.bases:
            number, length = equivalent_prompts(tokens, batch.prefill_query_key_pairs)
            prefill *= self._prompts.ratio(number * self._prompt_share, length)
        if decodes and "decode_attention" in self.bases:
            context = batch.decode_kv_tokens / decodes
            decode *= self._decodes.ratio(decodes * self._decode_share, context)
        if not (in_one_call and prefill and decode):
            return prefill, decode
        longer = self._formula.hybrid_attention(batch) / sum(by_formula)
        return prefill, max(0.0, longer * (prefill + decode) - prefill)


def equivalent_prompts(tokens: int, pairs: int) -> tuple[float, float]:
    """How many equal prompts of what length have as many tokens and causal query-key pairs; if
    these would be longer than the tokens (they have a context), one of as many pairs.
    """
    length = 2 * pairs / tokens - 1
    if length <= tokens:
        return tokens / length, length
    return 1.0, (math.sqrt(1 + 8 * pairs) - 1) / 2


def _nearest(rows: pd.DataFrame, own: Heads) -> tuple[Heads, pd.DataFrame]:
    shapes = [Heads(*map(int, shape)) for shape in rows[list(SHAPE)].drop_duplicates().to_numpy()]
    base = min(shapes, key=own.distance)
    return base, rows[(rows[list(SHAPE)] == list(base)).all(axis=1)]


def _ratios(rows: pd.DataFrame, computed: list[float], first: str, second: str) -> RatioGrid:
    ratios = rows.assign(ratio=rows.seconds / computed)
    return RatioGrid(ratios.pivot_table(index=first, columns=second, values="ratio"))
