"""Runs single operations of the engine, each alone, in all layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Literal, cast

import torch
from torch import Tensor

from sarathi_kernels.attention.plan import AttentionPlan
from sarathi_kernels.attention.reference import make_segment
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch, run_once
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.timeline import durations
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import Layer

CUDA_REPETITIONS = 3  # replays whose mean is a measurement; one of LONG tokens is enough
LONG = 2048
REFERENCE = 64  # tokens
KEPT = 64  # graphs: each takes some of the device's memory
# Operations as an iteration in C++ tells them (`structures.OPERATIONS`), by the probe's names.
TOLD = {"attention_prefill": "attention", "attention_decode": "attention", "lm_head": "logits"}
TOLD |= dict.fromkeys(("experts", "ffn_up", "ffn_down"), "ffn")
PRODUCTS = ("qkv_proj", "out_proj", "ffn", "elementwise")

Timing = Literal["graph", "calls", "host"]  # replayed, launched one by one, of a CPU


class OperationProbe:
    """Runs one operation at a time, in all layers, each with its own weights and cache: caches see
    what they would. Batches must be of sequences that hold cache blocks.

    Times are seconds over all layers of one iteration; on a GPU the device's own, of replayed CUDA
    graphs, and the mean of several where they are short. `timing` says how the newest was taken.
    An iteration in C++ tells those of its operations itself: alone, each would wait for threads of
    torch, which spin on the same cores, and take up to several times as long.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.model = executor.model
        self.layers = cast(list[Layer], list(executor.model.layers))
        device = self.model.device
        self._replays = _Replays(device) if device.type == "cuda" else None
        self.timing: Timing = "calls" if self._replays else "host"
        # What graphs read must stay; on a CPU it is drawn anew, and so in its caches.
        self._random = cache(self._drawn) if self._replays else self._drawn
        executor.cache.keys.normal_()
        executor.cache.values.normal_()

    @torch.inference_mode()
    def attention(self, batch: Batch) -> float:
        """Seconds of the attention of `batch`."""
        if told := self.told(batch):
            return told["attention"]
        spec = self.model.spec
        inputs = self.executor.packed(batch)
        query = self._random(batch.num_tokens, spec.num_heads, spec.head_size)
        work = partial(self._attend, query, inputs)
        plan = inputs.attention
        # A shape's inputs lie where they lay the last time, unless their buffer has grown since.
        key = None
        if isinstance(plan, AttentionPlan):
            places = plan.tiles.shape, plan.decodes.shape, plan.block_table.shape
            key = (*places, plan.tile_rows, plan.num_parts, plan.block_table.data_ptr())
        return self._time("attention", work, batch.num_tokens, key)

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
    def products(self, batch: Batch) -> dict[str, float]:
        """Seconds by operation of what depends on the number of tokens of `batch` alone."""
        if told := self.told(batch):
            return {name: told[name] for name in PRODUCTS}
        num_tokens = batch.num_tokens
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
        seconds, timings = {}, set[Timing]()
        for name, operation in of_a_layer.items():
            seconds[name] = self._time(name, partial(in_all_layers, operation), num_tokens)
            timings.add(self.timing)
        self.timing = min(timings)  # calls, if any
        return seconds

    @torch.inference_mode()
    def reference(self, num_tokens: int) -> float:
        """Seconds of one product a layer of up to `REFERENCE` tokens: as much memory traffic and
        arithmetic of the same kinds as fits in a millisecond or few, to know the device's speed by.
        """
        num_rows = min(num_tokens, REFERENCE)
        hidden = self._random(num_rows, self.model.spec.hidden_size)
        return self._time(
            "reference", lambda: [layer.qkv_proj(hidden) for layer in self.layers], num_rows
        )

    @torch.inference_mode()
    def logits(self, num_rows: int) -> float:
        """Seconds of the output head and sampling for `num_rows` emitted tokens; in C++, where the
        cache has a block for each of them, without the sampling.
        """
        if self.model.whole_pass is not None and num_rows <= self.executor.num_blocks:
            blocks = BlockManager(self.executor.num_blocks, self.executor.block_size)
            each = make_batch(prefill_tokens=1, num_prefills=num_rows, emits=True, blocks=blocks)
            return self.told(each)["logits"]
        model, rows = self.model, self._random(num_rows, self.model.spec.hidden_size)
        return self._time(
            "logits",
            lambda: model.operations.greedy(model.lm_head(model.final_norm(rows))),
            num_rows,
        )

    def iteration(self, batch: Batch) -> float:
        """Seconds of the whole iteration of `batch`."""
        # Where it is LONG, the device works longer than the host launches.
        is_long = batch.num_tokens >= LONG
        with nullcontext() if is_long else self.executor.recorded(batch):
            return self.whole(batch)

    def whole(self, batch: Batch) -> float:
        """Seconds of an iteration of `batch`, replayed if its shape is recorded."""
        result = run_once(self.executor, batch)
        if self._replays:
            self.timing = "graph" if result.is_replayed else "calls"
        return result.busy

    def told(self, batch: Batch) -> dict[str, float]:
        """Seconds by operation of one iteration of `batch` in C++, "others" those of all else; none
        where it is not in C++.
        """
        operations = self.model.operations
        if self.model.whole_pass is None:
            return {}
        seconds = dict.fromkeys((*PRODUCTS, "attention", "logits"), 0.0)

        def record(name: str, spent: float) -> None:
            if (part := TOLD.get(name, name)) in seconds:
                seconds[part] += spent

        before, operations.recorder = operations.recorder, lambda: record
        try:
            whole = run_once(self.executor, batch).busy
        finally:
            operations.recorder = before
        return {**seconds, "others": whole - sum(seconds.values())}

    def _drawn(self, *sizes: int) -> Tensor:
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

    def _time(
        self, name: str, work: Callable[[], object], num_tokens: int, key: Hashable = ()
    ) -> float:
        """Seconds of `work` once, which is for so many tokens. Work of one name, number of tokens
        and `key` is the same and reads the same memory: it is captured once. None: never twice.
        """
        repetitions = CUDA_REPETITIONS if self._replays and num_tokens < LONG else 1
        run = work
        if self._replays:
            which = None if key is None else (name, num_tokens, key)
            run = self._replays.of(work, num_tokens, which)
            self.timing = "calls" if run is work else "graph"

        def repeated() -> None:
            for _ in range(repetitions):
                run()

        return durations(repeated, self.executor.timeline, 1)[0] / repetitions


class _Replays:
    """Turns work into CUDA graphs, as the engine replays it: launching kernels one by one may take
    the host longer than they take the device. One at a time, on one stream and from one pool of
    memory. The `KEPT` newest are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # With the work, as that holds what the graph reads.
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, object]] = OrderedDict()
        self._too_large = math.inf  # tokens of work that there was no memory to capture

    def of(
        self, work: Callable[[], object], num_tokens: int, key: Hashable
    ) -> Callable[[], object]:
        """The replay of `work`, which runs once before; `work` itself if it can't be captured. That
        of `key`, unless None, is captured once.
        """
        if key is not None and key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0].replay
        if num_tokens >= self._too_large:
            return work
        graph = torch.cuda.CUDAGraph()
        try:
            self._capture(graph, work)
        except RuntimeError as error:
            torch.cuda.synchronize()
            is_memory = isinstance(error, torch.OutOfMemoryError)
            # Smaller work may fit. Another failure may leave torch's allocator in no state for any.
            self._too_large = num_tokens if is_memory else 0
            return work
        self._kept[key] = graph, work
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        # Not torch.cuda.graph: it empties the cache of memory each time, which costs more than what
        # is measured.
        with torch.cuda.stream(self._stream):
            work()  # whatever is compiled, chosen or allocated at first use
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                work()
            finally:
                graph.capture_end()
