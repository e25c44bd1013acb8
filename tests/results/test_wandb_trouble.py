"""W&B down, slow, hanging or out of disk: the measurement ends as if nothing were wrong, with one
line of warning.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sarathi_lab.results.wandb_guard import Guard, in_time

from sarathi_lab.results.tracking import WandbTracker

WANDB = str(Path(sys.executable).parent / "wandb")
KEY = "a" * 40
RUN = {
    "name": "a run",
    "group": "a sweep",
    "job_type": "serve",
    "tags": ["tiny"],
    "config": {"chunk": 256},
}
SIMULATED = ["executor=simulated", "workload.num_requests=3", "batch=2", "chunk=128,256", "-m"]


def hang(connection: socket.socket) -> None:
    time.sleep(600)


def refuse(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    connection.close()


def break_off(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
    connection.close()


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that treats every connection so, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection = listening.accept()[0]
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def lab(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("WANDB_")},
        **variables,
    }
    command = [sys.executable, "-m", "sarathi_lab.run", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=env, check=False
    )


def leet(path: Path) -> dict:
    command = [WANDB, "leet", "inspect", "--summary", "--json", str(path)]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    )


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: W&B")]


def test_a_hanging_server_costs_a_sweep_one_line_and_a_bounded_wait_and_loses_nothing(tmp_path):
    with server(hang) as url:
        args = [
            *SIMULATED,
            "baselines=[orca]",
            "tracking.mode=online",
            "tracking.timeout=2",
            f"output={tmp_path}",
        ]
        done = lab(*args, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    (warning,) = warnings(done.stderr)
    assert "the server did not take the run within 2 s" in warning
    assert f"wandb sync {tmp_path}/wandb sends them" in warning
    assert len(list(tmp_path.rglob("summary.json"))) == 3
    kept = {
        run["name"]: run for run in map(leet, tmp_path.glob("wandb/offline-run-*/*.wandb"))
    }  # for `wandb sync`
    assert kept.keys() == {
        "baseline orca",
        "sarathi chunk=128",
        "sarathi chunk=256",
        "sweep of chunk",
    }
    assert all(run["exit_code"] == 0 for run in kept.values())
    assert kept["sarathi chunk=256"]["summary"]["throughput"] > 0
    assert kept["sweep of chunk"]["summary"]["sweep"]["nrows"] == 3


@pytest.mark.parametrize("answer", [refuse, break_off, None])
def test_a_server_that_takes_nothing_is_tried_once(tmp_path, answer, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    tracker = WandbTracker(project="test", mode="online", dir=str(tmp_path), timeout=4)
    with server(answer or hang) as url:
        monkeypatch.setenv(
            "WANDB_BASE_URL", url if answer else "http://127.0.0.1:9"
        )  # a closed port
        for _ in range(2):
            with tracker.run(**RUN) as run:
                run.log_summary({"throughput": 1.0})
    (warning,) = warnings(capsys.readouterr().err)
    assert "the server did not take the run" in warning
    assert [leet(path)["exit_code"] for path in tmp_path.rglob("*.wandb")] == [0, 0]


def test_a_run_folder_that_cannot_be_written_leaves_the_block_alone(tmp_path, capsys):
    (tmp_path / "wandb").write_text("a file where the folder should be")
    tracker = WandbTracker(project="test", mode="offline", dir=str(tmp_path))
    for _ in range(2):
        with tracker.run(**RUN) as run:
            run.log_summary({"throughput": 1.0})
    (warning,) = warnings(capsys.readouterr().err)
    assert "File exists" in warning
    assert "results are complete without it" in warning


def test_a_full_disk_is_said_once_and_leaves_the_results_alone(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    command = f'mount -t tmpfs -o size=128k none {small} && exec "$@"'
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*own_mounts, command, "sh", "true"], check=False).returncode
    ):
        pytest.skip("no namespace to mount a small disk in")
    args = [
        "executor=simulated",
        "workload.num_requests=64",
        "batch=8",
        "baselines=[]",
        f"output={tmp_path / 'out'}",
    ]
    run = [sys.executable, "-m", "sarathi_lab.run", *args, f"tracking.dir={small}"]
    done = subprocess.run(
        [*own_mounts, command, "sh", *run], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (warning,) = warnings(done.stderr)
    assert "No space left" in warning or "no space left" in warning
    (summary,) = tmp_path.glob("out/*/*/summary.json")
    assert json.loads(summary.read_text())["throughput"] > 0


def test_a_service_that_hangs_is_ended_and_a_later_tracker_gets_another(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sarathi_lab.results.tracking.LOCAL_TIMEOUT", 5.0)
    started = time.monotonic()
    with WandbTracker(project="test", mode="offline", dir=str(tmp_path / "a")).run(**RUN) as run:
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("wandb-core"):
                process.send_signal(signal.SIGSTOP)
        run.log_summary({"throughput": 1.0})
    assert time.monotonic() - started < 40
    (warning,) = warnings(capsys.readouterr().err)
    assert "no answer within 5 s" in warning
    monkeypatch.setattr("sarathi_lab.results.tracking.LOCAL_TIMEOUT", 60.0)
    with WandbTracker(project="test", mode="offline", dir=str(tmp_path / "b")).run(**RUN) as run:
        run.log_summary({"throughput": 2.0})
    (path,) = (tmp_path / "b").rglob("run-*.wandb")
    assert leet(path)["summary"]["throughput"] == 2.0


def test_errors_of_the_block_come_through_a_failing_tracker(tmp_path):
    (tmp_path / "wandb").write_text("")

    def fail() -> None:
        with WandbTracker(project="test", mode="offline", dir=str(tmp_path)).run(**RUN):
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        fail()


def test_a_guard_waits_no_longer_than_told_and_does_not_try_again(capsys):
    guard = Guard("test", 0.2, "so what")
    calls: list[str] = []
    started = time.monotonic()
    guard._try(lambda: in_time(lambda: time.sleep(30), 0.1))
    guard.call(lambda: calls.append("tried again"))
    assert time.monotonic() - started < 20
    assert calls == []
    assert warnings(capsys.readouterr().err) == ["warning: W&B: no answer within 0.1 s; so what"]
