"""`lab.check_policy` passes the lab's policies and finds the rule that a wrong one breaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from every_policy import POLICIES
from own_policies import DecodesThenOneChunk

import sarathi_lab as lab
from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.check_policy import PolicyFault
from sarathi_lab.policy import Orca, Policy


@pytest.mark.parametrize("name", POLICIES)
def test_the_labs_policies_break_no_rule(name):
    assert "no rule is broken in" in str(lab.check_policy(POLICIES[name], num_queues=4))


def test_a_class_is_checked_with_its_defaults_and_other_budgets():
    result = lab.check_policy(DecodesThenOneChunk, num_queues=10)
    assert result.policy == "decodes_then_one_chunk"
    assert result.num_served + result.num_refused == 10


@dataclass(frozen=True)
class Wrong(Orca):
    name: ClassVar[str] = "wrong"


class OverBudget(DecodesThenOneChunk):
    """Whole prompts, whatever the budget."""

    def fill(self, batch, scheduler):
        scheduler.add_decodes(batch)
        scheduler.admit(batch, max_prefills=1)


class Idle(Wrong):
    """Nobody who was admitted goes on."""

    def fill(self, batch, scheduler):
        scheduler.admit(batch)


class Lifo(Wrong):
    """The newest first."""

    def fill(self, batch, scheduler):
        scheduler.add_decodes(batch)
        for sequence in reversed(scheduler.upcoming(100)):
            if not scheduler.enter(batch, sequence, sequence.num_pending):
                return


class Greedy(Wrong):
    """Tokens without a place for them in the cache."""

    def fill(self, batch, scheduler):
        scheduler.continue_prefills(batch)
        scheduler.admit(batch, max_prefills=1)
        for sequence in scheduler.idle_decodes:
            batch.add(sequence, 1)


class Twice(Wrong):
    """Takes a sequence that is in the batch already."""

    def fill(self, batch, scheduler):
        super().fill(batch, scheduler)
        for chunk in list(batch.chunks):
            batch.add(chunk.sequence, 1)


@dataclass(frozen=True)
class Remembers(Policy):
    """Another number of prompts in every other run."""

    name: ClassVar[str] = "remembers"
    calls: list[int] = field(default_factory=list)

    def fill(self, batch, scheduler):
        self.calls.append(len(self.calls))
        scheduler.add_decodes(batch)
        scheduler.admit(batch, max_prefills=1 + len(self.calls) % 3)


@pytest.mark.parametrize(
    ("policy", "rule", "words"),
    [
        (OverBudget, "budget", "tokens"),
        (Idle, "progress", "policy wrong stalled: 1 decoding request got no token"),
        (Lifo, "starvation", "is overtaken by"),
        (Greedy(reserve="chunk"), "blocks", "for which it holds no block"),
        (Twice, "no errors", "ValueError: cannot take 1 tokens"),
        (Remembers, "same schedule", "another way"),
    ],
)
def test_the_broken_rule_is_named_in_a_line_with_its_queue(policy, rule, words):
    with pytest.raises(PolicyFault) as error:
        lab.check_policy(policy)
    assert error.value.rule == rule
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    if rule not in ("starvation", "same schedule"):  # which fewer requests may not show
        assert len(error.value.case.requests) <= 4


def test_a_policy_that_refuses_everything_is_a_users_error():
    with pytest.raises(UserError, match="refuses every queue, such as: "):
        lab.check_policy(Orca(max_prefills=0), num_queues=3)
