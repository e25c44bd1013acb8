"""W&B down, slow, hanging or out of disk: the measurement ends as if nothing were wrong, with one
line of warning.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from wandb_records import summary_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.tracking import TrackedRun, WandbTracker

KEY = "a" * 40
RUN = TrackedRun("a run", "a sweep", "serve", summary={"throughput": 1.0})
SMALL = ["executor=simulated", "workload.num_requests=3", "batch=2"]


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


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: W&B")]


@pytest.fixture
def online(monkeypatch):
    """Logs in at the address that it is called with."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return lambda url: monkeypatch.setenv("WANDB_BASE_URL", url)


def test_a_hanging_server_costs_a_sweep_one_line_and_a_bounded_wait_and_loses_nothing(tmp_path):
    args = [*SMALL, "chunk=128,256", "-m", "baselines=[orca]"]
    args += ["tracking.mode=online", "tracking.timeout=1", f"output={tmp_path}"]
    command = [sys.executable, "-m", "sarathi_lab.run", *args]  # a login lasts for a process
    with server(hang) as url:
        own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        env = {**own, "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=env, check=False
        )
    assert done.returncode == 0, done.stderr
    (warning,) = warnings(done.stderr)
    assert "the server did not take the run within 1 s" in warning
    assert f"wandb sync {tmp_path}/wandb sends them" in warning
    assert len(list(tmp_path.rglob("summary.json"))) == 3
    kept = map(summary_of, tmp_path.glob("wandb/offline-run-*/*.wandb"))
    runs = {run["name"]: run for run in kept}  # for `wandb sync`
    own = {"sarathi chunk=128", "sarathi chunk=256"}
    assert runs.keys() == {"baseline orca", *own, "sweep of chunk"}
    assert all(run["exit_code"] == 0 for run in runs.values())
    assert runs["sarathi chunk=256"]["summary"]["throughput"] > 0
    assert runs["sweep of chunk"]["summary"]["sweep"]["nrows"] == 3


@pytest.mark.parametrize("answer", [refuse, break_off, None])
def test_a_server_that_takes_nothing_is_tried_once(tmp_path, answer, online, capsys):
    tracker = WandbTracker(project="test", mode="online", dir=str(tmp_path), timeout=2)
    with server(answer or hang) as url:
        online(url if answer else "http://127.0.0.1:9")  # a closed port
        for _ in range(2):
            tracker.track(RUN)
    (warning,) = warnings(capsys.readouterr().err)
    assert "the server did not take the run" in warning
    assert [summary_of(path)["exit_code"] for path in tmp_path.rglob("*.wandb")] == [0, 0]


def test_a_run_folder_that_cannot_be_written_costs_one_line(tmp_path, capsys):
    (tmp_path / "wandb").write_text("a file where the folder should be")
    tracker = WandbTracker(project="test", mode="offline", dir=str(tmp_path))
    for _ in range(2):
        tracker.track(RUN)
    (warning,) = warnings(capsys.readouterr().err)
    assert "File exists" in warning
    assert "results are complete without it" in warning


def test_online_runs_without_wandb_are_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb, or use"):
        WandbTracker("online", "p", str(tmp_path)).check()
