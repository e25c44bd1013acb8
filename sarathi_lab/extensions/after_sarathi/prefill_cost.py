"""What a prompt's prefill takes as a quadratic of its length, fitted to a device's cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from sarathi_lab.config.checked import number
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.policy import Policy
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


@dataclass(frozen=True, kw_only=True)
class KnowsPrefillCost(Policy):
    """A policy that is told what a prompt takes: by its settings, or else by the device's cost
    model.
    """

    seconds_per_token: float | None = number(None, above=0, fix="use seconds such as 3e-5")
    seconds_per_squared_token: float = number(0.0, minimum=0, fix="use seconds such as 1e-10")

    @cached_property  # asked of every prompt that is ranked
    def prefill_cost(self) -> PrefillCost:
        """In seconds, or in tokens where nobody said."""
        return PrefillCost(self.seconds_per_squared_token, self.seconds_per_token or 1.0)

    def check_seconds(self, what: str) -> None:
        """Raise UserError, in the name of `what` needs them, if nobody said seconds."""
        if self.seconds_per_token is None:
            raise UserError(
                f"{what} needs seconds_per_token here, as a device that is measured has no cost "
                "model; add policy.seconds_per_token=SECONDS"
            )

    def on_device(
        self, predictor: Callable[[], Predictor | None], batch_size: int, max_model_len: int
    ) -> Self:
        if self.seconds_per_token is not None or (iteration_time := predictor()) is None:
            return self
        square, linear = fit_prefill_cost(iteration_time, max_model_len)
        return replace(self, seconds_per_token=linear, seconds_per_squared_token=square)
