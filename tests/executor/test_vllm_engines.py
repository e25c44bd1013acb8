"""vLLM's other engines: tensor and pipeline parallel, two batches in flight, the runner V2."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import joblib  # noqa: F401 - its start method
import pytest
import torch
from checkpoints import greedy_tokens, make_checkpoint
from vllm_engine import (
    SIZES,
    TINY,
    backend_of,
    requests_of_tokens,
    served,
    tiny_checkpoint,
    tokens_of,
)

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.vllm.executor import VllmExecutor
from sarathi_lab.executor.vllm.workers import Workers, make_config
from sarathi_lab.experiment.real_bubbles import MEASURED, PipelineBench, real_bubbles
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.policy import Orca, Sarathi, SarathiServe, VllmV1

pytestmark = pytest.mark.vllm

REQUESTS = requests_of_tokens()
SMALL = {  # sizes of TINY
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_size": 32,
    "ffn_size": 128,
    "vocab_size": 211,
}
POLICIES = (
    (Sarathi(chunk=48), 48),
    (VllmV1(max_num_batched_tokens=64), 9),
    (SarathiServe(chunk=48, reserve="chunk"), 9),
)


@pytest.fixture(scope="module")
def expected(vllm_executor):
    return tokens_of(served(vllm_executor, Orca(), REQUESTS, 48))


def check_tokens(executor, expected, policies=POLICIES, **settings):
    for policy, num_blocks in policies:
        ledger = served(executor, policy, REQUESTS[: len(expected)], num_blocks, **settings)
        assert tokens_of(ledger) == expected, policy


def test_two_batches_in_flight(expected):
    """A CPU refuses it, where it is as correct: tokens pass from one batch to the next."""
    backend = backend_of()
    config = make_config(backend.arguments(TINY, tiny_checkpoint(), SIZES), "auto")
    config.scheduler_config.async_scheduling = True
    executor = VllmExecutor(Workers(config))
    assert executor.capacity == 2
    assert executor.feeds_tokens
    check_tokens(executor, expected)
    executor.workers.close()


def zero_share(worker):
    parameters = [one for one in worker.get_model().parameters() if one.ndim > 1]
    return max(float((one == 0).float().mean()) for one in parameters)


def test_workers_draw_weights_and_every_phase_is_announced(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = backend_of(random_weights="dummy")
    executor = backend.build(TINY, None, SIZES)
    assert backend.facts["load_format"] == "dummy"
    assert executor.workers._executor.collective_rpc(zero_share)[0] < 0.01
    tokens = tokens_of(served(executor, Sarathi(chunk=48), REQUESTS, 48))
    assert len({token for one in tokens for token in one}) > 10
    assert tokens_of(served(executor, Orca(), REQUESTS, 48)) == tokens
    executor.close()
    assert not list(tmp_path.rglob("*.safetensors"))
    phases = [line for line in capsys.readouterr().out.splitlines() if "vLLM: " in line]
    assert [phase.split()[1] for phase in phases] == [
        *("starting", "drawing", "measuring", "making", "running")
    ]


def check_stage_times(executor):
    """Each stage has a micro-batch after the other, and after the stage before; some of the time
    it has none.
    """
    ledger = served(executor, Orca(), REQUESTS[:5], 48, num_micro_batches=2)
    starts = ledger.stages().pivot(index="iteration", columns="stage", values="start")
    ends = ledger.stages().pivot(index="iteration", columns="stage", values="end")
    assert (starts < ends).all(axis=None)
    assert (starts[1] > ends[0]).all()
    assert (starts.iloc[1:].to_numpy() > ends.iloc[:-1].to_numpy()).all()
    assert 0 < starts[0].min() < ends[1].max() < executor.now
    assert (ledger.requests().bubble_time > 0).any()
    sizes = {**CATALOG["real_bubbles"].sizes("dry"), "longest": 48}
    cache = (executor.num_blocks, executor.block_size, sizes["longest"])
    engine = EngineConfig(Orca(), sizes["batch"], *cache, num_micro_batches=2)
    bench = PipelineBench(TINY, engine, {MEASURED: executor}).with_simulation(sizes)
    points = list(real_bubbles(bench, 0, **sizes))
    assert all(math.isfinite(point.y.value) for point in points)
    assert {dict(point.labels)["how"] for point in points} == {"measured", "simulated"}


@pytest.mark.parametrize("parallel", ["tensor_parallel", "pipeline_parallel"])
def test_parallel(parallel, expected, request):
    """Of two workers, one of which is then killed: a line, and no process stays. This process has
    the start method of those of joblib and `limit`.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    request.addfinalizer(lambda: multiprocessing.set_start_method(before, force=True))
    multiprocessing.set_start_method("loky", force=True)
    backend = backend_of(**{parallel: 2})
    executor = backend.build(TINY, tiny_checkpoint(), SIZES)
    assert executor.capacity == backend.num_stages
    # The last policy preempts; few requests, as processes that share cores answer slowly.
    check_tokens(executor, expected[:5], POLICIES[2:], num_micro_batches=backend.num_stages)
    if backend.num_stages > 1:
        check_stage_times(executor)
    workers = [one for one in multiprocessing.active_children() if "Worker" in one.name]
    assert len(workers) == 2
    workers[0].kill()
    with pytest.raises(RunError, match="a worker process of vLLM was killed"):
        check_tokens(executor, expected[:5], num_micro_batches=backend.num_stages)
    for process in workers:
        process.join(timeout=30)
        assert not process.is_alive()


def test_runner_v2(tmp_path, expected):
    """In another process, as Triton's interpreter is chosen when vLLM is imported."""
    script = Path(__file__).parents[1] / "support" / "vllm_runner_v2.py"
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, script, tmp_path / "tokens.json"], env=environment, check=True)
    assert json.loads((tmp_path / "tokens.json").read_text()) == [expected] * 2


def test_a_compiled_engine_frees_its_weights(expected):
    """Else a second engine in a process has no room on a GPU."""
    backend = backend_of(eager=False)
    config = make_config(backend.arguments(TINY, tiny_checkpoint(), SIZES), "auto")
    executor = VllmExecutor(workers := Workers(config))
    check_tokens(executor, expected, POLICIES[:1])
    weights: list[weakref.ref[torch.Tensor]] = []

    def note_weights(worker):
        weights.extend(map(weakref.ref, worker.model_runner.model.parameters()))

    workers.core.model_executor.collective_rpc(note_weights)
    workers.close()
    del executor, workers
    gc.collect()
    assert weights
    assert not [weight for weight in weights if weight() is not None]


def test_the_paper_s_plain_block():
    """The shape of 13b, as a sequential GPT-NeoX: torch's tokens."""
    spec = replace(load_option("model", "13b"), **SMALL)
    requests = requests_of_tokens(4)
    torch_backend = TorchBackend(device="cpu", dtype="float32", kernels="torch")
    ours = served(torch_backend.build(spec, None, SIZES), Sarathi(chunk=48), requests, 48)
    executor = backend_of().build(spec, None, SIZES)
    theirs = served(executor, SarathiServe(chunk=48, reserve="chunk"), requests, 9)
    assert tokens_of(theirs) == tokens_of(ours)
    executor.close()


def test_a_checkpoint_of_another_family(tmp_path):
    """Saved by transformers, and read as `model.path` is."""
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    theirs = make_checkpoint("qwen3", tmp_path, **sizes)
    requests = requests_of_tokens(4)
    for request in requests:
        request.prompt_token_ids[:] %= 97  # of its vocabulary
    greedy = greedy_tokens(theirs, requests)
    spec, folder = AutoModel(str(tmp_path)).resolve("tiny")
    executor = backend_of().build(spec, folder, SIZES)
    ledger = served(executor, SarathiServe(chunk=48, reserve="chunk"), requests, 9)
    assert tokens_of(ledger) == [greedy[request.request_id] for request in requests]
    executor.close()
