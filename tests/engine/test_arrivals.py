"""How requests arrive: the processes, users who wait for their answers, priorities, and ten
thousand at a time.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from composed import config_of
from helpers import ScriptedExecutor, requests_of, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.arrivals import Arrivals, ClosedLoop, behind_front_end
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.policy import Orca, RequestLevel, SarathiServe
from sarathi_lab.tasks.plan import make_plan
from sarathi_lab.workload.base import Arriving
from sarathi_lab.workload.synthetic import PaperGrid


def grid(**settings) -> PaperGrid:
    return PaperGrid(**{"num_requests": 50, "seq_len": 8, "pd_ratio": 3, "seed": 0, **settings})


def times_of(num_requests: int = 20_000, seed: int = 1, **settings) -> np.ndarray:
    return Arriving(seed=seed, **settings).times(num_requests)


def served(arrivals, executor=None, policy=None, **kwargs) -> pd.DataFrame:
    ledger = Ledger()
    run_engine(
        arrivals, scheduler_for(policy or Orca(), **kwargs), executor or ScriptedExecutor(), ledger
    )
    return ledger.requests()


def test_a_front_end_takes_requests_one_after_the_other():
    """Of 2 s each: those sent at 0 and 1 s are there at 2 and 4 s, that of 9 s at 11 s."""
    sent = Arrivals(requests_of((4, 1), (4, 1), (4, 1), arrivals=[0.0, 1.0, 9.0]))
    arrivals = behind_front_end(sent, 2.0)
    times = []
    for _ in sent.requests:
        times.append(arrivals.next_time)
        assert arrivals.pop().arrival_time == sent.requests[len(times) - 1].arrival_time
    assert times == [2.0, 4.0, 11.0]
    assert behind_front_end(sent, 0.0) is sent


def test_users_behind_a_front_end_wait_for_it_too():
    requests = requests_of((4, 1), (4, 1))
    alone = served(ClosedLoop(requests, 1))
    behind = served(behind_front_end(ClosedLoop(requests, 1), 100.0))
    waited = behind.finish_time - behind.arrival_time
    assert waited.tolist() == pytest.approx((alone.finish_time - alone.arrival_time + 100).tolist())


@pytest.mark.parametrize(("host", "rate"), [("vllm_http", 44.0), ("sglang_http", 128.0)])
def test_a_hosts_front_end_bounds_the_requests_a_second(host, rate):
    settings = ["executor=simulated", "model=tiny", "workload.num_requests=50"]
    plan = make_plan(config_of(*settings, f"host={host}"))
    scheduler, executor = plan.build()
    ledger = Ledger()
    run_engine(plan.load.arrivals(), scheduler, executor, ledger)
    last_passed = 50 / rate
    assert last_passed * 0.99 <= ledger.requests().finish_time.max() <= 2 * last_passed


def test_gamma_gaps_have_their_mean_and_variation_and_with_1_are_exponential():
    for cv in (0.3, 1.0, 3.0):
        gaps = np.diff(times_of(arrivals="gamma", rate=4.0, cv=cv))
        assert gaps.mean() == pytest.approx(0.25, rel=0.06)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    poisson = times_of(arrivals="poisson", rate=4.0)
    assert np.allclose(times_of(arrivals="gamma", rate=4.0, cv=1.0), poisson)


@pytest.mark.parametrize("settings", [{"arrivals": "gamma", "cv": 2.5}, {"arrivals": "poisson"}])
def test_rates_share_their_random_numbers_and_so_do_more_requests(settings):
    times = times_of(num_requests=100, rate=2.0, **settings)
    assert np.allclose(times_of(num_requests=100, rate=8.0, **settings), times / 4)
    assert np.array_equal(times_of(num_requests=60, rate=2.0, **settings), times[:60])
    assert not np.allclose(times_of(num_requests=100, rate=2.0, seed=2, **settings), times)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"arrivals": "weekly"}, "arrivals=weekly is unknown"),
        ({"arrivals": "gamma", "rate": 2.0}, "needs workload.cv, the coefficient of variation"),
        ({"arrivals": "gamma", "rate": 2.0, "cv": 200.0}, "cv=200.0 exceeds 100"),
        (
            {"arrivals": "poisson", "rate": 2.0, "cv": 2.0},
            "cv=2.0 has no effect on poisson arrivals.*arrivals=gamma",
        ),
        ({"arrivals": "users"}, "needs workload.users"),
        (
            {"arrivals": "users", "users": 2, "rate": 1.0},
            "rate=1.0 has no effect on users arrivals",
        ),
        (
            {"arrivals": "closed", "users": 2},
            "users=2 has no effect on closed arrivals.*arrivals=users",
        ),
        ({"rate": 1.0, "users": 2}, "rate=1.0 and workload.users=2 are for different arrivals"),
        ({"cv": 2.0}, "arrivals=gamma needs workload.rate"),
        ({"think_time": 1.0}, "arrivals=users needs workload.users"),
        ({"priorities": 3}, "priorities=3 is not a list"),
        ({"priorities": [1, 1]}, "all are equal"),
    ],
)
def test_what_is_missing_unknown_or_without_effect_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        grid(**settings)


def test_a_closed_loop_by_hand():
    """Two users, request-level batches of two, a second an iteration: 4 + 2 tokens take two of
    them.

    Requests 0 and 1 come at 0 and end at 2; with 3 s of thought, 2 and 3 come at 5 and end at 7.
    """
    loop = ClosedLoop(requests_of(*[(4, 2)] * 4, arrivals=[9.0] * 4), num_users=2, think_time=3.0)
    table = served(loop, policy=RequestLevel())
    assert table.arrival_time.tolist() == [0.0, 0.0, 5.0, 5.0]
    assert table.finish_time.tolist() == [2.0, 2.0, 7.0, 7.0]


@settings(max_examples=60, deadline=None)
@given(
    pipeline=st.sampled_from([(1, False), (3, False), (2, True)]),  # capacity, feeds_tokens
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=20),
    num_users=st.integers(1, 8),
    think_time=st.sampled_from([0.0, 0.3, 5.0]),
)
def test_users_never_have_more_requests_unfinished_than_there_are_users(
    pipeline, lengths, num_users, think_time
):
    capacity, feeds_tokens = pipeline
    executor = ScriptedExecutor(
        lambda batch: 0.5 + 0.1 * batch.num_tokens, capacity, feeds_tokens=feeds_tokens
    )
    loop = ClosedLoop(requests_of(*lengths), num_users, think_time)
    table = served(
        loop, executor, SarathiServe(chunk=8), num_micro_batches=1 if feeds_tokens else capacity
    )
    assert table.request_id.tolist() == list(range(len(lengths)))
    assert table.arrival_time.is_monotonic_increasing  # the list's order is that of sending
    events = [(time, -1) for time in table.finish_time] + [(time, 1) for time in table.arrival_time]
    assert max(np.cumsum([change for _, change in sorted(events)])) <= num_users
    started = (table.arrival_time == 0).sum()
    assert started >= min(num_users, len(lengths))
    answers = sorted(table.finish_time + think_time)
    later = table.arrival_time[min(num_users, len(lengths)) :]
    assert later.tolist() == pytest.approx(
        answers[: len(later)]
    )  # each answer lets one request come


def test_priorities_are_drawn_as_often_as_they_are_listed_and_the_first_ones_stay():
    many, few = (
        [one.priority for one in grid(num_requests=n, priorities=[0, 7, 7]).generate(None).requests]
        for n in (5000, 50)
    )
    assert many.count(7) / 5000 == pytest.approx(2 / 3, abs=0.02)
    assert set(many) == {0, 7}
    assert few == many[:50]
    assert {request.priority for request in grid().generate(None).requests} == {0}


def test_users_are_described_and_leave_no_times_to_choose_a_chunk_by():
    load = grid(arrivals="users", users=3, num_requests=9).generate(None)
    assert "from 3 users who think 0 s" in load.describe()
    users = ("executor=simulated", "workload.arrivals=users", "workload.users=3")
    with pytest.raises(UserError, match="do not wait for answers as those of users"):
        make_plan(config_of(*users, "chunk=auto"))
