"""What the experiments of adaptive budgets count, by hand and held against the logs of P-PAS."""

from __future__ import annotations

import pandas as pd
import pytest
from helpers import requests_of

from sarathi_lab.extensions.after_sarathi.adaptive_budgets import (
    aimed,
    longest_queue,
    phased,
    within,
)
from sarathi_lab.policy import SarathiServe
from sarathi_lab.policy.zoo import Lprs, Niyama
from sarathi_lab.results.serving_metrics import Slo

SLO = Slo(name="two", ttft=1.0, tbt=0.5)


@pytest.mark.parametrize(
    ("rate", "logged"),
    [(0.4, [13, 13, 11, 15, 18]), (1.0, [22, 32, 21, 25, 28]), (2.0, [41, 47, 37, 43, 50])],
)
def test_arrivals_are_as_many_as_p_pas_was_measured_with(rate, logged):
    phases = [(10, 0.2), (10, rate), (10, 0.2), (10, rate), (10, 0.2)]
    assert [len(phased(phases, seed)) for seed in range(5)] == logged


def test_a_deadline_forgives_a_gap_that_was_saved_up_and_a_gap_does_not():
    times = [[2.1, 2.2, 3.4], [2.1, 3.5, 3.6], [3.1, 3.2]]
    table = pd.DataFrame(
        {
            "arrival_time": [2.0, 2.0, 2.0],
            "token_times": times,
            "first_token_time": [own[0] for own in times],
            "first_scheduled_time": [2.0, 2.0, 2.0],
            "finish_time": [own[-1] for own in times],
            "output_len": [len(own) for own in times],
        }
    )
    # The second token of the second request was due at 3.5, the first of the third at 3.
    assert within(table, SLO, "deadlines").tolist() == [True, True, False]
    assert within(table, SLO, "gaps").tolist() == [False, False, False]


def test_the_longest_queue_of_prompts_by_hand():
    """Of 10 tokens a second: 1 s waits, then 0.5 s and 2 s, then 1.5 s and 0.5 s."""
    requests = requests_of((10, 1), (20, 1), (5, 1), arrivals=[0.0, 0.5, 1.5])
    assert longest_queue(requests, 10.0, 0.0) == pytest.approx(2.5)
    assert longest_queue(requests, 10.0, 1 / 3) == pytest.approx(0.5)  # without the longest


def test_policies_are_aimed_at_the_objective():
    niyama = aimed(Niyama(), SLO, "deadlines")
    assert (niyama.ttft, niyama.tbt, niyama.since) == (1.0, 0.5, "arrival")
    assert aimed(Niyama(), SLO, "gaps").since == "last_token"
    assert aimed(Lprs(), SLO, "gaps").target_time == 0.5
    assert aimed(SarathiServe(), SLO, "gaps") == SarathiServe()
