"""The engine on its kernels, batches made ahead and padded: on a GPU, or else in Triton's
interpreter, and in plain torch on the late device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES
from helpers import scheduler_for
from toy_executors import BLOCK_SIZE, load_family, make_family, on_kernels, requests_with_tokens

from sarathi_kernels.attention import hybrid as hybrid_attention
from sarathi_kernels.elementwise import sampling
from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.executor.torch import backend, executor
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.packing import Packer
from sarathi_lab.executor.torch.shapes import NoGraphs, Shape
from sarathi_lab.model import operations
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.policy import Orca, Sarathi, SarathiServe

LENGTHS = [(17, 3), (2, 1)]  # few: the interpreter takes its time
# Grouped heads, a window, norms of heads, and (gpt_neox) biases, LayerNorm and partial rotation.
KERNEL_FAMILIES = ["mistral window", "qwen3", "gpt_neox"]


def served(model, executor, policy, requests, num_blocks=40):
    scheduler = scheduler_for(
        policy, batch_size=3, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=80
    )
    ledger = Ledger()
    run_engine(requests, scheduler, executor, ledger)
    table = ledger.requests()
    return (
        dict(zip(table.request_id, table.output_token_ids, strict=True)),
        ledger.iterations(),
        scheduler,
    )


@pytest.fixture(scope="session")  # before the late device, under which transformers is not imported
def checkpoints(tmp_path_factory):
    families = (*KERNEL_FAMILIES, "llama")
    return {name: make_family(name, tmp_path_factory.mktemp("checkpoint")) for name in families}


@pytest.fixture(scope="module", params=KERNEL_FAMILIES)
def family(request, checkpoints, kernels_device):
    """(a model on kernels, its requests, the tokens that plain torch gives for each)."""
    assert request.param in FAMILIES
    model = load_family(checkpoints[request.param], kernels_device)
    requests = requests_with_tokens(LENGTHS)
    executor = TorchExecutor(model, num_blocks=40, block_size=BLOCK_SIZE)
    expected, _, _ = served(model, executor, Orca(), requests)
    backend.use_triton(model, "series")
    return model, requests, expected


def test_tokens_are_those_of_plain_torch(family):
    """Which are those of transformers, see test_torch_executor; two batches in flight. Fixed shapes
    change no token of a llama's, see below.
    """
    model, requests, expected = family
    assert served(model, on_kernels(model), Sarathi(chunk=16), requests)[0] == expected


@pytest.fixture(scope="module")
def llama(checkpoints, kernels_device) -> Transformer:
    model = load_family(checkpoints["llama"], kernels_device)
    backend.use_triton(model, "series")
    return model


@pytest.fixture(scope="module")
def warm(llama) -> TorchExecutor:
    """Two batches in flight, padded to fixed shapes."""
    executor = on_kernels(llama)
    executor.warm_up(batch_size=3, chunk_tokens=16, longest=80)
    return executor


def test_capacity_and_padding_change_no_token_and_no_schedule(llama, warm):
    policy, plain = SarathiServe(chunk=16), on_kernels(llama, capacity=1)
    requests = requests_with_tokens(LENGTHS)
    expected, plain_iterations, _ = served(llama, plain, policy, requests)
    tokens, iterations, _ = served(llama, warm, policy, requests)
    assert tokens == expected
    assert iterations.is_replayed.any() == (llama.device.type == "cuda")
    columns = [
        "num_prefill_tokens",
        "num_decode_tokens",
        "num_running",
        "num_waiting",
        "num_blocks_used",
    ]
    assert iterations[columns].equals(plain_iterations[columns])


class Closures(NoGraphs):
    """Graphs for any device: what was recorded is called again."""

    def __init__(self) -> None:
        self.recorded: dict[Shape, Callable[[], None]] = {}

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        self.recorded[shape] = work

    def replay(self, shape: Shape) -> bool:
        if shape in self.recorded:
            self.recorded[shape]()
        return shape in self.recorded

    def drop(self, shape: Shape) -> None:
        self.recorded.pop(shape, None)


@pytest.fixture(scope="module")
def tokens_in_series(llama):
    return served(llama, on_kernels(llama), Sarathi(chunk=16), requests_with_tokens(LENGTHS))[0]


def test_every_policy_replays_all_its_iterations(llama, tokens_in_series):
    """Chunks, their tails and whole prompts: else one policy would gain by launches alone."""
    made = on_kernels(llama, graphs=True if llama.device.type == "cuda" else Closures())
    made.warm_up(batch_size=3, chunk_tokens=16, longest=20, max_tokens=20)
    for policy in (Orca(), SarathiServe(chunk=16)):
        tokens, iterations, _ = served(llama, made, policy, requests_with_tokens(LENGTHS))
        assert tokens == tokens_in_series
        assert iterations.is_replayed.all()
        # A CPU computes while it launches.
        assert iterations.launching_time.any() == (llama.device.type == "cuda")
    assert len(made.recordings) == 5


def test_what_other_runs_recorded_is_forgotten_when_it_is_too_much(llama, monkeypatch):
    made = on_kernels(llama, graphs=(graphs := Closures()))
    many, few = ({"batch_size": size, "longest": 20, "max_tokens": size} for size in (3, 1))
    made.prepare(**few)
    wanted = set(graphs.recorded)
    made.prepare(**many)
    made.prepare(**few)
    everything = set(graphs.recorded)
    assert wanted < everything
    monkeypatch.setattr(executor, "MAX_RECORDED", len(everything) - 1)
    made.prepare(**few)
    assert set(graphs.recorded) == wanted
    made.prepare(**many)
    assert everything - wanted <= set(graphs.recorded), "what is forgotten is recorded anew"


@pytest.mark.parametrize("uses_kernels", [False, True])
def test_logits_that_are_not_numbers_stop_the_run(checkpoints, uses_kernels, kernels_device):
    """Named is the request."""
    model = load_family(checkpoints["llama"], kernels_device)
    executor = TorchExecutor(model, num_blocks=40, block_size=BLOCK_SIZE)
    if uses_kernels:
        backend.use_triton(model, "series")
        executor = on_kernels(model)
    model.layers[1].ffn_down.weight[3, 5] = float("nan")
    with pytest.raises(RunError, match=r"request 0: the logits of its token 0 are not numbers"):
        served(model, executor, Orca(), requests_with_tokens([(7, 3)]))


def test_host_time_and_padding_are_in_the_record(llama, warm):
    _, iterations, _ = served(llama, warm, SarathiServe(chunk=16), requests_with_tokens(LENGTHS))
    assert (iterations.host_time > 0).all()
    tokens = iterations.num_prefill_tokens + iterations.num_decode_tokens
    assert iterations.num_padding_tokens.sum() > 0
    padded = tokens + iterations.num_padding_tokens
    hybrids = iterations.num_prefills > 0
    assert set(padded[hybrids]) == {16}
    assert set(padded[~hybrids]) <= {1, 2, 3}
    assert (np.diff(iterations.end) >= 0).all()


def test_padding_alone_takes_an_iteration_and_touches_no_cache(llama):
    """What the KV pool is sized by: the activations of the largest iteration."""
    executor = on_kernels(llama, num_blocks=1)
    executor.cache.keys.fill_(7.0)
    seen = []
    hook = llama.register_forward_hook(
        lambda module, args, logits: seen.append((args[0].token_ids, logits))
    )
    executor.compute_padding(num_tokens=50, num_emits=3)
    hook.remove()
    assert [(len(tokens), tuple(logits.shape)) for tokens, logits in seen] == [(50, (3, 97))]
    assert (executor.cache.keys == 7.0).all()


def test_every_kernel_that_a_batch_may_need_is_compiled_before(llama, monkeypatch):
    executor = on_kernels(llama)
    shapes = []
    send = Packer.send
    monkeypatch.setattr(Packer, "send", lambda own, shape: shapes.append(shape) or send(own, shape))
    monkeypatch.setattr(executor, "_run", lambda inputs: None)
    with torch.inference_mode():
        executor.compile_kernels(longest=1500)
    compiled = {
        (shape.num_tiles, shape.num_decodes, shape.tile_rows, shape.num_reductions)
        for shape in shapes
    }
    assert compiled == {
        (num_tiles, num_decodes, rows, split)
        for num_tiles, num_decodes in ((1, 1), (1, 0), (0, 1))
        for rows in (64, 128)
        for split in (0, 1)[: 1 + num_decodes]
    }


def test_what_the_lab_says_without_triton_is_what_the_kernels_say():
    """Names that are written twice, as neither side may import the other's: Triton is not
    everywhere.
    """
    assert get_args(hybrid_attention.Variant) == get_args(operations.Hybrid)
    assert operations.NAN_TOKEN == sampling.NAN_TOKEN
    assert TorchBackend.hybrid == get_args(hybrid_attention.Variant)[0]
