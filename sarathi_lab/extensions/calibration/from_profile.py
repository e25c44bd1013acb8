"""A `Hardware` fitted to tables of task=calibrate: efficiencies and fixed costs.

As in `experiments/lab/cost_model/fit.py` they minimise the mean |ln(predicted / measured)|: of
products and norms first, then of attention; the fixed cost of an iteration is the median remainder
of the rows of `others`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import minimize

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.hardware import UNCERTAIN, Hardware
from sarathi_lab.executor.tables import ATTENTION, MICROSECOND, TIME, OperationTables
from sarathi_lab.model.spec import ModelSpec

Floats = NDArray[np.float64]
Errors = Floats  # predicted / measured - 1, one entry per measurement
Group = tuple[Errors, Floats]  # errors, and their weights of sum 1
MAX_ITERATIONS = 120
TOLERANCES = {"xatol": 1e-3, "fatol": 1e-5}  # of the logarithms, and of their mean error


def fit(
    hardware: Hardware, names: Sequence[str], errors: Callable[[Hardware], list[Group]]
) -> Hardware:
    """Minimise the mean error over the fields `names`, from their present values, by Nelder and
    Mead's simplex over logarithms; all groups of `errors` have the same weight.
    """
    start = np.log([getattr(hardware, name) for name in names])
    limits = np.array([0.0 if name.endswith("efficiency") else math.inf for name in names])

    def with_values(logs: Floats) -> Hardware:
        return replace(hardware, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def loss(logs: Floats) -> float:
        if (logs > limits).any():
            return math.inf
        groups = errors(with_values(logs))
        return float(np.mean([weights @ np.abs(np.log1p(error)) for error, weights in groups]))

    corners = [start + 0.1 * (-1) ** i * row for i, row in enumerate(np.eye(len(start)), start=1)]
    options = {"initial_simplex": [start, *corners], "maxiter": MAX_ITERATIONS, **TOLERANCES}
    return with_values(minimize(loss, start, method="Nelder-Mead", options=options).x)


def evenly(errors: Errors) -> Group:
    """Make a group of measurements with equal weights."""
    return errors, np.full(len(errors), 1.0 / len(errors))


# Operations of calibrated tables, and their parts in the analytic cost model.
PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("qkv_proj",),
    "out_proj": ("out_proj",),
    "ffn": ("ffn_up", "ffn_down", "activation"),
    "elementwise": ("norms",),
    "prefill_attention": ("prefill_attention",),
    "decode_attention": ("decode_attention",),
    "logits": ("lm_head", "sampling"),
    "others": ("kv_write",),  # and the fixed cost
}
MATMUL = ("qkv_proj", "out_proj", "ffn")
STREAMED = ("matmul_efficiency", "memory_efficiency", "kernel_launch")
ATTENDED = ("attention_efficiency", "causal_efficiency", "kv_efficiency", "attention_launch")
# Start of the search: usual shares of a peak, and seconds.
START: dict[str, Any] = {
    "matmul_efficiency": 0.7,
    "attention_efficiency": 0.4,
    "causal_efficiency": 0.3,
    "memory_efficiency": 0.7,
    "kv_efficiency": 0.5,
    "kernel_launch": 5e-6,
    "attention_launch": 10e-6,
    "iteration_overhead": 0.0,
}


def hardware_from_profile(measured: OperationTables, spec: ModelSpec, **known: Any) -> Hardware:
    """Fit the device of tables that task=calibrate `measured` with `spec`; `known` are its other
    fields.

    Every second row of an operation is fitted, the others give the uncertainty (mean absolute
    relative error).
    """
    hardware = Hardware(**known, uncertainty=dict.fromkeys(UNCERTAIN, 0.0), **START)
    rows = [rows_of(measured, operation, spec) for operation in PARTS]
    fitted, held_out = (pd.concat([part.iloc[i::2] for part in rows]) for i in (0, 1))
    for fields, operations in ((STREAMED, (*MATMUL, "elementwise")), (ATTENDED, ATTENTION)):

        def errors(tried: Hardware, operations: Sequence[str] = operations) -> list[Group]:
            return [evenly(_errors(tried, spec, fitted, name)) for name in operations]

        hardware = fit(hardware, fields, errors)
    predicted, seconds = _times(hardware, spec, fitted, "others")
    uncertainty = {}
    for kind, names in (("matmul", MATMUL), ("attention", ATTENTION)):
        errors_of = [_errors(hardware, spec, held_out, name) for name in names]
        uncertainty[kind] = float(np.abs(np.concatenate(errors_of)).mean())
    overhead = max(0.0, float(np.median(seconds - predicted)))
    return replace(hardware, iteration_overhead=overhead, uncertainty=uncertainty)


def rows_of(tables: OperationTables, operation: str, spec: ModelSpec) -> pd.DataFrame:
    """Select one operation's rows by size: tokens, cached tokens read, seconds over all layers."""
    if operation not in ATTENTION:
        layer, rows = tables.layers[operation]
        seconds = rows.seconds * (spec.num_layers if layer.per == "layer" else 1)
        table = pd.DataFrame({"num_tokens": rows["size"], "kv_tokens": 0, "seconds": seconds})
    else:
        rows, is_decode = tables.frames["attention"], operation == "decode_attention"
        rows = rows[(rows.n_decode > 0) == is_decode]
        tokens = rows.n_decode if is_decode else rows.prefill_chunk
        seen = rows.n_decode * rows.kv_decode if is_decode else rows.kv_prefill + tokens
        seconds = rows[TIME] * MICROSECOND * spec.num_layers / tables.num_layers
        table = pd.DataFrame({"num_tokens": tokens, "kv_tokens": seen, "seconds": seconds})
    return table.assign(operation=operation).sort_values(["num_tokens", "kv_tokens"])


def batch_of_row(operation: str, num_tokens: int, kv_tokens: int) -> Batch:
    """Make a batch with the `operation` of a row of `rows_of`."""
    if operation == "decode_attention":
        return make_batch(num_decodes=num_tokens, context=kv_tokens // num_tokens)
    if operation == "logits":  # only the operations over emitting rows count
        return make_batch(num_decodes=num_tokens)
    return make_batch(prefill_tokens=num_tokens, start=max(0, kv_tokens - num_tokens))


def _times(
    hardware: Hardware, spec: ModelSpec, table: pd.DataFrame, operation: str
) -> tuple[Floats, Floats]:
    """Compute predicted and measured seconds of the rows of `operation`."""
    cost = make_cost_model("analytic", spec, hardware, hardware.dtype_bytes)
    rows = table[table.operation == operation]
    predicted = []
    for num_tokens, kv_tokens in zip(rows.num_tokens, rows.kv_tokens, strict=True):
        batch = batch_of_row(operation, int(num_tokens), int(kv_tokens))
        by_part = cost.operation_times(batch)
        predicted.append(sum(by_part[part] for part in PARTS[operation]))
    return np.array(predicted), rows.seconds.to_numpy(float)


def _errors(hardware: Hardware, spec: ModelSpec, table: pd.DataFrame, operation: str) -> Errors:
    predicted, measured = _times(hardware, spec, table, operation)
    return predicted / measured - 1
