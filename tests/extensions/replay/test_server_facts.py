"""What a server states of itself, by whichever source: logs of several versions, descriptions,
files of arguments and command lines. All are invented.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from composed import config_of, refusal_of
from hydra.core.override_parser.overrides_parser import OverridesParser

from sarathi_lab.config.command_line import read_arguments
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.sweeper import compose
from sarathi_lab.extensions.replay.argument_table import table
from sarathi_lab.extensions.replay.names import names_of_model
from sarathi_lab.extensions.replay.real_run import ServerSettings
from sarathi_lab.extensions.replay.server_arguments import Statement
from sarathi_lab.extensions.replay.server_arguments import read_arguments as read_server_arguments
from sarathi_lab.extensions.replay.server_commands import read_command
from sarathi_lab.extensions.replay.server_facts import find_facts, read_facts
from sarathi_lab.workload.text_files import COLORS

MODEL = "meta-llama/Llama-3.1-8B"
NAMESPACE = (
    "INFO 10-07 22:54:50 api_server.py:527] args: Namespace(host=None, port=8000, "
    f"model='{MODEL}', dtype='auto', max_model_len=8192, max_num_seqs=256, block_size=16, "
    "tensor_parallel_size=2, enable_chunked_prefill=None, max_num_batched_tokens=None, "
    "speculative_model=None, quantization=None, swap_space=4)\n"
)
CONFIG = (
    f"model='{MODEL}', speculative_config=None, dtype=torch.bfloat16, max_seq_len=8192, "
    "tensor_parallel_size=2, quantization=None, enable_prefix_caching=False, seed=0, "
)
V0 = (
    "INFO 10-07 22:54:50 api_server.py:526] vLLM API server version 0.6.3\n"
    + NAMESPACE
    + "INFO 10-07 22:54:54 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: "
    + CONFIG
    + "chunked_prefill_enabled=False)\n"
    + "INFO 10-07 22:55:20 gpu_executor.py:57] # GPU blocks: 27260, # CPU blocks: 4096\n"
)
V1 = (
    "\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO non-default args: "
    f"{{'model_tag': '{MODEL}', 'max_num_seqs': 128, 'gpu_memory_utilization': 0.85}}\n"
    "INFO Chunked prefill is enabled with max_num_batched_tokens=8192.\n"
    "INFO Asynchronous scheduling is disabled.\n"
    "(EngineCore_DP0 pid=9) INFO Initializing a V1 LLM engine (v0.11.0) with config: "
    + CONFIG
    + "pipeline_parallel_size=1, compilation_config={'level': 3, "
    "'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, "
    "'cudagraph_capture_sizes': [4, 2, 1]}\n"
    "INFO [kv_cache_utils.py:1087] GPU KV cache size: 161,552 tokens\n"
    "WARNING Config file not found at ['E=8,N=7,device_name=NVIDIA_H100_80GB_HBM3.json']\n"
)
SGLANG = (
    f"[2025-08-08 03:34:20] server_args=ServerArgs(model_path='{MODEL}', dtype='auto', "
    "context_length=None, max_running_requests=None, chunked_prefill_size=8192, page_size=64, "
    "max_prefill_tokens=16384, tp_size=2, pp_size=1, dp_size=1, kv_cache_dtype='auto', "
    "enable_mixed_chunk=True, disable_radix_cache=False, mem_fraction_static=0.85)\n"
    "[2025-08-08 03:34:30 TP0] Load weight end. type=X, dtype=torch.bfloat16, avail mem=63 GB\n"
    "[2025-08-08 03:34:57 TP0] max_total_num_tokens=900032, chunked_prefill_size=8192, "
    "max_prefill_tokens=16384, max_running_requests=4096, context_len=131072, "
    "available_gpu_mem=7.74 GB\n"
)
INFO = {"model_path": MODEL, "chunked_prefill_size": 4096, "version": "0.5.2"}
INFO |= {"internal_states": [{"max_total_num_tokens": 400_000}]}
# As the newest vLLM's /server_info?config_format=json gives it.
SECTIONS = {
    "vllm_config": {
        "cache_config": {"block_size": 32, "cache_dtype": "fp8", "num_gpu_blocks": 7844},
        "compilation_config": {"mode": 3, "cudagraph_mode": [2, 1], "splitting_ops": ["x"]},
        "device_config": {"device": "cuda"},
        "model_config": {"model": MODEL, "max_model_len": 4096, "quantization": None},
        "parallel_config": {"tensor_parallel_size": 2, "enable_dbo": False},
        "scheduler_config": {"policy": "fcfs", "max_num_seqs": 64, "enable_chunked_prefill": False},
        "speculative_config": None,
    }
}
POD = f"""
apiVersion: leaderworkerset.x-k8s.io/v1
spec:
  leaderTemplate:
    containers:
      - image: vllm/vllm-openai:v0.8.5
        command: [sh, -c, "bash start.sh leader; python3 -m vllm.entrypoints.openai.api_server
          --model {MODEL} --tensor-parallel-size 8 -pp 2"]
  workerTemplate:
    containers:
      - image: vllm/vllm-openai:v0.8.5
        command: [sh, -c, "bash start.sh worker --address=$(LEADER)"]
"""
COMPOSE = f"""
version: '3'
services:
  server:
    image: vllm/vllm-openai:latest
    command: --model {MODEL} --max-num-seqs ${{SEQUENCES:-64}} --port ${{PORT}}
"""
YAML = f"model: {MODEL}\nmax-num-seqs: 96\ntensor-parallel-size: 2\nenable-prefix-caching: false\n"
STATED = {
    "V0": (
        V0,
        "prefill_first",
        {
            "model": MODEL,
            "version": "0.6.3",
            "executor.tensor_parallel": 2,
            "batch": 256,
            "max_model_len": 8192,
            "policy.max_num_batched_tokens": 8192,
            "cache.num_blocks": 27260,  # V0 has no null block
            "cache.block_size": 16,
            "cache.prefix": False,
            "dtype": "bfloat16",
        },
    ),
    "V0 with chunks": (
        V0.replace("chunked_prefill_enabled=False", "chunked_prefill_enabled=True").replace(
            "max_num_batched_tokens=None", "max_num_batched_tokens=512"
        ),
        "vllm_v0_chunked",
        {"chunk": 512, "batch": 256},
    ),
    "V0 between releases": (
        V0.replace("(v0.6.3)", "(vdev)").replace("prefix_caching=False, ", "prefix_caching=False "),
        "prefill_first",
        {"cache.prefix": False, "max_model_len": 8192},
    ),
    "V0 by its version, arguments broken within a value": (
        "INFO api_server.py:526] vLLM API server version 0.7.3\n"
        + NAMESPACE.replace("dtype='auto', ", "config_format=<ConfigFormat.AUTO: 'auto'\n>, "),
        "prefill_first",
        {"executor.tensor_parallel": 2, "max_model_len": 8192},
    ),
    "V1": (
        V1,
        "",
        {
            "model": MODEL,
            "version": "0.11.0",
            "chunk": 8192,
            "batch": 128,
            "cache.memory_share": 0.85,
            "cache.num_blocks": 10096,
            "host.overlaps": False,
            "host.graphs.mode": "full_and_piecewise",
            "host.graphs.sizes": [1, 2, 4],
            "hardware": "NVIDIA_H100_80GB_HBM3",
        },
    ),
    "SGLang": (
        SGLANG,
        "sglang",
        {
            "model": MODEL,
            "dtype": "bfloat16",
            "chunk": 8192,
            "batch": 4096,
            "executor.tensor_parallel": 2,
            "cache.tokens": 900_032,
            "cache.block_size": 64,
            "policy.enable_mixed_chunk": True,
            "max_model_len": 131_072,
        },
    ),
    "server_info": (
        json.dumps(INFO),
        "sglang",
        {"model": MODEL, "chunk": 4096, "cache.tokens": 400_000, "version": "0.5.2"},
    ),
    "sections of a configuration": (
        json.dumps(SECTIONS),
        "",
        {
            "model": MODEL,
            "batch": 64,
            "cache.dtype": "fp8",
            "cache.num_blocks": 7843,
            "executor.tensor_parallel": 2,
            "policy.enable_chunked_prefill": False,
            "host.graphs.mode": "full_and_piecewise",
        },
    ),
    "a leader's and its worker's container": (
        POD,
        "",
        {"model": MODEL, "executor.tensor_parallel": 8, "executor.pipeline_parallel": 2},
    ),
    "a compose file with a version of its own": (
        COMPOSE,
        "",
        {"model": MODEL, "batch": 64, "version": None},
    ),
    "an engine's line that someone has broken": (
        V0.replace(" (v0.6.3) with", " (v0.6.3) \nwith").replace(", ", ", \n"),
        "prefill_first",
        {"model": MODEL, "max_model_len": 8192, "executor.tensor_parallel": 2},
    ),
    "YAML of SGLang": (
        f"model-path: {MODEL}\nchunked-prefill-size: 4096\n",
        "sglang",
        {"model": MODEL, "chunk": 4096},
    ),
    "arguments in a worker's log": (
        f"2026-03-11 17:57:27,811 Engine args: AsyncEngineArgs(model='{MODEL}', seed=2026, "
        "max_model_len=8192, max_num_seqs=64, enable_dbo=False, some_new_flag=None)\n",
        "",
        {"model": MODEL, "max_model_len": 8192, "batch": 64},
    ),
    "graphs that are off": (
        V1.replace("FULL_AND_PIECEWISE: (2, 1)", "NONE: 0"),
        "",
        {"host.graphs.mode": "none"},
    ),
    "YAML": (
        YAML,
        "",
        {"model": MODEL, "batch": 96, "executor.tensor_parallel": 2, "cache.prefix": False},
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_a_servers_facts_are_read_from_each_source(name):
    text, policy, settings = STATED[name]
    facts = find_facts(Path("server.log"), text)
    assert facts.policy == policy
    assert {key: facts.settings.get(key) for key in settings} == settings
    assert not facts.not_simulated


def broken_at(text: str, width: int) -> str:
    """Break each line of arguments as a terminal of a width does."""
    lines = list[str]()
    for line in text.splitlines():
        if "args" in line or "config:" in line:
            lines += [line[start : start + width] for start in range(0, len(line), width)]
        else:
            lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["V1", "SGLang"])
@pytest.mark.parametrize("width", [66, 77, 120])
def test_lines_that_a_terminal_has_broken_are_read_whole(name, width):
    text = COLORS.sub("", STATED[name][0])
    assert find_facts(Path("x"), broken_at(text, width)) == find_facts(Path("x"), text)


@pytest.mark.parametrize(
    "log",
    [
        V1.partition("28, 'gpu_memory")[0],  # of 128 sequences
        NAMESPACE.partition("56, block_size")[0],
        V0.partition("92, tensor_parallel")[0],
        SGLANG.partition("384, tp_size")[0],
    ],
    ids=["changed", "listed", "engine", "SGLang"],
)
def test_a_log_that_is_cut_off_within_its_arguments_is_refused(log):
    with pytest.raises(UserError, match="is cut off within the server's arguments"):
        find_facts(Path("server.log"), log)


COMMANDS = {
    f"vllm serve {MODEL} -tp 2 --max-num-seqs=128 --no-enable-prefix-caching "
    "--max-num-batched-tokens 8k --max-model-len 16K --enforce-eager": {
        "model": MODEL,
        "executor.tensor_parallel": 2,
        "batch": 128,
        "cache.prefix": False,
        "chunk": 8000,
        "max_model_len": 16384,
        "host.graphs.mode": "none",
    },
    "CUDA_VISIBLE_DEVICES=0,1 python -m vllm.entrypoints.openai.api_server \\\n"
    f"  --model {MODEL} --trust-remote-code -pp 2 --cudagraph-capture-sizes 1 2 4": {
        "model": MODEL,
        "executor.pipeline_parallel": 2,
        "host.graphs.sizes": [1, 2, 4],
    },
    f"docker run --gpus all -p 80:80 vllm/vllm-openai:v0.11.0 --model {MODEL} "
    "--kv-cache-dtype fp8 --no-async-scheduling": {
        "model": MODEL,
        "version": "0.11.0",
        "cache.dtype": "fp8",
        "host.overlaps": False,
    },
    f"vllm serve --enable-prefix-caching {MODEL} --compilation-config "
    """'{"cudagraph_mode": "FULL"}'""": {
        "model": MODEL,
        "cache.prefix": True,
        "host.graphs.mode": "full",
    },
    f"nohup vllm serve --max-num-seqs 64 -O3 {MODEL} > server.log 2>&1 &": {
        "model": MODEL,
        "batch": 64,
    },
    f"vllm serve {MODEL} –max-num-seqs 64 ^\n -tp4 -cc.cudagraph_mode=NONE  # four cards": {
        "batch": 64,
        "executor.tensor_parallel": 4,
        "host.graphs.mode": "none",
    },
    f"""vllm serve {MODEL} -O '{{"cudagraph_mode": "PIECEWISE", "mode": 3}}'""": {
        "host.graphs.mode": "piecewise",
    },
    f"#!/bin/sh\nN=64\nMODEL={MODEL}\n# vllm serve x\nvllm serve $MODEL --served-model-name vllm "
    "--max-num-seqs ${N}\nvllm bench serve --model x": {"model": MODEL, "batch": 64},
    f"docker run --entrypoint /bin/sh vllm/vllm-openai:v0.11.0 -c 'vllm serve {MODEL} -dp 2'": {
        "model": MODEL,
        "version": "0.11.0",
        "cluster.num": 2,
    },
    f"['python3', '-m', 'vllm.entrypoints.openai.api_server', '--model', '{MODEL}']": {
        "model": MODEL,
    },
    f"LLM(model='{MODEL}', max_num_seqs=64)": {"model": MODEL, "batch": 64},
    f"LLM('{MODEL}',  # don't drop\n max_num_seqs=64,  # any\n max_model_len=4096)": {
        "model": MODEL,
        "batch": 64,
        "max_model_len": 4096,
    },
    f"vllm serve --swap-space 4 {MODEL} -cc.cudagraph_capture_sizes=[1,2,4]": {
        "model": MODEL,
        "host.graphs.sizes": [1, 2, 4],
    },
    f'M={MODEL}\nEXTRA="--max-num-seqs 64 --enforce-eager"; vllm serve $M $EXTRA\nM=x': {
        "model": MODEL,
        "batch": 64,
        "host.graphs.mode": "none",
    },
    f"docker run --name vllm-openai --gpus all vllm/vllm-openai:v0.11.0 --model {MODEL}": {
        "model": MODEL,
        "version": "0.11.0",
    },
    f"""image: vllm/vllm-openai:v0.11.0\nargs: ["--model", "{MODEL}", "--max-num-seqs", "64"]""": {
        "model": MODEL,
        "version": "0.11.0",
        "batch": 64,
    },
    f"kind: Pod\nspec:\n  containers:\n  - command: [/bin/sh, -c]\n    args:\n    - |\n"
    f"      vllm serve {MODEL} \\\n        --max-num-seqs $SEQUENCES\n"
    "    env:\n    - name: SEQUENCES\n      value: '64'\n": {"model": MODEL, "batch": 64},
    f"python -m sglang.launch_server --model {MODEL} --tp 2 --chunked-prefill-size -1 "
    "--enable-mixed-chunk --max-running-requests 64": {
        "model": MODEL,
        "executor.tensor_parallel": 2,
        "chunk": -1,
        "batch": 64,
        "policy.enable_mixed_chunk": True,
    },
    f"docker run nvcr.io/nvidia/tensorrt-llm/release:1.0.0rc3 trtllm-serve serve {MODEL} --port 8 "
    "--max_batch_size 64 --max_num_tokens 2048 --max_seq_len 4096 --tp_size 2 --pp_size=2 "
    "--kv_cache_free_gpu_memory_fraction 0.8 --enable_chunked_prefill": {
        "model": MODEL,
        "version": "1.0.0",
        "batch": 64,
        "chunk": 2048,
        "max_model_len": 4096,
        "executor.tensor_parallel": 2,
        "executor.pipeline_parallel": 2,
        "cache.memory_share": 0.8,
    },
}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines_are_read_as_the_servers_read_them(command):
    facts = read_command(command)
    expected = COMMANDS[command]
    assert {key: facts.settings.get(key) for key in expected} == expected
    (policy,) = [name for name in ("sglang", "trtllm", "") if name in command][:1]
    assert facts.policy == policy
    assert facts.is_complete


SERVER = "vllm serve M --max-num-seqs 64 -tp 2"


@pytest.mark.parametrize(
    "script",
    [
        f'pkill -f "vllm serve"\n{SERVER}',
        f'echo "Starting vllm serve"; {SERVER}',
        f"docker pull vllm/vllm-openai:v0.11.0 && {SERVER} && echo done",
        f"PID=$(pgrep -f 'vllm serve x' | head -1)\n{SERVER}; sleep 5",
        f"if ! pgrep -f 'vllm serve'; then {SERVER}; fi  # don't",
        f"trap 'pkill -f \"vllm serve\"' EXIT\nexec nohup env A=1 {SERVER}&",
        f"pkill vllm\n{SERVER} 2>&1 | tee server.log",
        f"COMMAND='{SERVER}'\n$COMMAND > server.log",
        f"bash -c 'echo vllm serve x && {SERVER}'",
        f"({SERVER})",
        f"{{ {SERVER}; }} &",
        'A=(-tp 2)\nA+=(\n  --max-num-seqs 64  # don\'t\n)\nvllm serve M "${A[@]}"',
        "A='-tp 2'; A+=' --max-num-seqs 64'; vllm serve M $A",
        f"+ {SERVER}\n{SERVER}",
        f"    from vllm.entrypoints.cli.main import main\n{SERVER}",
    ],
)
def test_a_scripts_server_is_the_command_that_starts_one(script):
    assert read_command(script) == read_command(SERVER)


def test_no_flag_takes_the_model_behind_it():
    values = {"text": "x", "any": "x", "list": "1 2 --port 80"}
    values |= {"int": "7", "count": "7", "chunk": "7", "number": "0.5", "share": "0.5"}
    for row in table("vllm").values():
        if "*" in row.argument or row.argument.startswith(("VLLM", "model", "config")):
            continue
        flag = f"--{row.argument} {values.get(row.kind, '')}"
        assert read_command(f"vllm serve {flag} {MODEL}").settings["model"] == MODEL, flag


@pytest.mark.parametrize(
    ("arguments", "policy", "is_noted"),
    [
        ("--max-model-len 131072", "vllm_v0_chunked", False),
        ("--max-model-len 131072 --no-enable-chunked-prefill", "prefill_first", False),
        ("--max-model-len 131072 --enable-lora", "prefill_first", False),
        ("--max-model-len 32768", "prefill_first", False),
        ("", "prefill_first", True),
    ],
)
def test_vllms_first_engine_chunks_by_default_where_positions_are_many(arguments, policy, is_noted):
    image = "vllm/vllm-openai:v0.8.5"
    facts = read_command(f"docker run --env=VLLM_USE_V1=0 {image} --model M {arguments}")
    assert facts.policy == policy
    assert ("chunked prefill by default" in " ".join(facts.not_simulated)) == is_noted


def test_what_stands_beside_a_commands_arguments_is_not_dropped():
    command = "VLLM_USE_V1=0 VLLM_ATTENTION_BACKEND=TRITON vllm serve x y --max-model-len auto"
    facts = read_command(command)
    assert facts.policy == "prefill_first"
    assert facts.not_simulated == [
        "max_model_len=auto (the server chooses it)",
        "VLLM_ATTENTION_BACKEND=TRITON (kernels are those of the hardware file)",
        "y (no flag stands before it)",
        "chunked prefill by default above 32768 positions (max_model_len is not stated)",
    ]
    (file,) = read_command("docker run --env-file e vllm/vllm-openai --model x").not_simulated
    assert file == "--env-file (its variables are not here)"
    container = "services:\n x:\n  env_file: .env\n  image: vllm/vllm-openai:v0.7.3\n"
    container += "  command: --model ${M}\n"
    facts = read_command(container)
    assert facts.policy == "prefill_first"  # of the engine that version 0.7 has by default
    assert facts.not_simulated[:2] == [
        "model=${M} (nothing here sets the variable)",
        "env_file (its variables are not here)",
    ]
    command = "vllm serve x --served-model-name $NAME y -cc.cudagraph_mode=$MODE --api-key $KEY"
    facts = read_command(command)
    assert facts.not_simulated == [
        "served_model_name=['$NAME', 'y'] (nothing here sets the variable)",
        "compilation_config={'cudagraph_mode': '$MODE'} (nothing here sets the variable)",
    ]
    assert facts.without_effect == ["api_key"]
    facts = read_command("LLM('x', 'y', max_num_seqs=8, dtype=torch.float16)")
    assert facts.settings == {"model": "x", "batch": 8, "dtype": "float16"}
    assert facts.not_simulated == ["y (no flag stands before it)"]
    (reason,) = read_command("vllm serve x --config missing.yaml").not_simulated
    assert "name it as task.log=FILE" in reason


def test_a_command_line_needs_no_quotes_of_hydra():
    typed = f"task.server=vllm serve {MODEL} --max-num-seqs=128 --compilation-config '{{}}'"
    (setting,) = read_arguments([typed]).settings
    (override,) = OverridesParser.create().parse_overrides([setting])
    assert override.value() == typed.partition("=")[2]
    for kept in ("task.server=null", "task.server='vllm serve x'"):
        assert read_arguments([kept]).settings == (kept,)


def test_tensorrt_llms_prompts_that_are_not_cut_and_its_file_are_named(client):
    command = f"trtllm-serve {MODEL} --extra_llm_api_options o.yaml --max_batch_size 4"
    replay = replayed(client, "hardware=h100", f"task.server='{command}'").as_run
    assert (replay.engine.policy.name, replay.engine.policy.budget) == ("trtllm", 8192)
    assert (replay.engine.batch_size, replay.backend.host.name) == (4, "trtllm_1_0")
    said = " ".join(replay.describe())
    assert "enable_chunked_prefill=false (prompts are cut at the token budget here)" in said
    assert "extra_llm_api_options=o.yaml (its settings are not read" in said


def test_commands_that_are_not_understood_are_refused():
    with pytest.raises(UserError, match="did you mean max_num_seqs"):
        read_command("vllm serve x --max-num-seq 128")
    for other in ("tritonserver --model-repository m", "trtllm-serve disaggregated -c x.yaml"):
        with pytest.raises(UserError, match="policy=trtllm"):
            read_command(other)
    with pytest.raises(UserError, match="did you mean max_num_tokens"):
        read_command("trtllm-serve m --max_num_token 2048")
    with pytest.raises(UserError, match="starts no known server"):
        read_command("ollama serve")
    with pytest.raises(UserError, match=f"is a file; name it as task.log={__file__}"):
        read_command(__file__)
    with pytest.raises(UserError, match="close its quotes"):
        read_command("vllm serve 'x")
    with pytest.raises(UserError, match="commands of 2 servers"):
        read_command("- command: vllm serve x\n- command: vllm serve y")
    for two in ("vllm serve x &\nvllm serve y", "LLM('x')\nLLM('y')"):
        with pytest.raises(UserError, match="commands of 2 servers"):
            read_command(two)
    listed = read_command("python -m sglang.launch_server --model m --cuda-graph-bs 1 2 4")
    assert listed.not_simulated == ["cuda_graph_bs (the host is what its file states)"]
    (reason,) = read_command("vllm serve x --scheduling-policy priority").not_simulated
    assert reason == "scheduling_policy=priority (the recorded requests have no priorities)"


@pytest.fixture
def client(tmp_path) -> Path:
    """A client's file that states nothing of the server."""
    content = {
        "backend": "openai",
        "completed": 1,
        "input_lens": [100],
        "output_lens": [2],
        "start_times": [1.0],
        "ttfts": [0.1],
        "itls": [[0.05]],
        "errors": [""],
    }
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    return path


def replayed(path: Path, *settings: str):
    cfg = config_of("task=validate", f"task.run={path}", *settings)
    (case,) = build(cfg.task).check(cfg)
    return case


def test_a_log_names_its_card_whatever_is_in_the_name():
    for name in ("NVIDIA_A100-SXM4-40GB", "NVIDIA_H100_80GB_HBM3_MIG_1g.10gb"):
        facts = find_facts(Path("log"), V1.replace("NVIDIA_H100_80GB_HBM3", name))
        assert facts is not None
        assert facts.settings["hardware"] == name


def test_beside_a_clients_file_only_what_neither_states_is_asked_for(client, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(V1)
    replay = replayed(client, f"task.log={log}").as_run
    engine = replay.engine
    assert (replay.backend.hardware.name, replay.spec.name) == ("h100", "llama3.1-8b")
    assert (engine.policy.budget, engine.batch_size, engine.num_blocks) == (8192, 128, 10096)
    assert replay.backend.tensor_parallel == 2
    assert not replay.backend.host.overlaps
    log.write_text(V0)
    refusal = refusal_of("task=validate", f"task.run={client}", f"task.log={log}")
    assert refusal.endswith(f"{client} and {log} do not state the server's GPU; add hardware=NAME")
    replay = replayed(client, f"task.log={log}", "hardware=h100").as_run
    assert replay.engine.policy.name == "prefill_first"
    assert "vllm 0.6.3 with whole prompts and 256 sequences" in replay.describe()[0]
    assert "host=vllm_0_12, of another version" in replay.describe()[0]
    log.write_text(SGLANG)
    replay = replayed(client, f"task.log={log}", "hardware=h100").as_run
    assert (replay.engine.policy.name, replay.engine.num_blocks) == ("sglang", 900_032 // 64)


@pytest.mark.parametrize(
    ("line", "blocks"),
    [
        # 2 groups of 18 layers share 1,000 blocks, of which 500 are tokens of each.
        ("GPU KV cache size: 8,000 tokens", 2 * 500),
        # 10 sequences of 512 blocks, and 137 of a window with a chunk, share 6,490.
        (
            "GPU KV cache size: 81,920 tokens, Maximum concurrency for 8,192 tokens per request: "
            "10.00x",
            10 * (512 + 137),
        ),
        (
            "GPU KV cache size: 81,920 tokens\n"
            "INFO Maximum concurrency for 8,192 tokens per request: 10.00x",
            10 * (512 + 137),
        ),
    ],
)
def test_a_cache_in_tokens_is_of_as_many_groups_of_layers_as_there_are(
    line, blocks, client, tmp_path
):
    log = tmp_path / "server.log"
    log.write_text(
        "INFO non-default args: {'model': 'openai/gpt-oss-120b', 'max_model_len': 8192, "
        f"'max_num_batched_tokens': 2048, 'max_num_seqs': 64}}\nINFO {line}\n"
    )
    replay = replayed(client, f"task.log={log}", "hardware=h100").as_run
    assert replay.engine.num_blocks == blocks - 1
    log.write_text(log.read_text().replace("openai/gpt-oss-120b", MODEL))
    dense = replayed(client, f"task.log={log}", "hardware=h100").as_run
    assert dense.engine.num_blocks < blocks - 1


def test_a_block_is_of_the_last_size_that_a_log_sets(client, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        f"INFO non-default args: {{'model': '{MODEL}', 'max_num_seqs': 8}}\n"
        "INFO Setting kv cache block size to 32 for FLASH_ATTN backend(s).\n"
        "INFO Setting attention block size to 528 tokens to ensure that it is >= mamba page size.\n"
        "INFO GPU KV cache size: 52,800 tokens\n"
    )
    engine = replayed(client, f"task.log={log}", "hardware=h100").as_run.engine
    assert (engine.block_size, engine.num_blocks) == (528, 100 - 1)


def test_a_log_whose_block_size_is_not_understood_has_blocks_of_the_default():
    text = "INFO args: Namespace(block_size=3x)\nINFO GPU KV cache size: 1,600 tokens\n"
    facts = read_facts(Path("server.log"), text)
    assert facts.settings["cache.num_blocks"] == 1600 // 16 - 1
    assert facts.not_simulated == ["block_size=3x (not understood)"]


def test_lines_behind_arguments_are_part_of_them_up_to_the_next_of_the_log():
    text = "INFO non-default args: {'model': 'm', 'max_num_\nseqs': 8}\nWARNING seqs': 9}\n"
    assert read_facts(Path("server.log"), text).settings == {"model": "m", "batch": 8}


def test_a_command_above_a_log_without_arguments_counts():
    text = f"vllm serve {MODEL} \\\n --max-num-seqs 8\nINFO # GPU blocks: 1001\n"
    facts = read_facts(Path("server.log"), text)
    assert facts.settings == {"model": MODEL, "batch": 8, "cache.num_blocks": 1000}


def test_the_name_of_a_model_tells_the_type_of_its_weights(client):
    def replayed_with(command):
        return replayed(client, "hardware=h100", f"task.server='{command}'").as_run

    fp8 = replayed_with(f"vllm serve {MODEL}-FP8-dynamic")
    assert fp8.config["executor"]["weights"] == "fp8"
    told = "executor.weights=fp8, as the model's name Llama-3.1-8B-FP8-dynamic tells"
    assert told in " ".join(fp8.describe())
    q4 = replayed_with(f"vllm serve {MODEL}-Q4_K_M")
    assert "not simulated: weights of q4" in " ".join(q4.describe())
    stated = replayed_with(f"vllm serve {MODEL}-quantized.w4a16 --quantization fp8")
    assert stated.config["executor"]["weights"] == "fp8"


def test_weights_that_a_checkpoints_method_leaves_open_are_those_of_its_name(client, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(V1.replace("quantization=None", "quantization=compressed-tensors"))
    settings = ["hardware=h100", f"task.log={log}"]
    said = " ".join(replayed(client, *settings).as_run.describe())
    assert "not simulated: quantization=compressed-tensors" in said
    log.write_text(log.read_text().replace(MODEL, f"{MODEL}-quantized.w4a16"))
    replay = replayed(client, *settings).as_run
    assert replay.config["executor"]["weights"] == "int4"
    assert "quantization" not in " ".join(replay.describe())


def test_what_a_server_was_told_otherwise_than_by_default_is_shown(client):
    flags = "--no-enable-chunked-prefill --max-model-len 4096 --kv-cache-dtype fp8 --enforce-eager"
    command = f"task.server='vllm serve {MODEL} --watermark 0.01 --max-num-seqs 8 {flags}'"
    said = " ".join(replayed(client, "hardware=h100", command).as_run.describe())
    for setting in (
        *("policy.enable_chunked_prefill=false", "policy.watermark=0.01", "cache.dtype=fp8"),
        *("max_model_len=4096", "host.graphs.mode=none"),
    ):
        assert setting in said
    plain = replayed(client, "hardware=h100", f"task.server='vllm serve {MODEL}'").as_run
    assert "otherwise than by default" not in " ".join(plain.describe())


def test_sources_that_differ_get_a_line_for_each_fact(client, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(V1)
    command = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 1"
    replay = replayed(client, f"task.log={log}", f"task.server='{command}'").as_run
    said = " ".join(replay.describe())
    for name, counts in (
        *(("model", "Qwen/Qwen3-8B"), ("executor.tensor_parallel", "1"), ("server", "SGLang")),
    ):
        assert f"sources differ in {name} (" in said
        assert f"): {counts} counts" in said
    same = "task.server='vllm serve /models/Llama-3.1-8B -tp 2'"
    assert "sources differ" not in " ".join(
        replayed(client, f"task.log={log}", same).as_run.describe()
    )


def test_a_command_line_is_one_more_source(client):
    command = f"'vllm serve {MODEL} --max-num-seqs 128 --enable-lora'"
    case = replayed(client, "hardware=h100", f"task.server={command}", "batch=64")
    assert case.as_run.engine.batch_size == 128
    assert case.what_if.engine.batch_size == 64
    assert "not simulated: enable_lora=True" in " ".join(case.as_run.describe())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "INFO Engine 000: Avg prompt throughput: 1.0 tokens/s\n",
            "a log without its start",
        ),
        ("| NVIDIA-SMI 535.104.05 |\n", "is text that begins with"),
        ("{}", "is JSON and states nothing of a server"),
        ("[Unit]\nDescription=x\n", "is a file of settings in sections"),
        ("import os, sys\n", "is a script and states nothing"),
        ("[06/01/2026-10:00:00] [TRT-LLM] [I] max_num_tokens=8192\n", "policy=trtllm"),
        ("PAR1\x00", "is a Parquet file"),
    ],
)
def test_logs_that_state_nothing_are_named(text, words, client, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(text)
    refusal = refusal_of("task=validate", f"task.run={client}", f"task.log={log}")
    assert words in refusal
    assert f"task.log={log}" in refusal


def test_iterations_without_the_use_of_the_cache_are_read(tmp_path):
    log = tmp_path / "server.log"
    line = (
        "INFO [core.py:380] Iteration({}): {} context requests, {} context tokens, {} generation "
        "requests, {} generation tokens, iteration elapsed time: {} ms\n"
    )
    rows = [(0, 1, 2048, 0, 0, 48.0), (1, 0, 0, 16, 16, 9.5)]
    log.write_text(V1 + "".join(line.format(*row) for row in rows))
    case = replayed(log)
    assert case.run.logged.seconds.tolist() == pytest.approx([0.048, 0.0095])
    assert case.run.logged.cached.isna().all()


def test_a_models_path_has_its_name(client):
    for path in (
        "/models/Llama-3.1-8B-Instruct/",
        "/hub/models--meta--Llama-3.1-8B/snapshots/1a",
        "/snap --served-model-name meta/Llama-3.1-8B-Instruct",
        "/runs/Llama-3.1-8B-sft/merged",
    ):
        replay = replayed(client, "hardware=h100", f"task.server='vllm serve {path}'").as_run
        assert replay.spec.name == "llama3.1-8b"


def test_a_served_name_is_no_other_model(client):
    """Aliases are such as clients expect; the path has the size of what was served."""
    command = "task.server='vllm serve /m/Qwen2-0.5B --served-model-name llama3.1-8b'"
    refused = refusal_of("task=validate", f"task.run={client}", "hardware=h100", command)
    assert "model Qwen2-0.5B has no file" in refused


def test_whole_prompts_have_room_for_the_longest_answered_request(client, tmp_path):
    client.write_text(client.read_text().replace("[100]", "[3000]"))
    log = tmp_path / "server.log"
    log.write_text(V0.replace("8192", "512"))
    said = " ".join(replayed(client, "hardware=h100", f"task.log={log}").as_run.describe())
    assert "than max_model_len=512" in said
    assert "is taken, and for the budget of whole prompts" in said


def test_a_models_name_is_the_last_part_of_a_windows_path():
    assert names_of_model({"model": r"D:\Models\Qwen3.5-0.8B"})[0].name == "Qwen3.5-0.8B"


def test_a_model_without_a_file_is_named_by_its_hub_id(client):
    refused = refusal_of(
        "task=validate", f"task.run={client}", "hardware=h100", "task.server='vllm serve a/B-9b'"
    )
    assert "add model.path=a/B-9b, whose config.json is fetched, or model=NAME" in refused


def test_a_model_or_card_that_is_nearly_that_of_a_file_is_refused_with_what_differs(client):
    settings = ["task=validate", f"task.run={client}"]
    model = refusal_of(*settings, "hardware=h100", "task.server='vllm serve zai-org/GLM-4.5V'")
    assert 'by "4.5v" it may be another than glm-4.5' in model
    assert "add model.path=zai-org/GLM-4.5V, whose config.json is fetched, or model=glm" in model
    result = {**json.loads(client.read_text()), "model_id": MODEL, "gpu": "A100-SXM4-40GB"}
    client.write_text(json.dumps(result))
    card = refusal_of(*settings)
    assert 'by "40gb" it may be another than a100' in card
    *datasheet, option = [
        word for word in card.split() if word.startswith(("hardware=", "hardware."))
    ]
    (job,) = compose([*settings, *datasheet]).jobs
    (case,) = build(job.cfg.task).check(job.cfg)
    assert case.as_run.backend.hardware.memory_bytes == 40e9
    assert replayed(client, option).as_run.backend.hardware.name == "a100"


@pytest.mark.parametrize(("version", "policy"), [("0.6.3", "prefill_first"), ("0.8.5", "vllm_v1")])
def test_a_version_has_the_rules_of_its_engine(version, policy, client):
    """As a client's file, or meta.json beside it, states it."""
    result = json.loads(client.read_text())
    metadata = {"version": version, "model": MODEL, "max_model_len": 4096}
    client.write_text(json.dumps({**result, **metadata}))
    assert replayed(client, "hardware=h100").as_run.run.policy == policy
    client.write_text(json.dumps(result))
    engine = {"model": MODEL, "max_model_len": 4096}
    meta = {"vllm_version": version, "engine_kwargs": engine}
    client.with_name("meta.json").write_text(json.dumps(meta))
    assert replayed(client, "hardware=h100").as_run.run.policy == policy


@pytest.mark.parametrize(
    ("command", "note"),
    [
        ("deepseek-ai/DeepSeek-R1-0528", "weights=fp8, as the model's name DeepSeek-R1-0528 tells"),
        ("/mnt/models --served-model-name chat-awq", "weights=int4, as the served name chat-awq"),
        ("/hub/DeepSeek-R1-W8A8/quant", "weights=w8a8, as the folder DeepSeek-R1-W8A8 tells"),
        ("/mnt/models --served-model-name deepseek-r1-32b", ""),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "weights=fp8, as the model's name DeepSeek-V3.1"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", ""),
        ("unsloth/DeepSeek-V3-BF16", ""),
        ("nvidia/Llama-3.1-8B-Instruct-FP4", "weights=nvfp4, as the model's name Llama-3.1-8B"),
        ("/c/models--nvidia--Qwen3-8B-FP4/snapshots/1a", "weights=nvfp4, as the model's name Qwen"),
        ("our/Llama-3.1-8B-FP4", "state executor.weights=nvfp4 or mxfp4, whichever is nearer"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B --served-model-name deepseek-r1", ""),
        ("/data/awq-tests/models/Llama-3.1-8B", ""),
        ("/data/awq-tests/merged --served-model-name Llama-3.1-8B", ""),
        ("/data/awq/merged", ""),
    ],
)
def test_weights_are_told_by_the_surest_name_of_a_model(command, note):
    notes = ServerSettings([read_command(f"vllm serve {command}")]).notes()
    assert bool(note) == any("weights" in said for said in notes)
    assert note in " ".join(notes)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"model": "chat"}, {"model": "Qwen/Qwen3-8B", "served_model_name": ["chat"]}),
        ({"model": "meta/Llama-3.1-8B"}, {"model": "/hub/models--meta--Llama-3.1-8B/snapshots/1a"}),
        ({"device_name": "h100"}, {"device_name": "NVIDIA H100 80GB HBM3"}),
        ({"device_name": "NVIDIA A100"}, {"device_name": "A100-SXM4-80GB"}),
        ({"version": "0.11"}, {"version": "0.11.2"}),
    ],
    ids=str,
)
def test_sources_with_names_of_one_thing_agree(first, second):
    sources = [read_server_arguments("vllm", stated, "a file") for stated in (first, second)]
    assert not ServerSettings(sources).notes()


def test_a_card_whose_number_goes_on_is_another():
    names = ("A10", "A100")
    sources = [read_server_arguments("vllm", {"device_name": name}, "log") for name in names]
    (note,) = ServerSettings(sources).notes()
    assert note.startswith("sources differ in hardware")


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.6.3", "0.6.3"),
        ("mirror.example/hub/vllm/vllm-openai:v0.6.3", "0.6.3"),
        ("vllm/vllm-openai-rocm:v0.6.3", "0.6.3"),
        ("lmcache/vllm-openai:v0.3.9", ""),
        ("mirror.example/vllm-openai:v0.3.9", ""),
    ],
)
def test_the_tag_of_vllms_own_image_is_its_version(image, version):
    command = f"docker run {image} --model {MODEL} --max-model-len 4096"
    settings = ServerSettings([read_command(command)])
    said = " ".join(settings.notes())
    assert settings.stated.get("version", "") == version
    if version:
        assert "policy=prefill_first, the rules of vLLM's first engine (V0)" in said
    else:
        assert f"not simulated: {image} (its tag may be no version of vllm)" in said
        assert settings.policy == "vllm_v1"


@pytest.mark.parametrize("version", ["0.1.dev11000+g1a2b3c4", "0.1.0.dev3", "0.0.0"])
def test_a_build_without_its_tag_is_of_no_version(version, client):
    text = f"Initializing a V1 LLM engine (v{version}) with config: {CONFIG})\n"
    facts = find_facts(Path("server.log"), text)
    assert "version" not in facts.settings
    assert facts.not_simulated[0].startswith("version")
    metadata = {"version": version, "model": MODEL, "max_model_len": 4096}
    client.write_text(json.dumps({**json.loads(client.read_text()), **metadata}))
    replay = replayed(client, "hardware=h100").as_run
    assert (replay.run.policy, replay.backend.host.name) == ("vllm_v1", "vllm_0_19")
    assert "a build without its tag" in " ".join(replay.describe())


@pytest.mark.parametrize(
    ("version", "is_asked", "devices", "host"),
    [
        ("0.11.0", True, 1, "vllm_async"),
        ("0.11.0", False, 2, "vllm_0_12"),
        ("0.19.0", True, 1, "vllm_0_19"),
        ("0.19.0", True, 2, "vllm_async"),
    ],
)
def test_scheduling_ahead_that_leaves_a_device_waiting_has_a_host_of_its_own(
    version, is_asked, devices, host, client
):
    stated = {"version": version, "async_scheduling": is_asked, "tensor_parallel_size": devices}
    client.write_text(json.dumps({**json.loads(client.read_text()), "model": MODEL, **stated}))
    replay = replayed(client, "hardware=h100").as_run
    assert replay.backend.host.name == host


@pytest.mark.parametrize(
    ("of_run", "asked", "hosts"),
    [
        ({"tensor_parallel_size": 1}, "tensor_parallel=2", ("vllm_0_19", "vllm_async")),
        ({"tensor_parallel_size": 2}, "tensor_parallel=1", ("vllm_async", "vllm_0_19")),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel=1", ("none", "vllm_0_19")),
        ({"pipeline_parallel_size": 1}, "pipeline_parallel=2", ("vllm_0_19", "none")),
    ],
)
def test_other_devices_have_the_host_of_theirs(of_run, asked, hosts, client):
    server = {"version": "0.19.0", "model": MODEL, "async_scheduling": True, **of_run}
    client.write_text(json.dumps({**json.loads(client.read_text()), **server}))
    case = replayed(client, "hardware=h100", f"executor.{asked}")
    before, after = hosts
    assert (case.as_run.backend.host.name, case.what_if.backend.host.name) == hosts
    assert f"host={after} ({before})" in case.changed
    named = replayed(client, "hardware=h100", "host=none", f"executor.{asked}")
    assert {each.backend.host.name for each in (named.as_run, named.what_if)} == {"none"}


def test_a_version_is_of_the_server_that_runs():
    log = Statement("vllm.log", {"version": "0.19.0", "batch": 64})
    server = read_command(f"python -m sglang.launch_server --model {MODEL}")
    assert "version" not in ServerSettings([log, server]).stated
    assert ServerSettings([log, server]).stated["batch"] == 64
    assert ServerSettings([log]).stated["version"] == "0.19.0"


def test_a_log_of_markers_states_its_longest_context():
    log = (
        "GPU KV cache size: 2,725,376 tokens\n"
        "Maximum concurrency for 262,144 tokens per request: 10.40x\n"
    )
    facts = find_facts(Path("server.log"), log)
    assert facts is not None
    assert facts.settings["max_model_len"] == 262_144
