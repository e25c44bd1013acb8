"""Requests whose lengths have a stated median and P90, as papers describe their data sets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from sarathi_lab.config.checked import number, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.workload.synthetic import MadeUp

NORMAL = NormalDist()
MOST_STEPS, SETTLED = 10_000, 1e-9


@dataclass(frozen=True, kw_only=True)
class Lognormal(MadeUp):
    """Prompt and output lengths drawn apart from lognormals of these medians and P90 (tokens);
    requests of more than `max_len` tokens in all are drawn anew, which the fit allows for.
    """

    name = "lognormal"
    kinds: ClassVar[Sequence[str]] = ("prompt", "output")  # with a median and a P90
    prompt_p50: float = number(above=0, fix="use tokens")
    prompt_p90: float = number(above=0, fix="use tokens")
    output_p50: float = number(above=0, fix="use tokens")
    output_p90: float = number(above=0, fix="use tokens")
    max_len: int = whole(minimum=2, fix="use the most tokens of prompt and output together")

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.kinds:
            p50, p90 = getattr(self, f"{kind}_p50"), getattr(self, f"{kind}_p90")
            if p90 <= p50:
                raise UserError(
                    f"workload.{kind}_p90={p90:g} is not above workload.{kind}_p50={p50:g}; "
                    "raise it"
                )
        if self.prompt_p90 + self.output_p90 >= self.max_len:
            raise UserError(
                f"workload.max_len={self.max_len} is not above prompt_p90 + output_p90 = "
                f"{self.prompt_p90 + self.output_p90:g} tokens; raise it, or shorten the requests"
            )

    def lengths(self) -> Iterator[tuple[int, int]]:
        generator = np.random.default_rng([self.seed, 3])
        fits = [self._fit("prompt", "output"), self._fit("output", "prompt")]
        while True:
            drawn = (float(generator.lognormal(*fit)) for fit in fits)
            prompt_len, output_len = (max(1, round(length)) for length in drawn)
            if prompt_len + output_len <= self.max_len:
                yield prompt_len, output_len

    def _fit(self, kind: str, other: str) -> tuple[float, float]:
        """Mean and deviation of the logarithm of a lognormal with the stated median and P90 once
        what is above the longest is left out: F(p50) = F(longest) / 2, F(p90) = 0.9 F(longest).
        """
        p50, p90 = getattr(self, f"{kind}_p50"), getattr(self, f"{kind}_p90")
        longest = self.max_len - getattr(self, f"{other}_p50")
        share, deviation = 1.0, 0.0
        for _ in range(MOST_STEPS):
            middle, upper = NORMAL.inv_cdf(0.5 * share), NORMAL.inv_cdf(0.9 * share)
            before, deviation = deviation, math.log(p90 / p50) / (upper - middle)
            mean = math.log(p50) - deviation * middle
            share = NORMAL.cdf((math.log(longest) - mean) / deviation)
            if abs(deviation - before) < SETTLED * deviation:
                return mean, deviation
            if share < 0.05:  # ever wider: no lognormal falls off so late
                break
        raise UserError(
            f"workload.{kind}_p90={p90:g} is too near workload.max_len={self.max_len} for a "
            f"lognormal with median {p50:g}; raise max_len"
        )
