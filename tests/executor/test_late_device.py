"""The engine's path on a GPU, over a device that does its work late or in any order that its
streams allow: whatever is read before it is there, or written before it was read, changes tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
import torch
from cuda_stub import stubbed
from every_policy import POLICIES
from late_device import DEVICE, LateDevice, Stream
from plain_kernels import plain_kernels
from toy_executors import SPEC as FOR_KERNELS
from toy_executors import requests_with_tokens

from sarathi_kernels.attention import hybrid as hybrid_attention
from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.timeline import CudaTimeline
from sarathi_lab.executor.torch import backend, packing
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.shapes import CudaGraphs, Limits, NoGraphs
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import SarathiServe

NUM_SET_UPS = 12 * int(os.environ.get("FUZZ_CASES", "1"))
CPU = torch.device("cpu")
HYBRIDS = get_args(Hybrid)
SPEC = ModelSpec(
    name="toy",
    num_layers=1,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    ffn_size=48,
    vocab_size=97,
)
SHARED = 9  # tokens that two prompts begin with
LENGTHS = [(15, 6), (14, 6), (2, 3), (11, 1)]
LONGEST = 24
SIZES = {"batch_size": 4, "block_size": 4, "max_model_len": LONGEST}
NUM_BLOCKS = 8  # few, so that some requests must give way
POLICY = SarathiServe(chunk=8, watermark=0.0)


def requests() -> list[Request]:
    made = requests_with_tokens(LENGTHS)
    made[3].prompt_token_ids[:SHARED] = made[1].prompt_token_ids[:SHARED]
    return made


@torch.inference_mode()
def toy(device: torch.device, spec: ModelSpec) -> Transformer:
    """Whose tokens depend on what attention reads."""
    model = load_model(spec, None, device, torch.float32, seed=0)
    for layer in model.layers:
        layer.qkv_proj.weight.mul_(3.0)
        layer.out_proj.weight.mul_(9.0)
    return model


def served(
    executor: TorchExecutor, policy: Any, wishes: Sequence[Request] | None = None, **given: Any
) -> tuple[list[list[int]], Ledger]:
    sizes = {**SIZES, "num_blocks": NUM_BLOCKS, **given}
    ledger = serve(wishes or requests(), EngineConfig(policy, **sizes), executor)
    return ledger.requests().sort_values("request_id").output_token_ids.tolist(), ledger


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens that plain torch gives on a CPU."""
    executor = TorchExecutor(toy(CPU, SPEC), num_blocks=40, block_size=SIZES["block_size"])
    return served(executor, POLICIES["orca"], num_blocks=40)[0]


def late_executor(model: Transformer, **given: Any) -> TorchExecutor:
    """As the backend makes it for a GPU."""
    limits = Limits(model.spec, given["block_size"], num_sms=132)
    return TorchExecutor(model, timeline=CudaTimeline(DEVICE), limits=limits, capacity=2, **given)


@contextmanager
def on_late(
    device: LateDevice,
    hybrid: Hybrid = "series",
    *,
    graphs: bool = True,
) -> Iterator[TorchExecutor]:
    """An executor on `device`, warmed up."""
    with stubbed(device), plain_kernels():
        model = toy(DEVICE, SPEC)
        backend.use_triton(model, hybrid)
        executor = late_executor(
            model,
            num_blocks=NUM_BLOCKS,
            block_size=SIZES["block_size"],
            graphs=CudaGraphs() if graphs else NoGraphs(),
        )
        executor.warm_up(batch_size=4, chunk_tokens=8, longest=LONGEST, max_tokens=64)
        yield executor


@pytest.mark.parametrize("number", range(NUM_SET_UPS))
def test_no_order_of_the_device_changes_a_token(number, expected):
    """All policies in all; of set-ups one after the other all kinds of attention."""
    random = Random(number)
    graphs = number // 4 % 3 > 0
    device = LateDevice(number)
    with on_late(device, HYBRIDS[number % 3], graphs=graphs) as executor:
        for name in list(POLICIES)[number % 12 :: 12]:
            device.earliness = random.choice([0.0, 0.0, 0.3, 0.9])
            tokens, ledger = served(
                executor,
                POLICIES[name],
                shares_prefixes=random.random() < 0.5,
            )
            assert tokens == expected, name
            assert ledger.iterations().is_replayed.any() == graphs, name


@pytest.mark.parametrize("shares", [False, True])
def test_preemption_and_shared_prefixes_are_tried(shares, expected):
    with on_late(LateDevice()) as executor:
        tokens, ledger = served(executor, POLICY, shares_prefixes=shares)
    iterations = ledger.iterations()
    assert tokens == expected
    assert shares or iterations.num_preemptions.sum() > 0
    assert (ledger.requests().prefix_hit_tokens.sum() > 0) == shares
    assert iterations.is_replayed.any()


def logits_of_chunks(executor: TorchExecutor) -> torch.Tensor:
    """Of a prompt in chunks: batches packed one after the other, none of which is collected."""
    blocks = BlockManager(executor.num_blocks, executor.block_size)
    tokens = np.random.default_rng(1).integers(0, SPEC.vocab_size, 16, dtype=np.int32)
    sequence = SequenceState(Request(0, 0.0, len(tokens), 1, tokens), 0)
    assert blocks.admit(sequence, len(tokens))
    logits = []
    for start in range(0, len(tokens), 3):
        sequence.num_computed, sequence.in_flight = start, False
        batch = Batch()
        batch.add(sequence, min(3, len(tokens) - start))
        rows = torch.arange(batch.num_tokens, device=executor.model.device)
        inputs = replace(executor.packed(batch), emit_rows=rows)
        logits.append(executor.model(inputs, executor.cache))
    return torch.cat(logits)


@pytest.mark.parametrize("earliness", [0.0, 0.5])
@torch.inference_mode()
def test_logits_of_packed_batches_are_those_of_a_cpu(earliness):
    executor = TorchExecutor(toy(CPU, SPEC), num_blocks=8, block_size=SIZES["block_size"])
    expected = logits_of_chunks(executor)
    with stubbed(LateDevice(1, earliness)), plain_kernels():
        model = toy(DEVICE, SPEC)
        backend.use_triton(model, "series")
        executor = late_executor(model, num_blocks=8, block_size=SIZES["block_size"])
        found = logits_of_chunks(executor).to("cpu")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hybrid", ["streams", "fused"])
def test_the_kernels_themselves(hybrid):
    """In Triton's interpreter: few tokens, as it takes its time."""
    sizes = {"num_blocks": 3, "block_size": 16, "max_model_len": 24}
    tokens = []
    for device in (CPU, DEVICE):
        with stubbed(LateDevice(2, earliness=0.3)):
            model = toy(device, replace(FOR_KERNELS, num_layers=1))
            executor = TorchExecutor(model, num_blocks=3, block_size=16)
            if device == DEVICE:
                backend.use_triton(model, hybrid)
                executor = late_executor(model, num_blocks=3, block_size=16)
            wishes = requests_with_tokens([(17, 3), (9, 2)])
            tokens.append(served(executor, SarathiServe(chunk=12), wishes, **sizes)[0])
    assert tokens[0] == tokens[1]


# -- what it must catch ----------------------------------------------------------------------------


def one_host_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packing, "NUM_BUFFERS", 1)


def tokens_read_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaTimeline, "wait", lambda self, mark: 0.0)


def side_stream_that_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    _without_wait(patch, lambda waiting, other: waiting is hybrid_attention._side_stream(DEVICE))


def side_stream_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    _without_wait(patch, lambda waiting, other: other is hybrid_attention._side_stream(DEVICE))


def _without_wait(patch: pytest.MonkeyPatch, is_meant: Callable[[Stream, Stream], bool]) -> None:
    wait = Stream.wait_stream
    patch.setattr(Stream, "wait_stream", lambda one, two: is_meant(one, two) or wait(one, two))


def inputs_that_graphs_do_not_read(patch: pytest.MonkeyPatch) -> None:
    start = TorchExecutor.start

    def moved(executor: TorchExecutor) -> None:
        for shape, (buffer, inputs) in executor.recordings.items():
            executor.recordings[shape] = buffer.clone(), inputs
        start(executor)

    patch.setattr(TorchExecutor, "start", moved)


SABOTAGES = [
    (one_host_buffer, {}),
    (one_host_buffer, {"graphs": False}),
    (tokens_read_at_once, {}),
    (side_stream_that_does_not_wait, {"graphs": False, "hybrid": "streams"}),
    (side_stream_not_waited_for, {"graphs": False, "hybrid": "streams"}),
    (side_stream_not_waited_for, {"hybrid": "streams"}),
    (inputs_that_graphs_do_not_read, {}),
]


def is_right(expected: list[list[int]], earliness: float, **given: Any) -> bool:
    try:
        with on_late(LateDevice(1, earliness), **given) as executor:
            tokens, _ = served(executor, POLICY)
    except (RunError, RuntimeError, IndexError, ValueError):
        return False  # what was read was no index, or the device refused
    return tokens == expected


@pytest.mark.parametrize(("sabotage", "given"), SABOTAGES)
def test_what_it_catches(sabotage, given, expected, monkeypatch):
    sabotage(monkeypatch)
    assert not all(is_right(expected, earliness, **given) for earliness in (0.0, 0.5))
