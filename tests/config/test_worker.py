"""Processes that libraries start, and where none may be started."""

from __future__ import annotations

import multiprocessing
from multiprocessing.spawn import get_preparation_data
from types import SimpleNamespace

import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.processes import require_child_processes, start_methods_of_python


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
