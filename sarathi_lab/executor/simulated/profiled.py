"""One layer's operations by measured tables, and by formula where these have no rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch, Chunk
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.attention_tables import AttentionTable
from sarathi_lab.executor.simulated.hardware import ONE_DEVICE, Hardware, Parallel
from sarathi_lab.executor.simulated.interpolation import curve, curve_error
from sarathi_lab.executor.table_files import read_tables
from sarathi_lab.executor.tables import MICROSECOND, TIME, OperationTables
from sarathi_lab.model.spec import ModelSpec

MATMUL = ("qkv_proj", "out_proj", "ffn", "ffn_up", "ffn_down")
WHOLE = "others"  # of tables that hold all that an iteration costs


class ProfiledOperations:
    """`Operations` of `spec` by `tables`; what they have no rows of is by formula, if there is
    `hardware`. Raises UserError for tables of another model, or of another degree of tensor
    parallelism.
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
        self._curves: dict[str, dict[str, Callable[[int], float]]] = {
            "layer": {},
            "iteration": {},
            "emit": {},
        }
        self._left_out = set(tables.included)
        self.errors: dict[str, float] = {}  # by operation, of rows left out
        for layer, rows in tables.layers.values():
            sizes, seconds = rows["size"].to_numpy(float), rows["seconds"].to_numpy(float)
            self._curves[layer.per][layer.operation] = curve(sizes, seconds)
            self._left_out.update((layer.operation, *layer.replaces))
            self.errors[layer.operation] = curve_error(sizes, seconds)
        self._formula: AnalyticOperations | None = None
        self.iteration_overhead = 0.0
        if hardware is not None:
            self._formula = AnalyticOperations(spec, hardware, dtype_bytes, parallel)
            if WHOLE not in tables.layers:
                self.iteration_overhead = self._formula.iteration_overhead
        self._attention = self._attention_table()
        self.errors |= self._attention.errors if self._attention else {}

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """Mean relative error by kind of operation on rows that were held out."""
        if stated := self.tables.meta.get("uncertainty"):
            return dict(stated)
        known = self._formula.uncertainty if self._formula else {}
        matmul = [self.errors[name] for name in self.errors if name in MATMUL]
        attention = [error for name, error in self.errors.items() if name.endswith("_attention")]
        return {
            "matmul": max(matmul, default=known.get("matmul", 0.0)),
            "attention": max(attention, default=known.get("attention", 0.0)),
        }

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
        if self._attention is None:
            assert self._formula is not None, "checked when it was made"
            return self._formula.attention_times(batch)
        return self._attention.times(batch, in_one_call=self._attention.has_mixed)

    def _times(self, per: str, number: int, formula: Mapping[str, float]) -> Mapping[str, float]:
        """By formula what no row holds, and by the curves the rest."""
        kept = {name: time for name, time in formula.items() if name not in self._left_out}
        return kept | {
            name: time(number) if number else 0.0 for name, time in self._curves[per].items()
        }

    def _attention_table(self) -> AttentionTable | None:
        if (rows := self.tables.frames.get("attention")) is None:
            return None
        seconds = rows[TIME] * MICROSECOND / self.tables.num_layers
        formula = self._attention_at if self._formula else None
        return AttentionTable(rows.assign(seconds=seconds), formula)

    def _attention_at(self, chunk: float, before: float, decodes: float, context: float) -> float:
        """Seconds of one chunk and equal decodes, by formula."""
        assert self._formula is not None
        return sum(self._formula.attention_times(_sums(chunk, before, decodes, context)))


def _sums(chunk: float, before: float, decodes: float, context: float) -> Batch:
    """What formulas read of a batch of one chunk and equal decodes: no sequences."""
    batch = Batch()
    tokens, start, batch.num_decode_tokens = round(chunk), round(before), round(decodes)
    batch.decode_kv_tokens = round(decodes * context)
    if tokens:
        batch.chunks.append(Chunk(None, start, tokens, is_decode=False, emits_token=False))  # type: ignore[arg-type]
        batch.num_prefills, batch.num_prefill_tokens = 1, tokens
        batch.prefill_kv_tokens = start + tokens
        batch.prefill_query_key_pairs = tokens * start + tokens * (tokens + 1) // 2
    return batch


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
