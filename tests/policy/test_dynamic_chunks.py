"""Chunks that shrink with the context and follow one another through a pipeline, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import requests_of, rows, scheduler_for, serve
from hypothesis import given
from hypothesis import strategies as st

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.policy.zoo import DynamicChunks
from sarathi_lab.policy.zoo.prompts import PrefillCost

# f(l) = l^2 + l: a first chunk of 8 takes 72. Behind 8 tokens x^2 + 17 x = 72 gives 3.5, behind 11
# x^2 + 23 x = 72 gives 2.8, and so on, but never less than 2, a quarter.
SHRINKING = DynamicChunks(
    8, smooth_factor=1.0, alignment=1, seconds_per_token=1.0, seconds_per_squared_token=1.0
)
CHUNKS = [[(0, 0, 8)], [(0, 8, 3)], [(0, 11, 2)], [(0, 13, 2)], [(0, 15, 1)]]


def schedule(policy: DynamicChunks, **kwargs):
    return serve(requests_of((16, 1)), scheduler_for(policy, **kwargs)).schedule


def test_chunks_shrink_so_that_each_takes_as_long():
    assert schedule(SHRINKING) == CHUNKS
    # Half as far from 8: 5.7 behind 8 tokens, 5.0 behind 13.
    assert schedule(replace(SHRINKING, smooth_factor=0.5)) == rows("0:0+8 | 0:8+5 | 0:13+3")
    assert schedule(replace(SHRINKING, smooth_factor=0.0)) == [[(0, 0, 8)], [(0, 8, 8)]]
    assert SHRINKING.next_chunk(8) == 3
    assert replace(SHRINKING, alignment=2).next_chunk(8) == 2


@given(st.integers(1, 10**5), st.integers(0, 10**6), st.floats(1e-12, 1e-6))
def test_no_chunk_takes_longer_than_the_first_but_the_least_and_by_rounding(chunk, context, square):
    policy = DynamicChunks(
        chunk, 1.0, alignment=1, seconds_per_token=1e-5, seconds_per_squared_token=square
    )
    tokens, cost = policy.next_chunk(context), PrefillCost(square, 1e-5)
    assert max(1, chunk // 4) <= tokens <= chunk
    assert tokens == max(1, chunk // 4) or cost(tokens, context) <= cost(chunk) * (1 + 1e-6)


@given(st.integers(1, 10**5), st.floats(1e-12, 1e-6))
def test_a_prompt_begins_with_a_whole_chunk_whatever_is_rounded(chunk, square):
    # These seconds gave 255.99999999999994 tokens of 256, and so a page of 64 less.
    for policy in (
        DynamicChunks(
            256,
            seconds_per_token=7.203501673407452e-05,
            seconds_per_squared_token=3.7788630968708293e-08,
        ),
        DynamicChunks(chunk, seconds_per_token=1e-5, seconds_per_squared_token=square),
    ):
        assert policy.next_chunk(0) == policy.chunk


def test_a_prompts_chunks_follow_one_another_through_a_pipeline():
    """Two stages of a second each: the second chunk enters after one, not two; a decode waits for
    its token.
    """
    policy = DynamicChunks(4, smooth_factor=0.0)
    executor = PipelineExecutor(2, lambda batch: [1.0, 1.0])
    scheduler, ledger = scheduler_for(policy, num_micro_batches=2), Ledger()
    run_engine(requests_of((12, 2)), scheduler, executor, ledger)
    stages = ledger.stages()
    assert stages[stages.stage == 0].start.tolist() == [0.0, 1.0, 2.0, 4.0]
    table = ledger.requests()
    assert (table.first_token_time[0], table.finish_time[0]) == (4.0, 6.0)


def test_shrinking_needs_a_prompts_time():
    with pytest.raises(UserError, match="needs seconds_per_token here"):
        DynamicChunks(512).on_device(lambda: None, 4, 4096).validate(4, 4096)
