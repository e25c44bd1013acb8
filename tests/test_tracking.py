"""W&B runs made offline, read back by W&B's own tool; and the null tracker, which has the same methods."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from sarathi_lab.errors import UserError
from sarathi_lab.tracking import MAX_HISTORY_ROWS, NullTracker, TrackedRun, Tracker, WandbTracker

WANDB = str(Path(sys.executable).parent / "wandb")
RUN = {"name": "a run", "group": "a sweep", "job_type": "run", "tags": ["sarathi", "tiny"], "config": {"chunk": 256}}


def leet(*args: str) -> str:
    return subprocess.run([WANDB, "leet", "inspect", *args], capture_output=True, text=True, timeout=60).stdout


def the_run(folder: Path) -> Path:
    (path,) = folder.rglob("run-*.wandb")
    return path


@pytest.fixture
def tracker(tmp_path, monkeypatch) -> WandbTracker:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    return WandbTracker(project="test", mode="offline", dir=str(tmp_path))


def iterations(num_rows: int) -> pd.DataFrame:
    return pd.DataFrame({"iteration": range(num_rows), "start": [0.5 * i for i in range(num_rows)], "floor": 1.0})


def test_history_and_summary_are_what_was_logged(tracker, tmp_path):
    summary = {"throughput": 1234.56789, "floor": 7.25}
    with tracker.run(**RUN) as run:
        run.log_iterations(iterations(5))
        run.log_summary(summary)
    shown = json.loads(leet("--summary", "--json", str(the_run(tmp_path))))
    assert shown["state"] == "finished"
    assert (shown["name"], shown["project"], shown["tags"]) == ("a run", "test", ["sarathi", "tiny"])
    assert shown["config"] == {"chunk": 256}
    # The history's last row must not stand in for a summary number of the same name.
    assert {key: value for key, value in shown["summary"].items() if not key.startswith("_")} == summary
    history = [row for row in leet("--json", str(the_run(tmp_path))).splitlines() if '"type":"history"' in row]
    assert len(history) == 5


def test_a_long_history_is_thinned_and_keeps_its_ends(tracker, tmp_path):
    with tracker.run(**RUN) as run:
        run.log_iterations(iterations(MAX_HISTORY_ROWS * 3))
    lines = leet("--json", str(the_run(tmp_path))).splitlines()
    history = [line for line in lines if '"type":"history"' in line]
    assert len(history) == MAX_HISTORY_ROWS
    assert str(MAX_HISTORY_ROWS * 3 - 1) in history[-1]


def test_tables_become_one_artifact_below_the_output_folder(tracker, tmp_path):
    tables = tmp_path / "tables"
    tables.mkdir()
    iterations(3).to_parquet(tables / "iterations.parquet")
    requests = pd.DataFrame({"request_id": [0, 1], "output_token_ids": [[1], [2]], "token_times": [[0.1], [0.2]]})
    requests.to_parquet(tables / "requests.parquet")
    with tracker.run(**RUN) as run:
        run.log_tables(tables)
    shown = json.loads(leet("--summary", "--json", str(the_run(tmp_path))))
    assert shown["summary"]["requests"]["nrows"] == 2
    assert shown["summary"]["requests"]["ncols"] == 1
    staged = list((tmp_path / "wandb" / "data").rglob("tmp*"))
    assert len(staged) >= 2


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


def test_online_needs_a_login_and_offline_none(tracker, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = WandbTracker(project="test", mode="online", dir=str(tmp_path))
    tracker.check()
    with pytest.raises(UserError, match="wandb login"):
        online.check()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    online.check()
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    online.check()


def test_unknown_modes_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"tracking\.mode=onlin is unknown"):
        WandbTracker(project="test", mode="onlin", dir=str(tmp_path))


def test_the_null_tracker_has_the_same_methods_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    null: Tracker = NullTracker()
    null.check()
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
