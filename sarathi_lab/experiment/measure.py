"""Measures an experiment's points on a device in rounds of pairs, until a time is over."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import pandas as pd

from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.experiment.bench import Bench
from sarathi_lab.experiment.measured_clock import MeasuredCostModel
from sarathi_lab.experiment.served_figures import Gain, Server
from sarathi_lab.experiment.timed_figures import Unit
from sarathi_lab.results.intervals import FEWEST_PAIRS, median_of
from sarathi_lab.results.load import POINT
from sarathi_lab.tasks.gpu.context import Context

MOST_ROUNDS = 15
QUANTILES = ["q20", "q80"]
UNITS = {
    "fig03": "ms/token",
    "fig04": "tokens/ms",
    "fig07": "ms",
    "fig10": "s",
    "table2": "ms",
}  # else ratios
PANEL_UNITS = {"step": "ratio", "ratio": "ratio", "attention [ms]": "ms", "KV read [MB]": "MB"}

Key = tuple[str, str, str, float]  # figure, panel, series, x
Samples = dict[Key, list[float]]


class QuietContext(Context):
    """A part of no campaign: what it has to say, the progress bar says."""

    def say(self, text: str) -> None:
        """Nothing."""


def measure_rounds(
    executor: TorchExecutor,
    units: Sequence[Unit],
    gains: Sequence[Gain],
    context: Context,
    advance: Callable[[float], None],
) -> Samples:
    """Samples of every point, one a round: for `context.seconds`, but at least `FEWEST_PAIRS`
    rounds.

    In a round every batch of a unit is measured anew, and baseline and policy are served one after
    the other. A first visit to each kind warms up and does not count. `advance` is called with the
    seconds that passed.
    """
    cost, server, samples = (
        MeasuredCostModel(executor),
        Server(executor, context),
        defaultdict(list),
    )
    bench = Bench(cost, None)  # type: ignore[arg-type]  # only pipelines ask for the hardware
    tick = _Clock(advance)
    for unit in units[:1]:
        list(unit.points(bench))
    for gain in gains[:1]:
        server.warm_up(gain)
    tick()
    number, longest = 0, 0.0
    while number < FEWEST_PAIRS or (
        number < MOST_ROUNDS and context.elapsed + longest < context.seconds
    ):
        began, number = context.elapsed, number + 1
        for unit in units:
            cost.forget()
            for point in unit.points(bench):
                key = (unit.figure, point.panel, point.series, float(point.x))
                samples[key].append(_price(point.panel, point.y.value))
            tick()
        for gain in gains:
            server.serve(gain, number)
            tick()
        longest = max(longest, context.elapsed - began)
    for gain in gains:
        both = zip(server.runs.get(gain.baseline, ()), server.runs.get(gain.load, ()), strict=False)
        samples[gain.figure, gain.panel, gain.series, float(gain.x)] = [
            gain.of(*pair) for pair in both
        ]
    return dict(samples)


def table_of(samples: Samples, max_spread: float, seed: int) -> pd.DataFrame:
    """The points in the columns of `recorded`: medians and intervals, or the reason why there is no
    number.
    """
    rows = []
    for (figure, panel, series, x), values in samples.items():
        found = median_of(values, max_spread, of=1.0 if _is_difference(panel) else None, seed=seed)
        y = found.median if found.reason is None else math.nan
        ends = (found.low, found.high, found.num_pairs, unit_of(figure, panel), found.reason)
        rows.append((figure, panel, series, x, y, *ends, found.q20, found.q80))
    return pd.DataFrame(rows, columns=[*POINT, *QUANTILES])


def _price(panel: str, value: float) -> float:
    """A time that comes out at or below zero is below the noise: a ratio to it is infinite."""
    return math.inf if value <= 0 and not _is_difference(panel) else value


def _is_difference(panel: str) -> bool:
    """Whether values are shares of a whole, which may be nothing."""
    return panel.startswith("price: ")


def unit_of(figure: str, panel: str) -> str:
    """The unit of a panel: the paper's, if it is the paper's figure."""
    return PANEL_UNITS.get(panel) or UNITS.get(figure, "ratio")


class _Clock:
    """Hands on the seconds since it was last asked."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance, self._last = advance, time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        self._advance(now - self._last)
        self._last = now
