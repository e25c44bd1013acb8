"""Sweeps as jobs of a real Slurm: `python -m pytest -m slurm`, where tests/support/slurm.sh starts
one (as root, after `slurm.sh install`), or SLURM_CONF names one that runs here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
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
SAME = ("iterations.parquet", "requests.parquet", "results.parquet")


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
    assert runs == [9, 9]  # the sweep's, too


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
