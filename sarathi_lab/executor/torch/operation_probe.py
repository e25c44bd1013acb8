"""Measurement of single operations of the engine, each alone, in all layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from sarathi_kernels.attention.plan import AttentionPlan
from sarathi_lab.engine.compositions import run_once
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.single_iteration import SingleIteration, single_iteration
from sarathi_lab.executor.iteration_probe import REFERENCE, Timing
from sarathi_lab.executor.timeline import durations
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.packing import add_masks
from sarathi_lab.executor.torch.shapes import CudaGraphs, NoGraphs
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import KVCache, Layer, Transformer

CUDA_REPETITIONS = 3  # replays whose mean is a measurement; one of LONG tokens is enough
LONG = 2048
KEPT = 256  # graphs: each takes some of the device's memory
# Operations of an iteration in C++ (`structures.OPERATIONS`), by the probe's names.
NATIVE = {"attention_prefill": "attention", "attention_decode": "attention", "lm_head": "logits"}
NATIVE |= dict.fromkeys(("ffn_up", "ffn_down"), "ffn")
PRODUCTS = ("qkv_proj", "out_proj", "ffn", "elementwise")


class OperationProbe:
    """Timer of one operation at a time in all layers, each with its weights and cache, as in an
    iteration. Batches must be of sequences that hold cache blocks.

    Times are seconds over all layers of one iteration; on a GPU of replayed CUDA graphs on its
    clock, the mean of several where short. `timing` is how the newest was taken. C++ times its
    operations within an iteration: alone, each would wait for torch's threads on the same cores.
    """

    has_operations = True
    operation_share = math.nan  # what is not timed counts as `others`

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.model = executor.model
        self.layers = cast(list[Layer], list(executor.model.layers))
        self._is_gpu = self.model.device.type == "cuda"
        self._graphs = CudaGraphs() if self._is_gpu else NoGraphs()
        self._works: dict[Hashable, object] = {}  # with the memory that their graphs read
        self.timing: Timing = "calls" if self._is_gpu else "host"
        self._drawn: dict[tuple[int, ...], Tensor] = {}
        executor.cache.keys.normal_()
        executor.cache.values.normal_()

    @property
    def reports_operations(self) -> bool:
        """Whether an iteration times its operations (C++)."""
        return self.model.whole_pass is not None

    @torch.inference_mode()
    def attention(self, batch: Batch) -> float:
        """Return the seconds of the attention of `batch`."""
        times = self.operation_times(batch)
        if times:
            return times["attention"]
        spec = self.model.spec
        inputs = self.executor.packed(batch)
        query = self._random(batch.num_tokens, spec.num_heads, spec.head_size)
        work = partial(_attend, self.model, self.executor.cache, query, inputs)
        plan = inputs.attention
        # The inputs of a shape have the same addresses unless their buffer has grown.
        key = None
        if isinstance(plan, AttentionPlan):
            shapes = (plan.tiles.shape, plan.decodes.shape, plan.block_table.shape)
            address = plan.block_table.data_ptr()
            key = (*shapes, plan.tile_rows, plan.num_parts, address)
        return self._time("attention", work, batch.num_tokens, key)

    @torch.inference_mode()
    def keys_read(self, batch: Batch) -> float:
        """Count the cached tokens that the newest query of each sequence attends to, summed over
        `batch`: with keys of zero and a value of one at the newest token alone, the kernel returns
        one over their number, rounded as outputs are.
        """
        inputs = self.executor.packed(batch)
        lengths = torch.tensor([chunk.num_tokens for chunk in batch.chunks])
        newest = lengths.cumsum(0) - 1  # the last row of each sequence
        newest_slots = inputs.slots[newest].long()
        keys = self.executor.cache.keys[0]
        values = self.executor.cache.values[0]
        keys.zero_()
        values.zero_()
        values_by_slot = values.flatten(0, 1)
        values_by_slot[newest_slots] = 1.0
        query = self._random(batch.num_tokens, self.model.spec.num_heads, values.shape[-1])
        attended = self.model.operations.attend(query, inputs, keys, values)
        # Over heads and their elements, which are all equal but for rounding.
        shares = attended[newest].float().mean(dim=(1, 2))
        numbers_of_keys = 1 / shares
        # Measurements that follow attend to this layer, too.
        for tensor in (keys, values):
            tensor.normal_()
        return float(numbers_of_keys.sum())

    @torch.inference_mode()
    def products(self, batch: Batch) -> dict[str, float]:
        """Return the seconds of operations that depend on the number of tokens only."""
        num_tokens = batch.num_tokens
        hidden = self._random(num_tokens, self.model.spec.hidden_size)
        attended = self._random(num_tokens, self.model.spec.q_size)
        residual = hidden.clone()
        operations = self.model.operations

        def norms_and_residuals(layer: Layer) -> None:
            operations.add_norm(residual, hidden, layer.attention_norm)
            operations.add_norm(residual, hidden, layer.ffn_norm)

        of_a_layer: dict[str, Callable[[Layer], object]] = {
            "qkv_proj": lambda layer: layer.qkv_proj(hidden),
            "out_proj": lambda layer: layer.out_proj(attended),
            "ffn": lambda layer: layer.feed_forward(hidden, operations),
            "elementwise": norms_and_residuals,
        }
        seconds = {}
        timings = set[Timing]()
        for name, operation in of_a_layer.items():
            work = partial(_in_layers, self.layers, operation)
            seconds[name] = self._time(name, work, num_tokens)
            timings.add(self.timing)
        self.timing = min(timings)  # calls, if any
        return seconds

    @torch.inference_mode()
    def reference(self, num_tokens: int) -> float:
        """Return the seconds of one product a layer of up to `REFERENCE` tokens: memory traffic and
        arithmetic of a few milliseconds, as a measure of the device's present speed.
        """
        num_rows = min(num_tokens, REFERENCE)
        hidden = self._random(num_rows, self.model.spec.hidden_size)
        work = partial(_in_layers, self.layers, lambda layer: layer.qkv_proj(hidden))
        return self._time("reference", work, num_rows)

    def iteration(self, batch: Batch) -> SingleIteration:
        """Time an iteration of `batch`, as the engine runs it. A LONG one needs no graph: launches
        take less time than the device.
        """
        if batch.num_tokens < LONG:
            self.executor.record(batch)
        iteration = single_iteration(self.executor, batch)
        if self._is_gpu:
            self.timing = "graph" if iteration.result.is_replayed else "calls"
        return iteration

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Return the seconds by operation of one iteration of `batch` in C++, "others" of the rest;
        empty without C++.
        """
        operations = self.model.operations
        if self.model.whole_pass is None:
            return {}
        seconds = dict.fromkeys((*PRODUCTS, "attention", "logits"), 0.0)

        def record(name: str, spent: float) -> None:
            operation = NATIVE.get(name, name)
            if operation in seconds:
                seconds[operation] += spent

        before = operations.recorder
        operations.recorder = record
        try:
            iteration = run_once(self.executor, batch).busy
        finally:
            operations.recorder = before
        others = iteration - sum(seconds.values())
        return {**seconds, "others": others}

    def _random(self, *sizes: int) -> Tensor:
        """Return normal values: on a GPU, whose graphs need fixed inputs, always the same ones; on
        a CPU, new ones are in its caches.
        """
        if sizes in self._drawn:
            return self._drawn[sizes]
        drawn = torch.randn(sizes, device=self.model.device, dtype=self.model.dtype)
        if self._is_gpu:
            self._drawn[sizes] = drawn
        return drawn

    def _time(
        self, name: str, work: Callable[[], object], num_tokens: int, key: Hashable = ()
    ) -> float:
        """Return the seconds of `work` on so many tokens. Work of equal name, tokens and `key`
        reads the same memory and is captured once; that of None never.
        """
        is_short = num_tokens < LONG
        repetitions = CUDA_REPETITIONS if self._is_gpu and is_short else 1
        which = (name, num_tokens, key)
        if self._is_gpu and key is not None and which not in self._works:
            self._capture(which, work)

        def repeated() -> None:
            for _ in range(repetitions):
                if self._graphs.replay(which):
                    self.timing = "graph"
                else:
                    work()

        if self._is_gpu:
            self.timing = "calls"
        seconds = durations(repeated, self.executor.timeline, 1)[0]
        return seconds / repetitions

    def _capture(self, which: Hashable, work: Callable[[], object]) -> None:
        """Capture `work` as the newest of KEPT, unless memory does not suffice or it can't be."""
        work()  # to compile, choose and allocate
        try:
            self._graphs.capture(which, work)
        except RuntimeError:
            torch.cuda.synchronize()
        self._works[which] = work
        if len(self._works) > KEPT:
            oldest = next(iter(self._works))
            del self._works[oldest]
            self._graphs.drop(oldest)


def _in_layers(layers: Sequence[Layer], operation: Callable[[Layer], object]) -> None:
    for layer in layers:
        operation(layer)


def _attend(model: Transformer, cache: KVCache, query: Tensor, inputs: PackedInputs) -> None:
    """Attend in all layers; plain torch's masks, made once an iteration, are part of it."""
    inputs = add_masks(inputs, model)
    for keys, values in cache.layers():
        model.operations.attend(query, inputs, keys, values)
