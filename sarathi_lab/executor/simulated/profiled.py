"""One layer's operations by measured tables, and by formula where these have no rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from typing import cast

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import ALL_REDUCES, AnalyticOperations
from sarathi_lab.executor.simulated.attention_tables import AttentionTable, attention_table
from sarathi_lab.executor.simulated.hardware import UNCERTAIN, none_as_nan
from sarathi_lab.executor.simulated.interpolation import (
    Curve,
    Floats,
    Grid,
    curve,
    full_grid,
    log_distance,
)
from sarathi_lab.executor.simulated.kernel_times import CallTimes
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
ANALYTIC = "use executor.cost_model=analytic"  # the remedy where tables lack what is run
PRODUCT_SHAPE = ["in_features", "out_features"]
Shape = tuple[float, ...]  # values of these
ProductFormula = Callable[[int, int, int], float]  # seconds by tokens, in_features, out_features


class ProfiledOperations:
    """One layer's operations by `tables`, and by `formula` where these have no rows."""

    def __init__(self, tables: OperationTables, formula: AnalyticOperations) -> None:
        self.tables = tables
        self._formula = formula
        self._curves: dict[Per, dict[str, Curve]] = defaultdict(dict)
        self._measured = set(tables.included)  # names that the formula must not add
        for layer, rows in tables.layers.values():
            seconds_of = curve(rows["size"], rows.seconds)
            self._add(layer.operation, layer.per, seconds_of)
            self._measured.update(layer.replaces)
        self._add_products()
        self._add_all_reduce()
        has_all = REMAINDER in tables.layers
        self.iteration_overhead = 0.0 if has_all else formula.iteration_overhead
        # Mean relative errors of held-out rows by kind, as stated with the tables.
        self.uncertainty = dict.fromkeys(UNCERTAIN, math.nan)
        stated = tables.meta.get("uncertainty")
        if stated:
            self.uncertainty = {**formula.uncertainty, **none_as_nan(stated)}
        self._attention = self._table_of_attention()
        self._in_one_call = formula.hardware.hybrid_call
        if self._in_one_call is None and self._attention is not None:
            self._in_one_call = self._attention.both is not None

    def _table_of_attention(self) -> AttentionTable | None:
        """Make the table of attention, None without one of the kernel and the cache of this run."""
        rows = self.tables.frames.get("attention")
        formula = self._formula
        is_measured = formula.hardware.kernel is None and formula.spec.kv_dtype == "auto"
        if rows is None or not is_measured:
            return None
        seconds = rows[TIME] * MICROSECOND / self.tables.num_layers
        return attention_table(rows.assign(seconds=seconds), formula)

    @property
    def caution(self) -> str:
        """Source of the times, and which come from another shape or from no table."""
        computed = [*self._computed("layer", 1), *self._computed("emit", 1)]
        caution = f"operation times are of {self.tables.source}"
        if self._attention is None:
            computed.append("attention")
        elif self._attention.shapes:
            shapes = self._attention.shapes
            nearest = {f"{shape.num_heads}/{shape.num_kv_heads}" for shape in shapes}
            heads = " and ".join(sorted(nearest))
            caution += f"; attention by that of {heads} query/KV heads, by formula between its rows"
        if computed:
            caution += f"; by formula, as no table has them: {', '.join(computed)}"
        return f"{caution}; past a table's edge the edge is scaled by the formula"

    def times(self, per: Per, number: int) -> Mapping[str, float]:
        """Compute the seconds of operations `per` layer or iteration over `number` tokens, or per
        emitted token: by the curves, and by formula what no row contains.
        """
        times = self._computed(per, number)
        for name, seconds_of in self._curves[per].items():
            times[name] = seconds_of(number) if number else 0.0
        return times

    def _computed(self, per: Per, number: int) -> dict[str, float]:
        times = self._formula.times(per, number)
        return {name: times[name] for name in times if name not in self._measured}

    def attention_times(self, batch: Batch) -> CallTimes:
        """Compute the seconds of prefills and of decodes; in one call, decodes count as what they
        add to the prefills.
        """
        if self._attention is None:
            return self._formula.attention_times(batch)
        return self._attention.times(batch, bool(self._in_one_call))

    def _add(
        self,
        name: str,
        per: Per,
        time: Curve,
    ) -> None:
        self._curves[per][name] = time
        self._measured.add(name)

    def _add_products(self) -> None:
        """Add products by shape, where no layer of a table has them."""
        formula = self._formula
        spec = formula.spec
        products = product_table(self.tables, formula.dtype_bytes, formula.product_time)
        self._add_product("emit", products, spec.lm_head)
        if spec.stored is not None and spec.stored.of == "layers":
            # The output head is as the rest of the model, products of layers have 8 bits.
            fp8_bytes = DTYPE_SIZES["fp8"]
            products = product_table(self.tables, fp8_bytes, formula.layer_product_time)
        for linear in spec.layer_linears:
            self._add_product("layer", products, linear)

    def _add_product(
        self,
        per: Per,
        products: ProductTable | None,
        linear: Linear,
    ) -> None:
        if products is None or linear.name in self._measured:
            return
        rows, columns = self._formula.shard_shape(linear)
        measured = products.curve(rows, columns)

        def seconds(num_tokens: int) -> float:
            # The measured time has the conversion, which the kernel before may include.
            return measured(num_tokens) - self._formula.fused_time(num_tokens, linear)

        self._add(linear.name, per, seconds)

    def _add_all_reduce(self) -> None:
        """Add all-reduces of the hidden states, if a table has this number of devices."""
        formula = self._formula
        rows = self.tables.frames.get("communication")
        if rows is None:
            return
        is_all_reduce = rows.operation == "all_reduce"
        has_degree = rows.devices == formula.parallel.tensor
        calls = rows[is_all_reduce & has_degree].sort_values("bytes")
        if calls.empty:
            return
        seconds_of_bytes = curve(calls.bytes, calls[TIME] * MICROSECOND)
        token_bytes = formula.spec.hidden_size * formula.dtype_bytes

        def seconds(num_tokens: int) -> float:
            return ALL_REDUCES * seconds_of_bytes(num_tokens * token_bytes)

        self._add("all_reduce", "layer", seconds)


def product_table(
    tables: OperationTables, dtype_bytes: int, formula: ProductFormula
) -> ProductTable | None:
    """Make the table of products in elements of `dtype_bytes`, if there are rows."""
    rows = tables.frames.get("products")
    if rows is None:
        return None
    sizes = rows.dtype.map(DTYPE_SIZES.get)
    products = rows[sizes == dtype_bytes]
    if products.empty:
        return None
    seconds = products[TIME] * MICROSECOND
    return ProductTable(products.assign(seconds=seconds), formula)


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
        self.rows: dict[Shape, tuple[Floats, Floats]] = {}
        for key, group in rows.sort_values("tokens").groupby(PRODUCT_SHAPE):
            tokens = group.tokens.to_numpy(float)
            self.rows[cast(Shape, key)] = (tokens, group.seconds.to_numpy(float))
        shapes = rows[PRODUCT_SHAPE].drop_duplicates()
        grid = full_grid(shapes, PRODUCT_SHAPE)
        axes = [sorted(set(grid[column].tolist())) for column in PRODUCT_SHAPE]
        # Else there are only shapes.
        self._is_grid = all(len(axis) > 1 for axis in axes)
        self._shapes = list(product(*axes))
        self._grid = Grid(axes)
        self._logs = Grid([np.log(axis).tolist() for axis in axes])

    def curve(self, in_features: int, out_features: int) -> Curve:
        """Make the function of one shape's seconds by tokens."""
        shape = (in_features, out_features)
        near = self._nearest(shape)
        shares: dict[Shape, float] = {near: 1.0}
        if near not in self.rows:
            corners = self._logs.corners([math.log(size) for size in near])
            shares = {self._shapes[offset]: share for offset, share in corners}

        @cache
        def time(tokens: int) -> float:
            log_seconds = 0.0
            for corner, share in shares.items():
                log_seconds += share * math.log(self._at(tokens, corner))
            seconds = math.exp(log_seconds)
            if near == shape:
                return seconds
            return seconds * self._computed(tokens, shape) / self._computed(tokens, near)

        return time

    def _nearest(self, shape: Shape) -> Shape:
        """Return `shape` if it has rows or is within the grid, else the nearest that is."""
        if shape in self.rows:
            return shape
        edge = tuple(self._grid.clamp(shape))
        if edge != shape and not self._is_grid:
            return min(self.rows, key=partial(log_distance, shape))
        return edge

    def _computed(self, tokens: int, shape: Shape) -> float:
        in_features, out_features = shape
        return self._formula(tokens, int(in_features), int(out_features))

    def _at(self, tokens: int, shape: Shape) -> float:
        """Compute the seconds of a shape of the table."""
        sizes, seconds = self.rows[shape]
        smallest = int(sizes[0])
        largest = int(sizes[-1])
        inside = min(max(tokens, smallest), largest)
        seconds_inside = float(np.interp(inside, sizes, seconds))
        if inside == tokens:
            return seconds_inside
        computed = self._computed(tokens, shape)
        computed_inside = self._computed(inside, shape)
        return seconds_inside * computed / computed_inside


def tables_for(formula: AnalyticOperations, level: str = "profiled") -> OperationTables:
    """Read the tables of the formula's hardware. Raises UserError without tables of the model, its
    cache, elements or tensor-parallel degree.
    """
    spec = formula.spec
    hardware = formula.hardware
    setting = f"executor.cost_model={level}"
    _require_tabled_layers(formula, setting)
    if hardware.tables is None:
        raise UserError(
            f"{setting}: hardware {hardware.name} names no operation tables; name a folder by "
            f"hardware.tables, measure one on the device with task=calibrate, or {ANALYTIC}"
        )
    tables = read_tables(hardware.tables, model=spec.name, tensor=formula.parallel.tensor)
    if tables.dtype_bytes not in (None, formula.dtype_bytes):
        raise UserError(
            f"{tables.source} was measured with elements of {tables.dtype_bytes} bytes, not of "
            f"{formula.dtype_bytes}; use other tables, or another dtype"
        )
    if tables.is_model_specific:
        _require_measured_model(tables, formula, setting)
    return tables


def _require_tabled_layers(formula: AnalyticOperations, setting: str) -> None:
    """Raise UserError for a model with layers, or weights, that no table has."""
    spec = formula.spec
    hardware = formula.hardware
    if spec.layers != ALIKE:
        raise UserError(
            f"{setting} has no tables of the {spec.layers.description} of model {spec.name}, which "
            f"analytic has figures of; {ANALYTIC}"
        )
    stored = spec.stored
    if stored is None or stored.of == "experts":
        return
    # Without products of 8 bits a card computes such weights in 16, by kernels without a table.
    has_fp8_products = hardware.fp8_flops_per_second is not None
    has_table = stored.of == "layers" and stored.product_type == "fp8" and has_fp8_products
    if not has_table:
        raise UserError(
            f"{setting} has tables of weights in 16 bits, and in fp8 on cards with such products; "
            f"model {spec.name} has {stored.name} on {hardware.name}; {ANALYTIC}"
        )


def _require_measured_model(
    tables: OperationTables, formula: AnalyticOperations, setting: str
) -> None:
    """Raise UserError where tables of one model were measured with another one, with another cache
    or with another number of devices.
    """
    spec = formula.spec
    tensor = formula.parallel.tensor
    if tables.is_of(spec) and tables.tensor == tensor and spec.kv_dtype == "auto":
        return
    model = tables.meta.get("model", "that no meta.yaml names")
    raise UserError(
        f"{setting}: {tables.source} was measured with model {model}, "
        f"executor.tensor_parallel={tables.tensor} and cache.dtype=auto, not with model "
        f"{spec.name}, {tensor} and cache.dtype={spec.kv_dtype}; {ANALYTIC}, or tables of these"
    )
