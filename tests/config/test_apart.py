"""Work in a process of its own: it may fail, crash or hang, and only that is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

import apart_work
import pytest

from sarathi_lab.config.apart import call_apart
from sarathi_lab.config.errors import RunError, UserError


def test_it_runs_in_another_process(tmp_path):
    call_apart(apart_work.write, tmp_path / "pid", limit=60)
    assert int((tmp_path / "pid").read_text()) != os.getpid()


def test_errors_come_back_with_their_kind_and_traceback():
    with pytest.raises(UserError, match="value=7 is too large; use 6"):
        call_apart(apart_work.refuse, limit=60)
    with pytest.raises(ZeroDivisionError) as raised:
        call_apart(apart_work.divide, limit=60)
    assert "apart_work.py" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="this and that"):
        call_apart(apart_work.fail_oddly, limit=60)


def test_a_crash_is_an_error_of_the_run():
    with pytest.raises(RunError, match="its process was killed by signal 9"):
        call_apart(apart_work.die, limit=60)


def test_what_hangs_is_ended_with_what_it_started_and_keeps_what_it_has(tmp_path):
    with pytest.raises(RunError, match="took more than limit=4 seconds and was ended"):
        call_apart(apart_work.hang, tmp_path, limit=4)
    assert (tmp_path / "found").read_text() == "half"
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    for _ in range(50):
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("what it started is still there")
