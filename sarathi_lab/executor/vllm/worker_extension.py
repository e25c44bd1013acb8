"""What the lab adds to vLLM's workers (`worker_extension_cls`): when each stage of a pipeline
computes, for how long each operation, and random weights. It runs in the workers' processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Protocol

import torch

from sarathi_lab.executor.timeline import Mark
from sarathi_lab.executor.vllm.dummy_weights import draw_weights
from sarathi_lab.executor.vllm.operation_hooks import OperationTimer
from sarathi_lab.executor.vllm.stage_pipes import REPORT, pipe_of


class HostClock:
    """The clock of a device that computes while its host waits."""

    def mark(self) -> Mark:
        """Mark the end of all work submitted so far."""
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        """Return when a mark passed, in seconds of `time.perf_counter`, which is one clock for all
        processes of a machine. Marks come in their order.
        """
        return float(mark)


class EventClock(HostClock):
    """The clock of a GPU's current stream, anchored to the host's when the GPU is idle."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._last = self.mark()
        torch.cuda.synchronize()
        self._last_seconds = time.perf_counter()

    def mark(self) -> Mark:
        # `blocking`: a thread that waits for the event sleeps, and leaves the core to launches.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """Count from the mark before: times between events have only 24 bits."""
        mark.synchronize()
        self._last_seconds += self._last.elapsed_time(mark) / 1e3
        self._last = mark
        return self._last_seconds


class StageReporter:
    """Writer of a stage's reports. A GPU's events are waited for in a thread, as the worker goes on
    to launch the next micro-batch.
    """

    def __init__(self, pipe: Path, is_gpu: bool) -> None:
        self._file = os.open(pipe, os.O_WRONLY)
        self._is_gpu = is_gpu
        self._start: Mark = None
        self._marks: Queue[tuple[Mark, Mark]] = Queue()
        self.restart()
        if is_gpu:
            Thread(target=self._write_marks, daemon=True).start()

    def restart(self) -> None:
        """Report what is on its way, and anchor the clock again: two clocks drift apart."""
        self._marks.join()
        self._clock = EventClock() if self._is_gpu else HostClock()

    def begin(self, *hooked: object) -> None:
        """Mark that this stage has its input and begins; a hook before a module's forward pass."""
        self._start = self._clock.mark()

    def end(self, *hooked: object) -> None:
        """Mark and report that it has ended; a hook behind a module's forward pass."""
        end = self._clock.mark()
        if self._is_gpu:
            self._marks.put((self._start, end))
        else:
            self._write(self._start, end)

    def _write(self, start: Mark, end: Mark) -> None:
        begun = self._clock.seconds(start)
        ended = self._clock.seconds(end)
        os.write(self._file, REPORT.pack(begun, ended))

    def _write_marks(self) -> None:
        while True:
            self._write(*self._marks.get())
            self._marks.task_done()


class ParallelConfig(Protocol):
    """What is read of vLLM's configuration of devices."""

    tensor_parallel_size: int
    pipeline_parallel_size: int


class ModelRunner(Protocol):
    """What is read of vLLM's model runners, V1 and V2."""

    sampler: object


class WorkerExtension:
    """Methods that vLLM's worker class inherits, to be called by `collective_rpc`."""

    # Of vLLM's worker.
    rank: int
    device: torch.device
    parallel_config: ParallelConfig
    model_runner: ModelRunner
    get_model: Callable[[], torch.nn.Module]

    stage_reporter: StageReporter | None = None  # once stages report
    operation_timer: OperationTimer

    def report_stage_times(self, folder: str) -> None:
        """Write start and end of each later micro-batch to this stage's pipe in `folder`.

        A stage begins when its input is there and ends with its forward pass, the last stage with
        its sampling. Of workers that share a stage's layers the first one reports.
        """
        stage, rank_in_stage = divmod(self.rank, self.parallel_config.tensor_parallel_size)
        if rank_in_stage > 0:
            return
        if self.stage_reporter is not None:
            self.stage_reporter.restart()
            return
        reporter = StageReporter(pipe_of(folder, stage), self.device.type == "cuda")
        self.stage_reporter = reporter
        model = self.get_model()
        last_module = model
        if stage == self.parallel_config.pipeline_parallel_size - 1:
            last_module = self._last_module(model)
        model.register_forward_pre_hook(reporter.begin)
        last_module.register_forward_hook(reporter.end)

    def start_operation_times(self) -> None:
        """Time the operations of each later iteration, by hooks that take time themselves."""
        self.operation_timer = OperationTimer(self.get_model(), self.device.type == "cuda")

    def take_operation_times(self) -> list[dict[str, float]]:
        """Return the seconds by operation of each iteration since the last call, or the start."""
        return self.operation_timer.take()

    def stop_operation_times(self) -> None:
        self.operation_timer.remove()

    def draw_weights(self, seed: int) -> None:
        """Replace vLLM's dummy weights, of which many are zero."""
        draw_weights(self.get_model(), seed)

    def _last_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return what computes last: the sampler, or before a sampler that is no module (that of
        the runner V2) the logits.
        """
        sampler = self.model_runner.sampler
        if isinstance(sampler, torch.nn.Module):
            return sampler
        modules = dict(model.named_modules())
        name = next(name for name in modules if name.endswith("logits_processor"))
        return modules[name]
