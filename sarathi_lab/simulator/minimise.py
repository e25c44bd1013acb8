"""Fitting fields of a `Hardware` to measured times: the least mean |ln(predicted / measured)|, without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.simulator.hardware import Hardware

Errors = NDArray[np.float64]  # predicted / measured - 1, one entry per measurement
Group = tuple[Errors, NDArray[np.float64]]  # errors, and their weights of sum 1


def fit(hardware: Hardware, names: Sequence[str], errors: Callable[[Hardware], list[Group]]) -> Hardware:
    """`hardware` with the fields `names` at the least mean error, starting from the values it has.

    The groups that `errors` gives count alike.
    """

    def with_values(logs: NDArray[np.float64]) -> Hardware:
        return replace(hardware, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def loss(logs: NDArray[np.float64]) -> float:
        if any(log > 0 for name, log in zip(names, logs, strict=True) if name.endswith("efficiency")):
            return math.inf
        groups = errors(with_values(logs))
        return float(np.mean([np.sum(weights * np.abs(np.log1p(error))) for error, weights in groups]))

    return with_values(minimise(loss, np.log([getattr(hardware, name) for name in names])))


def minimise(
    loss: Callable[[NDArray[np.float64]], float], start: NDArray[np.float64], iterations: int = 120
) -> NDArray[np.float64]:
    """The simplex of Nelder and Mead; `start` and its neighbours are logarithms."""
    corners = [start, *(start + 0.1 * (-1) ** i * row for i, row in enumerate(np.eye(len(start)), start=1))]
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
            simplex[1:] = [_rated(loss, 0.5 * (lowest + np.array(corner))) for _, corner in simplex[1:]]
        simplex.sort()
    return np.array(simplex[0][1])


def _rated(loss: Callable[[NDArray[np.float64]], float], point: NDArray[np.float64]) -> tuple[float, tuple[float, ...]]:
    return loss(point), tuple(point.tolist())


def octave_weights(num_tokens: pd.Series) -> NDArray[np.float64]:
    """Weights of sum 1 that let every doubling of tokens above 16 count alike: tables have more rows of many tokens."""
    octave = np.ceil(np.log2(num_tokens.clip(lower=16))).to_numpy()
    _, inverse, counts = np.unique(octave, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse] / len(counts)


def evenly(errors: Errors) -> Group:
    """A group in which every measurement counts alike."""
    return errors, np.full(len(errors), 1.0 / len(errors))
