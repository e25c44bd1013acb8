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
from types import SimpleNamespace

import pandas as pd
import pytest
from wandb_records import records_of, summary_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.results import tracking
from sarathi_lab.results.tracking import Tracker, WandbTracker, as_tree, summary_columns
from sarathi_lab.results.wandb_writer import MAX_HISTORY_ROWS, PENDING, TrackedRun, Writer

RUN = TrackedRun(
    name="sarathi chunk=256",
    group="a sweep",
    job_type="run",
    folder="0",
    tags=["sarathi", "tiny"],
    config={"chunk": 256},
)
SUMMARY = {"throughput": 1234.56789, "roofline": 7.25}
NUM_ITERATIONS = MAX_HISTORY_ROWS * 3


def iterations(num_rows: int) -> pd.DataFrame:
    numbers = pd.Series(range(num_rows))
    tokens = {"num_prefill_tokens": 10, "num_decode_tokens": 2}
    return pd.DataFrame(
        {"iteration": numbers, "start": 0.5 * numbers, "end": numbers + 0.25, "mfu": 1.0, **tokens}
    )


def left(tracker: WandbTracker, run: TrackedRun, folder: Path) -> None:
    """Leave `run` in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    tracker.leave(replace(run, folder=str(folder)))


def the_run(folder: Path, name: str = "") -> Path:
    (path,) = folder.glob(f"wandb/offline-run-*-{name}*/run-*.wandb")
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A folder with runs of all kinds.

    Runs named light, full, failed and log are in folders of their names below sweep/.
    """
    output = tmp_path_factory.mktemp("written")
    sweep = output / "sweep"
    requests = {"request_id": [0, 1], "output_token_ids": [[1], [2]], "token_times": [[0.1], [0.2]]}
    for name in ("light", "full", "failed", "log"):
        (sweep / name).mkdir(parents=True)
        iterations(NUM_ITERATIONS).to_parquet(sweep / name / "iterations.parquet")
        pd.DataFrame(requests).to_parquet(sweep / name / "requests.parquet")
    logged = iterations(2)[["num_prefill_tokens", "num_decode_tokens"]]
    logged.to_parquet(sweep / "log" / "iterations.parquet")
    run = replace(RUN, summary=SUMMARY)
    full = replace(run, has_tables=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_DATA_DIR", raising=False)
        tracker = WandbTracker(project="test", mode="offline", dir=str(output))
        other = replace(tracker, dir=str(output / "other"))
        left(tracker, replace(run, name="light chunk=256"), sweep / "light")
        left(tracker, replace(full, name="log", has_history=True), sweep / "log")
        left(other, replace(full, name="full"), sweep / "full")
        failed = replace(run, has_failed=True, has_history=True, name="failed")
        left(tracker, replace(failed, baselines=["../full"]), sweep / "failed")
        writer = Writer()
        for name in ("failed", "light", "log"):
            writer.write(sweep / name)
        writer.close()
    assert writer.warnings == []
    return output


def test_runs_are_named_in_their_folders_by_what_was_swept(written):
    folder = the_run(written, "light").parent
    assert "light_chunk=256_" in folder.name
    # `wandb leet` takes what is behind the last hyphen for the id.
    assert (folder / f"run-{folder.name.rpartition('-')[2]}.wandb").is_file()
    assert not list(written.rglob(PENDING))


def test_a_light_run_is_its_summary_in_50_kb(written):
    shown, records = summary_of(the_run(written, "light")), records_of(the_run(written, "light"))
    assert (shown["name"], shown["project"]) == ("light chunk=256", "test")
    assert (shown["tags"], shown["config"]) == (RUN.tags, {"chunk": 256})
    public = {key: value for key, value in shown["summary"].items() if not key.startswith("_")}
    assert public == SUMMARY
    assert not {"history", "artifact"} & records.keys()
    parts = the_run(written, "light").parent.rglob("*")
    assert sum(part.lstat().st_blocks * 512 for part in parts) <= 50_000


def test_a_thinned_history_leaves_the_summary_as_it_was_given(written):
    shown = summary_of(the_run(written, "failed"))
    assert (shown["state"], shown["exit_code"]) == ("failed", 1)
    # The history's last row must not stand in for a summary number of the same name.
    public = {key: value for key, value in shown["summary"].items() if not key.startswith("_")}
    assert public == SUMMARY
    history = [row["item"] for row in records_of(the_run(written, "failed"))["history"]]
    assert len(history) == MAX_HISTORY_ROWS
    assert (history[0]["iteration"], history[-1]["iteration"]) == (0, NUM_ITERATIONS - 1)


def test_iterations_of_a_servers_log_which_have_no_times_cost_nothing(written):
    assert summary_of(the_run(written, "log"))["summary"]["throughput"] == SUMMARY["throughput"]
    assert "history" not in records_of(the_run(written, "log"))


def test_tables_become_one_artifact_below_the_output_folder_of_their_tracker(written):
    for output, name in ((written, "log"), (written / "other", "full")):
        shown = summary_of(the_run(output, name))["summary"]["requests"]
        assert (shown["nrows"], shown["ncols"]) == (2, 1)
        # Copies, for a later `wandb sync`, of both tables; the folder that was there before may
        # have been moved.
        copies = (output / "wandb" / "data").rglob("*")
        staged = {path.read_bytes() for path in copies if path.is_file()}
        assert {path.read_bytes() for path in (written / "sweep" / name).iterdir()} <= staged


def test_files_are_complete_when_they_are_closed_and_a_run_done_again_replaces_itself(tmp_path):
    """W&B's own `finish` returns before a file's last block is written, where the summary is."""
    tracker = WandbTracker(project="test", mode="offline", dir=str(tmp_path))
    run = replace(RUN, summary={f"quantity_{i}": i / 7 for i in range(150)})
    for folder in (tmp_path / "0", tmp_path / "1", tmp_path / "0"):
        left(tracker, run, folder)
        writer = Writer()
        writer.write(folder)
        writer.close()
        for path in tmp_path.rglob("run-*.wandb"):
            size = path.stat().st_size
            assert "exit" in records_of.__wrapped__(path)
            assert path.stat().st_size == size
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_what_jobs_and_earlier_commands_left_is_tracked_at_a_sweeps_end(tmp_path, monkeypatch):
    calls = []
    process = SimpleNamespace(write=calls.append, end=lambda: calls.append("end"))
    monkeypatch.setattr(tracking, "_writers", [process])
    tracker = WandbTracker(project="test", mode="offline", dir=str(tmp_path))
    folders = [tmp_path, tmp_path / "0", tmp_path / "baselines" / "orca-1"]
    for folder in folders:
        left(tracker, RUN, folder)
    tracker.keep(tmp_path / "1")  # has left none
    tracker.finish(tmp_path)
    assert calls == [*folders, "end"]
    assert tracking._writers == []


def test_baselines_are_columns_and_settings_a_tree():
    columns = summary_columns({"ttft_p50": 2.0}, {"orca": {"ttft_p50": 3.0, "throughput": 5.0}})
    own = {"ttft_p50": 2.0, "ms/ttft_p50": 2000.0}
    baseline = {"ttft_p50_orca": 3.0, "ms/ttft_p50_orca": 3000.0, "throughput_orca": 5.0}
    assert columns == own | baseline
    values = {"hardware": "h100", "slo.ttft": 2, "slo": "strict", "slo.tbt": 1, "workload.rate": 3}
    slo = {"option": "strict", "ttft": 2, "tbt": 1}
    assert as_tree(values) == {"hardware": "h100", "slo": slo, "workload": {"rate": 3}}


@pytest.mark.parametrize(
    ("iterations", "kept"), [("auto", [True, False]), (True, [True, True]), (False, [False] * 2)]
)
def test_iterations_decides_whose_tables_are_tracked(iterations, kept):
    tracker = WandbTracker("offline", "test", "outputs", iterations=iterations)
    assert [tracker.keeps_tables(is_measured=is_measured) for is_measured in (True, False)] == kept
    assert not Tracker().keeps_tables(is_measured=True)


def test_a_writer_that_is_killed_costs_one_line(tmp_path, capsys):
    tracker = WandbTracker(project="test", mode="offline", dir=str(tmp_path))
    tracker.start()
    tracking._writers[0]._process.kill()
    tracking._writers[0]._process.wait()
    left(tracker, RUN, tmp_path / "0")
    for _ in range(2):
        tracker.keep(tmp_path / "0", waits=True)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: W&B: the process that writes runs has ended (-9); results")
    tracker.finish(tmp_path / "other")
    assert not tracking._writers  # of the next command
    assert (tmp_path / "0" / PENDING).is_file()  # for it


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
from pathlib import Path, PosixPath
from sarathi_lab.results.tracking import WandbTracker
from sarathi_lab.results.wandb_writer import TrackedRun, Writer
tracker = WandbTracker(project='test', mode='offline', dir='.')
tracker.leave({replace(RUN, folder=str(tmp_path))!r})
writer = Writer()
writer.write(Path('.'))
writer.close()
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
    answer, tmp_path, monkeypatch
):
    tracker = WandbTracker(project="test", mode="online", dir=str(tmp_path), timeout=1)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with server(answer) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        writer = Writer()
        for folder in ("0", "1"):
            left(tracker, RUN, tmp_path / folder)
            writer.write(tmp_path / folder)
    (warning,) = writer.warnings
    assert warning.startswith("the server did not take the run")
    assert f"wandb sync {tmp_path}/wandb sends them" in warning
    assert [summary_of(path)["exit_code"] for path in tmp_path.rglob("*.wandb")] == [0, 0]
    assert not list(tmp_path.rglob(PENDING))


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path):
    (tmp_path / "wandb").write_text("a file where the folder should be")
    tracker = WandbTracker(project="test", mode="offline", dir=str(tmp_path))
    writer = Writer()
    for folder in ("0", "1"):
        left(tracker, RUN, tmp_path / folder)
        writer.write(tmp_path / folder)
    (warning,) = writer.warnings
    assert "File exists" in warning
    assert "results are complete without it" in warning


def test_unknown_modes_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"tracking\.mode=onlin is unknown"):
        WandbTracker(project="test", mode="onlin", dir=str(tmp_path))
    with pytest.raises(UserError, match=r"tracking\.iterations=1 is neither true nor false; use "):
        WandbTracker("offline", "test", str(tmp_path), iterations=1)
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
    null.start()
    null.leave(replace(RUN, folder=str(tmp_path)))
    null.keep(tmp_path, waits=True)
    null.finish(tmp_path)
    assert list(tmp_path.iterdir()) == []
