"""Sweeps that people leave running: continued after an interruption, and spread over processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from commands import running, sweep_of
from joblib.externals.loky import get_reusable_executor

from sarathi_lab.results.load import load_summary
from sarathi_lab.run import main

SCRIPTED = ["task._target_=sweep_tasks.Scripted", "tracking=none", "executor=simulated", "-m"]
PROCESSES = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
SIMULATED = ["executor=simulated", "tracking=none", "workload.num_requests=2", "batch=2", "-m"]
SIMULATED += ["baselines=[orca]"]


@pytest.fixture
def output(tmp_path):
    (tmp_path / "o").mkdir()
    return tmp_path / "o"


def start(args: list[str], output: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    return running(*args, f"output={output}")


def wait_for(path: Path, text: str, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:  # pytest's own time limit ends a wait that never does
        if path.is_file() and text in path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate(timeout=10))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below `folder`, with its bytes and time of change."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in files
    }


def calls(output: Path) -> list[str]:
    return (output / "calls").read_text().split()


def result(sweep: Path, number: int) -> dict:
    return json.loads((sweep / str(number) / "result.json").read_text())


def test_a_failing_run_is_recorded_the_rest_goes_on_and_resume_repeats_only_it(output, capfd):
    (output / "fail-128").touch()
    args = [*SCRIPTED, f"output={output}", "chunk=64,128,256"]
    assert main(args) == 1
    out, err = capfd.readouterr()
    sweep = sweep_of(output)
    failure = json.loads((sweep / "1" / "failed.json").read_text())
    assert failure["error"] == "ValueError: a bug with 128"
    assert "sweep_tasks.py" in failure["traceback"]
    assert err.splitlines()[-1] == "error: ValueError: a bug with 128"
    lines = re.findall(r"^\[.*", out, flags=re.MULTILINE)
    assert [line.split(" took")[0] for line in lines[::2]] == ["[1/3] chunk=64", "[3/3] chunk=256"]
    assert lines[1].startswith("[2/3] chunk=128 failed: ValueError: a bug with 128, about")
    assert "left" not in lines[2]
    command = shlex.split(next(line for line in out.splitlines() if line.startswith("resume")))[1:]
    assert command == ["python", "-m", "sarathi_lab.run", f"resume={sweep}"]

    with pytest.raises(ValueError, match="a bug with 128"):
        main([*SCRIPTED[:-1], f"output={output}", "chunk=128"])
    assert main([*args, "batch=5", "resume=true"]) == 2
    assert "finds no unfinished sweep of this command: 0 complete, 1 with" in capfd.readouterr().err
    assert main([*args, "batch=5", f"resume={sweep}"]) == 2
    assert "0 complete, 1 with another configuration; drop it" in capfd.readouterr().err

    finished = {number: contents(sweep / str(number)) for number in (0, 2)}
    (output / "fail-128").unlink()
    assert main([*args, "resume=true"]) == 0
    assert {number: contents(sweep / str(number)) for number in (0, 2)} == finished
    assert calls(output) == ["64", "128", "256", "128", "128"]
    assert not (sweep / "1" / "failed.json").exists()
    assert result(sweep, 1)["chunk"] == 128
    out, _ = capfd.readouterr()
    assert "(2 of 3 runs finished)" in out
    assert re.search(r"^\[3/3\] chunk=128 took", out, flags=re.MULTILINE)
    assert main([*args, "resume=true"]) == 2
    assert "1 complete, 0 with another configuration; drop it" in capfd.readouterr().err


def test_a_run_that_fails_its_check_is_named_or_left_out_and_resume_lists_what_is_left(
    output, capfd
):
    args = [*SIMULATED, "baselines=[]", "batch=2,3,512", "repeat=1", f"output={output}"]
    assert main([*args, "--dry-run"]) == 2
    error = capfd.readouterr().err
    assert re.match(r"error: batch=512: model 13b needs .* use cache\.num_blocks=auto", error)
    assert error.endswith("; skip_invalid=true leaves such runs out\n")
    # What all runs fail by is no run's own, and a value is named once.
    assert main([*SIMULATED, "batch=2,3", "max_model_len=1", "--dry-run"]) == 2
    assert capfd.readouterr().err.startswith("error: max_model_len=1 is below 2; use null")
    assert main([*SIMULATED, "policy=vllm_v1", "batch=0,3", "--dry-run"]) == 2
    assert capfd.readouterr().err.startswith("error: batch=0 is below 1; use the number")
    assert main([*args, "skip_invalid=true"]) == 0
    sweep = sweep_of(output)
    assert re.search(r"^left out: batch=512: model 13b", capfd.readouterr().out, re.MULTILINE)
    assert sorted(path.name for path in sweep.glob("[0-9]")) == ["0", "1"]
    (sweep / "1" / "finished.json").unlink()
    for resume in ([*args, "skip_invalid=true", "resume=true"], [f"resume={sweep}"]):
        assert main([*resume, "--dry-run"]) == 0
        *_, unfinished, total, _ = capfd.readouterr().out.splitlines()
        assert unfinished.split() == ["1", "sarathi", "batch=3"]
        assert total == "1 run, checked and not started; 1 finished before"
    assert main([*args[:-1], "batch=512,513", "skip_invalid=true", "--dry-run"]) == 2
    assert "no run of this sweep passes its check; left out: batch=512" in capfd.readouterr().err


def test_a_killed_sweep_over_simulated_runs_continues_with_its_baselines(output, capfd):
    args = [*SIMULATED, "chunk=128,256", f"output={output}"]
    assert main(args) == 0
    sweep = sweep_of(output)
    whole = load_summary(sweep / "1")
    # As a kill leaves it: a run without its end, a baseline half done beside the finished ones.
    (sweep / "1" / "finished.json").unlink()
    (sweep / "1" / "run.json").unlink()
    (sweep / "1" / "iterations.parquet").write_bytes(b"half")
    kept = {name: contents(sweep / name) for name in ("0", "baselines")}
    (sweep / "baselines" / "orca-1234").mkdir()
    capfd.readouterr()
    assert main([*args, "resume=true"]) == 0
    assert {name: contents(sweep / name) for name in kept} == kept
    assert load_summary(sweep / "1") == whole
    assert "All 3 runs of this sweep" in capfd.readouterr().out


def test_resume_repeats_what_a_killed_process_lost(output, capfd):
    (output / "kill-256").touch()
    (output / "meet").touch()
    code = main([*SCRIPTED, *PROCESSES, "chunk=64,128,256", f"output={output}"])
    get_reusable_executor().shutdown(kill_workers=True)
    err = capfd.readouterr().err
    sweep = sweep_of(output)
    assert code == 2, err
    assert err.splitlines()[-1].startswith("error: the launcher gave up (TerminatedWorkerError")
    assert [(sweep / number / "finished.json").is_file() for number in "012"] == [True, True, False]
    assert (sweep / "0" / "output.txt").read_text() == "chunk 64\n"
    assert result(sweep, 0)["process"] != result(sweep, 1)["process"]
    (output / "kill-256").unlink()
    assert main([f"resume={sweep}", "hydra/launcher=basic"]) == 0
    assert all((sweep / number / "finished.json").is_file() for number in "012")


def test_ctrl_c_ends_the_processes_too_and_names_the_command_that_continues(output, capfd):
    (output / "wait-128").touch()
    args = [*SCRIPTED, *PROCESSES, "chunk=64,128"]
    with start(args, output) as process:
        wait_for(output / "calls", "128", process)
        sweep = sweep_of(output)
        wait_for(sweep / "0" / "finished.json", "seconds", process)
        assert main([f"resume={sweep}"]) == 2
        assert capfd.readouterr().err.startswith(f"error: resume={sweep} is still running")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1] == (
        f"interrupted: finished runs are kept; python -m sarathi_lab.run resume={sweep} continues"
    )
    assert "Traceback" not in err
    (output / "wait-128").unlink()
    # Its own settings, though none are named; the launcher may be another.
    assert main([f"resume={sweep}", "hydra/launcher=basic"]) == 0
    assert sorted(calls(output)) == ["128", "128", "64"]


def test_jobs_beside_each_other_run_each_baseline_once(output, capfd):
    assert main([*SIMULATED, *PROCESSES, "chunk=128,256", "-v", f"output={output}"]) == 0
    get_reusable_executor().shutdown(kill_workers=True)
    sweep = sweep_of(output)
    assert "All 3 runs of this sweep" in capfd.readouterr().out
    texts = [(sweep / number / "output.txt").read_text() for number in "01"]
    assert sum(text.count("\nbaseline orca") for text in texts) == 1
    summaries = [load_summary(sweep / number) for number in "01"]
    assert all("throughput_vs_orca" in summary for summary in summaries)


def test_a_sweep_prints_a_line_a_run_and_with_v_what_each_found(output, capsys):
    command = [*SIMULATED, "chunk=128,256", f"output={output}"]
    assert main(command) == 0
    before_the_table = capsys.readouterr().out.partition("All 3 runs")[0]
    assert before_the_table.count(" took ") == 2
    assert len(before_the_table.splitlines()) < 12
    assert main([*command, "-v"]) == 0
    assert "KV re-read factor" in capsys.readouterr().out.partition("All 3 runs")[0]
