"""W&B runs made offline, read back by W&B's own tool; W&B missing, down or hanging; and the null
tracker.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from wandb_records import records_of, summary_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.tracking import MAX_HISTORY_ROWS, TrackedRun, Tracker, WandbTracker

RUN = TrackedRun(
    name="a run", group="a sweep", job_type="run", tags=["sarathi", "tiny"], config={"chunk": 256}
)


def the_run(folder: Path) -> Path:
    (path,) = folder.rglob("run-*.wandb")
    return path


@pytest.fixture
def tracker(tmp_path, monkeypatch) -> WandbTracker:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    return WandbTracker(project="test", mode="offline", dir=str(tmp_path))


def iterations(num_rows: int) -> pd.DataFrame:
    numbers = pd.Series(range(num_rows))
    tokens = {"num_prefill_tokens": 10, "num_decode_tokens": 2}
    return pd.DataFrame(
        {"iteration": numbers, "start": 0.5 * numbers, "end": numbers + 0.25, "mfu": 1.0, **tokens}
    )


def test_iterations_of_a_servers_log_which_have_no_times_cost_nothing(tracker, tmp_path, capsys):
    logged = iterations(2)[["num_prefill_tokens", "num_decode_tokens"]]
    (tables := tmp_path / "tables").mkdir()
    pd.DataFrame({"request_id": [0, 1]}).to_parquet(tables / "requests.parquet")  # no token's time
    tracker.track(replace(RUN, iterations=logged, summary={"throughput": 2.0}, folder=tables))
    assert "warning" not in capsys.readouterr().out
    assert summary_of(the_run(tmp_path))["summary"]["throughput"] == 2.0


def test_summary_and_a_thinned_history_are_what_was_given(tracker, tmp_path):
    summary = {"throughput": 1234.56789, "roofline": 7.25}
    num_rows = MAX_HISTORY_ROWS * 3
    tracker.track(replace(RUN, iterations=iterations(num_rows), summary=summary, has_failed=True))
    shown = summary_of(the_run(tmp_path))
    assert (shown["state"], shown["exit_code"]) == ("failed", 1)
    assert (shown["name"], shown["project"], shown["tags"]) == ("a run", "test", RUN.tags)
    assert shown["config"] == {"chunk": 256}
    # The history's last row must not stand in for a summary number of the same name.
    public = {key: value for key, value in shown["summary"].items() if not key.startswith("_")}
    assert public == summary
    history = [row["item"] for row in records_of(the_run(tmp_path))["history"]]
    assert len(history) == MAX_HISTORY_ROWS
    assert (history[0]["iteration"], history[-1]["iteration"]) == (0, num_rows - 1)


def test_tables_become_one_artifact_below_the_output_folder_of_their_tracker(tracker, tmp_path):
    tables = tmp_path / "tables"
    tables.mkdir()
    iterations(3).to_parquet(tables / "iterations.parquet")
    requests = pd.DataFrame(
        {"request_id": [0, 1], "output_token_ids": [[1], [2]], "token_times": [[0.1], [0.2]]}
    )
    requests.to_parquet(tables / "requests.parquet")
    for each in (tracker, replace(tracker, dir=str(tmp_path / "other"))):
        each.track(replace(RUN, folder=tables))
        (path,) = Path(each.dir).glob("wandb/offline-run-*/*.wandb")
        shown = summary_of(path)["summary"]["requests"]
        assert (shown["nrows"], shown["ncols"]) == (2, 1)
        # Copies, for a later `wandb sync`, of both tables; the folder that was there before may
        # have been moved.
        copies = Path(each.dir, "wandb", "data").rglob("*")
        staged = {path.read_bytes() for path in copies if path.is_file()}
        assert {path.read_bytes() for path in tables.iterdir()} <= staged


KEY = "a" * 40


CASES = {  # variables, netrc, and the error
    "none": (
        {},
        "",
        "no user is logged in to W&B; run `python -m wandb login`, or use tracking.mode=off",
    ),
    "short": ({"WANDB_API_KEY": "short"}, "", "the login is unusable"),
    "key": ({"WANDB_API_KEY": KEY}, "", None),
    "netrc": ({}, f"machine 127.0.0.1:9 login user password {KEY}", None),
}


def test_offline_runs_send_nothing_and_a_login_is_checked_without_the_server(tmp_path):
    """In a process with a home of its own, each login in a fork: W&B remembers it as long as a
    process lives.
    """
    for name, (_, netrc, _) in CASES.items():
        (tmp_path / name).write_text(netrc)
    code = f"""
import os
from sarathi_lab.results.tracking import TrackedRun, WandbTracker
WandbTracker(project='test', mode='offline', dir='.').track({RUN!r})
tracker = WandbTracker(project="test", mode="online", dir=".")
for name, (variables, _, _) in {CASES!r}.items():
    if (child := os.fork()) == 0:
        os.environ.update({{"NETRC": os.path.abspath(name), **variables}})
        try:
            tracker.check()
            print(name, "is fine", flush=True)
        except Exception as error:
            print(name, f"{{type(error).__name__}}: {{error}}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "NETRC"))}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        (tmp_path / "netrc").write_text(CASES["netrc"][1].replace(":9 ", f":{port} "))
        env = {**kept, "HOME": str(tmp_path), "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
        listening.settimeout(0.2)
        with pytest.raises(TimeoutError):  # no connection waits
            listening.accept()
    assert (done.returncode, done.stderr) == (0, "")
    assert the_run(tmp_path).is_file()
    printed = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for name, (_, _, error) in CASES.items():
        expected = "is fine" if error is None else f"UserError: tracking.mode=online, but {error}"
        assert printed[name].startswith(expected), name


def hang(connection: socket.socket) -> None:
    time.sleep(600)


def refuse(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
    connection.close()


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that treats every connection so, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):  # closed
                while True:
                    connection = listening.accept()[0]
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("answer", [hang, refuse])
def test_a_server_that_takes_nothing_costs_one_line_and_loses_nothing(
    answer, tmp_path, monkeypatch, capsys
):
    tracker = WandbTracker(project="test", mode="online", dir=str(tmp_path), timeout=1)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with server(answer) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        for _ in range(2):
            tracker.track(replace(RUN, name=f"to {answer.__name__}"))
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: W&B: the server did not take the run")
    assert f"wandb sync {tmp_path}/wandb sends them" in warning
    assert [summary_of(path)["exit_code"] for path in tmp_path.rglob("*.wandb")] == [0, 0]


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path, capsys):
    (tmp_path / "wandb").write_text("a file where the folder should be")
    for _ in range(2):
        WandbTracker(project="test", mode="offline", dir=str(tmp_path)).track(RUN)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "File exists" in warning
    assert "results are complete without it" in warning


def test_unknown_modes_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"tracking\.mode=onlin is unknown"):
        WandbTracker(project="test", mode="onlin", dir=str(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb, or use"):
        WandbTracker("online", "p", str(tmp_path)).check()


def test_the_hint_is_a_command_and_the_null_tracker_leaves_nothing(tmp_path, monkeypatch):
    own = WandbTracker(project="test", mode="offline", dir="my runs")
    assert own.hint() == "python -m wandb leet 'my runs/wandb'"
    monkeypatch.chdir(tmp_path)
    null = Tracker()
    null.check()
    assert null.hint() == ""
    null.track(replace(RUN, iterations=iterations(2), folder=tmp_path))
    assert list(tmp_path.iterdir()) == []
