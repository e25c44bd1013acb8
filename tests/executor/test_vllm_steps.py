"""What vLLM's workers get of a schedule, checked by workers with vLLM's bookkeeping."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from every_policy import MAX_LEN, POLICIES
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_lab.engine.compositions import rehearse
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.vllm.executor import VllmExecutor

NAMES = ("request_level", "orca", "sarathi", "sarathi_serve_chunk", "sglang", "vllm_v1", "tgi")
BLOCK = 4


class Bookkeeper:
    """Workers that hold tokens and blocks by name, as vLLM's do, and refuse what does not follow.
    The token after a sequence is the sum of its tokens modulo 97.
    """

    def __init__(self, *, is_async: bool = False, num_stages: int = 1) -> None:
        self.is_async, self.num_stages = is_async, num_stages
        self.wants_newest_tokens = num_stages > 1
        self.block_size, self.num_blocks = BLOCK, 64
        self.held: dict[str, SimpleNamespace] = {}
        self.most_held = 0
        self.cache: dict[tuple[int, int], int] = {}  # token by block and place

    def forget(self, names):
        for name in names:
            self.held.pop(name)

    def run(self, step):
        self.forget(step.ended)
        for name, token_ids, block_ids, num_computed in step.new:
            assert name not in self.held
            assert -1 not in token_ids
            state = SimpleNamespace(tokens=list(token_ids), blocks=list(block_ids))
            self.held[name] = state
            state.computed = num_computed
            state.given = len(token_ids)
        lists = (step.names, step.new_blocks, step.num_computed, step.num_generated)
        for name, blocks, computed, generated in zip(*lists, strict=True):
            state = self.held[name]
            assert state.computed == computed
            assert generated == len(state.tokens) - state.given
            state.blocks += blocks or []
        self.most_held = max(self.most_held, len(self.held))
        found = {}
        for name, number in step.num_tokens.items():
            state = self.held[name]
            for place in range(state.computed, state.computed + number):
                self.cache[state.blocks[place // BLOCK], place % BLOCK] = state.tokens[place]
            state.computed += number
            if state.computed == len(state.tokens):
                places = range(state.computed)
                in_cache = [self.cache[state.blocks[i // BLOCK], i % BLOCK] for i in places]
                assert in_cache == state.tokens
                found[name] = sum(in_cache) % 97
                state.tokens.append(found[name])
        return SimpleNamespace(
            tokens=lambda names: [found[name] for name in names], replay=lambda: (False, 0)
        )


def expected_tokens(request):
    tokens = list(request.prompt_token_ids)
    for _ in range(request.output_len):
        tokens.append(sum(tokens) % 97)
    return tokens[request.prompt_len :]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=10),
    num_blocks=st.integers(11, 30),
    shares=st.booleans(),
    kind=st.sampled_from([{}, {"is_async": True}, {"num_stages": 2}]),
)
def test_the_workers_hold_what_the_scheduler_means(name, lengths, num_blocks, shares, kind):
    """Preemption, prefix caching, two batches in flight and micro-batches."""
    requests = [
        Request(i, 0.0, p, d, np.arange(p, dtype=np.int32) % 7) for i, (p, d) in enumerate(lengths)
    ]
    workers = Bookkeeper(**kind)
    executor = VllmExecutor(workers)
    rehearse(executor, num_blocks, BLOCK, batch_size=4, chunk_tokens=8)
    stages = workers.num_stages
    engine = EngineConfig(
        POLICIES[name], 4, num_blocks, BLOCK, MAX_LEN, stages, shares_prefixes=shares
    )
    table = serve(requests, engine, executor).requests().sort_values("request_id")
    assert [list(one) for one in table.output_token_ids] == [*map(expected_tokens, requests)]
    assert workers.most_held <= 4 * stages
    executor.start()
    assert not workers.held
