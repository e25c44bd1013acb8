"""The executor of each rank: rank 0's, which the engine drives, and those that follow it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.executor import Span, StepResult, bubbles_between
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.torch.executor import InFlight, TorchExecutor
from sarathi_lab.executor.torch.packing import NUM_BUFFERS, Packer
from sarathi_lab.executor.torch.ranks import wire
from sarathi_lab.executor.torch.ranks.exchange import RankExchange
from sarathi_lab.executor.torch.ranks.group import REPORT, Group, Kind, Lost
from sarathi_lab.executor.torch.shapes import Shape
from sarathi_lab.model.operations import NAN_TOKEN
from sarathi_lab.model.sharded import ShardedTransformer

POLLED = 5e-4  # seconds between looks at whether a batch is done, while an arrival is waited for
CLOCKS_READ = 5  # the quickest answer of so many tells what another machine's clock is off by


class RankExecutor(TorchExecutor):
    """What rank 0's and the others' have in common."""

    model: ShardedTransformer

    def __init__(
        self, model: ShardedTransformer, group: Group, exchange: RankExchange, **own: Any
    ) -> None:
        super().__init__(model, **own)
        self.group = group
        self.exchange = exchange
        exchange.timeline = self.timeline
        self.num_layers = None  # prompts pass all layers at once
        self.num_stages = model.part.ranks.pipeline
        if self.num_stages > 1:
            self.capacity, self.feeds_tokens = self.num_stages, False
            if self._limits is not None:
                num_buffers = max(NUM_BUFFERS, self.num_stages)
                self._packer = Packer(self._limits, model.device, num_buffers)

    @property
    def ended(self) -> Any:
        """The end of this stage's part of the iteration launched last."""
        mark = self.exchange.ended
        return self.timeline.mark() if mark is None else mark


class Follower(RankExecutor):
    """Runs what rank 0 sends; the first rank of a later stage reports when it did, and the last
    stage's the tokens.
    """

    def expect(self, num_tokens: int) -> None:
        """Let the hidden states of a batch to come arrive meanwhile, where nothing else orders
        what arrives: a GPU's stream does.
        """
        if self.model.part.stage and self.model.device.type == "cpu":
            self.exchange.expect(num_tokens)

    @property
    def reports(self) -> bool:
        """Whether it speaks for a stage."""
        part = self.model.part
        return part.stage > 0 and part.tensor == 0

    @torch.inference_mode()
    def run(self, payload: Tensor) -> None:
        copies, _ = wire.copies_of(payload)
        if self._limits is None:
            model = self.model
            window, masks = model.spec.sliding_window, model.operations.wants_masks
            inputs = wire.unpacked(payload, window, model.device, model.dtype, with_masks=masks)
            self.exchange.begin()
            self._swap(Batch(copies=copies))
            token_ids = model.operations.greedy(model(inputs, self.cache))
        else:
            shape, buffer = wire.unpacked_for_kernels(payload)
            self._packer.take(buffer)
            self.exchange.begin()
            self._swap(Batch(copies=copies))
            self._compute(shape)
            token_ids = self._sampled[: wire.num_emits(payload)]  # the others are padding
        end = self.ended
        if self.reports:
            began, ended = self.timeline.wait(self.exchange.began), self.timeline.wait(end)
            zero = time.perf_counter() - self.timeline.now
            tokens = token_ids.tolist() if self.model.part.is_last else []
            report = [zero + began, zero + ended, *tokens]
            self.group.send(torch.tensor(report, dtype=torch.float64), 0, REPORT)

    def read_clock(self) -> None:
        """Answer rank 0 if it listens; what it does not take would be there for its next report."""
        if self.reports:
            self.group.send(torch.tensor([time.perf_counter()], dtype=torch.float64), 0, REPORT)


class Driver(RankExecutor):
    """Rank 0's: the engine's executor, which packs each batch, sends it to the others and computes
    its own part. With stages, as many batches are in flight; it is told of each stage's time, and
    bubbles are classified as in simulation.
    """

    def __init__(self, *args: Any, **own: Any) -> None:
        super().__init__(*args, **own)
        self._expected: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[list[Tensor] | Lost] = queue.SimpleQueue()
        self.clock_offsets = [0.0] * self.num_stages
        self._forget()

    def listen(self) -> None:
        """Hear what stages report from now on, the executors of all ranks being there."""
        if self.num_stages > 1:
            self._read_clocks()
            threading.Thread(target=self._listen, daemon=True).start()

    def _forget(self) -> None:
        self._last: Batch | None = None
        self._free_at: list[float] = []
        self._num_started = 0
        self._num_starved = 0  # places that were empty when there was nothing to put in
        self._starved: list[bool] = []  # of those in flight

    # -- the engine's side -------------------------------------------------------------------------

    def start(self) -> None:
        while self._in_flight:  # of a run that stopped half-way: its messages are on their way
            self._collected()
        super().start()
        self._forget()
        self._tell(Kind.START)

    def submit(self, batch: Batch) -> None:
        """Send `batch` to all ranks, and compute its first stage. RunError: a rank is gone, or
        hangs.
        """
        with self.group.ending_all(), self._expecting():
            super().submit(batch)
        self._starved.append(self._num_starved > 0)
        self._num_starved = max(0, self._num_starved - 1)
        if self.num_stages > 1:
            self._expected.put(batch.num_emits)

    def collect(self) -> StepResult:
        self._num_starved = self.capacity - self.num_in_flight
        if not self._in_flight or self.num_stages == 1:
            with self.group.ending_all(), self._expecting():
                return super().collect()
        done, spans, token_ids = self._collected()
        if NAN_TOKEN in token_ids:
            raise _not_numbers()
        before, self._last = self._last, done.batch
        free_at, self._free_at = self._free_at, [end for _, end in spans]
        number, self._num_started = self._num_started, self._num_started + 1
        is_starved = self._starved.pop(0)
        bubbles = bubbles_between(before, done.batch, free_at, spans, is_starved, number)
        end = spans[-1][1]
        self._profiler.collected()
        return StepResult(done.batch, spans[0][0], end, token_ids, spans, bubbles, **done.fields)

    @property
    def next_end(self) -> float:
        """Of a pipeline, whose first stage may be idle: after an arrival, unless it is done."""
        if self.num_stages == 1 or not self._reports.empty():
            return self.now
        return float("inf")

    def wait_until(self, time: float) -> None:
        """Or until a batch is done."""
        self._num_starved = self.capacity - self.num_in_flight
        while (left := time - self.now) > 0:
            if self.num_stages > 1 and not self._reports.empty():
                return
            self._sleep(min(left, POLLED) if self._in_flight else left)

    def prepare(self, *sizes: int) -> None:
        self._tell(Kind.PREPARE, sizes)
        super().prepare(*sizes)

    # -- the other ranks' side ---------------------------------------------------------------------

    def _launch_unpadded(self, batch: Batch, begun: float) -> InFlight:
        model = self.model
        self.exchange.begin()
        inputs = self.packed(batch)
        self.group.tell(Kind.RUN, wire.packed(inputs, batch.copies))
        host_time = time.perf_counter() - begun
        self._swap(batch)
        token_ids = self._fetch(model.operations.greedy(model(inputs, self.cache)))
        known = {"host_time": host_time}
        launched = self.timeline.launched
        return InFlight(batch, self.exchange.began, self.ended, launched, token_ids, known)

    def _share(self, batch: Batch, shape: Shape) -> None:
        self.exchange.begin()
        filled = self._packer.filled(shape)
        self.group.tell(Kind.RUN, wire.packed_for_kernels(shape, filled, batch))

    def _launch(self, batch: Batch, begun: float) -> InFlight:
        done = super()._launch(batch, begun)
        return done if self._limits is None else done._replace(end=self.ended)

    def _run_again(self, batch: Batch) -> None:
        raise _not_numbers()

    def _expecting(self) -> AbstractContextManager[None]:
        """While the others compute; a host that waits for its GPU takes CPU time."""
        return self.group.signs.expecting(counts_cpu=self.model.device.type == "cpu")

    def _tell(self, kind: Kind, payload: Any = None) -> None:
        with self.group.ending_all():
            self.group.tell(kind, payload)

    def _collected(self) -> tuple[InFlight, Sequence[Span], list[int]]:
        """The oldest batch, when each stage worked on it, and its tokens."""
        done = self._in_flight.popleft()
        start, end = self.timeline.wait(done.start), self.timeline.wait(done.end)
        spans = [(start, end)]
        if self.num_stages == 1:
            return done, spans, done.token_ids.tolist()
        with self._expecting(), self.group.exchanging():
            reports = self._reports.get()
        if isinstance(reports, Lost):
            raise self.group.broken()
        zero = time.perf_counter() - self.timeline.now
        for report, offset in zip(reports, self.clock_offsets[1:], strict=True):
            start, end = (report[:2] - zero - offset).tolist()
            # A clock that was read over a network is not exact: no stage begins before the last.
            start = max(start, spans[-1][1])
            spans.append((start, max(start, end)))
        return done, spans, [int(token) for token in reports[-1][2:].tolist()]

    def _listen(self) -> None:
        """Take what stages report of each batch; those waiting for one then wait for a thread."""
        try:
            while (num_emits := self._expected.get()) is not None:
                reports = []
                for stage in range(1, self.num_stages):
                    size = 2 + (num_emits if stage == self.num_stages - 1 else 0)
                    reports.append(self._hear(stage, size))
                self._reports.put(reports)
        except Lost as error:
            self._reports.put(error)

    def _hear(self, stage: int, size: int) -> Tensor:
        report = torch.empty(size, dtype=torch.float64)
        with self.group.exchanging():
            dist.recv(report, self.model.part.ranks.leader(stage), tag=REPORT)
        return report

    def _read_clocks(self) -> None:
        """What the clocks of stages on other machines are ahead of this one's (Cristian's method:
        the answer of the quickest message is of the middle of its way).
        """
        answers: list[list[tuple[float, float]]] = [[] for _ in range(self.num_stages)]
        for _ in range(CLOCKS_READ):
            before = time.perf_counter()
            self._tell(Kind.CLOCK)
            for stage in range(1, self.num_stages):
                read = float(self._hear(stage, 1))
                after = time.perf_counter()
                answers[stage].append((after - before, read - (before + after) / 2))
        own = self.group.store.get("host/0")
        for stage in range(1, self.num_stages):
            host = self.group.store.get(f"host/{self.model.part.ranks.leader(stage)}")
            self.clock_offsets[stage] = 0.0 if host == own else min(answers[stage])[1]

    def close(self) -> None:
        """Let go of the thread that listens."""
        self._expected.put(None)


def _not_numbers() -> RunError:
    return RunError(
        "the logits of an iteration are not numbers; check the model's weights (one device, "
        "without executor.tensor_parallel and executor.pipeline_parallel, says in which layer)"
    )
