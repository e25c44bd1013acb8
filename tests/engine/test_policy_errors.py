"""A policy of the user's that forgets requests or raises: one line with what to mend."""

from typing import ClassVar

import pytest
from helpers import requests_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.policy import Policy


class Forgetful(Policy):
    name: ClassVar[str] = "forgetful"
    moves: ClassVar[tuple[str, ...]] = ()

    def fill(self, batch, scheduler):
        for move in self.moves:
            getattr(scheduler, move)(batch)


class WithoutAdmissions(Forgetful):
    moves = ("add_decodes", "continue_prefills")


class WithoutDecodes(Forgetful):
    moves = ("continue_prefills", "admit")


class WithoutContinuation(Forgetful):
    moves = ("add_decodes",)

    def fill(self, batch, scheduler):
        super().fill(batch, scheduler)
        scheduler.admit(batch, token_budget=8)


class Misspelt(Forgetful):
    moves = ("add_decode",)


class WithAWrongCall(Forgetful):
    def fill(self, batch, scheduler):
        scheduler.share(batch, [None], token_budget=8)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (WithoutAdmissions, ("3 waiting requests never entered", "scheduler.admit?")),
        (WithoutDecodes, ("2 decoding requests got no token", "scheduler.add_decodes?")),
        (WithoutContinuation, ("got no prompt tokens", "scheduler.continue_prefills?")),
        (Misspelt, ("AttributeError", "test_policy_errors.py:")),
        (WithAWrongCall, ("AttributeError", "test_policy_errors.py:")),
    ],
)
def test_what_a_policy_forgets_is_one_line_with_a_remedy(policy, words):
    engine = EngineConfig(policy(), batch_size=2, num_blocks=64, block_size=4)
    executor = PipelineExecutor(1, lambda batch: [1.0])
    with pytest.raises(UserError) as caught:
        serve(requests_of(*[(20, 4)] * 3), engine, executor)
    message = str(caught.value)
    assert all(word in message for word in (*words, "check_policy"))
    assert "\n" not in message


class WithoutName(Policy):
    def fill(self, batch, scheduler):
        scheduler.add_decodes(batch)


def test_a_policy_needs_a_name():
    with pytest.raises(UserError, match="policy WithoutName has no name; add one to the class"):
        WithoutName().validate(batch_size=4, max_model_len=64)
