"""Random runs of every policy over a cache that checks every slot: pipelines, tight caches,
shared prefixes, replicas, drafts. FUZZ_CASES=N makes N runs of each of `POLICIES`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from every_policy import MAX_LEN, POLICIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from shadow import (
    Checker,
    CountingScheduler,
    ShadowCache,
    ShadowExecutor,
    Telling,
    as_array,
    check_books,
    history,
)

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.arrivals import Arrivals, ClosedLoop
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.speculation import NO_SPECULATION
from sarathi_lab.extensions.cluster.lockstep import LockstepReplicas
from sarathi_lab.extensions.cluster.routers import least_loaded
from sarathi_lab.policy import Policy

NUM_CASES = int(os.environ.get("FUZZ_CASES", "12"))
PIECE = 5  # tokens of the texts that prompts share
# How many batches are in flight, and whether tokens are fed from one to the next.
EXECUTORS = [(1, False), (2, True), (2, False), (4, False)]
SHARING = [None, "tokens", "nothing"]  # None: there is no prefix cache


@dataclass(frozen=True)
class Wish:
    """A request to be; it begins with the answer to an earlier one where that is `after` it."""

    texts: list[int]
    prompt_len: int
    output_len: int
    time: float
    after: int | None


wishes = st.lists(
    st.builds(
        Wish,
        texts=st.lists(st.integers(1, 2), max_size=4),
        prompt_len=st.integers(1, 28),
        output_len=st.integers(1, MAX_LEN - 28),
        time=st.sampled_from([0.0, 0.0, 0.0, 3.0, 4.5, 12.0, 30.0]),
        after=st.none() | st.integers(0, 3),
    ),
    min_size=1,
    max_size=10,
)


def prompts_of(wished: Sequence[Wish], *, with_answers: bool) -> list[list[int]]:
    """Tokens of the prompts: shared texts, then tokens of their own."""
    prompts: list[list[int]] = []
    for i, wish in enumerate(wished):
        before = []
        if with_answers and wish.after is not None and wish.after < i:
            answer = range(1000 * wish.after, 1000 * wish.after + wished[wish.after].output_len)
            before = [*prompts[wish.after], *answer]
        shared = [100 * text + k for text in wish.texts for k in range(PIECE)]
        own = range(1000 * i + 500, 1000 * i + 500 + MAX_LEN)
        prompts.append([*before, *shared, *own][: wish.prompt_len])
    return prompts


def requests_of(
    wished: Sequence[Wish], prompts: Sequence[list[int]], sharing: str | None
) -> list[Request]:
    return [
        Request(
            i,
            wish.time,
            wish.prompt_len,
            wish.output_len,
            as_array(prompt) if sharing == "tokens" else None,
            priority=i % 3,
        )
        for i, (wish, prompt) in enumerate(zip(wished, prompts, strict=True))
    ]


# An engine's sizes; `spare` are blocks beside those of the longest request, and tokens beside it.
engines = st.fixed_dictionaries(
    {
        "chunk": st.none() | st.integers(1, 24),
        "executor": st.sampled_from(EXECUTORS),
        "knows_tokens": st.booleans(),
        "batch_size": st.integers(1, 5),
        "block_size": st.sampled_from([1, 3, 4, 8]),
        "spare": st.tuples(st.integers(-1, 12), st.sampled_from([0, 0, 1, 9])),
        "queue_order": st.sampled_from(["fcfs", "priority", "shortest"]),
        "sharing": st.sampled_from(SHARING),
        "state_blocks": st.sampled_from([0, 0, 0, 2]),
        "aligns_chunks": st.sampled_from([False, False, True]),
        "num_replicas": st.sampled_from([1, 1, 1, 2]),
        "users": st.none() | st.integers(1, 3),
        "drafts": st.none()
        | st.builds(Telling, tokens=st.integers(1, 5), acceptance=st.sampled_from([0.0, 0.6, 1.0])),
    }
)


def make_scheduler(policy: Policy, longest: int, engine: dict[str, Any]) -> CountingScheduler:
    """Raises UserError for what `policy` refuses."""
    block_size = engine["block_size"]
    capacity, feeds_tokens = engine["executor"]
    if engine["chunk"] and policy.budget_field:
        policy = policy.with_budget(engine["chunk"])
    shares = engine["sharing"] is not None
    state_blocks = 0 if shares else engine["state_blocks"]
    num_blocks = max(1, -(-longest // block_size) + state_blocks + engine["spare"][0])
    cache = {"shares_prefixes": shares, "state_blocks": state_blocks}
    speculates = engine["drafts"] and not feeds_tokens and engine["num_replicas"] == 1
    return CountingScheduler(
        policy,
        BlockManager(num_blocks, block_size, **cache),
        batch_size=engine["batch_size"],
        max_model_len=longest + engine["spare"][1],
        num_micro_batches=1 if feeds_tokens else capacity,
        queue_order=engine["queue_order"],
        speculation=engine["drafts"] if speculates else NO_SPECULATION,
        aligns_chunks=engine["aligns_chunks"] and policy.budget_field is not None,
    )


def served(
    requests: Sequence[Request],
    prompts: Sequence[list[int]],
    schedulers: Sequence[CountingScheduler],
    engine: dict[str, Any],
) -> Checker:
    checker = Checker(*schedulers)
    is_shared = engine["sharing"] == "tokens"
    histories = [
        history(prompt, i, request.output_len, is_shared=is_shared)
        for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
    ]
    caches = [ShadowCache(scheduler, histories) for scheduler in schedulers]
    capacity, feeds_tokens = engine["executor"]
    executor = ShadowExecutor(
        caches, capacity, feeds_tokens=feeds_tokens, knows_tokens=engine["knows_tokens"]
    )
    users = engine["users"]
    arrivals = ClosedLoop(requests, users, think_time=0.5) if users else Arrivals(requests)
    one = len(schedulers) == 1
    run_engine(
        arrivals,
        schedulers[0] if one else LockstepReplicas(schedulers, least_loaded),
        executor,
        checker,
    )
    return checker


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=NUM_CASES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wished=wishes, engine=engines)
def test_a_run_is_refused_in_a_line_or_serves_every_request(name, wished, engine):
    prompts = prompts_of(wished, with_answers=engine["sharing"] == "tokens")
    requests = requests_of(wished, prompts, engine["sharing"])
    longest, refusal = max(request.total_len for request in requests), ""
    schedulers: list[CountingScheduler] = []
    try:
        for _ in range(engine["num_replicas"]):
            schedulers.append(make_scheduler(POLICIES[name], longest, engine))
            for request in requests:
                schedulers[-1].check_fits(request)
        served([], [], schedulers, engine)  # an executor that can't is told from before any batch
    except UserError as error:
        refusal = str(error)
    if refusal:
        assert "\n" not in refusal
        return
    checker = served(requests, prompts, schedulers, engine)
    check_books(requests, schedulers, checker, knows_tokens=engine["knows_tokens"])


def test_every_policy_is_tried():
    options = (OmegaConf.load(path)["_target_"] for path in (CONF / "policy").glob("*.yaml"))
    names = {option.rpartition(".")[-1] for option in options}
    assert names == {type(policy).__name__ for policy in POLICIES.values()}
