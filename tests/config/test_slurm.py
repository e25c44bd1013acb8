"""Sweeps as jobs of a real Slurm: `python -m pytest -m slurm`, where tests/support/slurm.sh starts
one (as root, after `slurm.sh install`), or SLURM_CONF names one that runs here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import running, sweep_of

from sarathi_lab.run import main

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parents[1] / "support" / "slurm.sh"
SLURM = "hydra/launcher=submitit_slurm"
SCRIPTED = ["task._target_=sweep_tasks.Scripted", "tracking=none", "executor=simulated", "-m"]
SIMULATED = ["executor=simulated", "workload.num_requests=6", "batch=4", "-m"]
SAME = ("iterations.parquet", "requests.parquet", "summary.json")


@pytest.fixture(scope="module", autouse=True)
def slurm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    if "slurm" not in request.config.option.markexpr:
        pytest.skip("takes minutes: python -m pytest -m slurm")
    if "SLURM_CONF" in os.environ:
        yield
        return
    if not shutil.which("slurmctld") or os.getuid():
        pytest.skip(f"needs root and Slurm: {SCRIPT} install")
    folder = str(tmp_path_factory.mktemp("slurm"))
    started = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, check=True)
    name, _, value = started.stdout.strip().partition("=")
    os.environ[name] = value
    yield
    subprocess.run([SCRIPT, "stop", folder], check=True)
    del os.environ[name]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "o").mkdir()
    return tmp_path / "o"


def failure(output: Path, number: int) -> str:
    return json.loads((sweep_of(output) / str(number) / "failed.json").read_text())["error"]


def test_eight_jobs_leave_what_one_machine_does(tmp_path):
    args = [*SIMULATED, "chunk=64,128,256,512", "seed=0,1"]
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    assert main([*args, f"output={here}"]) == 0
    with running(*args, SLURM, f"output={there}") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert err == ""  # though sacct is not there
    assert "  running: 0 of 8 runs, " in out  # without a terminal, too
    assert out.count(" took ") == 8
    assert len(list(sweep_of(there).glob(".submitit/*/*_submission.sh"))) == 1, "an array"
    for number in range(8):
        one, other = sweep_of(here) / str(number), sweep_of(there) / str(number)
        for name in SAME:
            assert (one / name).read_bytes() == (other / name).read_bytes()
    runs = [len(list((folder / "wandb").glob("offline-run-*"))) for folder in (here, there)]
    assert runs[0] == runs[1] > 8  # those of the baselines, too


def test_a_killed_job_is_recorded_the_rest_goes_on_and_resume_repeats_only_it(output):
    (output / "kill-256").touch()
    args = [*SCRIPTED, "chunk=64,128,256,512", f"output={output}"]
    with running(*args, SLURM) as process:
        _, err = process.communicate()
    assert process.returncode == 2
    assert err == f"error: {failure(output, 2)}\n"
    assert "was ended as FAILED; its log is " in err
    (output / "kill-256").unlink()
    assert main([f"resume={sweep_of(output)}", "hydra/launcher=basic"]) == 0
    assert sorted((output / "calls").read_text().split()) == ["128", "256", "256", "512", "64"]


def test_a_job_out_of_time_says_so_or_begins_anew(tmp_path):
    """Slurm warns up to a minute early, and begins a job anew two minutes after its end."""
    short = ["hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=45"]
    ends, anew = tmp_path / "ends", tmp_path / "anew"
    for folder in (ends, anew):
        folder.mkdir()
        (folder / "wait-128").touch()
    args = [*SCRIPTED, SLURM, "chunk=64,128", *short]
    with (
        running(*args, f"output={ends}") as ending,
        running(*args, f"output={anew}", "hydra.launcher.max_num_timeout=1") as requeued,
    ):
        while "128" not in ((anew / "calls").read_text() if (anew / "calls").exists() else ""):
            time.sleep(0.1)
        (anew / "wait-128").unlink()  # the second time it finds nothing to wait for
        _, err = ending.communicate()
        assert ending.returncode == 2
        assert err.startswith("error: it took more than hydra.launcher.timeout_min=2; allow more")
        out, err = requeued.communicate()
    assert (requeued.returncode, err) == (0, "")
    assert "[2/2] chunk=128 took" in out
    assert (anew / "calls").read_text().split().count("128") == 2
    assert (ends / "calls").read_text().split().count("128") == 1


def test_gpus_are_asked_for_by_type(output):
    args = [*SCRIPTED, SLURM, "chunk=64,128", f"output={output}"]
    with running(*args, "hydra.launcher.gres=gpu:h100:1") as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    (script,) = sweep_of(output).glob(".submitit/*/*_submission.sh")
    assert "#SBATCH --gres=gpu:h100:1\n" in script.read_text()
    with running(*args, "hydra.launcher.gres=gpu:h100:3") as process:
        _, err = process.communicate()
    assert process.returncode == 2
    assert "Requested node configuration is not available" in err
    assert err.splitlines()[-1].startswith("error: the launcher gave up")
