"""Prefix caching: who finds what, when it can be seen, what goes when room is short, and that no
block is lost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from helpers import ScriptedExecutor, scheduler_for, serve
from shadow import Checker, ShadowCache, ShadowExecutor, history

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import Orca, Policy, PrefillFirst, RequestLevel, Sarathi, SarathiServe

BLOCK_SIZE = 4
SERVE = SarathiServe(chunk=64, watermark=0.0)
POLICIES: list[Policy] = [
    RequestLevel(reserve="total"),
    Orca(reserve="prompt"),
    PrefillFirst(watermark=0.0),
    Sarathi(chunk=8, reserve="prompt"),
    Sarathi(chunk=8, min_decodes=0, reserve="chunk"),
    SarathiServe(chunk=8),
    SarathiServe(chunk=8, reserve="chunk", watermark=0.0),
]


def tokens(*parts: tuple[int, int]) -> np.ndarray:
    """Parts of `length` tokens, equal for equal `text`: (text, length) one after the other."""
    return np.concatenate([100 * text + np.arange(length) for text, length in parts]).astype(
        np.int32
    )


def request(request_id: int, prompt: np.ndarray, output_len: int = 1, time: float = 0.0) -> Request:
    return Request(request_id, time, len(prompt), output_len, prompt)


def sharing(
    policy: Policy = SERVE, *, num_blocks: int = 40, block_size: int = BLOCK_SIZE, **kwargs
) -> Scheduler:
    scheduler = scheduler_for(policy, num_blocks=num_blocks, block_size=block_size, **kwargs)
    scheduler.blocks = BlockManager(num_blocks, block_size, shares_prefixes=True)
    return scheduler


def starts(executor: ScriptedExecutor, request_id: int) -> list[int]:
    return [
        start for rows in executor.schedule for row_id, start, _ in rows if row_id == request_id
    ]


# -- what is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "hit"),
    [
        (tokens((1, 10), (3, 6)), 8),  # two whole blocks of the ten tokens
        (tokens((1, 8)), 4),  # at least one token is computed, so that it emits
        (tokens((1, 9)), 8),
        (tokens((1, 3), (2, 9)), 0),
        (tokens((2, 4), (1, 8)), 0),  # the same block behind others is not the same
        (tokens((1, 10), (2, 6)), 12),
    ],
)
def test_a_later_request_starts_behind_what_is_cached(second, hit):
    first = tokens((1, 10), (2, 3))
    executor = serve([request(0, first), request(1, second, time=5.0)], sharing())
    assert starts(executor, 0) == [0]
    assert starts(executor, 1) == [hit]


def test_generated_tokens_are_cached_too():
    """The second turn of a conversation: prompt, answer and what is asked next. The last block of
    the answer waits.
    """
    first = request(0, tokens((1, 6)), output_len=11)
    answer = np.arange(11, dtype=np.int32)  # as `tokens_of` says for request 0
    for known, hit in ((11, 12), (10, 12), (5, 8)):
        turn = np.concatenate([first.prompt_token_ids, answer[:known], tokens((2, 5))])
        executor = serve([first, request(1, turn, time=20.0)], sharing())
        assert starts(executor, 1) == [hit]
        assert executor.schedule[-1] == [(1, hit, len(turn) - hit)]


def test_a_chunk_is_seen_from_the_next_batch_on():
    prompt = tokens((1, 16))
    requests = [request(0, prompt), request(1, prompt), request(2, prompt, time=5.0)]
    assert serve(requests, sharing()).schedule == [[(0, 0, 16), (1, 0, 16)], [(2, 12, 4)]]
    chunks = serve(requests[:2], sharing(SarathiServe(chunk=12, watermark=0.0)))
    assert chunks.schedule == [[(0, 0, 12)], [(0, 12, 4), (1, 12, 4)]]


def test_the_budget_goes_to_what_is_computed():
    """Whole prompts of 16 tokens in 20: two of them if 12 tokens of each are cached."""
    prompts = [tokens((1, 16)), tokens((1, 12), (2, 4)), tokens((1, 12), (3, 4))]
    requests = [request(i, prompt, time=5.0 * (i > 0)) for i, prompt in enumerate(prompts)]
    policy = PrefillFirst(max_num_batched_tokens=20, watermark=0.0)
    assert serve(requests, sharing(policy, max_model_len=20)).schedule[1] == [
        (1, 12, 4),
        (2, 12, 4),
    ]
    assert serve(requests, scheduler_for(policy, max_model_len=20)).schedule[1] == [(1, 0, 16)]


# -- what stays ------------------------------------------------------------------------------------


def test_a_preempted_sequence_finds_its_own_blocks_again():
    requests = [request(0, tokens((1, 8)), 12), request(1, tokens((2, 8)), 12)]
    sizes = {"num_blocks": 7, "block_size": 4}
    found, computed = sharing(**sizes), scheduler_for(SERVE, **sizes)
    with_cache, without = serve(requests, found), serve(requests, computed)
    assert found.num_preemptions == computed.num_preemptions > 0
    again = [start for start in starts(without, 1) if start == 0]
    assert len(again) == 2
    assert starts(with_cache, 1).count(0) == 1
    assert sum(row[2] for rows in with_cache.schedule for row in rows) < sum(
        row[2] for rows in without.schedule for row in rows
    )


def test_what_was_in_use_longest_ago_goes_first_and_last_blocks_before_first_ones():
    """Of 8 blocks, A and B leave 3 each; C needs 4, so A loses its last two."""
    prompts = [tokens((1, 13)), tokens((2, 13)), tokens((3, 16))]
    later = [request(3, tokens((1, 9)), time=15.0), request(4, prompts[1], time=20.0)]
    requests = [*(request(i, prompt, time=5.0 * i) for i, prompt in enumerate(prompts)), *later]
    executor = serve(requests, sharing(num_blocks=8))
    # D, which begins as A, finds one block of A's, and takes what was used longest ago for two
    # more: B's last.
    assert [starts(executor, i) for i in range(5)] == [[0], [0], [0], [4], [4]]


# -- whatever comes --------------------------------------------------------------------------------


def run(policy: Policy, requests: Sequence[Request], capacity: int, *, feeds_tokens: bool, **sizes):
    scheduler = sharing(policy, max_model_len=40, **sizes)
    histories = [
        history(one.prompt_token_ids, one.request_id, one.output_len, is_shared=True)
        for one in requests
    ]
    executor = ShadowExecutor(
        [ShadowCache(scheduler, histories)], capacity, feeds_tokens=feeds_tokens
    )
    run_engine(requests, scheduler, executor, checker := Checker(scheduler))
    return executor.schedule, checker.iterations()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_making_batches_ahead_changes_no_schedule(policy, seed):
    """Prompts of parts out of few texts; some repeat a request's prompt and answer."""
    dice = random.Random(seed)
    requests: list[Request] = []
    for i in range(8):
        prompt = tokens(*((dice.randint(1, 2), dice.choice([4, 8, 3])) for _ in range(i % 3 + 1)))
        if i % 2:
            before = dice.choice(requests)
            answer = 1000 * before.request_id + np.arange(before.output_len)
            prompt = np.concatenate([before.prompt_token_ids, answer, prompt])[:28].astype(np.int32)
        requests.append(request(i, prompt, dice.randint(1, 12)))
    sizes = {"num_blocks": dice.randint(11, 24)}
    schedule, iterations = run(policy, requests, 1, feeds_tokens=False, **sizes)
    ahead, same = run(policy, requests, 2, feeds_tokens=True, **sizes)
    assert ahead == schedule
    assert iterations.equals(same)
