"""One layer's operations as tables have them measured on a GPU: no formula, nothing between.

A size that no row has takes the time of a measured one at most `REACH` away, products a straight
line between two rows at most that, or `PRODUCT_STEP` tokens, apart. Further away there is no time:
NaN. Operations without rows are left out and named, all of which stream; a layer's products and its
attention must be there, and without an output head an iteration that emits has no time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import get_args

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations, prefills
from sarathi_lab.executor.simulated.experts import seconds_of_experts
from sarathi_lab.executor.simulated.interpolation import Curve, Floats, RatioInterpolation
from sarathi_lab.executor.simulated.kernel_times import CallTimes
from sarathi_lab.executor.tables import (
    MICROSECOND,
    TIME,
    Layer,
    OperationTables,
    Per,
    rows_of_heads,
)
from sarathi_lab.model.spec import ModelSpec

REACH = 1 / 16  # share of a measured size by which another may differ from it
PRODUCT_STEP = 16  # tokens between two rows of a product that a straight line may join
# Repeats of one session have a temperature and a clock, which the bends between rows do not show.
LEAST_NOISE = 0.01
ROUTER = "router"  # of experts: a small product, of which no table here has rows
# Sizes of a call: equal chunks, of which a row of decodes has one without tokens, and decodes.
POINT = ("num_prefills", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
NO_PROMPTS = (1.0, 0.0, 0.0)
NO_DECODES = (0.0, 0.0)
OUTPUT_HEAD = "lm_head"  # a product too large to leave out of an iteration that emits


class MeasuredKernels:
    """One layer's operations by `tables` at measured sizes; `formula` has the model's shapes.

    Raises UserError for tables that lack one of a layer's products or its attention.
    """

    iteration_overhead = 0.0

    def __init__(self, tables: OperationTables, formula: AnalyticOperations) -> None:
        self.tables = tables
        self._formula = formula
        self._in_one_call = formula.hardware.hybrid_call
        self._times_of: dict[Per, dict[str, Curve]] = {}
        self._covered = set(tables.included)
        for layer, rows in tables.layers.values():
            self._add(layer, rows)
        self._attention = AttentionRows(tables, formula)
        self._require_layer()
        noise = self._noise_of_products()
        # A size may differ by `REACH`, and so may the time of attention, which grows with it.
        self.uncertainty = {"matmul": noise, "attention": REACH, "experts": noise}

    def _require_layer(self) -> None:
        """Raise UserError for a product or attention without rows."""
        spec = self._formula.spec
        products = {linear.name for linear in spec.layer_linears} - {ROUTER}
        missing = [name for name in self._absent() if name in products]
        if self._attention.seconds.size == 0:
            missing.append("attention")
        if missing:
            raise UserError(
                f"{self.tables.source} has no measured {missing[0]} of model {spec.name}, and "
                "executor.cost_model=measured_kernels takes none by formula; use "
                "executor.cost_model=profiled"
            )

    def _add(self, layer: Layer, rows: pd.DataFrame) -> None:
        sizes = rows["size"].to_numpy(float)
        seconds = rows.seconds.to_numpy(float)
        time = cache(partial(_between, sizes, seconds))
        self._times_of.setdefault(layer.per, {})[layer.operation] = time
        self._covered.update((layer.operation, *layer.replaces))

    def _noise_of_products(self) -> float:
        """Return the mean relative error of a product's row; NaN where no rows are near each other.

        The median bend of the tables' own rows is 1.03 times the mean of normal errors. It also has
        what kernels of neighbouring sizes differ by, so that it is rather too large.
        """
        names = {linear.name for linear in self._formula.spec.layer_linears}
        bends_of_rows: list[float] = []
        for layer, rows in self.tables.layers.values():
            if layer.operation in names:
                bends_of_rows.extend(
                    bends(rows["size"].to_numpy(float), rows.seconds.to_numpy(float))
                )
        if not bends_of_rows:
            return math.nan
        return max(LEAST_NOISE, float(np.median(np.abs(bends_of_rows))))

    def _absent(self) -> list[str]:
        """List the operations of the formula that no row has."""
        names: list[str] = []
        for per in get_args(Per):
            names += self._formula.times(per, 1)
        return [name for name in dict.fromkeys(names) if name not in self._covered]

    @property
    def caution(self) -> str:
        """Source of the times, and what is left out."""
        caution = (
            f"values are {self.tables.origin}; sizes that were not measured take those within "
            f"{REACH:.1%}, else there is no value"
        )
        absent = self._absent()
        if absent:
            caution += f"; left out, as no table has them: {', '.join(absent)}"
        return caution

    def times(self, per: Per, number: int) -> Mapping[str, float]:
        """Return the seconds of operations `per` layer or iteration over `number` tokens, or per
        emitted token; NaN where they were not measured.
        """
        functions = self._times_of.get(per, {})
        if number == 0:
            return dict.fromkeys(functions, 0.0)
        times = {name: seconds_of(number) for name, seconds_of in functions.items()}
        if per == "emit" and OUTPUT_HEAD not in self._covered:
            times[OUTPUT_HEAD] = math.nan
        return times

    def attention_times(self, batch: Batch) -> CallTimes:
        """Return the seconds of prefills and of decodes; in one call, decodes count as what they
        add to the prefills.
        """
        seconds_of = self._attention.at
        prompts = equal_prompts(batch)
        prefill = 0.0
        if batch.num_prefills:
            prefill = seconds_of((*prompts, *NO_DECODES))
        if batch.num_decodes == 0:
            return prefill, 0.0
        decodes = (batch.num_decodes, batch.decode_kv_tokens / batch.num_decodes)
        if self._in_one_call and batch.num_prefills:
            return prefill, seconds_of((*prompts, *decodes)) - prefill
        return prefill, seconds_of((*NO_PROMPTS, *decodes))


def equal_prompts(batch: Batch) -> tuple[float, float, float]:
    """Return number, tokens and context of a batch's chunks; NaN where they are not alike, of which
    no table has calls.
    """
    chunks = set(prefills(batch))
    if not chunks:
        return NO_PROMPTS
    if len(chunks) > 1:
        return math.nan, math.nan, math.nan
    start, tokens = chunks.pop()
    return batch.num_prefills, tokens, start


class AttentionRows:
    """Measured calls of the model's heads, all of them where tables are of one model.

    Attributes:
        sizes: Of the rows [rows, those of `POINT`].
        scales: What a difference in each is a share of, of the same shape.
        seconds: Of the rows [rows].
    """

    def __init__(self, tables: OperationTables, formula: AnalyticOperations) -> None:
        no_rows = pd.DataFrame(columns=[*POINT, TIME])
        rows = tables.frames.get("attention", no_rows)
        rows = rows_of_heads(rows, formula.heads)
        sizes = rows.reindex(columns=list(POINT), fill_value=1)
        # A call of decodes has no prompt, whatever its row says of their number.
        sizes["num_prefills"] = sizes.num_prefills.where(sizes.prefill_chunk > 0, 1)
        # A context counts with the chunk's own tokens, which attend to each other as well.
        scales = sizes.assign(kv_prefill=sizes.kv_prefill + sizes.prefill_chunk)
        seconds = rows[TIME] * MICROSECOND / tables.num_layers
        self.sizes = sizes.to_numpy(float)
        self.scales = scales.to_numpy(float)
        self.seconds = seconds.to_numpy(float)

    def at(self, sizes: tuple[float, ...]) -> float:
        """Return the seconds of the row that is nearest in the size that differs most, NaN if that
        is not within `REACH`.
        """
        differences = np.abs(self.sizes - np.array(sizes))
        # NaN, of chunks that are not alike, is within nothing.
        is_near = (differences <= REACH * self.scales).all(axis=1)
        near = np.flatnonzero(is_near)
        if near.size == 0:
            return math.nan
        shares = differences[near] / np.maximum(self.scales[near], 1.0)
        most_different = shares.max(axis=1)
        nearest = near[most_different.argmin()]
        return float(self.seconds[nearest])


class MeasuredExperts:
    """Seconds of one layer's experts by the rows of `moe.csv`, between tokens and experts read a
    factor of two apart; NaN past the rows.

    Choices are random, so the number of experts read is the mean over such choices. Raises
    UserError for tables without rows of this model.
    """

    def __init__(self, tables: OperationTables, spec: ModelSpec) -> None:
        rows = tables.frames.get("moe")
        if rows is None:
            raise UserError(
                f"{tables.source} has no measured experts of model {spec.name}; use "
                "executor.cost_model=profiled"
            )
        self._spec = spec
        self._most_pairs = int(rows.tokens.max()) * spec.experts_per_token
        pairs = rows.tokens * spec.experts_per_token
        seconds = rows[TIME] * MICROSECOND
        # Of one, in place of a formula: the grid then interpolates the seconds themselves.
        self._seconds_of = RatioInterpolation(
            pairs / rows.activated_experts, rows.activated_experts, seconds
        )
        self.seconds = seconds_of_experts(spec, self._time)

    @property
    def caution(self) -> str:
        """How the number of experts is known, which no run recorded."""
        return f"experts are those of {self._spec.name}, each chosen at random"

    def _time(self, pairs: float, chosen: float) -> float:
        if pairs > self._most_pairs:
            return math.nan
        return self._seconds_of.ratio(pairs / chosen, chosen)


def bends(sizes: Floats, seconds: Floats) -> Floats:
    """Return by what share each row is off the straight line between its neighbours, where these
    are so near that a line may join them to it; `sizes` ascend.
    """
    gaps = np.diff(sizes)
    before = gaps[:-1]
    after = gaps[1:]
    most = np.maximum(PRODUCT_STEP, REACH * sizes[1:-1])
    is_near = (before <= most) & (after <= most)
    weighted = seconds[:-2] * after + seconds[2:] * before
    on_line = weighted / (before + after)
    return (seconds[1:-1] / on_line - 1)[is_near]


def _between(sizes: Floats, seconds: Floats, size: int) -> float:
    """Return the seconds at `size` on the line between two near rows, NaN without such."""
    upper = int(np.searchsorted(sizes, size))
    if upper < len(sizes) and sizes[upper] == size:
        return float(seconds[upper])
    if upper in (0, len(sizes)):
        return math.nan
    gap = sizes[upper] - sizes[upper - 1]
    widest = max(PRODUCT_STEP, REACH * size)
    if gap > widest:
        return math.nan
    return float(np.interp(size, sizes, seconds))
