"""The figures of a `Hardware` from a profile measured on it: efficiencies and fixed costs of the
analytic cost model.

As in `experiments/lab/cost_model/fit.py` they are those of the least mean |ln(predicted / measured)|:
of products and norms first, then of attention; the fixed cost of an iteration is the median of what
the rows of `others` leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticCostModel
from sarathi_lab.executor.simulated.hardware import UNCERTAIN, Hardware
from sarathi_lab.executor.simulated.profile import ATTENTION, Profile
from sarathi_lab.model.spec import ModelSpec

Errors = NDArray[np.float64]  # predicted / measured - 1, one entry per measurement
Group = tuple[Errors, NDArray[np.float64]]  # errors, and their weights of sum 1


def fit(
    hardware: Hardware, names: Sequence[str], errors: Callable[[Hardware], list[Group]]
) -> Hardware:
    """`hardware` with the fields `names` at the least mean error, starting from the values it has.

    The groups that `errors` gives count alike.
    """

    def with_values(logs: NDArray[np.float64]) -> Hardware:
        return replace(hardware, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def loss(logs: NDArray[np.float64]) -> float:
        if any(
            log > 0 for name, log in zip(names, logs, strict=True) if name.endswith("efficiency")
        ):
            return math.inf
        groups = errors(with_values(logs))
        return float(
            np.mean([np.sum(weights * np.abs(np.log1p(error))) for error, weights in groups])
        )

    return with_values(minimise(loss, np.log([getattr(hardware, name) for name in names])))


def minimise(
    loss: Callable[[NDArray[np.float64]], float], start: NDArray[np.float64], iterations: int = 120
) -> NDArray[np.float64]:
    """The simplex of Nelder and Mead; `start` and its neighbours are logarithms."""
    corners = [
        start,
        *(start + 0.1 * (-1) ** i * row for i, row in enumerate(np.eye(len(start)), start=1)),
    ]
    simplex = sorted(_rated(loss, corner) for corner in corners)
    for _ in range(iterations):
        worst = np.array(simplex[-1][1])
        away = np.mean([corner for _, corner in simplex[:-1]], axis=0) - worst
        best = _rated(loss, worst + 2 * away)
        if best < simplex[0]:
            best = min(best, _rated(loss, worst + 3 * away))
        elif best >= simplex[-2]:
            best = min(best, _rated(loss, worst + 0.5 * away))
        if best < simplex[-1]:
            simplex[-1] = best
        else:
            lowest = np.array(simplex[0][1])
            simplex[1:] = [
                _rated(loss, 0.5 * (lowest + np.array(corner))) for _, corner in simplex[1:]
            ]
        simplex.sort()
    return np.array(simplex[0][1])


def _rated(
    loss: Callable[[NDArray[np.float64]], float], point: NDArray[np.float64]
) -> tuple[float, tuple[float, ...]]:
    return loss(point), tuple(point.tolist())


def octave_weights(num_tokens: pd.Series) -> NDArray[np.float64]:
    """Weights of sum 1 that let every doubling of tokens above 16 count alike: tables have more
    rows of many tokens.
    """
    octave = np.ceil(np.log2(num_tokens.clip(lower=16))).to_numpy()
    _, inverse, counts = np.unique(octave, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse] / len(counts)


def evenly(errors: Errors) -> Group:
    """A group in which every measurement counts alike."""
    return errors, np.full(len(errors), 1.0 / len(errors))


# The operations of a profile, by what the analytic cost model calls their parts.
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
START = {
    "matmul_efficiency": 0.7,
    "attention_efficiency": 0.4,
    "causal_efficiency": 0.3,
    "memory_efficiency": 0.7,
    "kv_efficiency": 0.5,
    "kernel_launch": 5e-6,
    "attention_launch": 10e-6,
    "iteration_overhead": 0.0,
}


def hardware_from_profile(
    profile: Profile,
    spec: ModelSpec,
    *,
    name: str,
    flops_per_second: float,
    bytes_per_second: float,
    memory_bytes: float,
    num_sms: int,
    dtype_bytes: int,
    profiles: Mapping[str, str],
) -> Hardware:
    """The device that `profile` of `spec` was measured on; peaks in FLOP/s and bytes/s.

    Every second row of an operation is fitted, the others say how uncertain the fit is (mean
    absolute relative error).
    """
    hardware = Hardware(
        name=name,
        flops_per_second=flops_per_second,
        bytes_per_second=bytes_per_second,
        memory_bytes=memory_bytes,
        num_sms=num_sms,
        uncertainty=dict.fromkeys(UNCERTAIN, 0.0),
        profiles=profiles,
        dtype_bytes=dtype_bytes,
        **START,
    )
    fitted, held_out = _split(profile)
    products = (*MATMUL, "elementwise")
    hardware = fit(
        hardware,
        STREAMED,
        lambda tried: [evenly(_errors(tried, spec, fitted, name)) for name in products],
    )
    hardware = fit(
        hardware,
        ATTENDED,
        lambda tried: [evenly(_errors(tried, spec, fitted, name)) for name in ATTENTION],
    )
    left = _measured(fitted, "others") - _predicted(hardware, spec, fitted, "others")
    uncertainty = {
        kind: float(
            np.mean(
                np.abs(np.concatenate([_errors(hardware, spec, held_out, name) for name in names]))
            )
        )
        for kind, names in (("matmul", MATMUL), ("attention", ATTENTION))
    }
    return replace(
        hardware, iteration_overhead=max(0.0, float(np.median(left))), uncertainty=uncertainty
    )


def batch_of_row(operation: str, num_tokens: int, kv_tokens: int) -> Batch:
    """A batch whose `operation` is the one that the row of a profile was measured for."""
    if operation == "decode_attention":
        return make_batch(num_decodes=num_tokens, context=kv_tokens // num_tokens)
    if operation == "logits":  # of the operations of these decodes, what depends on those that emit
        return make_batch(num_decodes=num_tokens)
    return make_batch(prefill_tokens=num_tokens, start=max(0, kv_tokens - num_tokens))


def _split(profile: Profile) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every second row of each operation, and the others."""
    rows = [profile.rows(operation) for operation in PARTS]
    return pd.concat([part.iloc[::2] for part in rows]), pd.concat(
        [part.iloc[1::2] for part in rows]
    )


def _measured(table: pd.DataFrame, operation: str) -> Errors:
    return table.seconds[table.operation == operation].to_numpy(float)


def _predicted(hardware: Hardware, spec: ModelSpec, table: pd.DataFrame, operation: str) -> Errors:
    cost = AnalyticCostModel(spec, hardware, hardware.dtype_bytes)
    rows = table[table.operation == operation]
    times = []
    for num_tokens, kv_tokens in zip(rows.num_tokens, rows.kv_tokens, strict=True):
        parts: Sequence[str] = PARTS[operation]
        by_part = cost.operation_times(batch_of_row(operation, int(num_tokens), int(kv_tokens)))
        times.append(sum(by_part[part] for part in parts))
    return np.array(times)


def _errors(hardware: Hardware, spec: ModelSpec, table: pd.DataFrame, operation: str) -> Errors:
    return _predicted(hardware, spec, table, operation) / _measured(table, operation) - 1
