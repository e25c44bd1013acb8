"""W&B runs made offline, read back by W&B's own tool; and the null tracker, which has the same
methods.
"""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
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


def test_history_and_summary_are_what_was_told(tracker, tmp_path):
    summary = {"throughput": 1234.56789, "roofline": 7.25}
    tracker.track(replace(RUN, iterations=iterations(5), summary=summary))
    shown = summary_of(the_run(tmp_path))
    assert (shown["state"], shown["exit_code"]) == ("finished", 0)
    assert (shown["name"], shown["project"], shown["tags"]) == ("a run", "test", RUN.tags)
    assert shown["config"] == {"chunk": 256}
    # The history's last row must not stand in for a summary number of the same name.
    public = {key: value for key, value in shown["summary"].items() if not key.startswith("_")}
    assert public == summary
    assert len(records_of(the_run(tmp_path))["history"]) == 5


def test_a_long_history_is_thinned_and_keeps_its_ends(tracker, tmp_path):
    tracker.track(replace(RUN, iterations=iterations(MAX_HISTORY_ROWS * 3)))
    history = records_of(the_run(tmp_path))["history"]
    assert len(history) == MAX_HISTORY_ROWS
    assert history[0]["item"]["iteration"] == 0
    assert history[-1]["item"]["iteration"] == MAX_HISTORY_ROWS * 3 - 1


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


def test_a_run_that_stopped_is_marked_as_failed(tracker, tmp_path):
    tracker.track(replace(RUN, summary={"throughput": 1.0}, has_failed=True))
    shown = summary_of(the_run(tmp_path))
    assert (shown["state"], shown["exit_code"]) == ("failed", 1)
    assert shown["summary"]["throughput"] == 1.0


KEY = "a" * 40


def in_process(code: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with a home of its own: W&B remembers a login and its settings as long as a
    process lives.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "NETRC"))
    }
    env = {**inherited, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), **variables}
    command = [sys.executable, "-c", f"{IMPORTS}\n{code}"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path
    )


IMPORTS = "import os; from sarathi_lab.results.tracking import TrackedRun, WandbTracker"
CASES = {  # variables, netrc, and what is said of them
    "nobody": ({}, "", "nobody is logged in to W&B; run `wandb login`, or use tracking.mode=offl"),
    "short": ({"WANDB_API_KEY": "short"}, "", "the login is unusable"),
    "key": ({"WANDB_API_KEY": KEY}, "", None),
    "netrc": ({}, f"machine 127.0.0.1:9 login user password {KEY}", None),
}


def test_online_needs_a_login_which_is_checked_before_any_run(tmp_path):
    """Each case in a fork: W&B remembers a login as long as a process lives."""
    for name, (_, netrc, _) in CASES.items():
        (tmp_path / name).write_text(netrc)
    code = f"""
import wandb
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
    # A closed port stands in for the server: the check must not need it.
    done = in_process(code, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (0, "")
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for name, (_, _, error) in CASES.items():
        expected = "is fine" if error is None else f"UserError: tracking.mode=online, but {error}"
        assert said[name].startswith(expected), name


def test_offline_runs_print_nothing_and_send_nothing(tmp_path):
    code = f"WandbTracker(project='test', mode='offline', dir='.').track({RUN!r})"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = in_process(code, tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):  # nobody waits to be let in
            server.accept()
    assert the_run(tmp_path).is_file()


def test_unknown_modes_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"tracking\.mode=onlin is unknown"):
        WandbTracker(project="test", mode="onlin", dir=str(tmp_path))


def test_the_hint_is_a_command_that_can_be_copied():
    assert (
        WandbTracker(project="test", mode="offline", dir="my runs").hint()
        == "wandb leet 'my runs/wandb'"
    )


def test_the_null_tracker_has_the_same_methods_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    null = Tracker()
    null.check()
    assert null.hint() == ""
    null.track(replace(RUN, iterations=iterations(2), folder=tmp_path))
    assert list(tmp_path.iterdir()) == []
    for name, method in inspect.getmembers(Tracker, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(WandbTracker, name)).parameters
            assert own.keys() == inspect.signature(method).parameters.keys()
