"""Whole iterations of vLLM's workers: the table that calibration makes of them, and a figure."""

from __future__ import annotations

import math

import pytest
from vllm_engine import TINY, backend_of

from sarathi_lab.experiment import measured_iterations
from sarathi_lab.experiment.measure import DeviceBench, load_executor, measure
from sarathi_lab.experiment.measured_iterations import Limits, grid_of, table_of, time_iterations
from sarathi_lab.experiment.registry import CATALOG

pytestmark = pytest.mark.vllm


def test_a_table_and_a_figure_are_measured_on_its_workers(monkeypatch):
    monkeypatch.setattr(measured_iterations, "MIN_ROUNDS", 1)
    backend = backend_of()
    limits = Limits(3, 128)
    grid = grid_of(limits)
    executor = backend.build(TINY, None, limits.sizes)
    timings = time_iterations(
        executor,
        [composition.make() for composition in grid],
        limits,
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        vocab_size=TINY.vocab_size,
        seconds=0.1,
    )
    assert len(timings.rows) == len(grid)
    assert (table_of(grid, timings.rows).time_us > 0).all()
    figure = CATALOG["fig03"]
    sizes = figure.sizes("dry")
    executor = load_executor(backend, TINY, figure.room(backend, TINY, sizes))
    assert executor.block_size == 32  # of which vLLM's attention on a CPU takes multiples
    bench = DeviceBench(executor, TINY)
    samples = measure(figure.parts(TINY, sizes), bench, seconds=0.0, max_rounds=1)
    totals = [values for point, values in samples.items() if point.series == "total"]
    assert totals
    assert all(values[0] > 0 for values in totals)
    attended = [values for point, values in samples.items() if point.series == "attn"]
    assert attended
    assert all(0 < values[0] < math.inf for values in attended), "by hooks, as it is eager"
    shares = [row.operation_share for row in bench.cost.measurements.values()]
    assert all(0.2 < share < 1.0 for share in shares)
