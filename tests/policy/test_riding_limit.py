"""Schedules of `riding_limit`, worked out by hand; `expect` explains the notation."""

from __future__ import annotations

import pytest
from helpers import expect

from sarathi_lab.policy.zoo import RidingLimit

TWO = "4+3 6+2"


def test_decodes_ride_while_their_caches_are_small():
    expected = "0:0+4 1:0+1 | 0:4+1 1:1+4 | 0:5+1 1:5+1 | 1:6+1"
    expect(RidingLimit(5, most_riding_tokens=100, watermark=0.0), TWO, expected)


def test_past_the_limit_decodes_and_a_chunk_take_turns():
    expected = "0:0+4 1:0+1 | 0:4+1 | 1:1+5 | 0:5+1 1:6+1"
    expect(RidingLimit(5, most_riding_tokens=3, watermark=0.0), TWO, expected)


@pytest.mark.parametrize("limit", [0, 3])
def test_a_turn_without_a_prompt_is_of_decodes(limit):
    policy = RidingLimit(5, most_riding_tokens=limit, watermark=0.0)
    expect(policy, "4+4", "0:0+4 | 0:4+1 | 0:5+1 | 0:6+1")
