"""A `Hardware` fitted to tables of task=calibrate: efficiencies and fixed costs.

As in `experiments/lab/cost_model/fit.py` they minimise the mean |ln(predicted / measured)|: of
products and norms first, then of attention; the fixed cost of an iteration is the median remainder
of the rows of `others`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import minimize

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.interpolation import Costs
from sarathi_lab.executor.tables import ATTENTION
from sarathi_lab.model.spec import ModelSpec

Floats = NDArray[np.float64]
Errors = Floats  # predicted / measured - 1, one entry per measurement
Group = tuple[Errors, Floats]  # errors, and their weights of sum 1
SIZES = ["num_tokens", "kv_tokens"]  # of a measured row
HELD_OUT_BLOCKS = 10  # of neighbours held out together, as tables are often dense at a step
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
KINDS = {"matmul": ("qkv_proj", "out_proj", "ffn"), "attention": ATTENTION}
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
}


def hardware_from_profile(table: pd.DataFrame, spec: ModelSpec, hardware: Hardware) -> Hardware:
    """Fit the shares and costs of the `hardware` on which task=calibrate measured `table` (columns
    operation, num_tokens, kv_tokens, seconds over all layers) with `spec`.

    Every second row of an operation is fitted, the others give the uncertainty (mean absolute
    relative error).
    """
    hardware = replace(hardware, **START)
    rows = [table[table.operation == operation].sort_values(SIZES) for operation in PARTS]
    fitted, held_out = (pd.concat([part.iloc[i::2] for part in rows]) for i in (0, 1))
    for fields, names in ((STREAMED, (*KINDS["matmul"], "elementwise")), (ATTENDED, ATTENTION)):
        hardware = fit(hardware, fields, partial(_groups, spec, fitted, names))
    predicted, seconds = _times(hardware, spec, fitted, "others")
    overhead = max(0.0, float(np.median(seconds - predicted)))
    uncertainty = {}
    for kind, names in KINDS.items():
        errors = [error for error, _ in _groups(spec, held_out, names, hardware)]
        uncertainty[kind] = float(np.abs(np.concatenate(errors)).mean())
    return replace(hardware, iteration_overhead=overhead, uncertainty=uncertainty)


def held_out_errors(table: pd.DataFrame) -> dict[str, float]:
    """Compute the mean relative error, by operation, of blocks of rows predicted from the others;
    the first and the last row are never held out, as tables are not made for extrapolation.
    """
    groups = table.sort_values(SIZES).groupby("operation", sort=False)
    return {str(name): _held_out_error(rows) for name, rows in groups}


def _held_out_error(rows: pd.DataFrame) -> float:
    tokens, kv_tokens, seconds = (rows[name].to_numpy(float) for name in (*SIZES, "seconds"))
    costly = (np.ones(len(rows)), tokens, kv_tokens, tokens * kv_tokens, kv_tokens / tokens)
    features, errors = np.stack([each for each in costly if each.any()], axis=-1), list[float]()
    inner = np.arange(1, len(rows) - 1)
    for block in np.array_split(inner, min(HELD_OUT_BLOCKS, len(inner))):
        kept = np.delete(np.arange(len(rows)), block)
        costs = Costs(features[kept], tokens[kept], seconds[kept])
        errors += [abs(costs.time(tokens[i], *features[i]) / seconds[i] - 1) for i in block]
    return float(np.mean(errors))


def batch_of_row(operation: str, num_tokens: int, kv_tokens: int) -> Batch:
    """Make a batch with the `operation` of a measured row."""
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


def _groups(
    spec: ModelSpec, table: pd.DataFrame, operations: Sequence[str], hardware: Hardware
) -> list[Group]:
    times = (_times(hardware, spec, table, operation) for operation in operations)
    return [evenly(predicted / measured - 1) for predicted, measured in times]
