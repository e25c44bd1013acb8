"""Every mistake of a user's: one clear line naming the value, the reason and the fix, exit code 2,
nothing written.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from sarathi_lab.run import main

SMALL = ["executor=simulated", "tracking=none", "workload.num_requests=2"]
NO_GPU = not torch.cuda.is_available()

MISTAKES = [
    (
        ["policy=layered_prefill", "executor=simulated", "executor.pipeline_parallel=2"],
        "policy layered_prefill moves prompts through groups of layers, which pipelines",
    ),
    (["chunk=0"], ["chunk=0", "below 1"]),
    (["chunk=-5"], ["chunk=-5", "below 1"]),
    (["chunk=abc"], ["chunk=abc", "not a whole number"]),
    (["chunk=2.5"], ["chunk=2.5", "not a whole number"]),
    (["chunk=4"], ["chunk=4", "smaller than the 7 decodes", "chunk>=8"]),
    (["batch=0"], ["batch=0", "below 1"]),
    (["pd_ratio=0"], ["pd_ratio=0"]),
    (["pd_ratio=many"], ["pd_ratio=many"]),
    (["seq_len=1"], ["seq_len=1"]),
    (["workload.num_requests=0"], ["num_requests=0"]),
    (["cache.num_blocks=3"], ["can never fit the KV cache", "cache.num_blocks"]),
    (["cache.block_size=0"], ["cache.block_size=0"]),
    (["cache.prefix=maybe"], ["cache.prefix=maybe", "use true"]),
    (["cache.num_host_blocks=5"], ["cache.num_host_blocks=5 has no effect", "preemption=swap"]),
    (
        ["hardware.host_bytes_per_second=null", "preemption=swap"],
        ["host_bytes_per_second", "preemption=recompute"],
    ),
    (
        ["workload.num_prefixes=2"],
        ["num_prefixes=2 has no effect", "workload.shared_prefix_len=512"],
    ),
    (["workload.shared_prefix_len=-1"], ["workload.shared_prefix_len=-1"]),
    (["max_model_len=10"], ["exceeds max_model_len=10"]),
    (["chnk=256"], ["chnk is not a setting", "did you mean chunk"]),
    (["+chnk=256"], ["chnk is not a setting", "did you mean chunk"]),
    (["policy=orcaa"], ["policy=orcaa is unknown", "did you mean orca", "request_level"]),
    (["policy.min_decode=2"], ["policy.min_decode", "did you mean policy.min_decodes"]),
    (["+policy.foo=2"], ["policy.foo is not a parameter", "policy.reserve"]),
    (["policy=orca", "policy.min_decodes=2"], ["policy.min_decodes", "policy.max_prefills"]),
    (
        ["policy=orca", "chunk=256"],
        ["chunk=256 has no effect", "policy=orca does not read chunk", "policy.max_prefills"],
    ),
    (["device=cpu"], ["device=cpu has no effect", "add executor=torch, or drop it", "hardware"]),
    (
        ["executor=torch", "hardware=h100"],
        ["executor=torch does not read hardware; add executor=simulated, or drop it (executor"],
    ),
    (
        ["workload=uniform", "seq_len=512"],
        ["seq_len=512 has no effect", "add workload=paper_grid, or drop it"],
    ),
    (["chunk=256,512"], ["chunk=256,512", "add -m"]),
    (["baselines=[orca,nobody]"], ["nobody is not a policy", "request_level"]),
    (["dtype=float12"], ["dtype=float12 is unknown"]),
    (["hardware=a6001"], ["hardware=a6001 is unknown", "did you mean a6000"]),
    (["model=13c"], ["model=13c is unknown", "13b"]),
    (["model=gpt3-175b"], ["gpt3-175b", "GB"]),
    (["chunk"], ["chunk"]),
    (["~hardware.num_sms"], ["Hardware", "num_sms", "put it back"]),
    (["hardware.num_sms=0"], ["hardware.num_sms=0", "below 1", "correct the hardware file"]),
    (
        ["hardware.bytes_per_second=-1"],
        ["hardware.bytes_per_second=-1", "above 0", "correct the hardware file"],
    ),
    (
        ["~hardware.uncertainty.matmul"],
        ["hardware.uncertainty", "matmul", "correct the hardware file"],
    ),
    (["experiment=orc"], ["experiment=orc is unknown", "did you mean orca", "kv_reread"]),
    (["experimnt=orca"], ["experimnt is not a setting", "did you mean experiment"]),
    (["baselines=orca"], ["baselines=orca is not a list", "baselines=[orca]"]),
    (["baselines=null"], ["baselines=None is not a list"]),
    (["tracking.mode=online"], ["tracking.mode is not a parameter", "it has none"]),
    (["-chunk=256"], ["option -chunk=256 is unknown"]),
    (["model.hidden_size=abc", "model=30m"], ["hidden_size=abc is not a whole number"]),
    (["+model.activation=relu", "model=30m"], ["activation=relu is unknown", "gelu_tanh"]),
    (["+model.norm=foo", "model=30m"], ["norm=foo is unknown", "rms"]),
    (["+model.rotary_fraction=abc", "model=30m"], ["rotary_fraction=abc is not a number"]),
    (["policy=prefill_first", "policy.watermark=abc"], ["watermark=abc is not a number"]),
    (["policy=prefill_first", "policy.delay_factor=abc"], ["delay_factor=abc is not a number"]),
    (["policy=prefill_first", "policy.max_num_batched_tokens=abc"], ["max_num_batched_tokens=abc"]),
    (["policy.min_decodes=1000"], ["min_decodes=1000 exceeds the 7 decodes"]),
    (["seq_len=1000000000"], ["GB for KV", "shorten the requests"]),
    (["--sweep"], ["option --sweep is unknown"]),
    (
        ["workload.arrivals=weekly"],
        ["workload.arrivals=weekly is unknown", "poisson, gamma, ramp, users"],
    ),
    (
        ["workload.users=3"],
        ["workload.users=3 has no effect on closed arrivals", "workload.arrivals=users"],
    ),
    (
        ["workload.arrivals=ramp", "workload.rate=2"],
        ["workload.arrivals=ramp needs workload.end_rate"],
    ),
    (["queue_order=priority"], ["queue_order=priority has no effect", "workload.priorities=[0,1]"]),
    (
        ["window.warmup=5"],
        ["window.warmup=5", "all requests arrive at once", "workload.arrivals=poisson"],
    ),
    (["window.warmup=abc"], ["window.warmup=abc", "neither seconds nor a share"]),
    (["window.start=5"], ["window.start is not a parameter of Window", "window.warmup"]),
    (
        ["stop_when_saturated.num_waiting=5"],
        ["stop_when_saturated has no effect", "all requests arrive at once"],
    ),
    (["workload.arrivals=poisson", "workload.rate=1e-320"], ["workload.rate=1e-320 is not from"]),
    (["workload.arrivals=poisson", "workload.rate=1e-12"], ["a request arrives after", "rate"]),
    (["workload.priorities=[0,99999999999999999999]"], ["priorities=99999999999999999999 is ab"]),
    (
        ["preemption=swap", "cache.num_host_blocks=999999999"],
        ["num_host_blocks=999999999 is ab"],
    ),
    (["hardware.flops_per_second=1e-320"], ["hardware.flops_per_second=1e-320 is not from"]),
    (["executor.host=5"], ["executor.host=5 is not one; choose one by host=NAME"]),
    (["stop_when_saturated.num_waiting=0"], ["stop_when_saturated.num_waiting=0", "below 1"]),
]


def refuse(args, capsys, output: Path) -> str:
    """Run `args`, check that it is refused in one line with nothing written, and return the
    line.
    """
    code = main([*args, f"output={output}"])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in captured.err
    assert not output.exists()
    return lines[0]


@pytest.mark.parametrize(
    ("args", "words"), MISTAKES, ids=lambda value: " ".join(value) if value else None
)
def test_one_line_and_exit_code_2(args, words, capsys, tmp_path):
    line = refuse([*SMALL, *args], capsys, tmp_path / "outputs")
    for word in words:
        assert word in line


COMMAND_LINES = [
    (["chunk=256,"], "'chunk=256,' can't be read"),
    (["chunk", "=", "256"], "'chunk' can't be read"),
    (["chunk=${bach}"], "'bach' not found"),
    (["--cfg", "job", "chnk=1"], "chnk is not a setting (did you mean chunk?)"),
    (["--cfg", "job", "chunk=1,2", "-m"], "Only one of"),
    (["hydra/launcher=rq"], "hydra/launcher=rq is unknown"),
    (
        ["policy=orca,request_level", "policy.min_decodes=1", "-m"],
        "policy.min_decodes is not a parameter of Orca",
    ),
    (["model=30m", "model.activation=gelu"], "write +model.activation=VALUE"),
    (["cache=null"], "cache=None is no setting itself; use cache.block_size"),
    (["~cache.dtype"], "cache.dtype is missing; put it back"),
    (["policy._target_=nope"], "policy._target_=nope can't be imported (No module named 'nope')"),
    (["policy._target_=pathlib.Path"], "_target_=PosixPath is no Policy"),
    (["--resolve"], "--resolve has no effect without --cfg"),
    (["chunk=range(1,100000000)", "-m"], "a sweep of more than 10000 runs"),
    (["chunk=range(5,1)", "-m"], "chunk=range(5,1) names no value"),
    (["hydra.verbose=maybe"], "hydra.verbose=maybe is neither true nor false"),
    (["hydra/launcher=joblib", "hydra.launcher.n_jobs=0", "-m"], "n_jobs=0 runs nothing"),
]


@pytest.mark.parametrize(("args", "words"), COMMAND_LINES, ids=lambda value: " ".join(value))
def test_command_lines_that_hydra_refuses_in_several_lines(args, words, capsys, tmp_path):
    assert words in refuse([*SMALL, *args], capsys, tmp_path / "outputs")


def test_a_mistake_in_the_last_job_of_a_sweep_stops_the_first(capsys, tmp_path):
    line = refuse([*SMALL, "chunk=256,512,3", "-m"], capsys, tmp_path / "outputs")
    assert "chunk=3 is smaller" in line


def test_unknown_option_and_value_that_nobody_reads_on_the_torch_executor(capsys, tmp_path):
    for override in ("hardware=a100", "hardware.num_sms=64"):
        line = refuse([override, "model=tiny"], capsys, tmp_path / "outputs")
        assert f"{override} has no effect" in line


@pytest.mark.parametrize("output", ["", "null", "5"])
def test_what_names_no_output_folder_is_refused(output, capsys):
    assert main([*SMALL, f"output={output}"]) == 2
    assert "is no text; name a folder, such as output=outputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting", ["hydra.run.dir={}/run", "hydra.sweep.dir={}/sweep", "tracking.dir={}/wandb"]
)
def test_other_folders_that_cannot_be_written(setting, capsys, tmp_path):
    taken = tmp_path / "taken"
    taken.touch()
    args = [
        argument
        for argument in SMALL
        if not (argument == "tracking=none" and "tracking" in setting)
    ]
    flags = ["-m", "chunk=128,256"] if "sweep" in setting else []
    assert main([*flags, *args, setting.format(taken), f"output={tmp_path / 'outputs'}"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {setting.partition('=')[0]}=")
    assert "can't be written" in lines[0]


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_cuda_without_a_gpu(capsys, tmp_path):
    assert "device=cuda" in refuse(["device=cuda", "model=tiny"], capsys, tmp_path / "outputs")


def test_a_simulation_only_shape_on_a_real_device(capsys, tmp_path):
    assert "executor=simulated" in refuse(["model=gpt3-175b"], capsys, tmp_path / "outputs")


@pytest.mark.parametrize("parent", ["file", "device"])
def test_an_output_folder_that_cannot_be_written(parent, capsys, tmp_path):
    blocked = tmp_path / "taken" if parent == "file" else Path("/dev/null")
    if parent == "file":
        blocked.touch()
    code = main([*SMALL, f"output={blocked / 'results'}"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(lines) == 1
    assert "can't be written" in lines[0]


def test_model_paths(capsys, tmp_path):
    output = tmp_path / "outputs"
    torch_run = ["tracking=none"]
    assert "missing" in refuse([*torch_run, f"model.path={tmp_path / 'missing'}"], capsys, output)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refuse([*torch_run, f"model.path={empty}"], capsys, output)
    (empty / "config.json").write_text(
        json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    assert "mamba" in refuse([*torch_run, f"model.path={empty}"], capsys, output)
    checkpoint = tmp_path / "checkpoint"
    make_checkpoint("llama", checkpoint)
    capsys.readouterr()  # transformers reports its progress
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "truncated" in refuse([*torch_run, f"model.path={checkpoint}"], capsys, output)
    weights.unlink()
    assert "has no weights" in refuse([*torch_run, f"model.path={checkpoint}"], capsys, output)


def test_a_checkpoint_runs_with_a_prompts_file(capsys, tmp_path):
    """Sound counterparts of the above: a folder of weights and a file of prompts."""
    make_checkpoint("qwen3", tmp_path / "checkpoint")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt_token_ids": [5, 6, 7], "output_len": 2}\n\n{"prompt": "A", "output_len": 3}\n'
    )
    args = [
        f"model.path={tmp_path / 'checkpoint'}",
        "workload=prompts",
        f"workload.path={prompts}",
        "device=cpu",
    ]
    assert (
        main([*args, "tracking=none", "baselines=[]", "chunk=8", f"output={tmp_path / 'out'}"]) == 0
    )
    assert "3 rows read = 2 used + 1 dropped, 1 blank" in capsys.readouterr().out


def test_workload_files(capsys, tmp_path):
    output = tmp_path / "outputs"
    base = ["executor=simulated", "tracking=none"]
    missing = refuse(
        [*base, "workload=trace", f"workload.path={tmp_path / 'no.csv'}"], capsys, output
    )
    assert "no.csv" in missing
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9799600,4808\n")
    assert "GeneratedTokens" in refuse(
        [*base, "workload=trace", f"workload.path={trace}"], capsys, output
    )
    trace.write_text("")
    assert "empty" in refuse([*base, "workload=trace", f"workload.path={trace}"], capsys, output)
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\nnonsense\n"
    )
    assert "line 3" in refuse([*base, "workload=trace", f"workload.path={trace}"], capsys, output)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "output_len": 2}\n{"prompt": \n')
    assert "line 2" in refuse(
        [*base, "workload=prompts", f"workload.path={prompts}"], capsys, output
    )
