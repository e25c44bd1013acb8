"""What vLLM's workers get of a schedule, checked by workers with vLLM's bookkeeping."""

from __future__ import annotations

import numpy as np
from bookkeeper import BLOCK, Bookkeeper
from every_policy import MAX_LEN, POLICIES
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch, rehearse, run_once
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.vllm.executor import VllmExecutor

NAMES = ("request_level", "orca", "sarathi", "sarathi_serve_chunk", "sglang", "vllm_v1", "tgi")


def expected_tokens(request):
    tokens = list(request.prompt_token_ids)
    for _ in range(request.output_len):
        tokens.append(sum(tokens) % 97)
    return tokens[request.prompt_len :]


@settings(max_examples=300, deadline=None)
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
    probe = make_batch(prefill_tokens=3, num_decodes=2, context=2, blocks=BlockManager(11, BLOCK))
    for _ in range(2):  # as probes of a batch's time do
        run_once(executor, probe)
    stages = workers.num_stages
    engine = EngineConfig(
        POLICIES[name], 4, num_blocks, BLOCK, MAX_LEN, stages, shares_prefixes=shares
    )
    table = serve(requests, engine, executor).requests().sort_values("request_id")
    assert [list(one) for one in table.output_token_ids] == [*map(expected_tokens, requests)]
    assert workers.most_held <= 4 * stages
    executor.start()
    assert not workers.held
