"""Constants of a hardware file fitted to measured times by Nelder and Mead's simplex."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from sarathi_lab.executor.simulated.hardware import Hardware

Floats = NDArray[np.float64]
Errors = Floats  # predicted / measured - 1, one entry per measurement
Group = tuple[Errors, Floats]  # errors, and their weights of sum 1
MAX_ITERATIONS = 120
TOLERANCES = {"xatol": 1e-3, "fatol": 1e-5}  # of the logarithms, and of their mean error


def fit(
    hardware: Hardware, names: Sequence[str], errors: Callable[[Hardware], list[Group]]
) -> Hardware:
    """Minimise the mean |ln(predicted / measured)| over the fields `names`, from their present
    values on, over logarithms; all groups of `errors` have the same weight.
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

    corners = []
    for number, step in enumerate(np.eye(len(start)), start=1):
        sign = (-1) ** number
        corners.append(start + 0.1 * sign * step)
    options = {"initial_simplex": [start, *corners], "maxiter": MAX_ITERATIONS, **TOLERANCES}
    return with_values(minimize(loss, start, method="Nelder-Mead", options=options).x)


def evenly(errors: Errors) -> Group:
    """Make a group of measurements with equal weights."""
    return errors, np.full(len(errors), 1.0 / len(errors))
