"""Experiments of single batches and equal requests, whose function lists parts of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sarathi_lab.engine.executor import Backend
from sarathi_lab.experiment.bench import CostBench, room_of
from sarathi_lab.experiment.points import Part
from sarathi_lab.experiment.registry import (
    COUNTED,
    Experiment,
    Measured,
    MeasuredJob,
    SimulatedJob,
    Sizes,
)
from sarathi_lab.experiment.scenario import Room
from sarathi_lab.model.spec import ModelSpec


@dataclass(frozen=True)
class Grid(Experiment):
    """An experiment whose function lists parts of batches and of equal requests, all of which a
    device has to hold.
    """

    shares_bench: ClassVar[bool] = True

    def parts(self, spec: ModelSpec, sizes: Sizes) -> Sequence[Part]:
        return list(self.make(spec, **sizes))

    def room(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> Room:
        return Room.largest(map(room_of, self.parts(spec, sizes)))

    def bench(self, job: SimulatedJob) -> CostBench:
        backend = job.backend
        # Composed kernels have times at measured sizes alone; serving would meet others.
        is_counting = job.method == COUNTED or backend.composes_kernels
        return CostBench(backend.cost_of(job.spec), is_counting=is_counting)

    def measure(self, job: MeasuredJob) -> Measured:
        from sarathi_lab.experiment.measure import measure_parts  # torch takes seconds

        return measure_parts(self.parts(job.spec, job.sizes), job)


@dataclass(frozen=True)
class Map(Grid):
    """Batches of many sizes, of which a device measures those that its memory holds."""

    def least_tokens(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> int:
        return min(room_of(part).kv_tokens for part in self.parts(spec, sizes))
