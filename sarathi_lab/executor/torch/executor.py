"""Executor of batches on a CPU or GPU through torch; on a GPU two batches are in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sarathi_kernels.attention.plan import TILE_ROWS
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_sequence, rehearse
from sarathi_lab.engine.executor import GraphUse, StepResult
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.executor.device import explain_device_errors, nan_error
from sarathi_lab.executor.timeline import (
    HostTimeline,
    Mark,
    Marks,
    OperationProfiler,
    WallClock,
    timeline_of,
)
from sarathi_lab.executor.torch.fields import layout_of
from sarathi_lab.executor.torch.packing import NUM_BUFFERS, Packer
from sarathi_lab.executor.torch.shapes import Limits, NoGraphs, PaddedShapes, Shape
from sarathi_lab.model.operations import NAN_TOKEN, PackedInputs
from sarathi_lab.model.transformer import KVCache, Transformer

MAX_EMITS = 1 << 16  # tokens sampled in one iteration
MAX_RECORDED = 256  # shapes: those of an experiment's few settings, which take turns


class LaunchedBatch(NamedTuple):
    """A batch in flight, its tokens on their way to the host."""

    batch: Batch
    start: Mark
    end: Mark
    launched: float  # time at which the host had launched all of it
    token_ids: Tensor
    graph_use: GraphUse
    num_padding_tokens: int
    host_time: float  # seconds that the host spent on packing and launching it
    operations: Marks  # if they are profiled


class TorchExecutor(WallClock):
    """`Executor` of one CPU or GPU with greedy sampling.

    With `capacity` 2 the host packs and launches a batch while the one before runs; tokens pass
    from one to the next on the device. With `limits` the model's operations are kernels, else plain
    torch's or C++, which need capacity 1.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_blocks: int,
        block_size: int,
        timeline: HostTimeline | None = None,
        sleep: Callable[[float], None] = time.sleep,
        limits: Limits | None = None,
        capacity: int = 1,
        graphs: NoGraphs | None = None,
        profiler: OperationProfiler | None = None,
    ) -> None:
        self.model = model
        self.cache = KVCache(model.spec, num_blocks, block_size, model.device, model.dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.capacity = capacity
        self.feeds_tokens = capacity > 1
        self.timeline = timeline or timeline_of(model.device)
        self._sleep = sleep
        self._uses_kernels = limits is not None
        self._limits = limits or Limits(model.spec, block_size, num_sms=0)
        self._graphs = graphs or NoGraphs()
        self._profiler = profiler
        if profiler is not None:
            model.operations.range = profiler.range
            model.operations.recorder = profiler.record
        self._packer = Packer(self._limits, model.device)
        self._shapes: PaddedShapes | None = None
        # Buffer and inputs of recorded work by shape.
        self.recordings: dict[Shape, tuple[Tensor, PackedInputs]] = {}
        self._in_flight: deque[LaunchedBatch] = deque()
        self._newest: Sequence[SequenceState] = ()  # whose tokens are the rows of `_sampled`
        self._sampled = torch.zeros(MAX_EMITS, dtype=torch.int32, device=model.device)
        # One for each batch in flight, in turn; a GPU writes to pinned ones while the host goes on.
        is_pinned = model.device.type == "cuda"
        on_host = []
        for _ in range(NUM_BUFFERS):
            on_host.append(torch.empty(MAX_EMITS, dtype=torch.int32, pin_memory=is_pinned))
        self._on_host = cycle(on_host)

    @property
    def shares_phases(self) -> bool:
        return self.model.device.type == "cpu"

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def start(self) -> None:
        self._in_flight.clear()  # of a run that stopped half-way
        self._newest = ()
        self.timeline.reset()
        if self._profiler is not None:
            self._profiler.start()

    @torch.inference_mode()
    def submit(self, batch: Batch) -> None:
        """Launch `batch`; on a CPU it has ended on return. Raises RunError without memory."""
        if len(self._in_flight) >= self.capacity:
            raise RuntimeError(f"{self.capacity} batches are in flight; collect one first")
        begun = time.perf_counter()
        counts = f"{batch.num_prefill_tokens} prompt tokens and {batch.num_decode_tokens} decodes"
        with explain_device_errors(f"an iteration of {counts}"):
            self._in_flight.append(self._launch(batch, begun))

    def collect(self) -> StepResult:
        """Wait for the oldest batch in flight. Raises RunError for logits that are not numbers."""
        if not self._in_flight:
            raise RuntimeError("nothing is in flight; submit a batch first")
        done = self._in_flight.popleft()
        start = self.timeline.wait(done.start)
        end = self.timeline.wait(done.end)
        launching_time = max(0.0, min(end, done.launched) - start)
        if self._profiler is not None:
            self._profiler.collected(done.operations)
        token_ids = done.token_ids.tolist()
        if NAN_TOKEN in token_ids:
            raise nan_error(self.model, done.batch, token_ids)
        return StepResult(
            done.batch,
            start,
            end,
            token_ids,
            host_time=done.host_time,
            num_padding_tokens=done.num_padding_tokens,
            graph_use=done.graph_use,
            launching_time=launching_time,
        )

    def write_profile(self, directory: Path) -> None:
        if self._profiler is not None:
            self._profiler.write(directory)

    def _launch(self, batch: Batch, begun: float) -> LaunchedBatch:
        """Launch `batch`; where the host computes, packing is part of its time."""
        start = self.timeline.mark()
        shape = self._shape_of(batch)
        emitting = self._packer.fill(batch, shape, self._newest)
        host_end = time.perf_counter()
        if self._uses_kernels:
            start = self.timeline.mark()
        graph_use = self._compute(shape)
        self._newest = emitting
        token_ids = self._fetch(self._sampled[: batch.num_emits])
        end = self.timeline.mark()
        if self._uses_kernels:  # which are launched, and computed meanwhile
            host_end = time.perf_counter()
        operations: Marks = []
        if self._profiler is not None:
            operations = self._profiler.launched()
        return LaunchedBatch(
            batch,
            start,
            end,
            launched=self.timeline.launched,
            token_ids=token_ids,
            graph_use=graph_use,
            num_padding_tokens=shape.num_tokens - batch.num_tokens,
            host_time=host_end - begun,
            operations=operations,
        )

    def _shape_of(self, batch: Batch) -> Shape:
        """Return the padded shape of `batch` after kernels' warm-up, else the exact one."""
        if self._shapes is None:
            return self._limits.exact(batch)
        return self._shapes.choose(batch)

    def _compute(self, shape: Shape) -> GraphUse:
        """Compute the filled inputs; return whether a graph was replayed."""
        recorded = self.recordings.get(shape)
        if recorded is None:
            self._run(self._send(shape))
            return "none"
        buffer, inputs = recorded
        self._packer.copy(buffer)
        if self._profiler is None and self._graphs.replay(shape):
            return "full"
        self._run(inputs)
        return "none"

    def _fetch(self, token_ids: Tensor) -> Tensor:
        """Copy to the host, complete when the preceding work is; valid for two more batches."""
        return next(self._on_host)[: len(token_ids)].copy_(token_ids, non_blocking=True)

    def _send(self, shape: Shape) -> PackedInputs:
        if self._uses_kernels:
            return self._packer.send(shape)
        return self._packer.for_torch(self.model)

    def _run(self, inputs: PackedInputs) -> None:
        """Sample into `_sampled`, and read the tokens unknown to the host from there."""
        feed = inputs.feed_rows
        if feed is None:
            self._sampled = self._sample(inputs)
            return
        # Not below 0: NAN_TOKEN can't be looked up.
        fed = self._sampled.index_select(0, feed.clamp(min=0)).clamp_(min=0)
        inputs = replace(inputs, token_ids=torch.where(feed < 0, inputs.token_ids, fed))
        token_ids = self._sample(inputs)
        self._sampled[: len(token_ids)].copy_(token_ids)

    def _sample(self, inputs: PackedInputs) -> Tensor:
        logits = self.model(inputs, self.cache)
        with self.model.operations.range("sampling"):
            return self.model.greedy(logits)

    def packed(self, batch: Batch) -> PackedInputs:
        """Pack a batch of known tokens without padding, once the device has read those before;
        valid until the next one.
        """
        self.timeline.wait(self.timeline.mark())
        shape = self._limits.exact(batch)
        self._packer.fill(batch, shape, ())
        return self._send(shape)

    def warm_up(
        self,
        *,
        batch_size: int,
        chunk_tokens: int,
        longest: int,
        max_tokens: int | None = None,
        num_drafts: int = 0,
    ) -> None:
        """Record all padded shapes, then run throw-away iterations (`rehearse`), so that the first
        measured one is like the rest.

        Args:
            batch_size: The most sequences of a batch.
            chunk_tokens: Tokens of a chunk in the throw-away iterations.
            longest: The most tokens of a sequence.
            max_tokens: The most tokens of a batch, decodes included; None: `chunk_tokens`.
            num_drafts: The most drafts of a decode.
        """
        self.prepare(batch_size, longest, max_tokens or chunk_tokens, num_drafts)
        rehearse(self, self.num_blocks, self.block_size, batch_size, chunk_tokens)

    @torch.inference_mode()
    def prepare(self, batch_size: int, longest: int, max_tokens: int, num_drafts: int = 0) -> None:
        """Do the part of a warm-up that each device does alone."""
        if self._uses_kernels:
            self._shapes = PaddedShapes(
                self._limits,
                batch_size=batch_size,
                max_tokens=max_tokens,
                longest=longest,
                num_drafts=num_drafts,
            )
            with explain_device_errors("the recording of CUDA graphs"):
                self._record(self._shapes.all)
                if self.model.device.type == "cuda":
                    self.compile_kernels(longest)

    @torch.inference_mode()
    def compute_padding(self, num_tokens: int, num_emits: int) -> None:
        """Run an iteration of padding: it takes a real one's memory and touches no cache."""
        shape = Shape(num_tokens=num_tokens, num_emits=num_emits, tile_rows=TILE_ROWS[-1])
        self._packer.fill(Batch(), shape, ())
        self._run(self._packer.send(shape))

    def compile_kernels(self, longest: int) -> None:
        """Compile every kernel that a batch may need by running it: they depend on the kinds of its
        sequences, on the rows of a tile and on whether contexts are split.
        """
        num_parts_of_longest = self._limits.num_parts(1, longest)
        for lengths in ((2, 1), (2,), (1,)):  # a block each
            if len(lengths) > self.num_blocks:
                continue
            blocks = BlockManager(self.num_blocks, self.block_size)
            batch = Batch()
            for num_tokens in lengths:
                batch.add(make_sequence(0, num_tokens, emits=True, blocks=blocks), num_tokens)
            exact = self._limits.exact(batch)
            rooms = {0}
            if exact.num_decodes:  # whose contexts are one part each, or split
                rooms = {exact.num_parts, num_parts_of_longest}
            for tile_rows, num_parts in product(TILE_ROWS, sorted(rooms)):
                shape = replace(exact, tile_rows=tile_rows, num_parts=num_parts)
                self._packer.fill(batch, shape, ())
                self._run(self._packer.send(shape))
                self.timeline.wait(self.timeline.mark())

    def record(self, batch: Batch) -> None:
        """Let batches of the shape of `batch` be replayed from now on. Raises RunError without
        memory.
        """
        if not self._uses_kernels:
            return
        shape = self._shape_of(batch)
        if shape not in self.recordings:
            with explain_device_errors("the recording of CUDA graphs"):
                self._record([shape])

    @torch.inference_mode()
    def _record(self, shapes: Sequence[Shape]) -> None:
        """Run every shape not yet recorded on padding alone, and record it. Too many others go."""
        wanted = set(shapes)
        if self._shapes is not None:
            wanted.update(self._shapes.all)
        if len(self.recordings.keys() | wanted) > MAX_RECORDED:
            for shape in self.recordings.keys() - wanted:
                del self.recordings[shape]
                self._graphs.drop(shape)
        for shape in shapes:
            if shape in self.recordings:
                continue
            buffer = torch.empty(layout_of(shape).size, dtype=torch.int32, device=self.model.device)
            self._packer.fill(Batch(), shape, ())
            inputs = self._packer.send(shape, buffer)
            self._run(inputs)
            # The host's buffer is filled again for the next shape.
            self.timeline.wait(self.timeline.mark())
            self._graphs.capture(shape, partial(self._run, inputs))
            self.recordings[shape] = buffer, inputs
