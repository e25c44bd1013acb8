"""One layer's operations by measured tables, and by formula where these have no rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import ALL_REDUCES, AnalyticOperations
from sarathi_lab.executor.simulated.attention_shapes import Heads, ShapedAttention
from sarathi_lab.executor.simulated.attention_tables import AttentionTable, Formula, sums_of
from sarathi_lab.executor.simulated.hardware import (
    ONE_DEVICE,
    Hardware,
    Parallel,
    known_or_nan,
)
from sarathi_lab.executor.simulated.interpolation import Floats, curve, curve_error
from sarathi_lab.executor.simulated.product_tables import Formula as ProductFormula
from sarathi_lab.executor.simulated.product_tables import ProductTable
from sarathi_lab.executor.table_files import read_tables
from sarathi_lab.executor.tables import DTYPE_SIZES, MICROSECOND, SHAPE, TIME, OperationTables
from sarathi_lab.model.spec import ModelSpec

PRODUCTS = ("qkv_proj", "out_proj", "ffn", "ffn_up", "ffn_down", "products")
WHOLE = "others"  # of tables that hold all that an iteration costs
Curve = Callable[[int], float]


class ProfiledOperations:
    """`Operations` of `spec` by `tables`; what they have no rows of is by formula, if there is
    `hardware`, which tables of shapes need.
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
        self._left_out = set(tables.included)
        self.errors: dict[str, float] = {}  # by operation, of rows left out
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
            if WHOLE not in tables.layers:
                self.iteration_overhead = self._formula.iteration_overhead
        self._own, self._shaped = self._attention(spec)
        asked = hardware.hybrid_call if hardware else None
        has_mixed = self._own is not None and self._own.has_mixed
        self._in_one_call = has_mixed if asked is None else asked
        self.errors |= self._own.errors if self._own else {}

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """Mean relative error by kind of operation on rows that were held out, as stated with the
        tables or found in them.
        """
        known = dict(self._formula.uncertainty) if self._formula else {}
        if stated := self.tables.meta.get("uncertainty"):
            return known | known_or_nan(stated)
        products = [error for name, error in self.errors.items() if name in PRODUCTS]
        attention = [error for name, error in self.errors.items() if name.endswith("_attention")]
        return {
            "matmul": max(products, default=known.get("matmul", math.nan)),
            "attention": max(attention, default=known.get("attention", math.nan)),
        }

    @property
    def caution(self) -> str:
        """What the times are of, what comes from another shape, and what no table has."""
        formula = self._formula
        computed = [] if formula is None else [*formula.token_times(1), *formula.emit_times(1)]
        missing = [name for name in computed if name not in self._left_out]
        parts = [f"operation times are of {self.tables.source}"]
        if self._own is None and self._shaped is None:
            missing.append("attention")
        if self._shaped is not None:
            near = {f"{base.num_heads}/{base.num_kv_heads}" for base in self._shaped.bases.values()}
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
        if self._own is not None:
            return self._own.times(batch, self._in_one_call)
        assert self._formula is not None, "checked when it was made"
        if self._shaped is not None:
            return self._shaped.times(batch, self._in_one_call)
        return self._formula.attention_times(batch)

    def _times(self, per: str, number: int, formula: Mapping[str, float]) -> Mapping[str, float]:
        """By formula what no row holds, and by the curves the rest."""
        kept = {name: time for name, time in formula.items() if name not in self._left_out}
        return kept | {
            name: time(number) if number else 0.0 for name, time in self._curves[per].items()
        }

    def _add(self, name: str, per: str, time: Curve, replaces: Sequence[str] = ()) -> None:
        self._curves[per][name] = time
        self._left_out.update((name, *replaces))

    def _add_products(self, formula: AnalyticOperations) -> None:
        """Products of the model's shapes, where no layer of a table has them."""
        spec, share_of = formula.spec, formula.share_of
        own = self.products = self._products(formula.dtype_bytes, formula.product_time)
        if own and spec.lm_head.name not in self._left_out:
            self._add(spec.lm_head.name, "emit", own.curve(*share_of(spec.lm_head)))
        if spec.weight_dtype == "fp8":
            own = self._products(DTYPE_SIZES["fp8"], formula.layer_product_time)
        if own:
            self.errors["products"] = own.error
            for linear in spec.layer_linears:
                if linear.name not in self._left_out:
                    self._add(linear.name, "layer", own.curve(*share_of(linear)))

    def _products(self, dtype_bytes: int, formula: ProductFormula) -> ProductTable | None:
        """Those of elements of so many bytes, if there are such."""
        rows = self.tables.frames.get("products")
        if rows is not None:
            rows = rows[rows.dtype.map(DTYPE_SIZES.get) == dtype_bytes]
        if rows is None or rows.empty:
            return None
        return ProductTable(rows.assign(seconds=rows[TIME] * MICROSECOND), formula)

    def _add_all_reduce(self, formula: AnalyticOperations) -> None:
        """All-reduces of a layer over the hidden states, if a table has as many devices."""
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

    def _attention(self, spec: ModelSpec) -> tuple[AttentionTable | None, ShapedAttention | None]:
        """By rows of the model's own shape, if there are such with contexts or mixed batches, or
        by those of the nearest.
        """
        rows, formula = self.tables.frames.get("attention"), self._formula
        if rows is None:
            return None, None
        rows = rows.assign(seconds=rows[TIME] * MICROSECOND / self.tables.num_layers)
        if formula is None or SHAPE[0] not in rows:
            return AttentionTable(rows, None if formula is None else _at(formula)), None
        degree = formula.parallel.tensor
        own = Heads(spec.num_heads // degree, spec.num_kv_heads // degree, spec.head_size)
        mine = rows[(rows[list(SHAPE)] == list(own)).all(axis=1)]
        if (mine.kv_prefill > 0).any():
            return AttentionTable(mine, _at(formula)), None
        return None, ShapedAttention(rows, own, formula, self._formula_of)

    def _formula_of(self, heads: Heads) -> Formula:
        """The formula for one device of that shape."""
        assert self._formula is not None
        of = self._formula
        spec = replace(of.spec, **heads._asdict())
        return _at(AnalyticOperations(spec, of.hardware, of.dtype_bytes))


def _at(formula: AnalyticOperations) -> Formula:
    """Seconds of equal chunks and equal decodes, by formula."""

    def seconds(
        chunk: float, before: float, decodes: float, context: float, num_chunks: int
    ) -> float:
        batch = sums_of(chunk, before, decodes, context, num_chunks)
        if chunk and decodes:
            return formula.hybrid_attention(batch)
        return sum(formula.separate_attention(batch))

    return seconds


def _floats(rows: pd.DataFrame) -> tuple[Floats, Floats]:
    return rows["size"].to_numpy(float), rows["seconds"].to_numpy(float)


def profiled_operations(
    spec: ModelSpec, hardware: Hardware, dtype_bytes: int, parallel: Parallel = ONE_DEVICE
) -> ProfiledOperations:
    """The operations of `spec` by the tables that `hardware` names. Raises UserError if there are
    none for the model, its cache or the degree of tensor parallelism.
    """
    setting = "executor.cost_model=profiled"
    if spec.kv_dtype != "auto":
        raise UserError(
            f"{setting} holds for a cache in the model's own type, in which it was measured, not "
            f"for cache.dtype={spec.kv_dtype}; use executor.cost_model=analytic, or "
            "cache.dtype=auto"
        )
    if hardware.tables is None:
        raise UserError(
            f"{setting}: hardware {hardware.name} names no operation tables; name a folder by "
            "hardware.tables, measure one on the device with task=calibrate, or use "
            "executor.cost_model=analytic"
        )
    tables = read_tables(hardware.tables, model=spec.name, tensor=parallel.tensor)
    _check_model(tables, spec, dtype_bytes, parallel)
    return ProfiledOperations(tables, spec, dtype_bytes, hardware, parallel)


def _check_model(
    tables: OperationTables, spec: ModelSpec, dtype_bytes: int, parallel: Parallel
) -> None:
    """Refuse tables in other elements, and those without shapes of another model or degree."""
    if tables.dtype_bytes not in (None, dtype_bytes):
        raise UserError(
            f"{tables.source} was measured with elements of {tables.dtype_bytes} bytes, not of "
            f"{dtype_bytes}; use other tables, or another dtype"
        )
    if not tables.has_own_model:
        return
    use = "use executor.cost_model=analytic, or tables of it"
    if not tables.is_of(spec):
        of = tables.meta.get("model")
        whose = f"of model {of}, not of {spec.name}" if of else "of a model that no meta.yaml names"
        raise UserError(f"{tables.source} has times {whose}; {use}")
    if tables.tensor != parallel.tensor:
        raise UserError(
            f"{tables.source} was measured with tensor_parallel={tables.tensor}, not "
            f"{parallel.tensor}; {use} in a folder tp{parallel.tensor}"
        )
