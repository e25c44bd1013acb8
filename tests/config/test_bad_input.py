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
