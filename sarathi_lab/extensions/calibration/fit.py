"""The analytic cost model fitted to whole iterations, and how far predictions of others are off."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from sarathi_lab.engine.compositions import make_sequence
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.hardware import UNCERTAIN, Hardware
from sarathi_lab.executor.simulated.iteration_table import IterationTable
from sarathi_lab.experiment.measured_iterations import Limits
from sarathi_lab.model.spec import ModelSpec

HELD_OUT = 16  # compositions of each kind
MOST_PROMPTS = 4  # of a held-out composition
# What is fitted, from these values on: usual shares of a peak, and seconds.
START: Mapping[str, float] = {
    "matmul_efficiency": 0.7,
    "attention_efficiency": 0.4,
    "causal_efficiency": 0.3,
    "memory_efficiency": 0.7,
    "kv_efficiency": 0.5,
    "kernel_launch": 5e-6,
    "attention_launch": 10e-6,
    "iteration_overhead": 1e-3,
}
LEAST_SHARE = 1e-4
LEAST_SECONDS = 1e-9
MOST_SECONDS = 10.0
NOISE = 0.02  # of a logarithm; rows that are further off count less than by their square


def held_out_of(limits: Limits, seed: int) -> list[tuple[str, Batch]]:
    """List random compositions by kind: sizes are log-uniform, contexts uniform and uneven."""
    random = np.random.default_rng(seed)
    size = limits.batch_size
    compositions = []
    for _ in range(HELD_OUT):
        prompt = Batch()
        decodes = Batch()
        _add_prompts(prompt, 1, limits, random)
        _add_decodes(decodes, size, limits, random)
        compositions += [("prompt", prompt), ("decodes", decodes)]
        if size > 1:
            prompts = Batch()
            both = Batch()
            number = int(random.integers(2, min(MOST_PROMPTS, size) + 1))
            _add_prompts(prompts, number, limits, random)
            _add_prompts(both, 1, limits, random)
            _add_decodes(both, size - 1, limits, random)
            compositions += [("prompts", prompts), ("both", both)]
    return compositions


def _add_prompts(batch: Batch, number: int, limits: Limits, random: np.random.Generator) -> None:
    share = limits.prompt_tokens // number
    longest = min(limits.longest, share)
    for _ in range(number):
        tokens = _log_uniform(longest, random)
        latest_start = limits.longest - tokens
        start = int(random.integers(0, latest_start + 1))
        prompt = make_sequence(start, tokens, emits=True, order=len(batch))
        batch.add(prompt, tokens)


def _add_decodes(
    batch: Batch, most_decodes: int, limits: Limits, random: np.random.Generator
) -> None:
    for _ in range(_log_uniform(most_decodes, random)):
        start = int(random.integers(1, limits.longest_decode))
        decode = make_sequence(start, is_decode=True, order=len(batch))
        batch.add(decode, 1)


def _log_uniform(largest: int, random: np.random.Generator) -> int:
    logarithm = random.uniform(0, math.log(largest))
    return round(math.exp(logarithm))


def _name_of(batch: Batch) -> str:
    """Return a composition in words, such as "239 at 512 + 17 decodes of 900", their mean."""
    work = []
    for chunk in batch.chunks:
        if not chunk.is_decode:
            work.append(f"{chunk.num_tokens} at {chunk.start}")
    number = batch.num_decodes
    if number:
        work.append(f"{number} decodes of {batch.decode_kv_tokens // number}")
    return " + ".join(work)


def predictions(
    held_out: Sequence[tuple[str, Batch]],
    seconds: NDArray[np.float64],
    table: pd.DataFrame,
    hardware: Hardware,
    spec: ModelSpec,
) -> pd.DataFrame:
    """Return held-out compositions with their measured seconds beside those of `table` (predicted)
    and of the analytic cost model (analytic), each with its relative error.
    """
    by_table = IterationTable(table).seconds
    by_formula = predictor(hardware, spec)
    rows = []
    for (kind, batch), measured in zip(held_out, seconds.tolist(), strict=True):
        predicted = by_table(batch)
        analytic = by_formula(batch)
        row = {
            "kind": kind,
            "composition": _name_of(batch),
            "seconds": measured,
            "predicted": predicted,
            "error": predicted / measured - 1,
            "analytic": analytic,
            "analytic_error": analytic / measured - 1,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def mean_errors(held_out: pd.DataFrame, column: str) -> dict[str, float]:
    """Return the mean absolute error by kind of held-out composition."""
    errors = {}
    for kind, of_kind in held_out.groupby("kind", sort=False):
        sizes = of_kind[column].abs()
        errors[str(kind)] = float(sizes.mean())
    return errors


def fit_hardware(
    hardware: Hardware,
    spec: ModelSpec,
    batches: Sequence[Batch],
    seconds: NDArray[np.float64],
) -> Hardware:
    """Fit shares of the peaks, and fixed costs, to the `seconds` of iterations of `batches`.

    What of the fixed costs is a kernel's launch and what an iteration's overhead can't be told from
    whole iterations: their sum can.
    """
    names = list(START)
    is_share = np.array([name.endswith("efficiency") for name in names])
    # Logarithms, as values differ by orders of magnitude and none is negative.
    lower = np.log(np.where(is_share, LEAST_SHARE, LEAST_SECONDS))
    upper = np.log(np.where(is_share, 1.0, MOST_SECONDS))
    measured = np.log(seconds)

    def with_values(logs: NDArray[np.float64]) -> Hardware:
        figures = np.exp(logs)
        values: dict[str, Any] = dict(zip(names, figures.tolist(), strict=True))
        return replace(hardware, **values)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        candidate = with_values(logs)
        seconds_of = predictor(candidate, spec)
        predicted = [seconds_of(batch) for batch in batches]
        return np.log(predicted) - measured

    start = np.log(list(START.values()))
    solution = least_squares(
        residuals, start, bounds=(lower, upper), loss="soft_l1", f_scale=NOISE, diff_step=1e-2
    )
    return with_values(solution.x)


def predictor(hardware: Hardware, spec: ModelSpec) -> Callable[[Batch], float]:
    """Return the analytic cost model's seconds of an iteration."""
    cost_model = make_cost_model("analytic", spec, hardware, hardware.dtype_bytes)
    return cost_model.iteration_time


def with_error(hardware: Hardware, error: float) -> Hardware:
    """State the mean error on held-out iterations, which have products and attention."""
    return replace(hardware, uncertainty=dict.fromkeys(UNCERTAIN, error))
