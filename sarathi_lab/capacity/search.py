"""Looks for the highest rate that passes, on a logarithmic grid: galloping from a guess, then bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

ROUNDING = 1e-9  # of the logarithm, so that a rate of the grid is its own step


@dataclass(frozen=True)
class Grid:
    """Rates (1 + `precision`)^k requests per second for whole k: the same ones for every policy, seed and objective."""

    precision: float

    def rate(self, step: int) -> float:
        """Requests per second of a step."""
        return (1 + self.precision) ** step

    def step(self, rate: float) -> int:
        """The highest step whose rate is not above `rate`."""
        return math.floor(math.log(rate) / math.log1p(self.precision) + ROUNDING)


@dataclass(frozen=True)
class Bracket:
    """Neighbouring steps of which one passes and the next does not; None where the limits were reached."""

    passing: int | None
    failing: int | None

    @property
    def is_whole(self) -> bool:
        return self.passing is not None and self.failing is not None


def highest_passing(passes: Callable[[int], bool], start: int, lowest: int, highest: int) -> Bracket:
    """The bracket found from `start` within `lowest` to `highest`, both included.

    Goes 1, 2, 4, ... steps up while steps pass, or down while they do not, and halves what is between. Whether steps
    pass need not be monotone: then it is one of the places where passing ends.
    """
    start = min(max(start, lowest), highest)
    bracket = _upwards(passes, start, highest) if passes(start) else _downwards(passes, start, lowest)
    passing, failing = bracket.passing, bracket.failing
    if passing is None or failing is None:
        return bracket
    while failing - passing > 1:
        middle = (passing + failing) // 2
        passing, failing = (middle, failing) if passes(middle) else (passing, middle)
    return Bracket(passing, failing)


def _upwards(passes: Callable[[int], bool], passing: int, highest: int) -> Bracket:
    stride = 1
    while passing < highest:
        step = min(passing + stride, highest)
        if not passes(step):
            return Bracket(passing, step)
        passing, stride = step, 2 * stride
    return Bracket(passing, None)


def _downwards(passes: Callable[[int], bool], failing: int, lowest: int) -> Bracket:
    stride = 1
    while failing > lowest:
        step = max(failing - stride, lowest)
        if passes(step):
            return Bracket(step, failing)
        failing, stride = step, 2 * stride
    return Bracket(None, failing)
