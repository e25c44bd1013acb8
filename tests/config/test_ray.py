"""Sweeps on a real Ray on this machine: `python -m pytest -m ray`, with '.[ray]'. RAY_ADDRESS names
one that runs here, with tests/support in its PYTHONPATH; else one is started, whose agents must be
up within Ray's 15 seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import running, sweep_of

from sarathi_lab.run import main

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
SCRIPTED = ["task._target_=sweep_tasks.Scripted", "tracking=none", "executor=simulated", "-m"]
SIMULATED = ["executor=simulated", "tracking=none", "workload.num_requests=6", "batch=4", "-m"]
SAME = ("iterations.parquet", "requests.parquet", "results.parquet")
PORT = 26379
CPU = "+hydra.launcher.ray.remote.num_cpus=0.5"  # so four at a time


@pytest.fixture(scope="module", autouse=True)
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    if "ray" not in request.config.option.markexpr:
        pytest.skip("takes a minute: python -m pytest -m ray")
    if find_spec("ray") is None or find_spec("hydra_plugins.hydra_ray_launcher") is None:
        pytest.skip("needs Ray: pip install -e '.[ray]', in an environment of its own")
    if "RAY_ADDRESS" in os.environ:
        yield
        return
    os.environ |= {"RAY_raylet_start_wait_time_s": "180", "RAY_AUTH_MODE": "disabled"}
    own = ["--disable-usage-stats", "--object-store-memory=80000000", "--include-dashboard=false"]
    try:
        ray("start", "--head", f"--port={PORT}", "--num-cpus=2", "--num-gpus=1", *own)
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{PORT}"
        yield
    finally:
        ray("stop", "--force")
        os.environ.pop("RAY_ADDRESS", None)


def ray(*args: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", *args]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # its workers', too
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "o").mkdir()
    return tmp_path / "o"


def test_eight_jobs_leave_what_one_machine_does(tmp_path):
    args = [*SIMULATED, "chunk=64,128,256,512", "seed=0,1"]
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    assert main([*args, f"output={here}"]) == 0
    with running(*args, "hydra/launcher=ray", CPU, f"output={there}") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert err == ""
    assert out.count(" took ") == 8
    for number in range(8):
        one, other = sweep_of(here) / str(number), sweep_of(there) / str(number)
        for name in SAME:
            assert (one / name).read_bytes() == (other / name).read_bytes()
