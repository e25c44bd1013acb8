"""Computes an experiment's points with a cost model: the same batches, requests and policies on a
virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.experiment.bench import Bench
from sarathi_lab.experiment.gpu_serving import Load, Served, serve
from sarathi_lab.experiment.measure import unit_of
from sarathi_lab.experiment.served_figures import Gain
from sarathi_lab.experiment.timed_figures import Unit
from sarathi_lab.results.load import POINT, SIMULATED

BLOCK_SIZE = 16  # tokens


@dataclass(frozen=True)
class SimulatedDevice:
    """A GPU, the level of its cost model and the model on it, as `figure.parquet` names them in
    one.
    """

    hardware: str
    level: str
    model: str

    @classmethod
    def of(cls, name: str) -> SimulatedDevice:
        """From a name such as "simulated a6000, profiled, 13b"."""
        hardware, level, model = name.removeprefix("simulated ").split(", ")
        return cls(hardware, level, model)

    @property
    def folder(self) -> str:
        """The device of recorded results; the analytic level is the usual one."""
        return SIMULATED + self.hardware + ("" if self.level == "analytic" else f"-{self.level}")


Row = tuple[str, str, str, float, float, float]  # figure, panel, series, x, y, relative error


def simulated_points(bench: Bench, units: Sequence[Unit], gains: Sequence[Gain]) -> pd.DataFrame:
    """The points in the columns of `recorded`; their intervals are the error that the cost model
    states of itself.
    """
    rows = [*_timed(bench, units), *_served(bench, gains)]
    table = pd.DataFrame(rows, columns=["figure", "panel", "series", "x", "y", "error"])
    table["unit"] = [
        unit_of(figure, panel) for figure, panel in zip(table.figure, table.panel, strict=True)
    ]
    return _with_intervals(table)


def by_device(points: pd.DataFrame) -> dict[SimulatedDevice, pd.DataFrame]:
    """The recomputed points of `figure.parquet` by simulated device, in the columns of `recorded`.

    Points that are counted instead of served are left out.
    """
    own = points[(points.source == "simulated") & ~points.device.str.endswith("counted")]
    tables = {}
    for name, rows in own.groupby("device", sort=False):
        device = SimulatedDevice.of(str(name))
        table = _with_intervals(rows.rename(columns={"uncertainty": "error"}))
        tables[device] = table.assign(model=device.model, device_name=name)
    return tables


def _timed(bench: Bench, units: Sequence[Unit]) -> Iterator[Row]:
    for unit in units:
        for point in unit.points(bench):
            yield (
                unit.figure,
                point.panel,
                point.series,
                float(point.x),
                point.y.value,
                point.y.error,
            )


def _served(bench: Bench, gains: Sequence[Gain]) -> Iterator[Row]:
    known: dict[Load, Served] = {}
    for gain in gains:
        for load in (gain.baseline, gain.load):
            known[load] = known.get(load) or _serve(bench, load)
        error = math.hypot(*[max(bench.cost.uncertainty.values())] * 2)
        value = gain.of(known[gain.baseline], known[gain.load])
        yield gain.figure, gain.panel, gain.series, float(gain.x), value, error


def _serve(bench: Bench, load: Load) -> Served:
    num_blocks = math.ceil(1.1 * load.batch_size * math.ceil(load.longest / BLOCK_SIZE)) + 1
    executor = SimulatedExecutor(bench.cost.iteration_time)
    served = serve(executor, load, num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=1)
    if served is None:
        raise UserError(f"the simulated cache does not hold {load}; choose a smaller setup")
    return served


def _with_intervals(table: pd.DataFrame) -> pd.DataFrame:
    low, high = (table.y - table.y.abs() * table.error, table.y + table.y.abs() * table.error)
    table = table.assign(low=low, high=high, num_pairs=0, reason=None)
    return table[POINT]
