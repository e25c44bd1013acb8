"""Drafts in batches: which are made, what they cost of the budget and the cache, what comes out."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from helpers import ScriptedExecutor, requests_of, rows, scheduler_for, serve
from hypothesis import given
from hypothesis import strategies as st
from shadow import Telling, TellingDrafts

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine import loop
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.extensions.speculation import Assumed, PromptLookup
from sarathi_lab.policy import Orca, Sarathi


class Scripted(Telling):
    """Knows what the test says of each request's output tokens."""

    def __init__(self, tokens: int, *known: str) -> None:
        super().__init__(tokens=tokens)
        object.__setattr__(self, "script", known)

    def drafts(self, request: Request) -> TellingDrafts:
        return TellingDrafts([letter == "y" for letter in self.script[request.request_id]])


def test_one_speculating_batch_by_hand():
    """Three drafts a decode and budgets of 8: the first request runs whole, then its decodes leave
    4 tokens to the second's prompt. Of the drafts of tokens 1 to 3 only the first is right, so 1
    and 2 are emitted; those of 3 to 5 all are, so 3 to 6 are, and the request is done.
    """
    scheduler = scheduler_for(
        Sarathi(chunk=8), batch_size=2, speculation=Scripted(3, "nynyyyn", "n")
    )
    executor, ledger = ScriptedExecutor(), Ledger()
    loop.run_engine(requests_of((3, 7), (12, 1)), scheduler, executor, ledger)
    assert executor.schedule == rows("0:0+3 | 0:3+4 1:0+4 | 0:5+4 1:4+4 | 1:8+4")
    requests, iterations = ledger.requests(), ledger.iterations()
    assert requests.output_token_ids.tolist() == [list(range(7)), [1000]]
    assert requests.token_times[0] == [1, 2, 2, 3, 3, 3, 3]
    assert iterations.num_draft_tokens.tolist() == [0, 3, 3, 0]
    assert iterations.num_accepted_tokens.tolist() == [0, 1, 3, 0]
    assert iterations.num_emits.tolist() == [1, 4, 4, 1]
    assert iterations.decode_kv_tokens.tolist() == [0, 7, 9, 0]
    assert scheduler.blocks.num_used == 0


def test_drafts_leave_a_token_to_everybody_and_make_nobody_give_way():
    """Of a budget of 4, with a decode and a waiting prompt, 2 drafts; of two blocks of 4 tokens
    none while the other request has one, then as many as are left to emit.
    """
    serving = {"batch_size": 2, "speculation": Scripted(3, "n" * 9, "n")}
    executor = serve(requests_of((3, 9), (5, 1)), scheduler_for(Sarathi(chunk=4), **serving))
    assert executor.schedule[1] == [(0, 3, 3), (1, 0, 1)]
    policy = Orca(max_prefills=None, reserve="prompt")
    small = scheduler_for(policy, num_blocks=2, max_model_len=8, **serving)
    executor = serve(requests_of((3, 5), (3, 2)), small)
    assert executor.schedule[1:3] == [[(0, 3, 1), (1, 3, 1)], [(0, 4, 3)]]
    assert small.num_preemptions == 0


def test_without_drafts_the_record_has_no_columns_of_them():
    engine = EngineConfig(Orca(), batch_size=1, num_blocks=9, block_size=4)
    ledger = loop.serve(requests_of((3, 3)), engine, ScriptedExecutor())
    assert not [name for name in ledger.iterations() if "draft" in name or "accepted" in name]


def test_what_makes_batches_ahead_takes_no_drafts():
    sizes = {"batch_size": 1, "num_blocks": 9, "block_size": 4, "speculation": Assumed()}
    engine, ahead = EngineConfig(Orca(), **sizes), ScriptedExecutor(capacity=2, feeds_tokens=True)
    with pytest.raises(UserError, match="without overlap"):
        loop.serve(requests_of((3, 3)), engine, ahead)


def looked_up(known: list[int], settings: PromptLookup) -> list[int]:
    """What `PromptLookup` says, by going through all places."""
    for size in range(settings.max_ngram, settings.min_ngram - 1, -1):
        newest = known[len(known) - size :]
        places = [at for at in range(size, len(known)) if known[at - size : at] == newest]
        if places:
            text = list(known)
            for i in range(settings.tokens):
                text.append(text[places[-1] + i])
            return text[len(known) :]
    return []


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    outputs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=4),
    settings=st.builds(PromptLookup, tokens=st.integers(1, 5), min_ngram=st.integers(1, 3)),
)
def test_drafts_are_what_followed_the_longest_ngram_where_it_stood_last(prompt, outputs, settings):
    request = Request(0, 0.0, len(prompt), 99, np.array(prompt, dtype=np.int32))
    sequence, source = SequenceState(request, 0), settings.drafts(request)
    for tokens in outputs:
        sequence.output_token_ids += tokens
        known = [*prompt, *sequence.output_token_ids]
        drafts = list(source.propose(sequence, settings.tokens))
        assert drafts == looked_up(known, settings)


@given(
    tokens=st.integers(1, 8),
    acceptance=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    seed=st.integers(0, 9),
)
def test_assumed_drafts_are_right_as_the_seed_says_whatever_their_number(tokens, acceptance, seed):
    request, later = Request(3, 0.0, 4, 60), Request(3, 9.0, 8, 60)
    drawn = Assumed(tokens=tokens, acceptance=acceptance, seed=seed).drafts(request)
    assert drawn == Assumed(tokens=1, acceptance=acceptance, seed=seed).drafts(later)
    sequence = SequenceState(request, 0)
    sequence.output_token_ids += [0] * 7
    sequence.draft_token_ids = drawn.propose(sequence, tokens)
    right = len(list(takewhile(bool, drawn.are_right[7 : 7 + tokens])))
    assert drawn.num_accepted(sequence, []) == right
