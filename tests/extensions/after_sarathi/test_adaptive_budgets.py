"""Schedules of budgets that follow an objective, by hand; rows are (request, start, tokens)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import ScriptedExecutor, expect, requests_of, rows, scheduler_for, serve

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.policy.zoo import Lprs, Niyama, PPas, SloBudget

TOKEN = 0.125  # seconds
# Of 1 to 8 tokens, each of which takes an eighth of a second, as predicted.
LADDER = {"min_num_batched_tokens": 2, "step": 1, "times": (0.0, TOKEN, 0.0)}


def schedule(policy, requests, **kwargs):
    executor = ScriptedExecutor(lambda batch: TOKEN * batch.num_tokens)
    return serve(requests, scheduler_for(policy, **kwargs), executor).schedule


def test_a_budget_fills_the_time_between_tokens():
    """Five tokens take it: one decode and four of the prompt; without decodes all eight run."""
    requests = requests_of((4, 6), (26, 1), arrivals=[0, 0.25])
    assert schedule(SloBudget(8, **LADDER, tbt=5 * TOKEN), requests) == [
        [(0, 0, 4)],
        *([(0, 4 + i, 1), (1, 4 * i, 4)] for i in range(5)),
        [(1, 20, 6)],
    ]


@pytest.mark.parametrize(
    ("changed", "tokens"),
    [
        ({}, 4),
        ({"tbt": 4 * TOKEN}, 3),
        ({"margin": 1.25}, 3),
        ({"times": (TOKEN, TOKEN, 0.0)}, 3),
        ({"times": (0.0, TOKEN, TOKEN / 5)}, 2),  # of 7 tokens that the decode reads, and 2 more
        ({"step": 3, "min_num_batched_tokens": 3}, 2),
        ({"tbt": TOKEN}, 1),  # nothing fits: the least that is taken
        ({"tbt": TOKEN, "min_num_batched_tokens": 4}, 3),
        ({"since": "arrival", "ttft": 0.75}, 7),
        ({"max_num_batched_tokens": 4}, 3),
    ],
)
def test_every_parameter_of_the_budget_counts(changed, tokens):
    requests = requests_of((4, 6), (26, 1), arrivals=[0, 0.7])
    policy = SloBudget(8, **LADDER, tbt=5 * TOKEN)
    batches = schedule(replace(policy, **changed), requests)
    start = next(batch for batch in batches if len(batch) == 2)
    assert start[1] == (1, 0, tokens)


def test_a_deadline_from_the_arrival_leaves_what_an_early_first_token_saved():
    requests = requests_of((4, 6), (26, 1), arrivals=[0, 0.25])
    policy = SloBudget(16, **LADDER, tbt=2 * TOKEN, since="arrival", ttft=1.5)
    # Due at 1.75 s; it is 0.5 s.
    assert schedule(policy, requests)[1] == [(0, 4, 1), (1, 0, 9)]


def test_the_devices_cost_model_is_asked_where_no_times_are_given():
    policy = SloBudget(8).on_device(lambda: Predictor(lambda batch: {"all": 0.01}), 4, 200)
    policy.validate(4, 200)
    assert policy.predicted(None) == 0.01
    with pytest.raises(UserError, match=r"policy=slo_budget needs policy\.times here"):
        SloBudget(8).on_device(lambda: None, 4, 200).validate(4, 200)
    with pytest.raises(UserError, match=r"times=\[0.1\] are not three times"):
        SloBudget(8, times=[0.1]).validate(4, 200)


# -- Niyama ----------------------------------------------------------------------------------------

# A decode, then a long prompt and a short one.
PAIR = requests_of((2, 9), (12, 1), (4, 1), arrivals=[0, 0.125, 0.125])


def begun(policy, requests=PAIR, **kwargs) -> list[int]:
    """Request ids in the order in which they were begun."""
    rows = [row for batch in schedule(policy, requests, **kwargs) for row in batch]
    return [number for number, start, _ in rows if start == 0]


@pytest.mark.parametrize(
    ("changed", "order"),
    [
        ({"hybrid": 0.0}, [0, 1, 2]),
        ({"hybrid": 0.008}, [0, 2, 1]),  # 8 tokens less are 64 ms sooner
        ({"hybrid": 0.0, "ttft": 1.0}, [0, 2, 1]),  # twelve tokens at 8 a second come too late
    ],
)
def test_niyama_puts_near_deadlines_first_and_gives_up_the_late(changed, order):
    policy = Niyama(8, **LADDER, ttft=4.0, tbt=0.5)
    assert begun(replace(policy, **changed)) == order


def test_niyama_counts_a_predicted_time_1_2_times():
    requests = requests_of((4, 6), (26, 1), arrivals=[0, 0.25])
    policy = Niyama(8, **LADDER, tbt=5 * TOKEN, since="last_token")
    assert schedule(policy, requests)[1] == [(0, 4, 1), (1, 0, 3)]


# -- LPRS ------------------------------------------------------------------------------------------


def test_lprs_has_a_target_without_decodes_too():
    policy = Lprs(8, **LADDER, target_time=5 * TOKEN)
    assert schedule(policy, requests_of((12, 2), (6, 1))) == rows(
        "1:0+5 | 1:5+1 0:0+4 | 0:4+5 | 0:9+3 | 0:12+1"
    )


@pytest.mark.parametrize(
    ("changed", "order"),
    [
        ({}, [0, 2, 1]),  # 0.3 of the 8 tokens of a second
        ({"prompt_weight": 0.0}, [0, 1, 2]),
    ],
)
def test_lprs_weighs_waiting_against_length(changed, order):
    requests = requests_of((2, 9), (12, 1), (4, 1), arrivals=[0, 0.05, 0.15])
    policy = replace(Lprs(8, **LADDER, target_time=4 * TOKEN), **changed)
    assert begun(policy, requests) == order


# -- P-PAS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "second"),
    [
        ({}, "0:4+1 1:0+2"),  # the cap is 16 / 8
        ({"prefill_cap": 5}, "0:4+1 1:0+5"),
        ({"min_active_prefills": 3}, "0:4+1 1:0+15"),
        ({"max_num_batched_tokens": 32}, "0:4+1 1:0+4"),
    ],
)
def test_p_pas_caps_prompts_while_several_press_on_decodes(changed, second):
    policy = PPas(**{"max_num_batched_tokens": 16, **changed})
    expect(policy, "4+6 20+1@0.5 20+1@0.5", f"0:0+4 | {second} | ...")


def test_p_pas_lifts_its_cap_without_decodes():
    expected = "* | * | * | * | * | 0:8+1 1:8+2 | 1:10+10 2:0+6 | 2:6+14"
    expect(PPas(16), "4+6 20+1@0.5 20+1@0.5", expected)
    # From one prompt on it cuts only beside decodes.
    policy = PPas(32, min_active_prefills=1)
    expected = "0:0+10 | 0:10+1 1:0+4 | 0:11+1 1:4+4 | 1:8+2 2:0+10"
    expect(policy, "10+3 10+1@0.5 10+1@0.5", expected)
    with pytest.raises(UserError, match="prefill_cap=16384 has no effect"):
        scheduler_for(PPas(prefill_cap=16384))
