"""Times by operation of vLLM's workers: hooks on the modules of a model that runs eagerly. They
run in the workers' processes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial

import torch
from torch import nn

from sarathi_lab.executor.timeline import Mark, Marks

# By the lab's names. Attention writes the cache, too; products sum over tensor-parallel devices.
QKV = "qkv_proj"
ATTENTION = "attention"
OUT = "out_proj"
FFN = "ffn"
ELEMENTWISE = "elementwise"
LOGITS = "logits"
EMBEDDING = "embedding"


class OperationTimer:
    """Timer of the operations of a model, until `remove` is called."""

    def __init__(self, model: nn.Module, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._iterations: list[Marks] = []
        self._starts: dict[nn.Module, Mark] = {}
        self._handles = [model.register_forward_pre_hook(self._begin_iteration)]
        for module, operation in operations_of(model).items():
            end = partial(self._end, operation)
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(end))

    def take(self) -> list[dict[str, float]]:
        """Return the seconds by operation of each iteration since the last call."""
        iterations = self._iterations
        self._iterations = []
        if self._is_gpu:
            torch.cuda.synchronize()  # events have times only when the device has passed them
        sums = []
        for marks in iterations:
            seconds: defaultdict[str, float] = defaultdict(float)
            for operation, start, end in marks:
                seconds[operation] += self._seconds(start, end)
            sums.append(dict(seconds))
        return sums

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin_iteration(self, *hooked: object) -> None:
        self._iterations.append([])

    def _begin(self, module: nn.Module, arguments: object) -> None:
        self._starts[module] = self._mark()

    def _end(self, operation: str, module: nn.Module, *hooked: object) -> None:
        start = self._starts[module]
        end = self._mark()
        self._iterations[-1].append((operation, start, end))

    def _mark(self) -> Mark:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._is_gpu:
            return end - start
        milliseconds = start.elapsed_time(end)
        return milliseconds / 1e3


def operations_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the operation of each module that is timed, none of them within another.

    A layer is what holds a block with attention. In that block the products before attention are
    the QKV projection, the one behind it is the output projection. The rest of the layer is norms
    and the feed-forward block, whole. Norms of the queries and rotations are not timed.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

    modules = dict(model.named_modules())
    operations: dict[nn.Module, str] = {}
    blocks: dict[str, nn.Module] = {}  # with attention, by name
    for name, module in modules.items():
        if isinstance(module, AttentionLayerBase):
            operations[module] = ATTENTION
            block_name = _parent_of(name)
            blocks[block_name] = modules[block_name]
    for name, block in blocks.items():
        for module in block.children():
            if isinstance(module, RowParallelLinear):
                operations[module] = OUT
            elif isinstance(module, LinearBase):
                operations[module] = QKV
        layer = modules[_parent_of(name)]
        for module in layer.children():
            if module is not block:
                operations[module] = ELEMENTWISE if _is_norm(module) else FFN
    for name, module in modules.items():
        if name.endswith("logits_processor"):
            operations[module] = LOGITS
        elif name.endswith(("embed_tokens", "embed_in")):
            operations[module] = EMBEDDING
        elif module not in operations and _is_norm(module) and not _is_within(name, blocks):
            operations[module] = ELEMENTWISE  # behind the last layer
    return operations


def _parent_of(name: str) -> str:
    """Return the name of the module that holds module `name`."""
    return name.rpartition(".")[0]


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _is_within(name: str, blocks: dict[str, nn.Module]) -> bool:
    """Return whether a module is within an attention block, or the layer that holds one."""
    layers = [_parent_of(block) for block in blocks]
    return any(name.startswith(f"{layer}.") for layer in layers)
