"""A `Hardware` from tables that task=calibrate measured on it: efficiencies and fixed costs of the
analytic model.

As in `experiments/lab/cost_model/fit.py` they are those of the least mean |ln(predicted /
measured)|: of products and norms first, then of attention; the fixed cost of an iteration is the
median of what the rows of `others` leave.
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
    """`hardware` with the fields `names` at the least mean error, starting from the values it has;
    the groups that `errors` gives count alike. Nelder and Mead's simplex, over logarithms.
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
    """A group in which every measurement counts alike."""
    return errors, np.full(len(errors), 1.0 / len(errors))


# The operations of calibrated tables, by what the analytic cost model calls their parts.
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
# Where the search starts: usual shares of a peak, and seconds.
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
    """The device that tables of `spec` were `measured` on by task=calibrate; `known` are its other
    fields.

    Every second row of an operation is fitted, the others say how uncertain the fit is (mean
    absolute relative error).
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
        found = [_errors(hardware, spec, held_out, name) for name in names]
        uncertainty[kind] = float(np.abs(np.concatenate(found)).mean())
    overhead = max(0.0, float(np.median(seconds - predicted)))
    return replace(hardware, iteration_overhead=overhead, uncertainty=uncertainty)


def rows_of(tables: OperationTables, operation: str, spec: ModelSpec) -> pd.DataFrame:
    """Rows of one operation by size: tokens, cached tokens read, and seconds over all layers."""
    if operation not in ATTENTION:
        layer, rows = tables.layers[operation]
        seconds = rows.seconds * (spec.num_layers if layer.per == "layer" else 1)
        made = pd.DataFrame({"num_tokens": rows["size"], "kv_tokens": 0, "seconds": seconds})
    else:
        rows, is_decode = tables.frames["attention"], operation == "decode_attention"
        rows = rows[(rows.n_decode > 0) == is_decode]
        tokens = rows.n_decode if is_decode else rows.prefill_chunk
        seen = rows.n_decode * rows.kv_decode if is_decode else rows.kv_prefill + tokens
        seconds = rows[TIME] * MICROSECOND * spec.num_layers / tables.num_layers
        made = pd.DataFrame({"num_tokens": tokens, "kv_tokens": seen, "seconds": seconds})
    return made.assign(operation=operation).sort_values(["num_tokens", "kv_tokens"])


def batch_of_row(operation: str, num_tokens: int, kv_tokens: int) -> Batch:
    """A batch whose `operation` is the one that a row of `rows_of` was measured for."""
    if operation == "decode_attention":
        return make_batch(num_decodes=num_tokens, context=kv_tokens // num_tokens)
    if operation == "logits":  # of the operations of these decodes, what depends on those that emit
        return make_batch(num_decodes=num_tokens)
    return make_batch(prefill_tokens=num_tokens, start=max(0, kv_tokens - num_tokens))


def _times(
    hardware: Hardware, spec: ModelSpec, table: pd.DataFrame, operation: str
) -> tuple[Floats, Floats]:
    """Seconds of the rows of `operation`, predicted and measured."""
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
