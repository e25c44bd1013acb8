"""Times of whole iterations by their size, as the engine runs them: what `task=iteration_time` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sarathi_lab.torch_executor.executor import TorchExecutor
from sarathi_lab.torch_executor.operation_probe import OperationProbe
from sarathi_lab.torch_executor.profiling import Shape, batch_of


def time_iterations(
    executor: TorchExecutor, shapes: Sequence[Shape], repetitions: int, advance: Callable[[int], None]
) -> dict[Shape, list[float]]:
    """Seconds of `repetitions` iterations of every shape, in turns, so that a slow minute spreads over all of them.

    Each goes behind one of its own shape, as in the engine, where iterations resemble the ones before. `advance` is
    told of every repetition.
    """
    probe = OperationProbe(executor)
    seconds: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    for _ in range(repetitions):
        for shape, found in seconds.items():
            probe.iteration(batch_of(executor, shape))
            found.append(probe.iteration(batch_of(executor, shape)))
            advance(1)
    return seconds
