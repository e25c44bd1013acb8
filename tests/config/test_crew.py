"""Simulations on several cores: the same numbers as on one, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time

import pandas as pd
import pytest
from composed import run

from sarathi_lab.config.crew import Crew, usable_cores
from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.experiment.trials import likely


def made() -> dict[str, int]:
    return {"process": os.getpid()}


def slow(own: dict[str, int], item: int) -> tuple[int, int]:
    time.sleep(0.1)
    assert own["process"] == os.getpid()
    return item * item, os.getpid()


def test_values_come_in_order_from_several_processes_each_told_of_once():
    steps = []
    crew = Crew(made, 2)
    found = crew.map(slow, range(24), steps.append)
    assert [value for value, _ in found] == [item * item for item in range(24)]
    assert len({process for _, process in found}) == 2
    assert steps == [1] * 24
    assert Crew(made, 1).map(slow, [3]) == [(9, os.getpid())]


def fails(own: object, item: int) -> None:
    time.sleep(0.05)
    if item == 11:
        raise UserError(f"no room for {item}")


def kills(parent: int, item: int) -> None:
    time.sleep(0.05)
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_of_another_process_is_raised_here_and_a_killed_one_is_told():
    with pytest.raises(UserError, match="no room for 11"):
        Crew(made, 2).map(fails, range(200))
    with pytest.raises(RunError, match="was killed; the system may have been out of memory"):
        Crew(os.getpid().__int__, 2).map(kills, range(200))


def test_a_slurm_job_takes_the_cores_that_it_was_given(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert usable_cores() == 1
    assert Crew(made).size == 1


SIMULATED = ("executor=simulated", "hardware=h100", "model=llama3-8b", "tracking=none")


def test_a_capacity_is_the_same_with_runs_ahead(tmp_path):
    settings = ("slo=strict", "batch=8", "workload=uniform", "workload.num_requests=24")
    own = ("task=capacity", "task.precision=0.2", "task.doublings=2")
    one, two = (
        run(tmp_path, *own, *SIMULATED, *settings, f"task.processes={number}") for number in (1, 2)
    )
    pd.testing.assert_frame_equal(one.tables["capacity.parquet"], two.tables["capacity.parquet"])
    assert one.summary == two.summary
    assert one.summary["capacity_trials"] > 8


def test_a_guess_goes_by_the_same_requests_first_then_by_others():
    outcomes = {(0, 8, 10): True, (0, 8, 12): False, (0, 4, 20): True}
    assert likely((0, 8, 9), outcomes)
    assert not likely((0, 8, 13), outcomes)
    assert likely((1, 8, 10), outcomes)
    assert not likely((1, 8, 12), outcomes)
    assert likely((0, 2, 17), outcomes)
    assert not likely((0, 2, 15), outcomes)
    assert not likely((0, 8, 0), {})
