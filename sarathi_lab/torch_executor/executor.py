"""Runs batches on a real device through torch; time is that of the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sarathi_lab.block_manager import BlockManager
from sarathi_lab.executor import StepResult
from sarathi_lab.model.transformer import KVCache, Transformer
from sarathi_lab.request import Batch, Request, Sequence
from sarathi_lab.torch_executor.inputs import pack


class TorchExecutor:
    """An `executor.Executor` for one CPU or GPU: one batch in flight, greedy sampling.

    `clock` returns seconds; `sleep` waits as many. A batch's time is that between its submission and the arrival of
    its tokens on the host, packing included.
    """

    capacity = 1
    feeds_tokens = False

    def __init__(
        self,
        model: Transformer,
        *,
        num_blocks: int,
        block_size: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self.cache = KVCache(model.spec, num_blocks, block_size, model.device, model.dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._clock = clock
        self._sleep = sleep
        self._zero = clock()
        self._in_flight: tuple[Batch, float, torch.Tensor] | None = None

    @property
    def now(self) -> float:
        """Seconds since `start`."""
        return self._clock() - self._zero

    @property
    def num_in_flight(self) -> int:
        return int(self._in_flight is not None)

    def start(self) -> None:
        """Set the clock to zero."""
        self._zero = self._clock()

    @torch.inference_mode()
    def submit(self, batch: Batch) -> None:
        """Launch `batch`; on a CPU it is finished when this returns."""
        if self._in_flight is not None:
            raise RuntimeError("a batch is in flight; collect it first")
        start = self.now
        model = self.model
        inputs = pack(batch, self.block_size, model.spec.sliding_window, model.device, model.dtype)
        self._in_flight = (batch, start, model.operations.greedy(model(inputs, self.cache)))

    def collect(self) -> StepResult:
        """Wait for the batch in flight."""
        if self._in_flight is None:
            raise RuntimeError("nothing is in flight; submit a batch first")
        batch, start, token_ids = self._in_flight
        self._in_flight = None
        on_host = token_ids.tolist()
        if self.model.device.type == "cuda" and not on_host:
            torch.cuda.synchronize(self.model.device)  # no token was copied, so nothing has waited yet
        return StepResult(batch, start, self.now, on_host)

    @property
    def next_end(self) -> float:
        """Not known before `collect`, nor asked for: one batch at a time leaves no room for another."""
        return self.now

    def wait_until(self, time: float) -> None:
        """Sleep until the clock reads `time`."""
        while (remaining := time - self.now) > 0:
            self._sleep(remaining)

    def warm_up(self, *, batch_size: int, chunk_tokens: int) -> None:
        """Run throw-away iterations of the common kinds, so that the first measured one is like the others.

        A chunk at the start of a prompt, one at an offset, and `batch_size` single tokens; all shortened to what the
        cache holds.
        """
        half = max(1, min(chunk_tokens, self.num_blocks * self.block_size // 2))
        blocks = BlockManager(self.num_blocks, self.block_size)
        prompt = _throw_away(2 * half, blocks) if 2 * half <= self.num_blocks * self.block_size else None
        if prompt is not None:
            for start in (0, half):
                prompt.num_computed = start
                self._run_once([prompt], half)
            blocks.free(prompt)
        self._run_once([_throw_away(1, blocks) for _ in range(min(batch_size, self.num_blocks))], 1)

    def _run_once(self, sequences: list[Sequence], num_tokens: int) -> None:
        batch = Batch()
        for sequence in sequences:
            batch.add(sequence, num_tokens)
        self.submit(batch)
        self.collect()
        for sequence in sequences:
            sequence.in_flight = False


def _throw_away(num_tokens: int, blocks: BlockManager) -> Sequence:
    sequence = Sequence(Request(0, 0.0, num_tokens, 1, [0] * num_tokens), order=0)
    blocks.grow(sequence, num_tokens)
    return sequence
