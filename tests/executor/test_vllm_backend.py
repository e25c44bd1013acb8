"""Settings of executor=vllm, its engine arguments, and the engine that runs share, without vLLM."""

from __future__ import annotations

import json
import logging
import logging.config
import math
import os
import sys
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bookkeeper import Bookkeeper
from quantised_checkpoints import make_quantised, num_bytes_of
from vllm_engine import SIZES, TINY

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.sweeper import compose
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor import device as devices
from sarathi_lab.executor.timeline import CudaTimeline, HostTimeline
from sarathi_lab.executor.vllm import backend as backends
from sarathi_lab.executor.vllm import executor as executors
from sarathi_lab.executor.vllm import worker_errors
from sarathi_lab.executor.vllm import workers as vllm
from sarathi_lab.executor.vllm.backend import SharedEngine, VllmBackend
from sarathi_lab.model.checkpoint import AutoModel, check_checkpoint
from sarathi_lab.model.huggingface import read_spec
from sarathi_lab.model.roofline import Peaks, roofline_time
from sarathi_lab.model.seeded_checkpoint import (
    config_of,
    require_architecture,
    seeded_checkpoint,
)
from sarathi_lab.model.spec import ModelSpec, RopeScaling
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import Orca
from tests.support.simulated import batch_of

NAMES = ["model", "attention_backend", "max_num_seqs", "block_size", "async_scheduling"]
NAMES += ["compilation_config", "max_cudagraph_capture_size"]
NAMES += ["enable_lora", "data_parallel_size", "speculative_config", "max_logprobs"]
NAMES += ["hf_overrides", "worker_extension_cls", "quantization"]


def module(name: str, monkeypatch: Any, **content: Any) -> None:
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def stub(monkeypatch):
    """A vLLM of version 0.32 for CPUs, of which only settings are asked."""
    arguments = make_dataclass("EngineArgs", [(name, Any, None) for name in NAMES])
    module("vllm", monkeypatch, __version__="0.32.0")
    module("vllm.platforms", monkeypatch, current_platform=SimpleNamespace(device_type="cpu"))
    packages = ("vllm.engine", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    for package in packages:
        module(package, monkeypatch)
    module("vllm.engine.arg_utils", monkeypatch, EngineArgs=arguments)
    attention = SimpleNamespace(get_supported_head_sizes=lambda: [16, 32, 64, 128])
    module("vllm.v1.attention.backends.cpu_attn", monkeypatch, CPUAttentionBackend=attention)
    vllm.version.cache_clear()
    yield
    vllm.version.cache_clear()


def test_a_missing_or_old_vllm_is_refused(monkeypatch, refused):
    vllm.version.cache_clear()
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "pip install -e '.[vllm]'" in refused("executor=vllm")
    module("vllm", monkeypatch, __version__="0.9.2")
    assert "needs vLLM 0.28 or newer, not 0.9.2" in refused("executor=vllm")
    module("vllm", monkeypatch, __version__="dev")
    assert vllm.version() == "dev"
    vllm.version.cache_clear()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("cache.block_size=48", "multiple of 32 tokens; use cache.block_size=32"),
        ("executor.options={atention_backend: A}", "did you mean attention_backend"),
        ("+executor.options.max_num_seqs=3", "is the lab's to set; use batch"),
        ("+executor.options.worker_extension_cls=A", "in every run of the lab"),
        ("+executor.options.enable_lora=true", "is of LoRA, which executor=vllm does not have"),
        ("+executor.options.data_parallel_size=2", "is of several engines (data parallel)"),
        ("+executor.options.speculative_config={}", "is of drafts"),
        ("+executor.options.max_logprobs=5", "it would change nothing; drop it"),
        ("executor.options={hf_overrides: {hidden_size: 8}}", "another model than the lab"),
        ("executor.options={hf_overrides: 8}", "hf_overrides=8 is no mapping"),
        ("speculation=prompt_lookup", "verifies no drafts"),
        ("cache.dtype=int8", "use fp8 or auto"),
        ("dtype=int8", "dtype=int8 is unknown"),
        ("executor.runner=v3", "use one of auto, v1, v2"),
        ("executor.async_scheduling=true executor.pipeline_parallel=2", "has no effect"),
        ("model=13b batch=4096", "lower batch"),
        ("model=tiny model.head_size=24", "heads of 24, which vLLM's attention does not compute"),
        ("task=calibrate executor.pipeline_parallel=2", "iterations of one stage, not of 2"),
    ],
)
def test_what_vllm_can_not_do_is_refused_in_a_line(settings, message, stub, refused):
    executor, *others = ["executor=vllm", *([settings] if "{" in settings else settings.split())]
    assert message in refused(executor, *others)


def test_engine_arguments(stub):
    backend = VllmBackend(options={"attention_backend": "FLASHINFER"}, eager=True)
    longer = replace(SIZES, max_model_len=5000)
    arguments = backend.arguments(TINY, None, longer)
    assert arguments["max_num_batched_tokens"] == SIZES.max_batch_tokens
    assert arguments["num_gpu_blocks_override"] == SIZES.num_blocks + 1
    assert arguments["hf_overrides"] == {"max_position_embeddings": 5000}
    assert arguments["attention_backend"] == "FLASHINFER"
    assert arguments["async_scheduling"] is None
    two = VllmBackend(tensor_parallel=2, pipeline_parallel=2, async_scheduling=False)
    assert two.arguments(TINY, None, SIZES)["max_num_seqs"] == 2 * SIZES.batch_size
    assert two.num_devices == 4


MIXTURE = replace(TINY, num_experts=3, experts_per_token=2)


def test_weights_are_dummies_on_a_gpu_and_seeded_where_tokens_are_compared(stub, monkeypatch):
    on_cpu = VllmBackend()
    assert "load_format" not in on_cpu.arguments(TINY, None, SIZES)
    dummy = VllmBackend(random_weights="dummy")
    assert dummy.arguments(TINY, None, SIZES)["load_format"] == "dummy"
    assert not on_cpu.cautions(MIXTURE)
    monkeypatch.setattr(VllmBackend, "torch_device", torch.device("cuda"))
    on_gpu = VllmBackend()
    arguments = on_gpu.arguments(TINY, None, SIZES)
    assert arguments["load_format"] == "dummy"
    assert "configs" in arguments["model"]
    assert "choose experts about evenly" in on_gpu.cautions(MIXTURE)[0]
    assert not on_gpu.cautions(TINY)
    assert "load_format" not in on_gpu.arguments(TINY, Path("a"), SIZES)
    seeded = VllmBackend(random_weights="seeded")
    assert "checkpoints" in seeded.arguments(TINY, None, SIZES)["model"]
    with pytest.raises(UserError, match=r"model\.path=a names one; drop one"):
        seeded.expect(TINY, Path("a"), SIZES)


def test_a_disk_or_a_host_too_small_for_seeded_weights_is_refused_before_anything_runs(
    stub, tmp_path, monkeypatch
):
    monkeypatch.setattr(backends, "_engine", SharedEngine())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(VllmBackend, "torch_device", torch.device("cuda"))
    large = replace(TINY, vocab_size=TINY.vocab_size << 16)
    usage = SimpleNamespace(free=3 << 30)
    monkeypatch.setattr(backends.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(backends, "free_memory_bytes", lambda device: 2 << 30)
    VllmBackend().expect(large, None, SIZES)  # dummies need neither
    seeded = VllmBackend(random_weights="seeded")
    with pytest.raises(UserError, match=r"need 3.5 GB of disk in .*, which has 3.2 GB free; .*XDG"):
        seeded.expect(large, None, SIZES)
    usage.free = 30 << 30
    with pytest.raises(UserError, match=r"need 3.5 GB of the host's memory .* has 2.1 GB free"):
        seeded.expect(large, None, SIZES)
    seeded.expect(TINY, None, SIZES)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "most_tokens", "largest"),
    [
        ({}, 256, 256),
        ({}, 2048, 512),  # as vLLM's server
        ({"eager": True}, 256, None),
        ({"options": {"max_cudagraph_capture_size": 64}}, 256, 64),
        ({"options": {"compilation_config": {"cudagraph_capture_sizes": [8]}}}, 256, None),
        ({"options": {"compilation_config": {"cudagraph_mode": "FULL"}}}, 256, 256),
    ],
)
def test_chunks_are_captured_as_decodes_are(settings, most_tokens, largest, stub, monkeypatch):
    monkeypatch.setattr(VllmBackend, "torch_device", torch.device("cuda"))
    backend = VllmBackend(**settings)
    arguments = backend.arguments(TINY, None, replace(SIZES, max_batch_tokens=most_tokens))
    assert arguments.get("max_cudagraph_capture_size") == largest


def test_options_are_merged_with_what_a_run_needs(stub):
    longer = replace(SIZES, max_model_len=5000)
    backend = VllmBackend(options={"hf_overrides": {"attention_dropout": 0.5}})
    overrides = backend.arguments(TINY, None, longer)["hf_overrides"]
    assert overrides == {"attention_dropout": 0.5, "max_position_embeddings": 5000}
    backend = VllmBackend(options={"hf_overrides": {"max_position_embeddings": 9}})
    with pytest.raises(UserError, match="max_position_embeddings=9, but this run needs 5000"):
        backend.arguments(TINY, None, longer)


def test_blocks_of_another_size_than_asked_for_are_refused(stub, monkeypatch):
    engine = SharedEngine()
    monkeypatch.setattr(backends, "_engine", engine)
    monkeypatch.setattr(engine, "get", lambda key, start: SimpleNamespace(block_size=64))
    with pytest.raises(UserError, match=r"made blocks of 64 tokens .* use cache.block_size=64"):
        VllmBackend().build(TINY, None, SIZES)


SHAPE = vllm.ModelShape(
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_size=24,
    ffn_size=96,
    vocab_size=211,
    max_position=512,
    is_latent=False,
    has_plain_rotation=True,
    is_quantised=False,
    block_size=32,
    beyond=None,
)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (SHAPE, "heads of 24 on a CPU"),
        (SHAPE._replace(is_latent=True), "latent attention with plain rotary embeddings on a CPU"),
        (SHAPE._replace(is_latent=True, has_plain_rotation=False), "latents of 24"),
        (SHAPE._replace(beyond="an encoder"), "an encoder"),
    ],
)
def test_a_checkpoint_that_does_not_run_here_is_refused_by_what_it_has(
    shape, reason, stub, tmp_path, monkeypatch
):
    (tmp_path / "config.json").touch()
    latent_attention = SimpleNamespace(get_supported_head_sizes=lambda: [576])
    for package in ("vllm.v1.attention.backends.mla", "vllm.v1.attention.backends.mla.cpu_mla"):
        module(package, monkeypatch, CPUMLABackend=latent_attention)
    monkeypatch.setattr(vllm, "model_shape", lambda arguments, runner: shape)
    with pytest.raises(UserError, match=f"has {reason}.*, which executor=vllm does not run"):
        VllmBackend().read_model(tmp_path)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (vllm.WeightBytes(dense=1.0, expert=None), 1),
        (vllm.WeightBytes(dense=None, expert=1.0), "quantises experts, which model tiny-vllm has"),
        (None, "states no bytes of such weights"),
        (ValueError("no config file"), r"vLLM refuses it \(ValueError: no config file\); drop it"),
    ],
)
def test_weights_that_vllm_quantises_are_counted_by_its_configuration(
    num_bytes, expected, stub, monkeypatch
):
    def configured(arguments: Any, runner: str) -> Any:
        if isinstance(num_bytes, ValueError):
            raise num_bytes
        return num_bytes

    monkeypatch.setattr(vllm, "weight_bytes", configured)
    backend = VllmBackend(options={"quantization": "some"})
    assert VllmBackend().with_weights(TINY, None) == TINY
    if isinstance(expected, str):
        with pytest.raises(UserError, match=f"executor.options.quantization=some:? .*{expected}"):
            backend.with_weights(TINY, None)
        return
    spec = backend.with_weights(TINY, None)
    assert spec.linear_bytes(4) == expected
    assert backend.memory(spec).weights == spec.weight_bytes(4) < TINY.weight_bytes(4)
    work = batch_of(decodes=3)
    assert spec.flops(work) == TINY.flops(work)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "measure_peaks", lambda *_: Peaks(1e12, 1e11, "measured"))
        peaks = backend.peaks()
    assert math.isnan(roofline_time(spec, work, 4, peaks)), "products of 8 bits are not measured"
    assert roofline_time(TINY, work, 4, peaks) > 0


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_quantised_checkpoint_of_a_model_with_formulas_has_its_bytes(
    method, stub, tmp_path, monkeypatch
):
    make_quantised(method, tmp_path)
    shape = SHAPE._replace(is_quantised=True, head_size=32)
    monkeypatch.setattr(vllm, "model_shape", lambda arguments, runner: shape)
    backend = VllmBackend()
    spec, _ = AutoModel(str(tmp_path)).resolve("tiny", backend.read_model)
    assert spec.has_formulas
    # The rest are norms, and the indices of rows that GPTQ saves: much of a small model.
    assert spec.weight_bytes(2) == pytest.approx(num_bytes_of(tmp_path), rel=0.1)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(f'"{method}"', '"other"'))
    unknown = backend.read_model(tmp_path)
    assert not unknown.has_formulas
    assert unknown.weight_bytes(2) == num_bytes_of(tmp_path)
    assert "of quantised weights" in unknown.size


def test_a_newer_vllm_is_a_caution(stub, monkeypatch):
    assert VllmBackend().cautions(TINY) == []
    vllm.version.cache_clear()
    module("vllm", monkeypatch, __version__="0.34.1")
    assert VllmBackend().cautions(TINY) == ["vLLM 0.34.1: tested up to 0.33"]


def test_runs_share_an_engine_for_the_largest():
    engine, started = SharedEngine(), []

    def start(sizes):
        started.append(sizes)
        if sizes.batch_size > 100:
            raise RunError("no memory")
        return SimpleNamespace(facts=lambda: {"runner": "v1"}, close=lambda: closed.append(sizes))

    closed: list[Any] = []
    large = replace(SIZES, batch_size=8, max_batch_tokens=100, chunk=None)
    for sizes in (SIZES, large):
        engine.expect("a", sizes)
    workers = engine.get("a", start)
    assert engine.get("a", start) is workers
    assert (started[0].batch_size, started[0].max_batch_tokens) == (8, SIZES.max_batch_tokens)
    assert engine.facts == {"runner": "v1"}
    engine.expect("a", replace(SIZES, batch_size=101))
    with pytest.raises(RunError):
        engine.get("a", start)
    assert len(closed) == 1  # one engine at a time
    engine.expect("a", SIZES)
    engine.get("a", start)
    assert started[-1].batch_size == SIZES.batch_size  # what did not fit is forgotten
    engine.close()
    assert len(closed) == 2


@pytest.mark.parametrize("step", ["make_engine", "execute_dummy_batch"])
def test_an_engine_that_does_not_start_is_ended(step, monkeypatch):
    done = []

    def take(name: str) -> None:
        done.append(name)
        if name == step:
            raise ValueError("no memory for the cache")

    def make_engine(config: Any, make_executor: Any, **_: Any) -> Any:
        executor = make_executor(config)
        executor.determine_available_memory()
        executor.initialize_from_config(None)
        take("make_engine")
        cache = SimpleNamespace(kv_cache_groups=["the layers"])
        scheduler = SimpleNamespace(kv_cache_config=cache)
        return SimpleNamespace(model_executor=executor, scheduler=scheduler)

    class FakeExecutor:
        def __init__(self, config: Any) -> None:
            self.shutdown = partial(take, "shutdown")
            self.execute_dummy_batch = partial(take, "execute_dummy_batch")
            self.collective_rpc = lambda name, args: take(name)

        def determine_available_memory(self) -> None:
            take("profile")

        def initialize_from_config(self, caches: Any) -> None:
            take("capture")

    for name in ("vllm", "vllm.distributed", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        module(name, monkeypatch)
    executor_class = SimpleNamespace(get_class=lambda config: FakeExecutor)
    cleanup = partial(take, "cleanup")
    parallel_state = "vllm.distributed.parallel_state"
    module(parallel_state, monkeypatch, cleanup_dist_env_and_memory=cleanup)
    module("vllm.sampling_params", monkeypatch, SamplingParams=SimpleNamespace)
    types = dict.fromkeys(("CachedRequestData", "NewRequestData", "SchedulerOutput"))
    module("vllm.v1.core.sched.output", monkeypatch, **types)
    module("vllm.v1.engine.core", monkeypatch, EngineCore=make_engine)
    module("vllm.v1.executor.abstract", monkeypatch, Executor=executor_class)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8, enforce_eager=False),
        load_config=SimpleNamespace(load_format="dummy"),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 64]),
        cache_config=SimpleNamespace(block_size=32, num_gpu_blocks=5),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=2, distributed_executor_backend="mp"
        ),
    )
    with pytest.raises(ValueError, match="no memory for the cache"):
        vllm.Workers(config, announce=done.append)
    assert done[-3:] == [step, "shutdown", "cleanup"]
    # A line before each phase.
    assert done[:7] == [
        "starting the engine and loading its weights",
        "drawing random weights on the device",
        "draw_weights",
        "compiling the model (minutes at first) and measuring the memory that it takes",
        "profile",
        "making the cache and capturing CUDA graphs of 3 sizes of batches up to 64 tokens",
        "capture",
    ]


def test_a_cache_in_groups_of_layers_is_refused():
    config = SimpleNamespace(model_config=SimpleNamespace(model="hybrid"))
    cache = SimpleNamespace(kv_cache_groups=["states", "attention"])
    with pytest.raises(UserError, match=r"model.path=hybrid: vLLM keeps its cache in 2 groups"):
        vllm.require_one_list_of_blocks(cache, config)


def test_another_executor_gets_the_memory_of_a_gpu(monkeypatch):
    ended = list[str]()
    assert backends._engine.close in devices.engine_ends
    monkeypatch.setattr(devices, "engine_ends", [lambda: ended.append("vllm")])
    devices.prepare_memory(torch.device("cpu"))
    assert not ended
    devices.prepare_memory(torch.device("cuda"))
    assert ended == ["vllm"]


def raise_from_cause() -> None:
    with executors.explained("it"):
        try:
            raise ValueError("no such head")
        except ValueError as cause:
            raise RuntimeError("it failed") from cause


def test_an_error_of_a_worker_process_is_named(monkeypatch, capsys):
    """By the configuration of logging that workers read: vLLM's executor says only that one has
    failed.
    """
    for name in (worker_errors.CONFIG_PATH, worker_errors.LEVEL):
        monkeypatch.delenv(name, raising=False)
    worker_errors.log_errors()
    log = logging.getLogger("vllm")
    was = log.handlers, log.level, log.propagate
    configuration = json.loads(Path(os.environ[worker_errors.CONFIG_PATH]).read_text())
    logging.config.dictConfig(configuration)
    try:
        log.warning("slow")
        for message in ("head of 16", "connection lost"):
            try:
                raise RuntimeError(f"{message}\nsecond line")
            except RuntimeError:
                log.exception("WorkerProc hit an exception.")
    finally:
        log.handlers, log.level, log.propagate = was
    assert "slow" not in (shown := capsys.readouterr().err)
    assert shown.count("Traceback") == 2
    with pytest.raises(RunError, match=r"\(RuntimeError: head of 16\)"), executors.explained("it"):
        raise Exception("see stack trace for root cause")
    worker_errors.forget_errors()
    with pytest.raises(RunError, match="root cause"), executors.explained("it"):
        raise Exception("see stack trace for root cause")


def test_a_worker_s_lack_of_memory_is_one(monkeypatch):
    text = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    monkeypatch.setattr(executors, "first_error", lambda: text)
    with pytest.raises(RunError, match=r"2.00 GiB more were wanted\); lower batch"):
        raise_from_cause()


def test_logging_is_the_user_s_where_it_is_configured(monkeypatch):
    monkeypatch.setenv(worker_errors.CONFIG_PATH, "/etc/logging.json")
    worker_errors.log_errors()
    assert os.environ[worker_errors.CONFIG_PATH] == "/etc/logging.json"
    monkeypatch.setenv(worker_errors.CONFIG_PATH, f"/tmp/gone/{worker_errors.CONFIG_NAME}")
    worker_errors.log_errors()  # of the process that started this one
    assert Path(os.environ[worker_errors.CONFIG_PATH]).is_file()


def test_errors_of_vllm_are_one_line():
    class Invalid(Exception):
        pass

    text = "1 validation error for VllmConfig\n  Value error, no Triton [type=value_error]"
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    listed = ValueError("No kernel. Reasons:\n  A requires AMX,\n  B a GPU")
    for error, reason in (
        (Invalid(text), "Value error, no Triton"),
        (memory, "out of memory"),
        (listed, "No kernel. Reasons: A requires AMX, B a GPU"),
    ):
        with pytest.raises(RunError, match=reason), executors.explained("it"):
            raise error
    with pytest.raises(RunError, match=r"\(RuntimeError: it failed, by ValueError: no such head\)"):
        raise_from_cause()
    lost = SimpleNamespace(is_lost=True, block_size=32, num_blocks=8, is_async=False, num_stages=1)
    lost.forget = lambda names: 1 / 0
    with pytest.raises(RunError, match="a worker process of vLLM was killed"):
        executors.VllmExecutor(lost).start()


PAPERS_BLOCK = {
    "norm": "layer",
    "num_kv_heads": 2,
    "gated_ffn": False,
    "activation": "gelu",
    "qkv_bias": True,
    "out_bias": True,
    "ffn_bias": True,
}
SHAPES = {
    "llama": {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64), "tie_embeddings": True},
    "mistral": {"sliding_window": 48},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "sliding_window": None},
    "mixtral": {"num_experts": 3, "experts_per_token": 2},
    "qwen3_moe": {"qk_norm": True, "num_experts": 3, "experts_per_token": 2},
    "gpt_neox": PAPERS_BLOCK,
}


@pytest.mark.parametrize("kind", SHAPES)
def test_seeded_weights_are_saved_as_a_checkpoint(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = replace(TINY, **SHAPES[kind])
    cpu, dtype = torch.device("cpu"), torch.float32
    folder = seeded_checkpoint(spec, cpu, dtype, seed=3)
    assert config_of(spec, "float32")["model_type"] == kind
    assert read_spec(folder) == spec
    check_checkpoint(folder, spec)
    drawn, read = load_model(spec, None, cpu, dtype, 3), load_model(spec, folder, cpu, dtype, 0)
    for one, other in zip(drawn.parameters(), read.parameters(), strict=True):
        assert torch.equal(one, other)
    assert seeded_checkpoint(spec, cpu, dtype, seed=3) == folder
    assert seeded_checkpoint(spec, cpu, dtype, seed=4) != folder


@pytest.mark.parametrize("name", ["13b", "33b", "7b", "mistral-7b", "llama3-8b", "30m-moe"])
def test_models_of_the_lab_can_be_given_to_vllm(name):
    """Among them the defaults of GPUs."""
    require_architecture(load_option("model", name))


def test_a_model_that_vllm_can_not_have_is_refused_before_anything_runs(stub, refused):
    small = ("seq_len=64", "pd_ratio=7", "workload.num_requests=2", "batch=1", "chunk=16")
    message = refused("executor=vllm", "model=tiny", "+model.gated_ffn=false", *small)
    assert "no architecture in transformers" in message


def test_a_shape_without_an_architecture_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = ModelSpec("plain", 2, 64, 2, 2, 96, 211, 32, norm="layer", gated_ffn=False)
    with pytest.raises(UserError, match="no architecture in transformers"):
        seeded_checkpoint(plain, torch.device("cpu"), torch.float32, 0)
    assert not list(tmp_path.rglob("*.json"))


def test_a_sweep_expects_all_its_batches_before_the_first_run(stub, monkeypatch):
    monkeypatch.setattr(backends, "_engine", engine := SharedEngine())
    small = ("model=tiny", "seq_len=64", "workload.num_requests=4", "pd_ratio=7", "tracking=none")
    compose(
        ["executor=vllm", "policy=sarathi,vllm_v1", "chunk=16,32", "batch=2,4", *small, "-m"]
    ).check()
    (key,), made = engine._largest, SimpleNamespace(facts=dict, close=dict)
    sizes = list[Any]()
    engine.get(key, lambda largest: sizes.append(largest) or made)
    assert sizes[0].batch_size == 4
    assert sizes[0].max_batch_tokens >= 4 * 56  # whole prompts, under request_level


def test_replay_and_padding_are_those_that_vllm_reports():
    def pending(stats: Any) -> vllm.Pending:
        result = SimpleNamespace(
            result=lambda: SimpleNamespace(
                cudagraph_stats=stats, req_id_to_index={"a": 1}, sampled_token_ids=[[], [3, 4]]
            )
        )
        return vllm.Pending(result, SimpleNamespace(result=lambda: None))

    graph = SimpleNamespace(runtime_mode="FULL", num_paddings=3)
    assert pending(graph).graph_use() == ("full", 3)
    piecewise = SimpleNamespace(runtime_mode="PIECEWISE", num_paddings=1)
    assert pending(piecewise).graph_use() == ("piecewise", 1)
    eager = SimpleNamespace(runtime_mode="CUDAGraphMode.NONE", num_paddings=0)
    assert pending(eager).graph_use() == ("none", 0)
    assert pending(None).graph_use() == ("none", 0)
    assert pending(None).tokens(["a"]) == [4]


class Stream(CudaTimeline):
    """A GPU's stream whose work takes a second, launched at once."""

    def __init__(self) -> None:
        self.marks, self.waited = 0, list[int]()
        HostTimeline.__init__(self)

    def reset(self) -> None:
        HostTimeline.reset(self)

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def wait(self, mark: int) -> float:
        self.waited.append(mark)
        return float(mark)


def test_times_are_a_streams_where_there_is_one():
    workers = Bookkeeper(is_async=True)
    executor = executors.VllmExecutor(workers, timeline=Stream())
    requests = [Request(i, 0.0, 5, 3, np.arange(5, dtype=np.int32)) for i in range(2)]
    engine = EngineConfig(Orca(), 2, 16, 4, 8)
    table = serve(requests, engine, executor).iterations()
    assert executor.timeline.waited == sorted(executor.timeline.waited)
    assert (table.end - table.start == 1).all()
    assert (table.start.diff().dropna() > 0).all()
