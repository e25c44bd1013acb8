"""Executors of the ranks: rank 0's, driven by the engine, and those that follow it; and their
assembly on all ranks at once (`TorchBackend.ranks`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Sizes, Span, StepResult, bubbles_between
from sarathi_lab.engine.request import Batch, Copy
from sarathi_lab.executor.device import nan_error
from sarathi_lab.executor.timeline import InFlight
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.packing import NUM_BUFFERS, Packer, fields_of
from sarathi_lab.executor.torch.shapes import Shape
from sarathi_lab.extensions.ranks import by_torchrun
from sarathi_lab.extensions.ranks.group import Group, group_of
from sarathi_lab.extensions.ranks.sharded import Ranks, ShardedTransformer, load_part
from sarathi_lab.model.operations import NAN_TOKEN
from sarathi_lab.model.spec import ModelSpec

POLL = 5e-4  # seconds between checks for a finished batch while an arrival is awaited


class RankExecutor(TorchExecutor):
    """Base of the executors of all ranks."""

    model: ShardedTransformer

    def __init__(self, model: ShardedTransformer, group: Group, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.group = group
        group.timeline = self.timeline
        self.num_stages = model.part.ranks.pipeline
        if self.num_stages > 1:
            self.capacity, self.feeds_tokens = self.num_stages, False
            num_buffers = max(NUM_BUFFERS, self.num_stages)
            self._packer = Packer(self._limits, model.device, num_buffers)

    @property
    def ended(self) -> Any:
        """Mark of the end of this stage's part of the newest iteration."""
        return self.timeline.mark() if self.group.ended is None else self.group.ended


class Follower(RankExecutor):
    """Executor of the calls of rank 0. The first rank of each later stage reports its times, and
    that of the last stage the tokens.
    """

    @torch.inference_mode()
    def run_filled(
        self, shape: Shape, buffer: Tensor, num_emits: int, copies: Sequence[Copy]
    ) -> None:
        """Compute inputs that rank 0 has packed."""
        self._packer.take(shape, buffer)
        self.group.begin()
        self._swap(Batch(copies=list(copies)))
        self._compute(shape)
        self._report(self._sampled[:num_emits])

    def _report(self, token_ids: Tensor) -> None:
        part, end = self.model.part, self.ended
        if part.stage == 0 or part.tensor > 0:
            return
        began, ended = self.timeline.wait(self.group.began), self.timeline.wait(end)
        zero = time.time() - self.timeline.now  # other machines' clocks are set by NTP
        tokens = token_ids.tolist() if part.is_last else []
        result = zero + began, zero + ended, tokens
        self.group.report(part.stage, result, is_last=part.is_last)


class Driver(RankExecutor):
    """Executor of rank 0 for the engine: it packs each batch, sends it to the others and computes
    its part. With stages, as many batches are in flight; stages report their times, and bubbles
    are classified as in simulation.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._later = range(1, self.num_stages)
        self._reset()

    def _reset(self) -> None:
        self._calls: deque[int] = deque()  # numbers of those in flight
        self._last: Batch | None = None
        self._free_at: list[float] = []
        self._num_started = 0
        self._num_starved = 0  # free places in the pipeline without a request to put in
        self._starved: deque[bool] = deque()  # of those in flight

    # -- the engine's side -------------------------------------------------------------------------

    def start(self) -> None:
        while self._in_flight:  # of a run that stopped half-way: its reports are on their way
            self._finish()
        super().start()
        self._reset()
        self._call("start")

    def submit(self, batch: Batch) -> None:
        """Send `batch` to all ranks and compute its first stage. Raises RunError for a lost one."""
        with self.group.end_if_lost():
            super().submit(batch)
        self._calls.append(self.group.num_calls)
        self._starved.append(self._num_starved > 0)
        self._num_starved = max(0, self._num_starved - 1)

    def collect(self) -> StepResult:
        self._num_starved = self.capacity - self.num_in_flight
        if not self._in_flight or self.num_stages == 1:
            with self.group.end_if_lost():
                return super().collect()
        done, spans, token_ids = self._finish()
        if NAN_TOKEN in token_ids:
            raise nan_error(self.model, done.batch, token_ids)
        before, self._last = self._last, done.batch
        free_at, self._free_at = self._free_at, [end for _, end in spans]
        number, self._num_started = self._num_started, self._num_started + 1
        is_starved = self._starved.popleft()
        bubbles = bubbles_between(before, done.batch, free_at, spans, is_starved, number)
        end = spans[-1][1]
        return StepResult(done.batch, spans[0][0], end, token_ids, spans, bubbles, **done.fields)

    def _finish(self) -> tuple[InFlight, list[Span], list[int]]:
        """Wait for the oldest batch: its spans by stage, and its tokens."""
        done = self._in_flight.popleft()
        spans = [(self.timeline.wait(done.start), self.timeline.wait(done.end))]
        if self.num_stages == 1:
            return done, spans, done.token_ids.tolist()
        with self.group.end_if_lost():
            last = self.group.size - self.model.part.ranks.tensor
            reports = self.group.take_reports(self._calls.popleft(), self._later, last)
        zero = time.time() - self.timeline.now
        for began, ended, _ in reports:
            # Clocks of other machines are not exact: no stage begins before the one before ends.
            start = max(began - zero, spans[-1][1])
            spans.append((start, max(start, ended - zero)))
        return done, spans, reports[-1][2]

    def _is_done(self) -> bool:
        with self.group.end_if_lost():
            return bool(self._calls) and self.group.has_reports(self._calls[0], self._later)

    @property
    def next_end(self) -> float:
        """`now` where only waiting helps; of a pipeline, whose first stage may be idle, infinite
        until the batch is done.
        """
        return self.now if self.num_stages == 1 or self._is_done() else float("inf")

    def wait_until(self, time: float) -> None:
        """Wait until `time`, or until a batch is done."""
        self._num_starved = self.capacity - self.num_in_flight
        while (left := time - self.now) > 0:
            if self.num_stages > 1 and self._is_done():
                return
            self._sleep(min(left, POLL) if self._in_flight else left)

    def prepare(self, *sizes: int) -> None:
        self._call("prepare", *sizes)
        super().prepare(*sizes)

    # -- the other ranks' side ---------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any) -> None:
        with self.group.end_if_lost():
            self.group.call(method, *arguments)

    def _share(self, batch: Batch, shape: Shape) -> None:
        filled = self._packer.host.sized(fields_of(shape).size).clone()
        self.group.call("run_filled", shape, filled, batch.num_emits, batch.copies)

    def _launch(self, batch: Batch, begun: float) -> InFlight:
        self.group.begin()
        return super()._launch(batch, begun)._replace(end=self.ended)


def ranks_of(backend: TorchBackend) -> Ranks:
    return Ranks(backend.tensor_parallel, backend.pipeline_parallel)


def check_settings(backend: TorchBackend) -> None:
    """Raise UserError for settings that ranks do not support, or GPUs that are missing."""
    ranks, count = ranks_of(backend), backend.num_devices
    if backend.profile != "none":
        raise UserError(
            f"executor.profile={backend.profile} looks into one device, not {ranks.description}; "
            "leave it out"
        )
    if ranks.tensor > 1 and (backend.weights != "auto" or backend.dtype == "int8"):
        setting = "dtype=int8" if backend.dtype == "int8" else f"executor.weights={backend.weights}"
        raise UserError(
            f"{setting} has scales of whole rows, which "
            f"executor.tensor_parallel={ranks.tensor} cuts; use executor.pipeline_parallel"
        )
    degrees = f"executor.tensor_parallel={ranks.tensor} times executor.pipeline_parallel="
    degrees += f"{ranks.pipeline}"
    if by_torchrun() and (size := int(os.environ["WORLD_SIZE"])) != count:
        raise UserError(
            f"torchrun started {size} ranks, but {degrees} is {count}; use torchrun "
            f"--nproc-per-node {count}, or leave torchrun out"
        )
    if backend.uses_gpus and not by_torchrun() and (present := torch.cuda.device_count()) < count:
        raise UserError(
            f"{degrees} needs {count} GPUs, and {present} are here; use fewer, several machines by "
            "torchrun, or device=cpu"
        )


def build(backend: TorchBackend, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> Driver:
    """Build a warmed-up executor over all ranks. Raises RunError."""
    group = group_of(backend.num_devices)
    try:
        with group.end_if_lost():
            group.call("build", backend, spec, checkpoint, sizes)
            driver = build_part(group, backend, spec, checkpoint, sizes)
        assert isinstance(driver, Driver), "this is rank 0"
        backend.warm_up(driver, sizes)
    except BaseException:
        group.close()  # others may wait for this rank
        raise
    return driver


def build_part(
    group: Group, backend: TorchBackend, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes
) -> RankExecutor:
    """Build the executor of this rank, not warmed up."""
    ranks = ranks_of(backend)
    group.arrange(ranks, backend.rank_timeout)
    if backend.uses_gpus:
        number = os.environ["LOCAL_RANK"] if by_torchrun() else group.rank  # of its machine's GPUs
        backend = replace(backend, device=f"cuda:{number}")
    part, place = ranks.part(group.rank), (backend.torch_device, backend.torch_dtype)

    def load(spec: ModelSpec) -> ShardedTransformer:
        return load_part(spec, checkpoint, part, group, *place, backend.seed)

    def agree(num_blocks: int) -> int:
        least = torch.tensor([num_blocks])
        with group.exchange():
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group.all)
        return int(least)

    model = backend.load(spec, load, is_whole=False)  # ranks exchange between calls of C++
    assert isinstance(model, ShardedTransformer), "of `load`"
    model.share_sums()
    make = partial(Follower if group.rank else Driver, group=group)
    executor = backend.assemble(make, model, sizes, agree)
    assert isinstance(executor, RankExecutor), "of `make`"
    return executor
