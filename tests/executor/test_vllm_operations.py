"""Times by operation of vLLM's workers, without vLLM: which modules are timed, and their sums."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bookkeeper import BLOCK, Bookkeeper
from torch import nn

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.timeline import HostTimeline
from sarathi_lab.executor.vllm.executor import VllmExecutor
from sarathi_lab.executor.vllm.operation_hooks import OperationTimer, operations_of
from sarathi_lab.experiment.measured_cost import MeasuredCostModel


class Work(nn.Module):
    """A module that takes a millisecond."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(1e-3)
        return values


class Linear(Work):
    pass


class RowParallel(Linear):
    pass


class Attention(Work):
    pass


class RMSNorm(Work):
    pass


class Block(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            values = child(values)
        return values


def layer() -> Block:
    block = Block(qkv_proj=Linear(), q_norm=RMSNorm(), attn=Attention(), o_proj=RowParallel())
    mlp = Block(gate_up_proj=Linear(), down_proj=RowParallel())
    return Block(input_norm=RMSNorm(), self_attn=block, mlp=mlp)


@pytest.fixture
def model(monkeypatch):
    """Two layers as vLLM's models have them, and vLLM's names of what they are made of."""
    package = "vllm.model_executor.layers"
    for name, content in (
        ("vllm", {}),
        ("vllm.model_executor", {}),
        (package, {}),
        (f"{package}.attention_layer_base", {"AttentionLayerBase": Attention}),
        (f"{package}.linear", {"LinearBase": Linear, "RowParallelLinear": RowParallel}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    layers = nn.Sequential(layer(), layer())
    inner = Block(embed_tokens=Work(), layers=layers, norm=RMSNorm())
    return Block(model=inner, logits_processor=Work())


def test_what_is_timed(model):
    names = {module: name for name, module in model.named_modules()}
    found = {names[module]: operation for module, operation in operations_of(model).items()}
    of_layer = {
        "self_attn.qkv_proj": "qkv_proj",
        "self_attn.attn": "attention",
        "self_attn.o_proj": "out_proj",
        "mlp": "ffn",
        "input_norm": "elementwise",
    }
    expected = {"model.embed_tokens": "embedding", "model.norm": "elementwise"}
    expected["logits_processor"] = "logits"
    for number in range(2):
        for name, operation in of_layer.items():
            expected[f"model.layers.{number}.{name}"] = operation
    assert found == expected


def test_times_are_summed_over_layers_and_hooks_go(model):
    timer = OperationTimer(model, is_gpu=False)
    for _ in range(2):
        model(torch.zeros(1))
    first, second = timer.take()
    for iteration in (first, second):
        assert set(iteration) == {
            *("embedding", "qkv_proj", "attention", "out_proj", "ffn", "elementwise", "logits")
        }
        assert iteration["qkv_proj"] >= 2e-3
        assert iteration["ffn"] >= 4e-3, "the whole block"
        assert iteration["elementwise"] >= 3e-3, "and the norm behind the last layer"
    timer.remove()
    model(torch.zeros(1))
    assert timer.take() == []


class Reporting(Bookkeeper):
    """Workers whose iterations take 10 ms, of which operations report nine."""

    times_operations = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.num_run = 0

    def run(self, step):
        self.num_run += 1
        self.clock += 0.01
        return super().run(step)

    @contextmanager
    def timed_operations(self):
        before, reports = self.num_run, []
        yield reports
        operations = {"qkv_proj": 2e-3, "attention": 3e-3, "ffn": 3e-3, "embedding": 1e-3}
        reports += [operations] * (self.num_run - before)


def test_operations_sum_to_the_iteration_and_their_share_is_recorded():
    workers = Reporting()
    executor = VllmExecutor(workers, timeline=HostTimeline(lambda: workers.clock))
    cost = MeasuredCostModel(executor, SimpleNamespace(vocab_size=97))
    cost.is_shared = False  # no references between timings
    assert cost.has_operations
    batch = make_batch(prefill_tokens=6, emits=True, blocks=BlockManager(16, BLOCK))
    times = cost.operation_times(batch)
    assert times.pop("others") == pytest.approx(2e-3), "the embedding, and what no hook times"
    assert {name: seconds for name, seconds in times.items() if seconds} == pytest.approx(
        {"prefill_attention": 3e-3, "qkv_proj": 2e-3, "ffn": 3e-3}
    )
    (measurement,) = cost.measurements.values()
    assert measurement.operation_share == pytest.approx(0.9)


def test_compiled_workers_have_whole_iterations():
    workers = Reporting()
    workers.times_operations = False
    cost = MeasuredCostModel(VllmExecutor(workers), SimpleNamespace(vocab_size=97))
    assert not cost.has_operations
    assert "executor.eager=true times vLLM's operations" in cost.reason
