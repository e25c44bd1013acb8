"""One layer's operations by measured tables, and by formula where these have no rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import ALL_REDUCES, AnalyticOperations
from sarathi_lab.executor.simulated.attention_tables import (
    AttentionTable,
    Formula,
    Heads,
    ShapedAttention,
    uniform_batch,
)
from sarathi_lab.executor.simulated.hardware import ONE_DEVICE, Hardware, Parallel, none_as_nan
from sarathi_lab.executor.simulated.interpolation import (
    Floats,
    curve,
    curve_error,
    full_grid,
    log_distance,
    neighbours_error,
    place,
)
from sarathi_lab.executor.tables import (
    DTYPE_SIZES,
    MICROSECOND,
    SHAPE,
    TIME,
    OperationTables,
    read_tables,
)
from sarathi_lab.model.spec import ModelSpec

PRODUCTS = ("qkv_proj", "out_proj", "ffn", "ffn_up", "ffn_down", "products")
REMAINDER = "others"  # a layer of tables that contain all that an iteration costs
PRODUCT_SHAPE = ["in_features", "out_features"]
Curve = Callable[[int], float]
ProductFormula = Callable[[int, int, int], float]  # seconds by tokens, in_features, out_features


class ProfiledOperations:
    """Operations of `spec` by `tables`, and by formula where these have no rows; tables of shapes
    need `hardware`.
    """

    def __init__(
        self,
        tables: OperationTables,
        spec: ModelSpec,
        dtype_bytes: int = 2,
        hardware: Hardware | None = None,
        parallel: Parallel = ONE_DEVICE,
    ) -> None:
        self.tables = tables
        self._curves: dict[str, dict[str, Curve]] = {"layer": {}, "iteration": {}, "emit": {}}
        self._measured = set(tables.included)  # names that the formula must not add
        self.errors: dict[str, float] = {}  # by operation, of held-out rows
        self.iteration_overhead = 0.0
        self.products: ProductTable | None = None
        self._formula: AnalyticOperations | None = None
        for layer, rows in tables.layers.values():
            self._add(layer.operation, layer.per, curve(*_floats(rows)), layer.replaces)
            self.errors[layer.operation] = curve_error(*_floats(rows))
        if hardware is not None:
            self._formula = AnalyticOperations(spec, hardware, dtype_bytes, parallel)
            self._add_products(self._formula)
            self._add_all_reduce(self._formula)
            if REMAINDER not in tables.layers:
                self.iteration_overhead = self._formula.iteration_overhead
        self._attention = self._make_attention(spec)
        self._in_one_call = self._attention is not None and self._attention.has_mixed
        if hardware is not None and hardware.hybrid_call is not None:
            self._in_one_call = hardware.hybrid_call
        self.errors |= self._attention.errors if self._attention else {}

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """Mean relative error by kind of operation on held-out rows, as stated with the tables or
        computed from them.
        """
        known = dict(self._formula.uncertainty) if self._formula else {}
        if stated := self.tables.meta.get("uncertainty"):
            return known | none_as_nan(stated)
        products = [error for name, error in self.errors.items() if name in PRODUCTS]
        attention = [error for name, error in self.errors.items() if name.endswith("_attention")]
        return {
            "matmul": max(products, default=known.get("matmul", math.nan)),
            "attention": max(attention, default=known.get("attention", math.nan)),
        }

    @property
    def caution(self) -> str:
        """Source of the times, and which come from another shape or from no table."""
        formula = self._formula
        computed = [] if formula is None else [*formula.token_times(1), *formula.emit_times(1)]
        missing = [name for name in computed if name not in self._measured]
        parts = [f"operation times are of {self.tables.source}"]
        if self._attention is None:
            missing.append("attention")
        elif self._attention.bases:
            near = {f"{base.num_heads}/{base.num_kv_heads}" for base in self._attention.bases}
            parts.append(f"attention by that of {' and '.join(sorted(near))} query/KV heads")
        if missing:
            parts.append(f"by formula, as no table has them: {', '.join(missing)}")
        if formula is not None:
            parts.append("past a table's edge the edge is scaled by the formula")
        return "; ".join(parts)

    def token_times(self, num_tokens: int) -> Mapping[str, float]:
        formula = self._formula.token_times(num_tokens) if self._formula else {}
        return self._times("layer", num_tokens, formula)

    def once_times(self, num_tokens: int) -> Mapping[str, float]:
        formula = self._formula.once_times(num_tokens) if self._formula else {}
        return self._times("iteration", num_tokens, formula)

    def emit_times(self, num_emits: int) -> Mapping[str, float]:
        formula = self._formula.emit_times(num_emits) if self._formula else {}
        return self._times("emit", num_emits, formula)

    def attention_times(self, batch: Batch) -> tuple[float, float]:
        if self._attention is not None:
            return self._attention.times(batch, self._in_one_call)
        assert self._formula is not None, "tables without attention need hardware"
        return self._formula.attention_times(batch)

    def _times(self, per: str, number: int, formula: Mapping[str, float]) -> Mapping[str, float]:
        """Combine the curves with the formula's times of what no row contains."""
        kept = {name: time for name, time in formula.items() if name not in self._measured}
        return kept | {
            name: time(number) if number else 0.0 for name, time in self._curves[per].items()
        }

    def _add(self, name: str, per: str, time: Curve, replaces: Sequence[str] = ()) -> None:
        self._curves[per][name] = time
        self._measured.update((name, *replaces))

    def _add_products(self, formula: AnalyticOperations) -> None:
        """Add products by shape, where no layer of a table has them."""
        spec, shard_shape = formula.spec, formula.shard_shape
        table = self.products = self._products(formula.dtype_bytes, formula.product_time)
        if table and spec.lm_head.name not in self._measured:
            self._add(spec.lm_head.name, "emit", table.curve(*shard_shape(spec.lm_head)))
        if spec.weight_dtype == "fp8":
            table = self._products(DTYPE_SIZES["fp8"], formula.layer_product_time)
        if table:
            self.errors["products"] = table.error
            for linear in spec.layer_linears:
                if linear.name not in self._measured:
                    self._add(linear.name, "layer", table.curve(*shard_shape(linear)))

    def _products(self, dtype_bytes: int, formula: ProductFormula) -> ProductTable | None:
        """Make the table of products in elements of `dtype_bytes`, if there are rows."""
        rows = self.tables.frames.get("products")
        if rows is not None:
            rows = rows[rows.dtype.map(DTYPE_SIZES.get) == dtype_bytes]
        if rows is None or rows.empty:
            return None
        return ProductTable(rows.assign(seconds=rows[TIME] * MICROSECOND), formula)

    def _add_all_reduce(self, formula: AnalyticOperations) -> None:
        """Add all-reduces of the hidden states, if a table has this number of devices."""
        rows, tensor = self.tables.frames.get("communication"), formula.parallel.tensor
        if rows is None or tensor == 1:
            return
        rows = rows[(rows.operation == "all_reduce") & (rows.devices == tensor)]
        if rows.empty:
            return
        rows = rows.sort_values("bytes").assign(size=rows.bytes, seconds=rows[TIME] * MICROSECOND)
        by_bytes = curve(*_floats(rows))
        token_bytes = formula.spec.hidden_size * formula.dtype_bytes
        self._add("all_reduce", "layer", lambda n: ALL_REDUCES * by_bytes(n * token_bytes))
        self.errors["all_reduce"] = curve_error(*_floats(rows))

    def _make_attention(self, spec: ModelSpec) -> AttentionTable | ShapedAttention | None:
        """Choose the rows of the model's shape, if there are such with contexts or mixed
        batches, else those of the nearest.
        """
        rows, formula = self.tables.frames.get("attention"), self._formula
        if rows is None:
            return None
        rows = rows.assign(seconds=rows[TIME] * MICROSECOND / self.tables.num_layers)
        if formula is None or SHAPE[0] not in rows:
            return AttentionTable(rows, None if formula is None else _seconds_by(formula))
        degree = formula.parallel.tensor
        heads = Heads(spec.num_heads // degree, spec.num_kv_heads // degree, spec.head_size)
        same = rows[(rows[list(SHAPE)] == list(heads)).all(axis=1)]
        if (same.kv_prefill > 0).any():
            return AttentionTable(same, _seconds_by(formula))

        def formula_of(shape: Heads) -> Formula:
            on_shape = replace(spec, **shape._asdict())
            return _seconds_by(AnalyticOperations(on_shape, formula.hardware, formula.dtype_bytes))

        return ShapedAttention(rows, heads, formula, formula_of)


def _seconds_by(formula: AnalyticOperations) -> Formula:
    """Make the function of seconds of equal chunks and equal decodes."""

    def seconds(
        chunk: float, before: float, decodes: float, context: float, num_chunks: int
    ) -> float:
        batch = uniform_batch(chunk, before, decodes, context, num_chunks)
        if chunk and decodes:
            return formula.hybrid_attention(batch)
        return sum(formula.separate_attention(batch))

    return seconds


def _floats(rows: pd.DataFrame) -> tuple[Floats, Floats]:
    return rows["size"].to_numpy(float), rows["seconds"].to_numpy(float)


class ProductTable:
    """Seconds of products [tokens, in] x [in, out] through `rows` of one element type (columns
    tokens, in_features, out_features, seconds), by number of tokens.

    Times are linear in tokens, and their logarithms in those of in_features and out_features
    between the shapes of the table's grid. A shape outside takes the nearest one's time, as does a
    number of tokens, scaled by `formula`.
    """

    def __init__(self, rows: pd.DataFrame, formula: ProductFormula) -> None:
        self._formula = formula
        self._curves: dict[tuple[int, ...], tuple[Floats, Floats]] = {
            (int(group.in_features.iloc[0]), int(group.out_features.iloc[0])): (
                group.tokens.to_numpy(float),
                group.seconds.to_numpy(float),
            )
            for _, group in rows.sort_values("tokens").groupby(PRODUCT_SHAPE)
        }
        grid = full_grid(rows[PRODUCT_SHAPE].drop_duplicates(), PRODUCT_SHAPE)
        self._axes = [sorted(set(grid[column].astype(int))) for column in PRODUCT_SHAPE]
        self.error = neighbours_error(self._curves.values())

    def has(self, in_features: int, out_features: int) -> bool:
        """Whether the table has exactly this shape."""
        return (in_features, out_features) in self._curves

    def curve(self, in_features: int, out_features: int) -> Curve:
        """Make the function of one shape's seconds by tokens."""
        shape: tuple[int, ...] = (in_features, out_features)
        near = shape
        if not self.has(in_features, out_features):
            pairs = zip(shape, self._axes, strict=True)
            near = tuple(min(max(size, axis[0]), axis[-1]) for size, axis in pairs)
            if near != shape and min(map(len, self._axes)) < 2:
                near = min(self._curves, key=partial(log_distance, shape))
        corners = {near: 1.0} if near in self._curves else self._corners(near)

        @cache
        def time(tokens: int) -> float:
            logs = (share * math.log(self._at(tokens, corner)) for corner, share in corners.items())
            seconds = math.exp(sum(logs))
            if near == shape:
                return seconds
            return seconds * self._formula(tokens, *shape) / self._formula(tokens, *near)

        return time

    def _corners(self, shape: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        """Find the grid's shapes around `shape`, which is within, and their logarithmic shares."""
        shares = []
        for axis, size in zip(self._axes, shape, strict=True):
            i, upper = place([math.log(each) for each in axis], math.log(size))
            shares.append({axis[i]: 1 - upper} | ({axis[i + 1]: upper} if upper else {}))
        ins, outs = shares
        return {(i, o): a * b for i, a in ins.items() for o, b in outs.items()}

    def _at(self, tokens: int, shape: tuple[int, ...]) -> float:
        """Compute the seconds of a shape of the table."""
        sizes, seconds = self._curves[shape]
        inside = min(max(tokens, int(sizes[0])), int(sizes[-1]))
        time = float(np.interp(inside, sizes, seconds))
        if inside == tokens:
            return time
        return time * self._formula(tokens, *shape) / self._formula(inside, *shape)


def profiled_operations(
    spec: ModelSpec, hardware: Hardware, dtype_bytes: int, parallel: Parallel = ONE_DEVICE
) -> ProfiledOperations:
    """Make the operations of `spec` by the tables of `hardware`. Raises UserError without tables of
    the model, its cache, elements or tensor-parallel degree.
    """
    setting = "executor.cost_model=profiled"
    if spec.kv_dtype != "auto":
        raise UserError(
            f"{setting} applies to a cache in the model's type, in which it was measured, not "
            f"to cache.dtype={spec.kv_dtype}; use executor.cost_model=analytic, or "
            "cache.dtype=auto"
        )
    if hardware.tables is None:
        raise UserError(
            f"{setting}: hardware {hardware.name} names no operation tables; name a folder by "
            "hardware.tables, measure one on the device with task=calibrate, or use "
            "executor.cost_model=analytic"
        )
    tables = read_tables(hardware.tables, model=spec.name, tensor=parallel.tensor)
    if tables.dtype_bytes not in (None, dtype_bytes):
        raise UserError(
            f"{tables.source} was measured with elements of {tables.dtype_bytes} bytes, not of "
            f"{dtype_bytes}; use other tables, or another dtype"
        )
    if tables.is_model_specific:
        use = "use executor.cost_model=analytic, or tables of it"
        if not tables.is_of(spec):
            of = tables.meta.get("model")
            model = f"model {of}, not of {spec.name}" if of else "a model that no meta.yaml names"
            raise UserError(f"{tables.source} has times of {model}; {use}")
        if tables.tensor != parallel.tensor:
            raise UserError(
                f"{tables.source} was measured with tensor_parallel={tables.tensor}, not "
                f"{parallel.tensor}; {use} in a folder tp{parallel.tensor}"
            )
    return ProfiledOperations(tables, spec, dtype_bytes, hardware, parallel)
