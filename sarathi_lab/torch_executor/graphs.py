"""Iterations recorded once and replayed: what a launch costs the host is paid once per shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from sarathi_lab.torch_executor.shapes import Shape


class Graphs(Protocol):
    """Work that is the same for every batch of a shape, as it reads its inputs from fixed places."""

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        """Record `work`, which must have run once before."""
        ...

    def replay(self, shape: Shape) -> bool:
        """Do what was recorded for `shape`; False if nothing was."""
        ...

    def drop(self, shape: Shape) -> None:
        """Forget what was recorded for `shape`, if anything."""
        ...


class NoGraphs:
    """Everything is launched anew, operation by operation."""

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        """See `Graphs`."""

    def replay(self, shape: Shape) -> bool:
        """See `Graphs`."""
        return False

    def drop(self, shape: Shape) -> None:
        """See `Graphs`."""


class CudaGraphs:
    """CUDA graphs, whose intermediate results share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        """See `Graphs`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._graphs[shape] = graph

    def replay(self, shape: Shape) -> bool:
        """See `Graphs`."""
        graph = self._graphs.get(shape)
        if graph is None:
            return False
        graph.replay()
        return True

    def drop(self, shape: Shape) -> None:
        """See `Graphs`."""
        self._graphs.pop(shape, None)
