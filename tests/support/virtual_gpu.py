"""vLLM's workers on a GPU whose host and device take the time that a test states."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.executor.timeline import CudaTimeline
from sarathi_lab.executor.vllm.executor import VllmExecutor


class VirtualGpu(CudaTimeline):
    """A host and a stream, in seconds of virtual time; a mark is when the stream reaches it."""

    def __init__(self) -> None:
        self.host = self.stream = self._zero = 0.0

    def reset(self) -> None:
        self._zero = self.host = self.stream = max(self.host, self.stream)

    @property
    def now(self) -> float:
        return self.host - self._zero

    def launch(self, host_seconds: float, device_seconds: float) -> None:
        self.host += host_seconds
        self.stream = max(self.host, self.stream) + device_seconds

    def mark(self) -> float:
        return max(self.host, self.stream)

    def wait(self, mark: float) -> float:
        self.host = max(self.host, mark)
        return mark - self._zero

    def seconds(self, before: float, after: float) -> float:
        return after - before


class WorkersOnGpu:
    """Workers whose host takes `host_seconds` an iteration and whose device `device_seconds` of its
    tokens by name. They refuse a sequence that does not go on where it was.
    """

    is_lost, num_stages, wants_newest_tokens = False, 1, False
    times_operations = False
    block_size, num_blocks = 4, 64

    def __init__(self, host_seconds: float, device_seconds: Any, *, is_async: bool) -> None:
        self.gpu = VirtualGpu()
        self.is_async = is_async
        self.host_seconds, self.device_seconds = host_seconds, device_seconds
        self.graph_use: Callable[[dict[str, int]], str] = lambda num_tokens: "full"
        self._computed: dict[str, int] = {}

    def forget(self, names: set[str]) -> None:
        for name in names:
            del self._computed[name]

    def run(self, step: Any) -> Any:
        self.forget(step.ended)
        for new in step.new:
            assert new.name not in self._computed
            assert NO_TOKEN not in new.token_ids
            self._computed[new.name] = new.num_computed
        for name, num_computed in zip(step.names, step.num_computed, strict=True):
            assert self._computed[name] == num_computed
        for name, number in step.num_tokens.items():
            self._computed[name] += number
        self.gpu.launch(self.host_seconds, self.device_seconds(step.num_tokens))
        return SimpleNamespace(
            tokens=lambda names: [0] * len(names),
            graph_use=lambda: (self.graph_use(step.num_tokens), 0),
        )


def executor_on_gpu(
    host_seconds: float, device_seconds: Any, *, is_async: bool = True
) -> VllmExecutor:
    workers = WorkersOnGpu(host_seconds, device_seconds, is_async=is_async)
    return VllmExecutor(workers, timeline=workers.gpu)
