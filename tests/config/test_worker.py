"""Work in a process of its own: it may fail, crash or hang, and only that is an error."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from types import SimpleNamespace

import pytest
import worker_functions

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.processes import (
    require_child_processes,
    run_with_timeout,
    start_methods_of_python,
)


def test_it_runs_in_another_process_whose_errors_come_back_with_their_traceback(tmp_path):
    run_with_timeout(worker_functions.write, tmp_path / "pid", limit=60)
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    with pytest.raises(UserError, match="value=7 is too large; use 6"):
        run_with_timeout(worker_functions.refuse, limit=60)
    with pytest.raises(ZeroDivisionError) as raised:
        run_with_timeout(worker_functions.divide, limit=60)
    assert "worker_functions.py" in str(raised.value.__cause__)


def test_a_crash_is_an_error_of_the_run():
    with pytest.raises(RunError, match="its process was killed"):
        run_with_timeout(worker_functions.die, limit=60)


def test_what_hangs_is_ended_with_what_it_started(tmp_path):
    with pytest.raises(RunError, match="took more than limit=4 s and was ended"):
        run_with_timeout(worker_functions.hang, tmp_path, limit=4)
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    for _ in range(50):
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("what it started is still there")


@pytest.mark.parametrize("inherited", ["loky", "loky_init_main", "fork", "spawn", "forkserver"])
def test_libraries_start_processes_where_another_library_started_this_one(inherited):
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(inherited, force=True)
    try:
        with start_methods_of_python():
            meanwhile = multiprocessing.get_start_method()
            assert get_preparation_data("worker")["start_method"] == meanwhile
        assert multiprocessing.get_start_method() == inherited
    finally:
        multiprocessing.set_start_method(before, force=True)
    methods = multiprocessing.get_all_start_methods()
    assert meanwhile == (inherited if inherited in methods else "spawn")


def test_a_daemon_may_start_no_workers(monkeypatch):
    require_child_processes()
    daemon = SimpleNamespace(name="PoolWorker-1", daemon=True)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: daemon)
    with pytest.raises(UserError, match=r"PoolWorker-1 is a daemon.*hydra.launcher.backend=loky"):
        require_child_processes()
