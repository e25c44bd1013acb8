"""One layer's operations by measured tables, and by formula where these have no rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import ALL_REDUCES, AnalyticOperations
from sarathi_lab.executor.simulated.attention_tables import AttentionTable, attention_table
from sarathi_lab.executor.simulated.hardware import UNCERTAIN, none_as_nan
from sarathi_lab.executor.simulated.interpolation import (
    Floats,
    curve,
    full_grid,
    interval,
    log_distance,
)
from sarathi_lab.executor.tables import (
    DTYPE_SIZES,
    MICROSECOND,
    TIME,
    OperationTables,
    Per,
    read_tables,
)
from sarathi_lab.model.layers import ALIKE, Linear

REMAINDER = "others"  # a layer of tables that contain all that an iteration costs
PRODUCT_SHAPE = ["in_features", "out_features"]
Curve = Callable[[int], float]
ProductFormula = Callable[[int, int, int], float]  # seconds by tokens, in_features, out_features


class ProfiledOperations:
    """One layer's operations by `tables`, and by `formula` where these have no rows."""

    def __init__(self, tables: OperationTables, formula: AnalyticOperations) -> None:
        self.tables = tables
        self._formula = formula
        self._curves: dict[Per, dict[str, Curve]] = defaultdict(dict)
        self._measured = set(tables.included)  # names that the formula must not add
        for layer, rows in tables.layers.values():
            self._add(layer.operation, layer.per, curve(rows["size"], rows.seconds))
            self._measured.update(layer.replaces)
        self._add_products()
        self._add_all_reduce()
        has_all = REMAINDER in tables.layers
        self.iteration_overhead = 0.0 if has_all else formula.iteration_overhead
        # Mean relative errors of held-out rows by kind, as stated with the tables.
        self.uncertainty: Mapping[str, float] = dict.fromkeys(UNCERTAIN, math.nan)
        stated = tables.meta.get("uncertainty")
        if stated:
            self.uncertainty = {**formula.uncertainty, **none_as_nan(stated)}
        self._attention: AttentionTable | None = None
        self._in_one_call = formula.hardware.hybrid_call
        attention = tables.frames.get("attention")
        is_measured = formula.hardware.kernel is None and formula.spec.kv_dtype == "auto"
        if attention is not None and is_measured:
            seconds = attention[TIME] * MICROSECOND / tables.num_layers
            self._attention = attention_table(attention.assign(seconds=seconds), formula)
            if self._in_one_call is None:
                self._in_one_call = self._attention.both is not None

    @property
    def caution(self) -> str:
        """Source of the times, and which come from another shape or from no table."""
        computed = [*self._computed("layer", 1), *self._computed("emit", 1)]
        sources = [f"operation times are of {self.tables.source}"]
        if self._attention is None:
            computed.append("attention")
        elif self._attention.shapes:
            nearest = {
                f"{shape.num_heads}/{shape.num_kv_heads}" for shape in self._attention.shapes
            }
            heads = " and ".join(sorted(nearest))
            sources.append(
                f"attention by that of {heads} query/KV heads, by formula between its rows"
            )
        if computed:
            sources.append(f"by formula, as no table has them: {', '.join(computed)}")
        sources.append("past a table's edge the edge is scaled by the formula")
        return "; ".join(sources)

    def times(self, per: Per, number: int) -> Mapping[str, float]:
        """Compute the seconds of operations `per` layer or iteration over `number` tokens, or per
        emitted token: by the curves, and by formula what no row contains.
        """
        times = self._computed(per, number)
        for name, time in self._curves[per].items():
            times[name] = time(number) if number else 0.0
        return times

    def _computed(self, per: Per, number: int) -> dict[str, float]:
        times = self._formula.times(per, number).items()
        return {name: time for name, time in times if name not in self._measured}

    def attention_times(self, batch: Batch) -> tuple[float, float]:
        """Compute the seconds of prefills and of decodes; in one call, decodes count as what they
        add to the prefills.
        """
        if self._attention is None:
            return self._formula.attention_times(batch)
        return self._attention.times(batch, bool(self._in_one_call))

    def _add(self, name: str, per: Per, time: Curve) -> None:
        self._curves[per][name] = time
        self._measured.add(name)

    def _add_products(self) -> None:
        """Add products by shape, where no layer of a table has them."""
        formula = self._formula
        spec = formula.spec
        table = product_table(self.tables, formula.dtype_bytes, formula.product_time)
        layer_table = table
        if spec.stored is not None and spec.stored.of == "layers":
            layer_table = product_table(self.tables, DTYPE_SIZES["fp8"], formula.layer_product_time)
        self._add_product("emit", table, spec.lm_head)
        for linear in spec.layer_linears:
            self._add_product("layer", layer_table, linear)

    def _add_product(self, per: Per, products: ProductTable | None, linear: Linear) -> None:
        if products is None or linear.name in self._measured:
            return
        measured = products.curve(*self._formula.shard_shape(linear))
        self._add(linear.name, per, partial(self._product_time, measured, linear))

    def _product_time(self, measured: Curve, linear: Linear, num_tokens: int) -> float:
        """Compute a product, whose `measured` time has the conversion that a kernel may include."""
        return measured(num_tokens) - self._formula.fused_time(num_tokens, linear)

    def _add_all_reduce(self) -> None:
        """Add all-reduces of the hidden states, if a table has this number of devices."""
        formula = self._formula
        rows = self.tables.frames.get("communication")
        if rows is None:
            return
        is_all_reduce = rows.operation == "all_reduce"
        calls = rows[is_all_reduce & (rows.devices == formula.parallel.tensor)]
        if calls.empty:
            return
        calls = calls.sort_values("bytes")
        by_bytes = curve(calls.bytes, calls[TIME] * MICROSECOND)
        token_bytes = formula.spec.hidden_size * formula.dtype_bytes
        self._add("all_reduce", "layer", lambda n: ALL_REDUCES * by_bytes(n * token_bytes))


def product_table(
    tables: OperationTables, dtype_bytes: int, formula: ProductFormula
) -> ProductTable | None:
    """Make the table of products in elements of `dtype_bytes`, if there are rows."""
    rows = tables.frames.get("products")
    if rows is None:
        return None
    products = rows[rows.dtype.map(DTYPE_SIZES.get) == dtype_bytes]
    if products.empty:
        return None
    return ProductTable(products.assign(seconds=products[TIME] * MICROSECOND), formula)


class ProductTable:
    """Seconds of products [tokens, in] x [in, out] through `rows` of one element type (columns
    tokens, in_features, out_features, seconds), by number of tokens.

    Times are linear in tokens, and their logarithms in those of in_features and out_features
    between the shapes of the table's grid. A shape outside takes the nearest one's time, as does a
    number of tokens, scaled by `formula`.
    """

    def __init__(self, rows: pd.DataFrame, formula: ProductFormula) -> None:
        self._formula = formula
        # Tokens and seconds by (in_features, out_features).
        self.rows: dict[tuple[int, ...], tuple[Floats, Floats]] = {}
        shape: Any
        for shape, group in rows.sort_values("tokens").groupby(PRODUCT_SHAPE):
            self.rows[shape] = (group.tokens.to_numpy(float), group.seconds.to_numpy(float))
        grid = full_grid(rows[PRODUCT_SHAPE].drop_duplicates(), PRODUCT_SHAPE)
        self._axes = [sorted(set(grid[column].astype(int))) for column in PRODUCT_SHAPE]

    def curve(self, in_features: int, out_features: int) -> Curve:
        """Make the function of one shape's seconds by tokens."""
        shape = (in_features, out_features)
        near = self._nearest(shape)
        corners = {near: 1.0} if near in self.rows else self._corners(near)

        @cache
        def time(tokens: int) -> float:
            log_seconds = 0.0
            for corner, share in corners.items():
                log_seconds += share * math.log(self._at(tokens, corner))
            seconds = math.exp(log_seconds)
            if near == shape:
                return seconds
            return seconds * self._formula(tokens, *shape) / self._formula(tokens, *near)

        return time

    def _nearest(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `shape` if it has rows or is within the grid, else the nearest that is."""
        if shape in self.rows:
            return shape
        clamped = []
        for size, axis in zip(shape, self._axes, strict=True):
            clamped.append(min(max(size, axis[0]), axis[-1]))
        edge = tuple(clamped)
        if edge != shape and min(map(len, self._axes)) < 2:  # no grid, only shapes
            return min(self.rows, key=partial(log_distance, shape))
        return edge

    def _corners(self, shape: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        """Find the grid's shapes around `shape`, which is within, and their logarithmic shares."""
        corners: dict[tuple[int, ...], float] = {(): 1.0}
        for axis, size in zip(self._axes, shape, strict=True):
            i, upper = interval([math.log(axis_size) for axis_size in axis], math.log(size))
            next_corners = {}
            for corner, share in corners.items():
                next_corners[*corner, axis[i]] = share * (1 - upper)
                if upper:
                    next_corners[*corner, axis[i + 1]] = share * upper
            corners = next_corners
        return corners

    def _at(self, tokens: int, shape: tuple[int, ...]) -> float:
        """Compute the seconds of a shape of the table."""
        sizes, seconds = self.rows[shape]
        inside = min(max(tokens, int(sizes[0])), int(sizes[-1]))
        time = float(np.interp(inside, sizes, seconds))
        if inside == tokens:
            return time
        return time * self._formula(tokens, *shape) / self._formula(inside, *shape)


def tables_for(formula: AnalyticOperations, level: str = "profiled") -> OperationTables:
    """Read the tables of the formula's hardware. Raises UserError without tables of the model, its
    cache, elements or tensor-parallel degree.
    """
    spec = formula.spec
    hardware = formula.hardware
    tensor = formula.parallel.tensor
    setting = f"executor.cost_model={level}"
    analytic = "use executor.cost_model=analytic"
    if spec.layers != ALIKE:
        raise UserError(
            f"{setting} has no tables of the {spec.layers.description} of model {spec.name}, which "
            f"analytic has figures of; {analytic}"
        )
    stored = spec.stored
    has_table = (
        stored is None
        or stored.of == "experts"
        or (stored.of == "layers" and hardware.for_products(stored) is not None)
    )
    if stored is not None and not has_table:
        raise UserError(
            f"{setting} has no tables of weights in {stored.name}, which model {spec.name} has; "
            f"{analytic}"
        )
    if hardware.tables is None:
        raise UserError(
            f"{setting}: hardware {hardware.name} names no operation tables; name a folder by "
            f"hardware.tables, measure one on the device with task=calibrate, or {analytic}"
        )
    tables = read_tables(hardware.tables, model=spec.name, tensor=tensor)
    if spec.kv_dtype != "auto" and tables.is_model_specific:
        raise UserError(
            f"{setting}: {tables.source} was measured with a cache in the model's type, not with "
            f"cache.dtype={spec.kv_dtype}; {analytic}, or cache.dtype=auto"
        )
    if tables.dtype_bytes not in (None, formula.dtype_bytes):
        raise UserError(
            f"{tables.source} was measured with elements of {tables.dtype_bytes} bytes, not of "
            f"{formula.dtype_bytes}; use other tables, or another dtype"
        )
    if tables.is_model_specific and not tables.is_of(spec):
        of = tables.meta.get("model")
        model = f"model {of}, not of {spec.name}" if of else "a model that no meta.yaml names"
        raise UserError(f"{tables.source} has times of {model}; {analytic}, or tables of it")
    if tables.is_model_specific and tables.tensor != tensor:
        raise UserError(
            f"{tables.source} was measured with tensor_parallel={tables.tensor}, not {tensor}; "
            f"{analytic}, or tables of it in a folder tp{tensor}"
        )
    return tables
