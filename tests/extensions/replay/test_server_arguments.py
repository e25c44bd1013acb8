"""What files and users state of a server: each argument has its effect, or is named as unused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from composed import checked, config_of, refusal_of, run
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.sweeper import compose
from sarathi_lab.extensions.replay.argument_table import NO_EFFECT, OF_FILES, misspelt, table
from sarathi_lab.extensions.replay.literals import named_values
from sarathi_lab.extensions.replay.names import ModelName, weights_in_names
from sarathi_lab.extensions.replay.server_arguments import read_arguments
from sarathi_lab.extensions.replay.server_commands import find_command
from sarathi_lab.extensions.replay.server_facts import find_facts
from sarathi_lab.extensions.replay.settings import SETTINGS

# Two requests as vLLM's client records them.
CLIENT = {
    "date": "20260818-021333",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "meta-llama/Llama-3.1-8B",
    "tokenizer_id": "meta-llama/Llama-3.1-8B",
    "num_prompts": 2,
    "request_rate": 2.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "completed": 2,
    "failed": 0,
    "duration": 1.0,
    "total_input_tokens": 150,
    "total_output_tokens": 5,
    "max_output_tokens_per_s": 5.0,
    "max_concurrent_requests": 1,
    "request_throughput": 2.0,
    "output_throughput": 5.0,
    "median_ttft_ms": 150.0,
    "input_lens": [100, 50],
    "output_lens": [3, 2],
    "start_times": [1000.0, 1000.5],
    "ttfts": [0.2, 0.1],
    "itls": [[0.1, 0.2], [0.05]],
    "errors": ["", ""],
}
SGLANG = {name: value for name, value in CLIENT.items() if name not in ("start_times", "model_id")}
SGLANG |= {"total_output_tokens_retokenized": 5}
SIZES = {"max_num_batched_tokens": 512, "max_num_seqs": 8}
DUMP = {"model_path": "meta-llama/Llama-3.1-8B", "chunked_prefill_size": 512, "version": "0.5.10"}
OTHER_SETTINGS = ("model", "hardware", "dtype", "version", "host.overlaps", "cluster.num")
OTHER_SETTINGS += ("host.graphs.mode", "host.graphs.sizes", "host.graphs.largest")


@pytest.fixture
def result(tmp_path) -> Path:
    """The file of a client that states nothing of its server but the model."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(CLIENT))
    return path


def replayed(path: Path, *settings: str):
    """Compose the replays of a run on an H100."""
    cfg = config_of("task=validate", f"task.run={path}", "hardware=h100", *settings)
    (case,) = build(cfg.task).check(cfg)
    return case


def as_vllm(path: Path, **arguments):
    """The replay of `path` as it was, with vLLM's `arguments` stated in meta.json."""
    meta = {"vllm_version": "0.12.0", "engine_kwargs": {**SIZES, **arguments}}
    path.with_name("meta.json").write_text(json.dumps(meta))
    return replayed(path).as_run


def as_sglang(path: Path, **arguments):
    """The replay as it was of a result of SGLang's client with its description of the server."""
    path.write_text(json.dumps({**SGLANG, "server_info": {**DUMP, **arguments}}))
    path.with_name("meta.json").unlink(missing_ok=True)  # of another server
    return replayed(path).as_run


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Replays of both systems without further arguments."""
    path = tmp_path_factory.mktemp("plain") / "result.json"
    path.write_text(json.dumps(CLIENT))
    of_vllm = as_vllm(path)
    return {"vllm": of_vllm, "sglang": as_sglang(path)}


# By argument: a value, what of the replay shows it, and what that is then.
VLLM_EFFECTS = {
    "model": ("Qwen/Qwen3-8B", lambda it: it.spec.name, "qwen3-8b"),
    "dtype": ("torch.bfloat16", lambda it: it.backend.dtype_name, "bfloat16"),
    "max_num_batched_tokens": (256, lambda it: it.engine.policy.budget, 256),
    "max_num_seqs": (4, lambda it: it.engine.batch_size, 4),
    "max_model_len": (256, lambda it: it.engine.max_model_len, 256),
    "tensor_parallel_size": (2, lambda it: it.backend.tensor_parallel, 2),
    "quantization": ("awq_marlin", lambda it: it.backend.weights, "int4"),
    "kv_cache_dtype": ("fp8_e4m3", lambda it: it.spec.kv_dtype, "fp8"),
    "block_size": (32, lambda it: it.engine.block_size, 32),
    # 131,072 bytes a token.
    "kv_cache_memory_bytes": (400 * 16 * 131_072, lambda it: it.engine.num_blocks, 399),
    "num_gpu_blocks_override": (400, lambda it: it.engine.num_blocks, 399),
    "enable_prefix_caching": (False, lambda it: it.engine.shares_prefixes, False),
    "no_enable_prefix_caching": (True, lambda it: it.engine.shares_prefixes, False),
    "async_scheduling": (True, lambda it: it.backend.host.overlaps, True),
    "no_async_scheduling": (False, lambda it: it.backend.host.overlaps, True),
    "cudagraph_mode": ("FULL", lambda it: it.backend.host.graphs.mode, "full"),
    "enforce_eager": (True, lambda it: it.backend.host.graphs.mode, "none"),
    "cudagraph_capture_sizes": (
        [1, 4],
        lambda it: list(it.backend.host.graphs.sizes or ()),
        [1, 4],
    ),
    "max_cudagraph_capture_size": (4, lambda it: it.backend.host.graphs.largest, 4),
    "scheduler_reserve_full_isl": (
        False,
        lambda it: it.engine.policy.scheduler_reserve_full_isl,
        False,
    ),
    "long_prefill_token_threshold": (
        64,
        lambda it: it.engine.policy.long_prefill_token_threshold,
        64,
    ),
    "no_enable_chunked_prefill": (
        True,
        lambda it: it.engine.policy.enable_chunked_prefill,
        False,
    ),
    "max_num_active_seqs": (4, lambda it: it.engine.policy.max_num_active_seqs, 4),
    "prefill_schedule_interval": (2, lambda it: it.engine.policy.prefill_schedule_interval, 2),
    "watermark": (0.1, lambda it: it.engine.policy.watermark, 0.1),
}
SGLANG_EFFECTS = {
    "model_path": ("Qwen/Qwen3-8B", lambda it: it.spec.name, "qwen3-8b"),
    "chunked_prefill_size": (256, lambda it: it.engine.policy.budget, 256),
    "max_running_requests": (4, lambda it: it.engine.batch_size, 4),
    "effective_max_running_requests_per_dp": (4, lambda it: it.engine.batch_size, 4),
    "context_length": (256, lambda it: it.engine.max_model_len, 256),
    "tp_size": (2, lambda it: it.backend.tensor_parallel, 2),
    "quantization": ("awq_marlin", lambda it: it.backend.weights, "int4"),
    "kv_cache_dtype": ("fp8_e5m2", lambda it: it.spec.kv_dtype, "fp8"),
    "page_size": (64, lambda it: (it.engine.block_size, it.engine.policy.page_size), (64, 64)),
    "token_capacity": (6400, lambda it: it.engine.num_blocks, 100),  # of 64
    "max_total_num_tokens": (6400, lambda it: it.engine.num_blocks, 400),  # of 16
    "disable_radix_cache": (True, lambda it: it.engine.shares_prefixes, False),
    "max_prefill_tokens": (64, lambda it: it.engine.policy.max_prefill_tokens, 64),
    "enable_mixed_chunk": (True, lambda it: it.engine.policy.enable_mixed_chunk, True),
    "schedule_conservativeness": (
        0.3,
        lambda it: it.engine.policy.schedule_conservativeness,
        0.3,
    ),
}


# Other ways to state the same.
SAME_AS_OTHERS = ("enforce_eager", "max_cudagraph_capture_size")
SAME_AS_OTHERS += ("effective_max_running_requests_per_dp", "max_total_num_tokens")


@pytest.mark.parametrize("is_same", [False, True], ids=["first", "others"])
@pytest.mark.parametrize("system", ["vllm", "sglang"])
def test_each_argument_of_a_server_is_honoured(system, is_same, result, plain):
    effects = VLLM_EFFECTS if system == "vllm" else SGLANG_EFFECTS
    make = as_vllm if system == "vllm" else as_sglang
    chosen = {
        name: effect
        for name, effect in effects.items()
        if (name in SAME_AS_OTHERS or name.startswith("no_")) == is_same
    }
    replay = make(result, **{name: value for name, (value, _, _) in chosen.items()})
    for name, (_, shown, expected) in chosen.items():
        assert shown(plain[system]) != expected, name
        assert shown(replay) == expected, name


def test_a_smaller_share_of_the_memory_leaves_a_smaller_cache(result, plain):
    of_vllm = as_vllm(result, gpu_memory_utilization=0.5)
    assert of_vllm.engine.num_blocks < plain["vllm"].engine.num_blocks
    result.with_name("meta.json").unlink()
    of_sglang = as_sglang(result, mem_fraction_static=0.5)
    assert of_sglang.engine.num_blocks < plain["sglang"].engine.num_blocks


@pytest.mark.parametrize("system", ["vllm", "sglang"])
def test_every_argument_of_the_table_is_honoured_or_named(system):
    valid = {*SETTINGS, *OF_FILES, *OTHER_SETTINGS}
    policies = [OmegaConf.load(path) for path in (CONF / "policy").glob("*.yaml")]
    valid |= {f"policy.{field}" for policy in policies for field in policy}
    samples = {
        "int": 7,
        "count": 7,
        "chunk": 7,
        "number": 0.5,
        "share": 0.5,
        "flag": True,
        "inverse": True,
    }
    samples |= {"list": [1, 2], "text": "fcfs", "any": "x"}
    for row in table(system).values():
        name, value = row.argument.replace("*", "x"), samples[row.kind]
        if row.setting in ("executor.weights", "cache.dtype"):
            value = "fp8"
        stated = read_arguments(system, {name: value}, "a file")
        if row.setting == NO_EFFECT:
            assert stated.without_effect == [name]
        elif row.setting:
            assert {*stated.settings} == {*row.setting.split()} <= valid, name
        elif row.neutral != "*":
            assert name in stated.not_simulated[0]
            assert row.reason in stated.not_simulated[0]


# Arguments by which an iteration takes another time, or another one follows; none of these values
# is a server's default.
CHANGES_TIMES = {
    "vllm": {
        "attention_backend": "TRITON_ATTN",
        "compilation_config": {"level": 0},
        "cpu_offload_gb": 4,
        "decode_context_parallel_size": 2,
        "enable_dbo": True,
        "enable_eplb": True,
        "enable_lora": True,
        "hf_overrides": {"num_hidden_layers": 2},
        "kv_offloading_size": 8,
        "kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"},
        "mamba_cache_dtype": "float32",
        "max_num_partial_prefills": 4,
        "max_num_scheduled_tokens": 64,
        "model_impl": "transformers",
        "moe_backend": "triton",
        "nnodes": 2,
        "num_scheduler_steps": 8,
        "optimization_level": 0,
        "quantization": "modelopt",
        "scheduler_cls": "my.Scheduler",
        "scheduling_policy": "priority",
        "speculative_config": {"method": "ngram"},
        "stream_interval": 10,
    },
    "sglang": {
        "attention_backend": "triton",
        "cpu_offload_gb": 4,
        "cuda_graph_bs": [1, 2],
        "cuda_graph_max_bs": 4,
        "decode_attention_backend": "flashmla",
        "device": "cpu",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disaggregation_mode": "prefill",
        "enable_dp_attention": True,
        "enable_flashinfer_allreduce_fusion": True,
        "enable_hierarchical_cache": True,
        "enable_lora": True,
        "enable_torch_compile": True,
        "enable_two_batch_overlap": True,
        "ep_size": 2,
        "fp8_gemm_runner_backend": "cutlass",
        "json_model_override_args": '{"num_hidden_layers": 2}',
        "mamba_full_memory_ratio": 0.2,
        "mamba_ssm_dtype": "bfloat16",
        "model_impl": "transformers",
        "moe_a2a_backend": "deepep",
        "moe_runner_backend": "triton",
        "nnodes": 2,
        "num_continuous_decode_steps": 4,
        "prefill_attention_backend": "fa4",
        "quantization": "modelopt",
        "radix_eviction_policy": "lfu",
        "sampling_backend": "pytorch",
        "schedule_policy": "lof",
        "speculative_algorithm": "EAGLE",
        "stream_interval": 10,
        "torchao_config": "int4wo-128",
        "triton_attention_num_kv_splits": 16,
    },
}
# What a description of a server with nothing but defaults has.
DEFAULTS_OF_SGLANG = {
    "attention_backend": "fa3",
    "cuda_graph_max_bs": 256,
    "ep_num_redundant_experts": 0,
    "flashinfer_mxfp4_moe_precision": "default",
    "fp8_gemm_runner_backend": "auto",
    "grammar_backend": "xgrammar",
    "json_model_override_args": "{}",
    "mamba_full_memory_ratio": 0.9,
    "mamba_scheduler_strategy": "auto",
    "moe_runner_backend": "auto",
    "nnodes": 1,
    "sampling_backend": "flashinfer",
    "swa_full_tokens_ratio": 0.8,
    "triton_attention_num_kv_splits": 8,
}


@pytest.mark.parametrize("system", CHANGES_TIMES)
def test_arguments_that_change_times_are_never_silent(system):
    for name, value in CHANGES_TIMES[system].items():
        for is_dump in (False, True):
            stated = read_arguments(system, {name: value}, "a file", is_dump=is_dump)
            (named,) = stated.not_simulated
            assert named.startswith(name), name


def test_defaults_of_a_server_are_silent():
    stated = read_arguments("sglang", DEFAULTS_OF_SGLANG, "a file", is_dump=True)
    assert not stated.not_simulated


@pytest.mark.parametrize(
    ("name", "weights", "word"),
    [
        *[(f"Llama-8B-{word}", "", word.lower()) for word in ("FP4", "w4a8", "W4AFP8")],
        *[(f"Llama-8B-{word}", "", word.lower()) for word in ("int3", "6bit", "Q4_K")],
        ("Llama-8B-GGUF:Q8_0", "", "gguf"),
        ("Llama-8B:IQ4_XS", "", "iq4"),
        ("Llama-8B-NVFP4", "nvfp4", "nvfp4"),
        ("DeepSeek-V3", "fp8", "DeepSeek-V3"),
        ("DeepSeek-R1-Distill-Llama-8B", "", ""),
        ("Llama-8B-GPTQ-Int8", "int8", "int8"),
        ("Llama-8B-quantized.w8a8", "w8a8", "w8a8"),
        ("Llama-8B-FP8", "fp8", "fp8"),
        ("Llama-8B-quantized.w4a16", "int4", "w4a16"),
        ("Llama-8B-GPTQ-Int4", "int4", "int4"),
        ("Llama-8B-bf16", "", ""),
        ("Llama-8B-fp16", "", ""),
    ],
)
def test_a_models_name_may_tell_its_weights(name, weights, word):
    told = word.removeprefix("gptq-").partition("_")[0]
    assert weights_in_names([ModelName(name)])[:2] == (weights, told)


def test_what_is_not_simulated_is_named_in_one_line(result, capsys, tmp_path):
    arguments = {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "scheduling_policy": "priority",
        "quantization": "modelopt",
        "kv_cache_dtype": "auto",
        "enable_lora": False,
        "seed": 42,
        "an_argument_of_next_year": 1,
    }
    as_vllm(result, **arguments)
    run(tmp_path, "task=validate", f"task.run={result}", "hardware=h100")
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "not simulated: " in line]
    for words in (
        "speculative_config (how many drafts were accepted",
        "scheduling_policy=priority (the recorded requests have no priorities)",
        "quantization=modelopt",
        "an_argument_of_next_year (unknown here)",
    ):
        assert words in line
    assert "kv_cache_dtype" not in said
    assert "enable_lora" not in said
    assert "the server's arguments without effect: seed" in said


def test_misspelt_arguments_are_refused_with_a_suggestion(result):
    for name, value, meant in (
        ("enable_chunked_prefil", True, "enable_chunked_prefill"),
        ("tensor-paralel-size", 2, "tensor_parallel_size"),
        ("compilation_config", {"cudagraph_mod": "full"}, "cudagraph_mode"),
    ):
        with pytest.raises(UserError, match=f"did you mean {meant}") as error:
            as_vllm(result, **{name: value})
        assert "meta.json" in str(error.value)
    with pytest.raises(UserError, match="max_num_seqs=many is not a whole number from 1 on"):
        as_vllm(result, max_num_seqs="many")
    for name, value, complaint in (
        ("block_size", 0, "is not a whole number from 1 on"),
        ("max_num_seqs", 1.5, "is not a whole number from 1 on"),
        ("gpu_memory_utilization", 90, "is not a share"),
        ("long_prefill_token_threshold", -2, "is not a whole number from 0 on"),
        ("max_model_len", "nan", "is not a whole number"),
    ):
        with pytest.raises(UserError, match=f"{name}={value} {complaint}"):
            as_vllm(result, **{name: value})
    with pytest.raises(UserError, match="enforce_eager=maybe is not true or false"):
        as_vllm(result, enforce_eager="maybe")
    meta = {"engine_kwargs": SIZES, "tensor_paralel_size": 2}
    result.with_name("meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="did you mean tensor_parallel_size"):
        replayed(result)


def test_metadata_of_the_client_are_the_servers_settings(result):
    metadata = {"tensor_parallel_size": "2", "version": "0.25.1", "gpu": "H100"}
    metadata |= {
        "max_num_batched_tokens": "2048",
        "max_num_seqs": "64",
        "max_num_batch_tokens": "1",
    }
    result.write_text(json.dumps({**CLIENT, **metadata}))
    cfg = config_of("task=validate", f"task.run={result}")
    (case,) = build(cfg.task).check(cfg)
    replay = case.as_run
    assert (replay.backend.hardware.name, replay.backend.tensor_parallel) == ("h100", 2)
    assert (replay.engine.policy.budget, replay.engine.batch_size) == (2048, 64)
    assert "max_num_batch_tokens, maybe max_num_batched_tokens" in " ".join(replay.describe())
    assert not [name for name in CLIENT if name in table("vllm") or misspelt("vllm", name)]


LOG = (
    "INFO [api_utils.py:273] non-default args: {'model': 'meta-llama/Llama-3.1-8B', "
    "'max_num_seqs': 64, 'compilation_config': CompilationConfig(level=3, sizes=[1, 2]), "
    "'tensor_parallel_size': 2, 'speculative_config': {'method': 'ngram'}}\n"
    "INFO [core.py:114] Initializing a V1 LLM engine (v0.19.0) with config: "
    "model='meta-llama/Llama-3.1-8B', speculative_config=None, dtype=torch.float16, "
    "max_seq_len=8192, pipeline_parallel_size=1, kv_cache_dtype=fp8, seed=0, "
    "enable_prefix_caching=False\n"
    "INFO Chunked prefill is enabled with max_num_batched_tokens=4096.\n"
    "INFO GPU KV cache size: 16,000 tokens\n"
)


def test_a_log_without_iterations_states_its_server(result, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(LOG)
    replay = replayed(result, f"task.log={log}").as_run
    engine, backend = replay.engine, replay.backend
    assert (engine.policy.budget, engine.batch_size, engine.num_blocks) == (4096, 64, 999)
    assert (engine.max_model_len, engine.shares_prefixes) == (8192, False)
    assert (backend.tensor_parallel, backend.dtype_name) == (2, "float16")
    assert replay.spec.kv_dtype == "fp8"
    compiled, drafts = find_facts(log, LOG).not_simulated
    assert (compiled, drafts.partition(" ")[0]) == ("compilation_config", "speculative_config")
    assert named_values("a=1, b='x, y', c={'d': [1, 2]}, e=F(g=1, h=2)") == {
        "a": 1,
        "b": "x, y",
        "c": {"d": [1, 2]},
        "e": "F(g=1, h=2)",
    }


def test_sources_that_differ_are_named(result, tmp_path):
    as_vllm(result, max_model_len=4096)
    log = tmp_path / "server.log"
    log.write_text(LOG)
    said = " ".join(replayed(result, f"task.log={log}").as_run.describe())
    assert "sources differ in batch" in said
    assert "server.log 64): 64 counts" in said


def test_what_no_file_states_is_the_users_and_else_the_servers_default(result):
    case = replayed(result, "executor.tensor_parallel=4", "cache.prefix=false")
    assert case.what_if is None
    assert case.as_run.backend.tensor_parallel == 4
    assert not case.as_run.engine.shares_prefixes
    said = " ".join(case.as_run.describe())
    assert "as you state: executor.tensor_parallel=4" in said
    # vLLM's on a card of 80 GB.
    assert "assumed, as nothing states them: host=vllm_async, cache.block_size=16" in said
    assert "chunk=8192 and batch=1024 by default of vLLM" in said
    case = replayed(result, "chunk=1024", "batch=16", "policy.long_prefill_token_threshold=100")
    assert case.what_if is None
    assert (case.as_run.engine.policy.budget, case.as_run.engine.batch_size) == (1024, 16)
    assert case.as_run.engine.policy.long_prefill_token_threshold == 100


STATED_OTHERWISE = {
    "executor.tensor_parallel=1": lambda it: it.backend.tensor_parallel,
    "executor.pipeline_parallel=2": lambda it: it.backend.pipeline_parallel,
    "executor.weights=auto": lambda it: it.backend.weights,
    "cache.dtype=auto": lambda it: it.spec.kv_dtype,
    "cache.block_size=16": lambda it: it.engine.block_size,
    "cache.num_blocks=500": lambda it: it.engine.num_blocks,
    "cache.prefix=true": lambda it: it.engine.shares_prefixes,
    "chunk=256": lambda it: it.engine.policy.budget,
    "batch=16": lambda it: it.engine.batch_size,
    "max_model_len=8192": lambda it: it.engine.max_model_len,
    "policy.long_prefill_token_threshold=0": lambda it: (
        it.engine.policy.long_prefill_token_threshold
    ),
    "policy.scheduler_reserve_full_isl=true": lambda it: (
        it.engine.policy.scheduler_reserve_full_isl
    ),
}
STATED = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "block_size": 32,
    "num_gpu_blocks_override": 400,
    "enable_prefix_caching": False,
    "max_model_len": 512,
    "long_prefill_token_threshold": 64,
    "scheduler_reserve_full_isl": False,
}


def test_what_the_user_states_otherwise_than_a_file_is_a_further_replay(result):
    """Also where it is the default of the lab's file."""
    as_vllm(result, **STATED)
    case = replayed(result, *STATED_OTHERWISE)
    assert case.what_if is not None
    for setting, shown in STATED_OTHERWISE.items():
        value = setting.partition("=")[2]
        assert str(shown(case.what_if)).lower() == value != str(shown(case.as_run)).lower()
        assert any(setting in change for change in case.changed)


@pytest.mark.parametrize(
    "setting",
    [
        *("executor.tensor_parallel=2", "executor.weights=fp8", "cache.prefix=false", "chunk=512"),
        *("cache.dtype=fp8", "cache.block_size=32", "batch=16", "max_model_len=8192"),
        "policy.enable_chunked_prefill=false",
    ],
)
def test_a_command_has_its_servers_defaults_and_what_is_typed_is_a_further_replay(setting, result):
    command = "task.server='vllm serve meta-llama/Llama-3.1-8B'"
    alone = replayed(result, command)
    case = replayed(result, command, setting)
    assert case.as_run.does_the_same_as(alone.as_run)
    (change,) = [change for change in case.changed if change.startswith(setting)]
    assert change != f"{setting} ({setting.partition('=')[2]})"
    assert "as you state" not in " ".join(case.as_run.describe())


def test_graphs_are_asked_for_on_the_runs_own_host(result):
    command = "task.server='vllm serve meta-llama/Llama-3.1-8B'"
    case = replayed(result, command, "host.graphs.mode=none", "executor.tensor_parallel=2")
    graphs = {each.backend.host.graphs.mode for each in (case.as_run, case.what_if)}
    assert graphs == {"full_and_piecewise", "none"}
    assert case.changed == [
        "host=vllm_async (vllm_0_19)",
        "host.graphs.mode=none (full_and_piecewise)",
        "executor.tensor_parallel=2 (1)",
    ]
    limited = f"{command[:-1]} --max-num-seqs 8'"
    case = replayed(result, limited, "host.graphs.mode=full")
    assert case.what_if.backend.host.graphs.largest == 16
    assert case.changed == ["host.graphs.mode=full (full_and_piecewise)"]
    case = replayed(result, command, "host.graphs.mode=full", "host.graphs.largest=8")
    assert (case.what_if.backend.host.name, case.what_if.backend.host.graphs.largest) == (
        case.as_run.backend.host.name,
        8,
    )
    sglang = "task.server='python -m sglang.launch_server --model-path Qwen/Qwen3-8B'"
    stages = "executor.pipeline_parallel=2"
    for settings, host in (([sglang], "sglang_0_5"), ([command, stages], "none")):
        refused = refusal_of(
            *("task=validate", f"task.run={result}", "hardware=h100", "host.graphs.mode=none"),
            *settings,
        )
        assert f"host.graphs.mode=none has no effect on host={host}, that of the run" in refused


def test_what_a_command_does_not_tell_is_the_users(result):
    """The cache that a server finds when it starts, its version, and weights of no such type."""
    command = "task.server='vllm serve our/Llama-3.1-8B-FP4'"
    settings = ["cache.num_blocks=999", "executor.weights=nvfp4", "policy.version=0.33"]
    case = replayed(result, command, *settings)
    assert case.what_if is None
    said = " ".join(case.as_run.describe())
    assert all(f"as you state: {setting}" in said for setting in settings)


def test_a_replay_with_other_devices_has_their_cache(result):
    as_vllm(result, num_gpu_blocks_override=400, tensor_parallel_size=1)
    case = replayed(result, "executor.tensor_parallel=2")
    assert case.as_run.engine.num_blocks == 399
    assert case.what_if.engine.num_blocks > 10_000


@pytest.mark.parametrize(
    ("file_model", "model", "is_noted", "has_cache"),
    [
        ("meta-llama/Llama-3.1-8B", "llama2-7b", True, False),
        ("Qwen/Qwen3-30B-A3B", "qwen3-8b", True, False),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b", False, True),
        # Of no option's name: the user's stands for it.
        ("my/finetune", "llama3.1-8b", True, True),
    ],
)
def test_another_model_than_the_files_is_named_and_has_its_own_cache(
    file_model, model, is_noted, has_cache, result
):
    result.write_text(json.dumps({**CLIENT, "model_id": file_model}))
    settings = {**SIZES, "num_gpu_blocks_override": 400}
    result.with_name("meta.json").write_text(json.dumps({"engine_kwargs": settings}))
    replay = replayed(result, f"model={model}", "executor.tensor_parallel=2").as_run
    said = " ".join(replay.describe())
    note = f"model={model} as you state; the file states {file_model}"
    assert (note in said) == is_noted
    assert (replay.engine.num_blocks == 399) == has_cache
    assert ("cache of 399 blocks is of another model" in said) != has_cache


@pytest.mark.parametrize(
    ("in_file", "option", "is_noted"),
    [
        ("NVIDIA A100-SXM4-80GB", "h100", True),
        ("NVIDIA H100 PCIe", "h100", True),
        ("NVIDIA H100 80GB HBM3", "h100", False),
        ("NVIDIA A100-SXM4-80GB", "a100_fig12", False),
        ("NVIDIA L40S", "l4", True),
    ],
)
def test_another_card_than_the_files_is_named(in_file, option, is_noted, result):
    result.write_text(json.dumps({**CLIENT, "gpu": in_file, **SIZES}))
    said = " ".join(replayed(result, f"hardware={option}").as_run.describe())
    assert (f"hardware={option} as you state; the file states" in said) == is_noted


def test_layers_with_a_window_have_its_cache(result):
    result.write_text(json.dumps({**CLIENT, "model_id": "google/gemma-3-12b-it"}))
    replay = as_vllm(result)
    assert replay.spec.cached_window is not None
    assert replay.engine.window == replay.spec.cached_window


def test_without_chunks_the_longest_prompt_is_one(result):
    replay = as_sglang(result, chunked_prefill_size=-1, page_size=16)
    assert replay.engine.policy.budget == 112  # of 100 tokens, in whole pages
    said = " ".join(replay.describe())
    assert "chunked_prefill_size=-1 cuts no prompt: chunk=112, the longest prompt's tokens" in said
    assert "not simulated" not in said
    assert "chunk=8192" not in said
    assert replayed(result, "chunk=64").what_if.engine.policy.budget == 64


def test_a_chunk_is_that_of_the_runs_own_policy(result):
    as_sglang(result, enable_mixed_chunk=True, page_size=16)
    case = replayed(result, "chunk=256")
    policy = case.what_if.engine.policy
    assert (policy.name, policy.budget, policy.enable_mixed_chunk) == ("sglang", 256, True)
    case = replayed(result, "policy=sglang", "policy.enable_mixed_chunk=false")
    policy = case.what_if.engine.policy
    assert (policy.enable_mixed_chunk, policy.page_size) == (False, 16)
    case = replayed(result, "policy=sarathi_serve", "chunk=4096")
    assert case.as_run.engine.policy.name == "sglang"
    assert case.what_if.engine.policy.budget == 4096


def test_more_sequences_than_a_budget_has_tokens_are_named(result):
    replay = as_sglang(result, max_running_requests=2048)
    assert replay.engine.batch_size == 512
    assert "not simulated: batch=2048 above chunk=512" in " ".join(replay.describe())


def test_weights_that_have_no_cost_model_are_named(result):
    """A dense model has no experts, whose weights alone mxfp4 is of."""
    mixture = as_vllm(result, model="Qwen/Qwen3-30B-A3B", quantization="fp8")
    assert mixture.backend.weights == "fp8"
    dense = as_vllm(result, quantization="mxfp4")
    assert dense.backend.weights == "auto"
    assert "not simulated: executor.weights=mxfp4" in " ".join(dense.describe())
    for method in ("w4afp8", "experts_int8"):
        experts = as_vllm(result, model="Qwen/Qwen3-30B-A3B", quantization=method)
        assert experts.backend.weights == "auto"
        assert f"quantization={method} (of experts alone" in " ".join(experts.describe())


def test_weights_of_8_bits_are_read_into_16_where_a_card_has_no_other_products(result):
    as_vllm(result, quantization="fp8")
    replay = replayed(result, "hardware=a100").as_run
    assert replay.backend.weights == "fp8"
    cautions = " ".join(replay.backend.cautions(replay.spec))
    assert "at the rate of the model's type" in cautions


def test_settings_that_a_replay_does_not_read_are_refused(result):
    for setting in ("workload.seq_len=4", "workload.num_requests=5"):
        with pytest.raises(UserError, match="Validate does not read"):
            compose(["task=validate", f"task.run={result}", setting])
    (job,) = compose(["task=validate", f"task.run={result}", "hardware=h100", "chunk=64"]).jobs
    assert "chunk=64" in job.cfg.task.stated
    assert "replays in simulation" in refusal_of(
        "task=validate", f"task.run={result}", "hardware=h100", "executor=torch"
    )


BAD_VALUES = ["chunk=0.5", "chunk=auto", "batch=many", "cache.block_size=0", "cache.prefix=2"]
BAD_VALUES += [
    "queue_order=priority",
    "cache.num_blocks=some",
    "executor.tensor_parallel=x",
    "executor.weights=int3",
]


@pytest.mark.parametrize("setting", BAD_VALUES)
def test_values_that_a_setting_can_not_have_are_refused(setting, result):
    name = setting.partition("=")[0]
    refusal = refusal_of("task=validate", f"task.run={result}", "hardware=h100", setting)
    assert name in refusal or name.partition(".")[2] in refusal


def test_a_pipeline_serves_the_sequences_of_all_its_stages(result):
    engine = as_vllm(result, pipeline_parallel_size=2).engine
    assert (engine.batch_size, engine.policy.max_num_active_seqs) == (8, 8)
    assert engine.num_micro_batches == 2
    checked("task=validate", f"task.run={result}", "hardware=h100", "host=none")
    engine = as_sglang(result, pp_size=2, max_running_requests=8).engine
    assert (engine.num_micro_batches, engine.batch_size) == (2, 4)


APPLIED = """
cat <<'EOF' | kubectl apply -f -
kind: Deployment
spec:
  replicas: 4
  template:
    spec:
      containers:
        - image: lmsysorg/sglang:v0.5.9
          command: [python3, -m, sglang.launch_server, --model-path, "Qwen/Qwen3-8B"]
EOF
"""
ARRAY = """
VLLM_ARGV=( "$VENV/bin/vllm" serve Qwen/Qwen3-8B \\
  --max-num-seqs "${SEQUENCES:-64}" )
VLLM_ARGV+=(--attention-backend "$BACKEND")  # isn't set
"${VLLM_ARGV[@]}"
"""
UNIT = """
[Service]
Environment=MODEL=Qwen/Qwen3-8B "SEQUENCES=64"
EnvironmentFile=/etc/server
ExecStart=/opt/bin/vllm serve ${MODEL} --max-num-seqs ${SEQUENCES}
"""
INSPECTED = json.dumps(
    [
        {
            "Config": {
                "Image": "vllm/vllm-openai:v0.11.0",
                "Entrypoint": ["vllm", "serve"],
                "Cmd": ["Qwen/Qwen3-8B", "--max-num-seqs", "64"],
                "Env": ["PATH=/bin"],
            }
        }
    ]
)
INITIALISED = """
initContainers: [{name: get, image: "vllm/vllm-openai:v0.11.0", command: [hf, download, m]}]
containers:
  - {name: chat, image: "vllm/vllm-openai:v0.11.0", args: [Qwen/Qwen3-8B, --max-num-seqs, "64"]}
"""
LIST = """
import subprocess
def serve(port):
    cmd = ["vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "64", "--port", str(port)]
    print(cmd)
    subprocess.Popen(cmd)
"""
TEXT = """
import subprocess
print("starting vllm serve MODEL")
subprocess.Popen("vllm serve Qwen/Qwen3-8B --max-num-seqs 64", shell=True)
"""
DYNAMO = "python3 -m dynamo.vllm --model Qwen/Qwen3-8B --max-num-seqs 64"


@pytest.mark.parametrize(
    ("text", "stated", "notes"),
    [
        (UNIT, {"batch": 64}, ["EnvironmentFile (its variables are not here)"]),
        (INSPECTED, {"batch": 64, "version": "0.11.0"}, []),
        (INITIALISED, {"batch": 64, "version": "0.11.0"}, []),
        (LIST, {"batch": 64}, []),
        (TEXT, {"batch": 64}, []),
        (DYNAMO, {"batch": 64}, []),
        ("python -m ipex_llm.vllm.xpu.entrypoints.openai.api_server --model Qwen/Qwen3-8B", {}, []),
        ("docker run rocm/vllm-dev:nightly --model Qwen/Qwen3-8B", {}, []),
        (APPLIED, {"version": "0.5.9"}, ["replicas=4 (one of them serves all requests here)"]),
        (
            ARRAY,
            {"batch": 64},
            ["attention_backend=$BACKEND (nothing here sets the variable)"],
        ),
    ],
    ids=[
        *("unit", "inspected", "initialised", "list", "text of Python", "Dynamo", "ipex", "rocm"),
        *("applied", "array"),
    ],
)
def test_further_places_of_a_servers_command(text, stated, notes):
    statement = find_facts(Path("file"), text)
    assert statement is not None
    assert statement.settings.items() >= {"model": "Qwen/Qwen3-8B", **stated}.items()
    assert statement.not_simulated == notes


@pytest.mark.parametrize(
    "text",
    [
        "python -m vllm.benchmark --model Qwen/Qwen3-8B",
        "vllm bench serve --model Qwen/Qwen3-8B",
        "spec: {image: lmsysorg/sglang:latest, command: [python, -m, sglang_router.launch_router]}",
        "containers: [{name: a, image: vllm/vllm-openai, command: [sleep, infinity]}]",
        "containers: [{name: a, image: vllm/vllm-openai, command: [/bin/start], args: [-x]}]",
        "services: {a: {image: vllm/vllm-openai, entrypoint: /bin/start, command: --x}}",
        "services: {a: {image: vllm/vllm-openai, command: sleep infinity}}",
        # What other tools start a server by: none of it is read in part.
        "[Container]\nImage=docker.io/vllm/vllm-openai:v0.11.0\nExec=--model m\n",
        "modelSpec: [{repository: vllm/vllm-openai, modelURL: m, vllmConfig: {maxNumSeqs: 64}}]",
        "vllm: {image: {repository: vllm/vllm-openai}, model: m, maxNumSeqs: 64}",
        "modelFormat: {name: huggingface}\nargs: [--model_id=Qwen/Qwen3-8B, --max-num-seqs=64]",
        "llm_configs: [{model_loading_config: {model_id: m}, engine_kwargs: {max_num_seqs: 64}}]",
        "from ray.serve.llm import LLMConfig\nLLMConfig(engine_kwargs=dict(max_num_seqs=64))",
        'FROM vllm/vllm-openai:v0.11.0\nCMD ["--model", "m"]',
        "kubectl run chat --image=vllm/vllm-openai:v0.11.0 -- --model Qwen/Qwen3-8B",
        '{"model_path": "m", "image": "vllm/vllm-openai", "vllm_args": ["--max-num-seqs", "64"]}',
    ],
)
def test_what_starts_no_server_or_in_other_ways_states_none(text):
    assert find_facts(Path("file"), text) is None


SERVER = "vllm serve Qwen/Qwen3-8B"
OPENAI = "vllm/vllm-openai:v0.11.0"
WITH_OTHERS = """
services:
  chat: {image: "vllm/vllm-openai:v0.11.0", command: --model Qwen/Qwen3-8B}
  other: {image: "%s", command: --port 8000}
"""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (f"cd src/vllm\n{SERVER}", None),
        (f"cd src/vllm-openai\n{SERVER}", None),
        (f"rsync -a src/vllm host:/opt\n{SERVER}", None),
        (f"huggingface-cli download acme/vllm-configs --local-dir c\n{SERVER}", None),
        (f"docker run --rm rocm/vllm:latest rocm-smi\n{SERVER}", None),
        (f"docker run --rm --entrypoint nvidia-smi {OPENAI}\n{SERVER}", None),
        (f"docker run -d rocm/vllm:latest sleep infinity\n{SERVER}", None),
        (WITH_OTHERS % "myorg/vllm-proxy:1", "0.11.0"),
        (WITH_OTHERS % "lmcache/vllm-router:1", "0.11.0"),
        (f"docker run -v cache/vllm {OPENAI} --model Qwen/Qwen3-8B", "0.11.0"),
        (f"docker run -v cache/vllm-openai {OPENAI} --model Qwen/Qwen3-8B", "0.11.0"),
        (f"docker run --entrypoint vllm {OPENAI} serve Qwen/Qwen3-8B", "0.11.0"),
        (f"{OPENAI} --model Qwen/Qwen3-8B", "0.11.0"),
        (f"srun --container-image={OPENAI} bash -c '{SERVER} --port 80'", "0.11.0"),
    ],
)
def test_names_of_folders_and_other_images_are_no_server(text, version):
    statement = find_facts(Path("file"), text)
    assert statement is not None
    stated = statement.settings
    assert (stated["model"], stated.get("version")) == ("Qwen/Qwen3-8B", version)
    assert statement.not_simulated == []


@pytest.mark.parametrize(
    "text",
    [
        "cp -r workspace/vllm-fork /opt",
        "cp -r workspace/vllm-openai /opt",
        "docker run rocm/vllm-dev:latest bash",
        "\n" * 60 + "make vllm",  # in no more time than a line
    ],
)
def test_what_only_names_an_image_states_no_server(text):
    assert find_facts(Path("file"), text) is None


@pytest.mark.parametrize(
    ("script", "stated", "note"),
    [
        ("N=$1\n%s --max-num-seqs $N", {}, "max_num_seqs=$1"),
        ("N=${N:-64}\n%s --max-num-seqs $N", {"batch": 64}, ""),
        ("N=64\n%s --max-num-seqs ${N:?how many}", {"batch": 64}, ""),
        ("%s --max-num-seqs ${N:?}", {}, "max_num_seqs=${N:?}"),
        ("%s --max-num-seqs $(MANY)", {}, "max_num_seqs=$(MANY)"),
    ],
)
def test_variables_of_a_shell_are_filled_in_or_named(script, stated, note):
    statement = find_facts(Path("run.sh"), script % SERVER)
    assert statement is not None
    assert statement.settings == {"model": "Qwen/Qwen3-8B", **stated}
    notes = [f"{note} (nothing here sets the variable)"] if note else []
    assert statement.not_simulated == notes


@pytest.mark.parametrize(
    ("script", "line", "name"),
    [
        ("%s -tp $(lscpu | wc -l)", 1, "tensor_parallel_size"),
        ('%s -tp "$(wc "a b")"', 1, "tensor_parallel_size"),
        ("N=`nproc`\n%s --max-num-seqs $N", 1, "max_num_seqs"),
        ("N=4\n\n%s \\\n  --max-num-seqs $((2*N))", 3, "max_num_seqs"),
        ("%s ${TP:+-tp 8}", 1, "an argument"),
        ("if test $1\nthen\n  N=8\nfi\n%s --max-num-seqs $N", 3, "max_num_seqs"),
        ("if test $1; then N=8\nelse N=9\nfi\n%s --max-num-seqs $N", 2, "max_num_seqs"),
        ("case $1 in\n  a|b) N=8 ;;\nesac\n%s --max-num-seqs $N", 2, "max_num_seqs"),
        ("case $1 in a) N=8;; esac\n%s --max-num-seqs $N", 1, "max_num_seqs"),
        ("while test $1; do N=$2; done\n%s --max-num-seqs $N", 1, "max_num_seqs"),
        ("N=4\nfor N in 8 9; do\n  true\ndone\n%s --max-num-seqs $N", 2, "max_num_seqs"),
        ("N=4; test $1 && N=8\n%s --max-num-seqs $N", 1, "max_num_seqs"),
        ("N=4\ntest $1 ||\n  N=8\n%s --max-num-seqs $N", 2, "max_num_seqs"),
        ("((A > 4)) && N=8\n%s --max-num-seqs $N", 1, "max_num_seqs"),
        ("test $1 && { M=1; N=8; }\n%s --max-num-seqs $N", 1, "max_num_seqs"),
        ("set_sizes() {\n  N=8\n}\nset_sizes\n%s --max-num-seqs $N", 2, "max_num_seqs"),
        ("if test $1; then export VLLM_USE_V1=0; fi\n%s", 1, "VLLM_USE_V1"),
        ("if test $1; then S='%s'; fi\n$S", 1, "an argument"),
        ("N=4; setn(){ N=8; }; setn\n%s --max-num-seqs $N", 1, "max_num_seqs"),
        ("setn()\n{\n  N=8\n}\nN=4\nsetn\n%s --max-num-seqs $N", 3, "max_num_seqs"),
        ("N=8\nserve() {\n  %s --max-num-seqs ${N:-2}\n}\nN=4\nserve", 5, "max_num_seqs"),
        ("serve() {\n  %s --max-num-seqs ${N:-2}\n}\nN=4\nserve", 4, "max_num_seqs"),
        (
            "N=4\nwhile test $N -lt 64; do\n  %s --max-num-seqs $N\n  N=$((N*2))\ndone",
            4,
            "max_num_seqs",
        ),
        *[
            (f"N=4\n{setting}\n%s --max-num-seqs $N", 2, "max_num_seqs")
            for setting in (
                *(
                    "read N",
                    "IFS=, read -r M N <<< $X",
                    "unset N",
                    "printf -v N 8",
                    "mapfile -t N < sizes",
                ),
                *("let N=N*2", "let 'N += 1'", "((N*=2))", "(( ++N ))", "echo $((N++))"),
                *("source env.sh", ". ./env", "test -f .env && . .env", "if true; then . e; fi"),
            )
        ],
        ("source env.sh\n%s --max-num-seqs ${N:-4}", 1, "max_num_seqs"),
        ("export VLLM_USE_V1=0\nsource env.sh\n%s", 2, "VLLM_USE_V1"),
    ],
)
def test_what_only_a_run_of_a_shells_script_tells_is_refused_by_its_line(script, line, name):
    refusal = f"run.sh, line {line}: {name} is computed by the script, which is not run here"
    with pytest.raises(UserError, match=refusal):
        find_command(script % SERVER, "run.sh")


@pytest.mark.parametrize(
    "script",
    [
        f"if test $1; then {SERVER} --max-num-seqs 64; fi",
        f"cd src && N=64 && {SERVER} --max-num-seqs $N",
        f"export M=8 && export N=64\n{SERVER} --max-num-seqs $N",
        f"(N=64; {SERVER} --max-num-seqs $N)",
        f"N=64\nsource venv/bin/activate\n{SERVER} --max-num-seqs $N",
        f"source env.sh\nN=64\n{SERVER} --max-num-seqs $N",
        f"log() {{\n  local N=8\n  echo $1\n}}\nN=64\nlog start\n{SERVER} --max-num-seqs $N",
        f"N=64\nif ((N > 4)); then echo many; fi\n{SERVER} --max-num-seqs $N",
        f"N=64\nread -p 'ready? ' ANSWER\n{SERVER} --max-num-seqs $N",
        f"N=4\nN=64\ntest $PORT || PORT=8000\n{SERVER} --max-num-seqs $N --port $PORT",
    ],
)
def test_what_a_shell_sets_on_the_way_to_its_server_counts(script):
    statement = find_command(script, "run.sh")
    assert statement is not None
    assert statement.settings == {"model": "Qwen/Qwen3-8B", "batch": 64}
    assert not statement.not_simulated


@pytest.mark.parametrize(
    "script",
    [
        "ARGS=(\n  # the (large) batch\n  --max-num-seqs 64  # of them\n  --max-model-len 9\n)\n"
        '%s "${ARGS[@]}"',
        "ARGS='\n  --max-num-seqs 64\n  --max-model-len\n9\n'\n%s $ARGS",
        "%s --max-num-seqs 64 --chat-template 'a\nb' --max-model-len 9",
    ],
    ids=["comments in an array", "a text on lines", "a value on lines"],
)
def test_breaks_and_comments_of_a_shell_end_no_command_within_it(script):
    statement = find_command(script % SERVER, "run.sh")
    assert statement is not None
    sizes = {"batch": 64, "max_model_len": 9}
    assert statement.settings == {"model": "Qwen/Qwen3-8B", **sizes}
    assert not statement.not_simulated


UNUSED = "OLD = ['vllm', 'serve', 'm', '--max-num-seqs', '8']\n"
PYTHON = "cmd = ['vllm', 'serve', 'm', '--max-num-seqs', '8']\n%s\nsubprocess.Popen(cmd)"


@pytest.mark.parametrize(
    "script",
    [
        PYTHON % "print(' '.join(cmd), flush=True)",
        PYTHON % "os.environ['VLLM_LOGGING_LEVEL'] = level",
        "if is_main:\n    os.execvp('vllm', ['vllm', 'serve', 'm', '--max-num-seqs=8'])",
        "Container(command=['vllm', 'serve', 'm', '--max-num-seqs', '8'], args=[])",
        "job = {'command': ['bash', '-c', 'vllm serve m --max-num-seqs 8']}",
        "cmd = 'vllm serve m --max-num-seqs 8'\nsubprocess.run(shlex.split(cmd))",
        "subprocess.run(args='vllm serve m --max-num-seqs 8', shell=True)",
        "LLM('m', max_num_seqs=8)",
        "Popen([sys.executable, '-m', 'vllm.entrypoints.cli.main', 'serve', 'm',\n"
        "'--max-num-seqs=8'])",
        "self.model = vllm.LLM(model='m', max_num_seqs=8, trust_remote_code=TRUST)",
    ],
)
def test_a_python_script_states_a_command_by_literals(script):
    statement = find_command(script, "run.py")
    assert statement is not None
    assert statement.settings == {"model": "m", "batch": 8}
    assert not statement.not_simulated


@pytest.mark.parametrize(
    ("script", "line", "name"),
    [
        (PYTHON % "cmd += options.more", 2, "an argument"),
        (PYTHON % "if fast:\n    cmd.append('--enforce-eager')", 3, "an argument"),
        (PYTHON % "def add():\n    cmd.append('-tp8')\nadd()", 3, "an argument"),
        (PYTHON % "def add(cmd):\n    cmd.append('-tp8')\nadd(cmd)", 4, "an argument"),
        (PYTHON % "add(cmd)", 2, "an argument"),
        (PYTHON % "cmd[2:] = []", 2, "an argument"),
        (
            "def build():\n    return ['vllm', 'serve', 'm']\nPopen([*build(), '-O0'])",
            2,
            "an argum",
        ),
        ("MODEL = 'm'\nPopen(['vllm', 'serve', MODEL])", 2, "model"),
        ("Popen(['vllm', 'serve', 'm', '-tp', str(2)])", 1, "tensor_parallel_size"),
        ("cmd = 'vllm serve m'\ncmd += ' -tp 2'\nPopen(cmd, shell=True)", 2, "an argument"),
        ("\nLLM('m', max_num_seqs=options.n)", 2, "max_num_seqs"),
        ("\nLLM('m', **options)", 2, "an argument"),
        ("LLM('m')\nargs.max_num_seqs = 16", 2, "an argument"),
        ("def serve(cmd=['vllm', 'serve', 'm']):\n    Popen(cmd)", 1, "an argument"),
        ("os.environ['VLLM_USE_V1'] = version\nLLM('m')", 1, "VLLM_USE_V1"),
        ("if old:\n    os.environ['VLLM_USE_V1'] = '0'\nLLM('m')", 2, "VLLM_USE_V1"),
        ("os.system(f'vllm serve m --max-num-seqs {n}')", 1, "max_num_seqs"),
        ("cmd = f'vllm serve {model}'\nsubprocess.run(cmd, shell=True)", 1, "model"),
        ("os.system('vllm serve %s' % model)", 1, "an argument"),
        ("run('vllm serve {}'.format(model), shell=True)", 1, "an argument"),
        ("cmd = 'vllm serve ' + model\nos.system(cmd)", 2, "an argument"),
        ("LLM('m')\nsetattr(args, 'max_num_seqs', 8)", 2, "an argument"),
        ("LLM('m')\nfor name, value in options:\n    setattr(args, name, value)", 3, "an argument"),
        ("LLM('m')\nargs = replace(args, max_num_seqs=8)", 2, "an argument"),
        (f"{UNUSED}subprocess.run(make_command())", 2, "an argument"),
        (f"{UNUSED}import subprocess as s\ns.run(make_command())", 3, "an argument"),
        (f"{UNUSED}from subprocess import Popen as P\nP(make_command())", 3, "an argument"),
        (f"{UNUSED}os.system(f'cd src && {{cmd}}')", 2, "an argument"),
        (f"{UNUSED}subprocess.run(args=make_command())", 2, "an argument"),
        (f"{UNUSED}cmd = ['vllm']\ncmd += more\nPopen(cmd)", 4, "an argument"),
        (f"{UNUSED}os.execvp('vllm', ['vllm', *more])\nPopen([program, 'x'])", 3, "an argument"),
        ("env = {**os.environ,\n 'VLLM_USE_V1': '0'}\nLLM('m')", 2, "VLLM_USE_V1"),
        ("image = image.env(VLLM_USE_V1='0')\nLLM('m')", 1, "VLLM_USE_V1"),
    ],
)
def test_what_only_a_run_of_a_python_script_tells_is_refused_by_its_line(script, line, name):
    refusal = f"run.py, line {line}: {name}.* is computed by the script, which is not run"
    with pytest.raises(UserError, match=refusal):
        find_command(script, "run.py")


def test_a_switch_that_a_script_states_once_counts():
    script = "os.environ['VLLM_USE_V1'] = '0'\nLLM('m', max_num_seqs=8)"
    assert find_command(script, "run.py").policy == "prefill_first"
    with pytest.raises(UserError, match="VLLM_USE_V1 is computed by the script"):
        find_command(f"{script}\nos.environ.pop('VLLM_USE_V1')", "run.py")


def test_sglangs_engine_may_be_of_a_shorter_name():
    statement = find_command("sgl.Engine(model_path='m')", "task.server")
    assert (statement.policy, statement.settings) == ("sglang", {"model": "m"})


def test_a_refused_script_is_answered_with_the_command_of_its_server():
    script = "from tensorrt_llm import LLM\nLLM(model='m', kv_cache_config=KvCacheConfig(share))"
    refusal = r"kv_cache_config is computed .* task.server='trtllm-serve MODEL \.\.\.'"
    with pytest.raises(UserError, match=refusal):
        find_command(script, "run.py")


@pytest.mark.parametrize(
    ("command", "notes"),
    [
        ("--model Qwen/Qwen3-8B", []),
        ('sh -c "vllm serve $$MODEL"', []),
        ("--model ${MODEL:?name it}", []),
        ("--model ${OTHER:?name it}", ["model=${OTHER} (nothing here sets the variable)"]),
    ],
)
def test_variables_of_compose_are_filled_in(command, notes):
    container = {"image": "vllm/vllm-openai:${TAG:-v0.11.0}", "command": command}
    container["environment"] = {"MODEL": "Qwen/Qwen3-8B"}
    statement = find_facts(Path("compose.yaml"), json.dumps({"services": {"chat": container}}))
    assert statement is not None
    assert statement.settings["version"] == "0.11.0"
    assert statement.settings.get("model") == (None if notes else "Qwen/Qwen3-8B")
    assert statement.not_simulated == notes


def test_installed_versions_count_outside_comments():
    script = "image = image.pip_install('vllm==0.11.2', 'x==1.0')\nLLM('m')"
    assert find_command(script, "run.py").settings["version"] == "0.11.2"
    script = f"# was vllm==0.6.6\npip install vllm==0.11.2\n%s{SERVER}"
    statement = find_command(script % "", "run.sh")
    assert statement is not None
    assert statement.settings["version"] == "0.11.2"
    statement = find_command(script % "pip install vllm==0.9.0\n", "run.sh")
    assert statement is not None
    assert "version" not in statement.settings
    assert statement.not_simulated == ["vllm 0.11.2 and 0.9.0 (several are installed)"]


def test_what_a_script_says_is_no_command():
    assert (
        find_command("raise SystemExit(f'use: vllm serve m -tp 4, not {x()}')\nf()", "run.py")
        is None
    )
    assert find_command("if f():\n    sys.exit('use: vllm serve m -tp 4')", "run.py") is None


@pytest.mark.parametrize(
    ("module", "call", "policy"),
    [
        ("vllm", "LLM", ""),
        ("tensorrt_llm", "LLM", "trtllm"),
        ("sglang", "Engine", "sglang"),
    ],
)
def test_calls_of_python_are_those_of_their_module(module, call, policy):
    script = f"from {module} import {call}\n{call}(model='m', tensor_parallel_size=2)"
    statement = find_command(script, "run.py")
    assert statement is not None
    assert statement.policy == policy
    assert statement.settings == {"model": "m", "executor.tensor_parallel": 2}


@pytest.mark.parametrize(
    "text",
    [
        f"services: {{a: {{image: '{OPENAI}', command: --model m, deploy: {{replicas: 2}}}}}}",
        f"services: {{a: {{image: '{OPENAI}', command: --model m, scale: 2}}}}",
        f"spec: {{replicas: 2, template: {{containers: [{{image: '{OPENAI}', args: [m/m]}}]}}}}",
    ],
    ids=["deploy", "scale", "Kubernetes"],
)
def test_replicas_are_named(text):
    statement = find_command(text, "file")
    assert statement is not None
    assert statement.not_simulated == ["replicas=2 (one of them serves all requests here)"]


def test_weights_that_do_not_fit_are_refused_as_they_are(result):
    with pytest.raises(UserError, match=r"needs 67\d\.\d GB for weights"):
        as_vllm(result, model="deepseek-ai/DeepSeek-V3", quantization="fp8")


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--max_batch_size 0", "max_batch_size=0 is not a whole number from 1 on"),
        ("--tp_size 0", "tp_size=0 is not a whole number from 1 on"),
        ("--kv_cache_free_gpu_memory_fraction 90", "fraction=90 is not a share"),
    ],
)
def test_sizes_of_tensorrt_llm_are_checked(argument, complaint):
    with pytest.raises(UserError, match=f"task.server.*{complaint}"):
        find_command(f"trtllm-serve m {argument}", "task.server")
