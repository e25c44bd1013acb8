"""W&B runs made offline, read back by W&B's own tool; and the null tracker, which has the same
methods.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.tracking import (
    MAX_HISTORY_ROWS,
    NullTracker,
    TrackedRun,
    Tracker,
    WandbTracker,
)

WANDB = str(Path(sys.executable).parent / "wandb")
RUN = {
    "name": "a run",
    "group": "a sweep",
    "job_type": "run",
    "tags": ["sarathi", "tiny"],
    "config": {"chunk": 256},
}


def leet(*args: str) -> str:
    return subprocess.run(
        [WANDB, "leet", "inspect", *args], capture_output=True, text=True, timeout=60
    ).stdout


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


def test_history_and_summary_are_what_was_logged(tracker, tmp_path):
    summary = {"throughput": 1234.56789, "roofline": 7.25}
    with tracker.run(**RUN) as run:
        run.log_iterations(iterations(5))
        run.log_summary(summary)
    shown = json.loads(leet("--summary", "--json", str(the_run(tmp_path))))
    assert shown["state"] == "finished"
    assert (shown["name"], shown["project"], shown["tags"]) == (
        "a run",
        "test",
        ["sarathi", "tiny"],
    )
    assert shown["config"] == {"chunk": 256}
    # The history's last row must not stand in for a summary number of the same name.
    assert {
        key: value for key, value in shown["summary"].items() if not key.startswith("_")
    } == summary
    history = [
        row
        for row in leet("--json", str(the_run(tmp_path))).splitlines()
        if '"type":"history"' in row
    ]
    assert len(history) == 5


def test_a_long_history_is_thinned_and_keeps_its_ends(tracker, tmp_path):
    with tracker.run(**RUN) as run:
        run.log_iterations(iterations(MAX_HISTORY_ROWS * 3))
    lines = leet("--json", str(the_run(tmp_path))).splitlines()
    history = [line for line in lines if '"type":"history"' in line]
    assert len(history) == MAX_HISTORY_ROWS
    assert str(MAX_HISTORY_ROWS * 3 - 1) in history[-1]


def test_tables_become_one_artifact_below_the_output_folder_of_their_tracker(tracker, tmp_path):
    tables = tmp_path / "tables"
    tables.mkdir()
    iterations(3).to_parquet(tables / "iterations.parquet")
    requests = pd.DataFrame(
        {"request_id": [0, 1], "output_token_ids": [[1], [2]], "token_times": [[0.1], [0.2]]}
    )
    requests.to_parquet(tables / "requests.parquet")
    for each in (tracker, replace(tracker, dir=str(tmp_path / "other"))):
        with each.run(**RUN) as run:
            run.log_tables(tables)
        shown = json.loads(
            leet("--summary", "--json", str(*Path(each.dir).glob("wandb/offline-run-*/*.wandb")))
        )
        assert shown["summary"]["requests"]["nrows"] == 2
        assert shown["summary"]["requests"]["ncols"] == 1
        # Copies, for a later `wandb sync`, of both tables; the folder that was there before may
        # have been moved.
        staged = {
            path.read_bytes()
            for path in Path(each.dir, "wandb", "data").rglob("*")
            if path.is_file()
        }
        assert {path.read_bytes() for path in tables.iterdir()} <= staged


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_closes_its_run_as_failed(tracker, tmp_path, error):
    def fail() -> None:
        with tracker.run(**RUN) as run:
            run.log_summary({"throughput": 1.0})
            raise error

    with pytest.raises(error):
        fail()
    shown = json.loads(leet("--summary", "--json", str(the_run(tmp_path))))
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
    command = [
        sys.executable,
        "-c",
        f"from sarathi_lab.results.tracking import WandbTracker\n{code}",
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path
    )


@pytest.mark.parametrize(
    ("variables", "netrc", "error"),
    [
        ({}, "", "nobody is logged in to W&B; run `wandb login`, or use tracking.mode=offline"),
        ({"WANDB_API_KEY": "short"}, "", "the login is unusable"),
        ({"WANDB_API_KEY": KEY}, "", None),
        (
            {"WANDB_BASE_URL": "http://127.0.0.1:9"},
            f"machine 127.0.0.1:9 login user password {KEY}",
            None,
        ),
    ],
)
def test_online_needs_a_login_which_is_checked_before_any_run(tmp_path, variables, netrc, error):
    (tmp_path / "netrc").write_text(netrc)
    # A closed port stands in for the server: the check must not need it.
    variables = {"WANDB_BASE_URL": "http://127.0.0.1:9", **variables}
    done = in_process(
        "WandbTracker(project='test', mode='online', dir='.').check()", tmp_path, **variables
    )
    if error is None:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    else:
        assert done.returncode == 1
        assert f"UserError: tracking.mode=online, but {error}" in done.stderr.splitlines()[-1]


def one_run(mode: str) -> str:
    tracker = f"WandbTracker(project='test', mode='{mode}', dir='.')"
    return f"with {tracker}.run(**{RUN}) as run: run.log_summary({{'mfu': 0.5}})"


def test_offline_runs_print_nothing_and_send_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = in_process(one_run("offline"), tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
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
    null: Tracker = NullTracker()
    null.check()
    assert null.hint() == ""
    with null.run(**RUN) as run:
        run.log_iterations(iterations(2))
        run.log_summary({})
        run.log_tables(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for protocol in (Tracker, TrackedRun):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                assert inspect.signature(getattr(NullTracker, name)).parameters.keys() == (
                    inspect.signature(method).parameters.keys()
                )
