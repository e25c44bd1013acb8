"""Runs single operations of the engine, each alone, in all layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from sarathi_kernels.attention.reference import make_segment
from sarathi_lab.engine.compositions import run_once
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.watching import durations
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import Layer

CUDA_REPETITIONS = 3  # replays whose mean is a measurement; one of LONG tokens is enough
LONG = 2048
REFERENCE = 64  # tokens


class OperationProbe:
    """Runs one operation at a time, in all layers, each with its own weights and cache: caches see
    what they would. Batches must be of sequences that hold cache blocks.

    Times are seconds over all layers of one iteration; on a GPU the device's own, of replayed CUDA
    graphs, and the mean of several where they are short.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.model = executor.model
        self.layers = cast(list[Layer], list(executor.model.layers))
        device = self.model.device
        self._replays = _Replays(device) if device.type == "cuda" else None
        executor.cache.keys.normal_()
        executor.cache.values.normal_()

    @torch.inference_mode()
    def attention(self, batch: Batch) -> float:
        """Seconds of the attention of `batch`."""
        spec = self.model.spec
        inputs = self.executor.packed(batch)
        query = self._random(batch.num_tokens, spec.num_heads, spec.head_size)
        return self._time(lambda: self._attend(query, inputs), batch.num_tokens)

    @torch.inference_mode()
    def keys_read(self, batch: Batch) -> float:
        """The cached tokens that the newest query of each sequence attends to, summed over `batch`,
        by what the kernel returns: beside keys of zeros all weigh alike, so a value of one at the
        newest token, the others zero, comes out as one over their number. Rounded as outputs are.
        """
        inputs = self.executor.packed(batch)
        newest = torch.tensor([chunk.num_tokens for chunk in batch.chunks]).cumsum(0) - 1
        keys, values = self.executor.cache.keys[0], self.executor.cache.values[0]
        keys.zero_()
        values.zero_().flatten(0, 1)[inputs.slots[newest].long()] = 1.0
        query = self._random(batch.num_tokens, self.model.spec.num_heads, values.shape[-1])
        shares = self.model.operations.attend(query, inputs, keys, values)[newest]
        for tensor in (keys, values):
            tensor.normal_()
        return float((1 / shares.float().mean(dim=(1, 2))).sum())

    @torch.inference_mode()
    def products(self, num_tokens: int) -> dict[str, float]:
        """Seconds by operation of what depends on the number of tokens alone."""
        hidden = self._random(num_tokens, self.model.spec.hidden_size)
        attended = self._random(num_tokens, self.model.spec.q_size)
        residual, operations = hidden.clone(), self.model.operations

        def norms_and_residuals(layer: Layer) -> None:
            operations.add_norm(residual, hidden, layer.attention_norm)
            operations.add_norm(residual, hidden, layer.ffn_norm)

        def in_all_layers(operation: Callable[[Layer], object]) -> None:
            for layer in self.layers:
                operation(layer)

        of_a_layer: dict[str, Callable[[Layer], object]] = {
            "qkv_proj": lambda layer: layer.qkv_proj(hidden),
            "out_proj": lambda layer: layer.out_proj(attended),
            "ffn": lambda layer: layer.feed_forward(hidden, operations),
            "elementwise": norms_and_residuals,
        }
        return {
            name: self._time(partial(in_all_layers, operation), num_tokens)
            for name, operation in of_a_layer.items()
        }

    @torch.inference_mode()
    def reference(self, num_tokens: int) -> float:
        """Seconds of one product a layer of up to `REFERENCE` tokens: as much memory traffic and
        arithmetic of the same kinds as fits in a millisecond or few, to know the device's speed by.
        """
        hidden = self._random(min(num_tokens, REFERENCE), self.model.spec.hidden_size)
        return self._time(lambda: [layer.qkv_proj(hidden) for layer in self.layers], num_tokens)

    @torch.inference_mode()
    def logits(self, num_rows: int) -> float:
        """Seconds of the output head and sampling for `num_rows` emitted tokens."""
        model, rows = self.model, self._random(num_rows, self.model.spec.hidden_size)
        return self._time(
            lambda: model.operations.greedy(model.lm_head(model.final_norm(rows))), num_rows
        )

    def iteration(self, batch: Batch) -> float:
        """Seconds of the whole iteration of `batch`."""
        # Where it is LONG, the device works longer than the host launches.
        is_long = batch.num_tokens >= LONG
        with nullcontext() if is_long else self.executor.recorded(batch):
            return run_once(self.executor, batch).busy

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.model.device, dtype=self.model.dtype)

    def _attend(self, query: Tensor, inputs: PackedInputs) -> None:
        """With masks, where plain torch needs them: made once an iteration, they are its cost."""
        operations = self.model.operations
        if operations.wants_masks:
            remade = partial(
                make_segment,
                sliding_window=self.model.spec.sliding_window,
                device=self.model.device,
                dtype=self.model.dtype,
            )
            segments = [
                remade(old.start, old.num_queries, old.kv_len, old.blocks)
                for old in inputs.attention
            ]
            inputs = replace(inputs, attention=segments)
        for keys, values in self.executor.cache.layers():
            operations.attend(query, inputs, keys, values)

    def _time(self, work: Callable[[], object], num_tokens: int) -> float:
        """Seconds of `work` once, which is for so many tokens."""
        repetitions = CUDA_REPETITIONS if self._replays and num_tokens < LONG else 1
        replay = self._replays.of(work) if self._replays else work

        def repeated() -> None:
            for _ in range(repetitions):
                replay()

        return durations(repeated, self.executor.timeline, 1)[0] / repetitions


class _Replays:
    """Turns work into CUDA graphs, as the engine replays it: launching kernels one by one may take
    the host longer than they take the device. One at a time, on one stream and from one pool of
    memory, which the newest graph keeps.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._newest: torch.cuda.CUDAGraph | None = None
        self._has_failed = False

    def of(self, work: Callable[[], object]) -> Callable[[], object]:
        """The replay of `work`, which runs once before; `work` itself if it can't be captured."""
        if self._has_failed:  # a broken capture may leave torch's allocator in no state for another
            return work
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            # Not torch.cuda.graph: it empties the cache of memory each time, which costs more than
            # what is measured.
            with torch.cuda.stream(self._stream):
                work()  # whatever is compiled, chosen or allocated at first use
                torch.cuda.synchronize()
                graph.capture_begin(pool=self._pool)
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError:
            torch.cuda.synchronize()
            self._has_failed = True
            return work
        self._newest = graph
        return graph.replay
