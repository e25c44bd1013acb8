"""Runs of the same requests at many rates, each served once, and the highest rate that meets an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd

from sarathi_lab.capacity.engine import Engine, all_at_once, at_rate
from sarathi_lab.capacity.search import Bracket, Grid, highest_passing
from sarathi_lab.intervals import bootstrap
from sarathi_lab.policy import Policy
from sarathi_lab.request import Request
from sarathi_lab.serving_metrics import is_met
from sarathi_lab.slo import Slo

# Where a search ends, in saturation rates, unless told. Above, only the shortness of a run lets it meet an objective.
BELOW, ABOVE = 1 / 64, 2.0


@dataclass(frozen=True)
class Trial:
    """One run: its seed and requests per second, and the tables that it left."""

    seed: int
    rate: float
    iterations: pd.DataFrame
    requests: pd.DataFrame

    @property
    def duration(self) -> float:
        """Seconds until the last token."""
        return float(self.iterations.end.max())


@dataclass
class Trials:
    """Serves `loads`, the requests of each seed, under one policy on `engine`; every run is kept.

    The rates are those of `grid`; a seed's search begins where the one before it ended.
    """

    engine: Engine
    policy: Policy
    loads: Mapping[int, Sequence[Request]]
    grid: Grid
    known: dict[tuple[int, int], Trial] = field(default_factory=dict)

    def at(self, seed: int, step: int) -> Trial:
        """The run of a seed at a step of the grid, served unless it was before."""
        if (seed, step) not in self.known:
            rate = self.grid.rate(step)
            ledger = self.engine.serve(at_rate(self.loads[seed], rate), self.policy)
            self.known[seed, step] = Trial(seed, rate, ledger.iterations(), ledger.requests())
        return self.known[seed, step]

    def saturation_rate(self) -> float:
        """Requests per second of the first seed's, all there at once."""
        requests = next(iter(self.loads.values()))
        ledger = self.engine.serve(all_at_once(requests), self.policy)
        return len(requests) / float(ledger.iterations().end.max())

    def meets(self, slo: Slo, seed: int, step: int) -> bool:
        """Whether the run of a seed at a step meets `slo`."""
        return is_met(self.at(seed, step).requests, slo)

    def capacity(self, slo: Slo, start: float, limits: tuple[float, float]) -> Capacities:
        """The highest rate of each seed that meets `slo`, looked for from `start` within `limits` (per second)."""
        lowest, highest = (self.grid.step(rate) for rate in limits)
        step, brackets = self.grid.step(start), {}
        for seed in self.loads:
            bracket = highest_passing(partial(self.meets, slo, seed), step, lowest, highest)
            brackets[seed] = bracket
            step = lowest if bracket.passing is None else bracket.passing
        return Capacities(self.grid, lowest, highest, brackets)


@dataclass(frozen=True)
class Capacities:
    """What the seeds of one search found; `lowest` and `highest` are the steps at its limits."""

    grid: Grid
    lowest: int
    highest: int
    brackets: Mapping[int, Bracket]

    @property
    def values(self) -> list[float]:
        """The highest passing rate of each seed; 0 where even the lowest fails."""
        return [0.0 if b.passing is None else self.grid.rate(b.passing) for b in self.brackets.values()]

    @property
    def summary(self) -> dict[str, float]:
        """The median over the seeds and its interval; the next rate of the grid is the upper end of each seed's."""
        low, high = bootstrap(self.values)
        num_whole = sum(bracket.is_whole for bracket in self.brackets.values())
        return {
            "capacity": float(np.median(self.values)),
            "capacity_low": low,
            "capacity_high": high * (1 + self.grid.precision),
            "capacity_seeds": float(num_whole),
        }

    @property
    def remark(self) -> str:
        """What kept seeds from a bracket; empty if all have one."""
        failing = sum(bracket.passing is None for bracket in self.brackets.values())
        passing = sum(bracket.failing is None for bracket in self.brackets.values())
        parts = []
        if failing:
            parts.append(f"even {self.grid.rate(self.lowest):.3g}/s, the lowest rate tried, fails with {failing}")
        if passing:
            parts.append(f"even {self.grid.rate(self.highest):.3g}/s, the highest rate tried, passes with {passing}")
        return f"{' and '.join(parts)} of {len(self.brackets)} seeds" if parts else ""


def limits_around(saturation: float, lowest: float | None, highest: float | None) -> tuple[float, float]:
    """Where a search ends: as told, else far below and above the saturation rate."""
    low = saturation * BELOW if lowest is None else lowest
    high = saturation * ABOVE if highest is None else highest
    return min(low, high), max(low, high)
