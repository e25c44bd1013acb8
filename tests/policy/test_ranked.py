"""Schedules of prompts in an order that their lengths and waits decide, by hand; rows are (request,
start, tokens). An iteration takes a second.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import expect
from hypothesis import given
from hypothesis import strategies as st

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.compositions import make_sequence
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.policy.zoo import Ranked
from sarathi_lab.policy.zoo.prompts import PrefillCost, fit_prefill_cost

# A long prompt, and two short ones that come while it runs.
LATE = "12+1 3+1@0.5 4+1@1.5"
IN_ORDER = "0:0+4 | 0:4+4 | 0:8+4 | 1:0+3 2:0+1 | 2:1+3"
SHORT_FIRST = "0:0+4 | 1:0+3 0:4+1 | 2:0+4 | 0:5+4 | 0:9+3"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"order": "fcfs"}, IN_ORDER),
        # At 1 s the long prompt has age 1, 8 tokens left (1/8), the first short one 0.5/3, which is
        # more. At 2 s the long one has 2/7, the second short one 0.5/4. At 3 s 3/3 beats 1.5/4.
        (
            {"order": "response_ratio"},
            "0:0+4 | 1:0+3 0:4+1 | 0:5+4 | 0:9+3 2:0+1 | 2:1+3",
        ),
        ({"order": "shortest", "patience": 100.0}, SHORT_FIRST),
        ({"order": "preflow", "patience": 100.0}, SHORT_FIRST),
        # With half the weight every twentieth of a second, half a second is more than lengths.
        ({"order": "shortest", "patience": 0.05}, IN_ORDER),
        ({"order": "preflow", "patience": 0.05}, IN_ORDER),
        # A quarter of a second a token: the long prompt has 6 s (twice its 3), short ones 2 s. At
        # 1 s it has (6 - 1 - 2) / 6 = 0.5 left, the first short one (2 - 0.5 - 0.75) / 2 = 0.375.
        # At 2 s (6 - 2 - 1.75) / 6 = 0.375, the second (2 - 0.5 - 1) / 2 = 0.25.
        (
            {"order": "slack", "patience": 2.0, "deadline_factor": 2.0, "seconds_per_token": 0.25},
            SHORT_FIRST,
        ),
        # With a deadline of a tenth of its time the long prompt is late at once, as others are:
        # (0.3 - 1 - 2) / 0.3 = -9 at 1 s, the first short one (0.1 - 0.5 - 0.75) / 0.1 = -11.5.
        (
            {"order": "slack", "patience": 0.1, "deadline_factor": 0.1, "seconds_per_token": 0.25},
            "0:0+4 | 1:0+3 0:4+1 | ...",
        ),
        # The second is as long as the first, for this rule.
        (
            {"order": "short_first", "patience": 100.0, "short_len": 3},
            "0:0+4 | 1:0+3 0:4+1 | 0:5+4 | 0:9+3 2:0+1 | 2:1+3",
        ),
        ({"order": "short_first", "patience": 0.9, "short_len": 3}, "0:0+4 | 0:4+4 | ..."),
        # The reserve is kept from a long prompt while a short one is there.
        (
            {"order": "fcfs", "short_len": 4, "reserve_tokens": 2},
            "0:0+4 | 0:4+2 1:0+2 | 0:6+2 1:2+1 2:0+1 | 0:8+2 2:1+2 | 0:10+2 2:3+1",
        ),
    ],
)
def test_prompts_share_an_iteration_by_their_order(settings, expected):
    expect(Ranked(chunk=4, **settings), LATE, expected)


def test_a_prompt_that_has_no_room_keeps_those_behind_it_out():
    # The cache has 16 tokens, the first prompt 12 of them; the second, of 8, is before the third,
    # which would fit.
    policy = Ranked(chunk=8, order="fcfs", watermark=0.0)
    expected = "0:0+8 | 0:8+4 | 1:0+8 | 2:0+4"
    expect(policy, "12+1 8+1@0.5 4+1@0.5", expected, num_blocks=4)


@given(
    st.sampled_from(["response_ratio", "shortest", "slack", "preflow", "short_first", "fcfs"]),
    st.integers(1, 4000),
    st.integers(1, 4000),
)
def test_nobody_is_passed_for_ever(order, mine, theirs):
    """However long it is and however short those that come, a prompt is first in the end."""
    policy = Ranked(order=order, seconds_per_token=1e-3)
    old, new = make_sequence(0, mine), make_sequence(0, theirs)
    now = 1e6
    new = replace(new, request=replace(new.request, arrival_time=now), order=1)
    assert (policy.rank(old, now), 0) < (policy.rank(new, now), 1)


def test_the_device_says_what_a_prompt_takes():
    def seconds(batch):
        return {"all": 0.5 + 2e-3 * batch.num_tokens + 4e-6 * batch.num_tokens**2}

    policy = Ranked(order="slack").on_device(lambda: Predictor(seconds), 4, 5000)
    assert policy.seconds_per_token == pytest.approx(2e-3)
    assert policy.seconds_per_squared_token == pytest.approx(4e-6)
    cost = PrefillCost(4e-6, 2e-3)
    assert cost(300) + cost(200, start=300) == pytest.approx(cost(500))
    flat = fit_prefill_cost(lambda batch: 1.0 - 1e-6 * batch.num_tokens**2, 100)
    assert flat.square == 0 < flat.linear


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"order": "newest"}, "order=newest"),
        ({"order": "fcfs", "patience": 3.0}, "patience=3.0 has no effect with order=fcfs"),
        ({"order": "shortest", "deadline_factor": 3.0}, "deadline_factor=3.0 has no effect"),
        ({"order": "slack"}, "order=slack needs seconds_per_token"),
        ({"reserve_tokens": 8, "chunk": 8}, "reserve_tokens=8 leaves nothing of chunk=8"),
    ],
)
def test_bad_parameters_are_one_line(settings, words):
    with pytest.raises(UserError, match=words):
        Ranked(**settings).validate(4, 100)
