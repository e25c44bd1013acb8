"""Simulations shared among processes: the same numbers, and one line where one is killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
from composed import config_of

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.experiment.grid import Grid
from sarathi_lab.experiment.points import Part
from sarathi_lab.experiment.registry import CATALOG, SimulatedJob, paper_jobs
from sarathi_lab.experiment.simulate import simulate
from sarathi_lab.tasks.measure import policy_of

SIMULATED = ("executor=simulated", "hardware=h100", "model=llama3-8b", "tracking=none")


def test_points_are_the_same_by_any_number_of_processes():
    cfg, own = config_of("task=measure", *SIMULATED), CATALOG["sarathi_serve_stalls"]
    spec, backend = load_option("model", "llama3-8b"), build(cfg.executor)
    job = SimulatedJob(own, spec, backend, own.sizes("dry"), make_policy=partial(policy_of, cfg))
    (one,), (two,) = (simulate([job], number) for number in (1, 2))
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    assert len(one)


def die(parent, seed):
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return []


class Dying(Grid):
    def parts(self, spec, sizes):
        return [Part(die, seed=0)] * 4

    def bench(self, job):
        return job.seed

    def __reduce__(self):
        return Dying, (self.name, die, "", 0.0)


def test_a_killed_process_is_one_line():
    job = replace(paper_jobs(CATALOG["table2"])[0], experiment=Dying("dying", die, "", 0.0))
    with pytest.raises(RunError, match="was killed; the system may have been out of memory"):
        simulate([replace(job, seed=os.getpid())], 2)
