"""Simulations shared among processes: the same numbers, and one line where one is killed."""

from __future__ import annotations

import os
import signal
from functools import partial

import pandas as pd
import pytest
from composed import config_of

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.experiment.cases import Round
from sarathi_lab.experiment.registry import FIGURES
from sarathi_lab.experiment.simulate import Bench, jobs_of, predict_all, run_all, simulate
from sarathi_lab.tasks.measure import policy_of

SIMULATED = ("executor=simulated", "hardware=h100", "model=llama3-8b", "tracking=none")


def test_rounds_cases_and_figures_are_the_same_by_any_number_of_processes():
    cfg = config_of("task=measure", *SIMULATED)
    on = [(load_option("model", "llama3-8b"), build(cfg.executor))]
    mine: list[list[pd.DataFrame]] = []
    for number in (1, 2):
        tables = predict_all(jobs_of("table2"), 1, None, number)
        own, settings = FIGURES["sarathi_serve_stalls"], {"make_policy": partial(policy_of, cfg)}
        tables += simulate(own, on, own.sizes("dry"), number, seed=0, **settings).values()
        mine.append(tables)
    for one, two in zip(*mine, strict=True):
        pd.testing.assert_frame_equal(one, two, check_exact=True)
        assert len(one)


def die(parent, seed):
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return []


def test_a_killed_process_is_one_line():
    bench = Bench(("killed",), partial(int, os.getpid()))
    with pytest.raises(RunError, match="was killed; the system may have been out of memory"):
        run_all("dying", "parts", [(bench, [Round(die, 0, {})] * 4)], 2)
