"""What a prompt's prefill takes as a quadratic of its length, fitted to a device's cost model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch

NUM_SAMPLES = 64


class PrefillCost(NamedTuple):
    """Seconds f(l) = `square` l^2 + `linear` l of a prompt's first l tokens, over those of none.

    The default counts tokens, which is enough where only an order is asked for.
    """

    square: float = 0.0
    linear: float = 1.0

    def __call__(self, num_tokens: int, start: int = 0) -> float:
        """Seconds of `num_tokens` tokens behind `start` ones."""
        return num_tokens * (self.square * (2 * start + num_tokens) + self.linear)


def fit_prefill_cost(iteration_time: Callable[[Batch], float], longest: int) -> PrefillCost:
    """Least squares over whole prompts of up to `longest` tokens, evenly spaced; `iteration_time`
    gives the seconds of a batch. No coefficient is below zero; a token always takes some time.
    """
    lengths = np.unique(np.linspace(1, max(2, longest), NUM_SAMPLES).astype(int))
    seconds = [iteration_time(make_batch(prefill_tokens=int(length))) for length in lengths]
    square, linear, _ = np.polyfit(lengths, seconds, 2) if len(lengths) > 2 else (0.0, 1.0, 0.0)
    if square <= 0:
        return PrefillCost(0.0, max(float(np.polyfit(lengths, seconds, 1)[0]), 1e-12))
    return PrefillCost(float(square), max(float(linear), 1e-12))
