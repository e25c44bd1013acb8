"""Time on a shared CPU: what is left out of it, and whose cores the threads have."""

from __future__ import annotations

import pytest

from sarathi_lab.executor import steal_corrected_clock
from sarathi_lab.executor.steal_corrected_clock import (
    StealCorrectedClock,
)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A machine told by hand: `wait(by thread)`; in seconds `now`, and what this thread `ran`."""
    monkeypatch.setattr(steal_corrected_clock, "TASKS", tmp_path)
    now, ran = [0.0], [0.0]
    monkeypatch.setattr(steal_corrected_clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(steal_corrected_clock.time, "thread_time", lambda: ran[0])

    def wait(**seconds: float) -> None:
        for thread, value in seconds.items():
            folder = tmp_path / thread.strip("t")
            folder.mkdir(exist_ok=True)
            (folder / "schedstat").write_text(f"99 {int(1e9 * value)} 1")

    wait(t1=5.0, t2=7.0)
    return wait, now, ran


@pytest.mark.parametrize(
    ("waits", "computed", "lost"),
    [
        ((0.0, 0.0), 1.0, 0.0),
        ((0.4, 0.0), 0.6, 0.4),
        ((0.5, 0.5), 0.2, 0.75),  # when is not known: half of the second half is one's alone
        ((1.0, 0.3), 0.0, 1.0),
        ((9.0, 0.0), 0.0, 1.0),  # what began before the last reading is told when it ends
        ((0.0, 1.0), 0.9, 0.1),  # the second waits for its core, nobody for the second
    ],
)
def test_the_clock_stands_still_while_a_thread_waits_for_its_core(tasks, waits, computed, lost):
    wait, now, ran = tasks
    clock = StealCorrectedClock()
    wait(t1=5.0 + waits[0], t2=7.0 + waits[1])
    now[0], ran[0] = 1.0, computed
    assert clock() == pytest.approx(1.0 - lost)
    now[0] = 3.0  # nobody waited since
    assert clock() == pytest.approx(3.0 - lost)


def test_what_other_machines_took_is_that_of_the_cores_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(steal_corrected_clock, "STAT", tmp_path / "stat")
    monkeypatch.setattr(steal_corrected_clock, "CORES", [1])
    assert steal_corrected_clock.stolen() == []
    cores = "cpu0 1 2 3 4 5 6 7 50 0\ncpu1 1 2 3 4 5 6 7 350 0\n"
    (tmp_path / "stat").write_text(f"cpu 2 4 6 8 10 12 14 400 0\n{cores}intr 5 5 5 5 5 5 5 5 5\n")
    assert steal_corrected_clock.stolen() == [3.5]
