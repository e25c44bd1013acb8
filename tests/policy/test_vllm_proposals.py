"""Schedules of rules proposed for vLLM's scheduler, by hand; batches are
REQUEST:START+TOKENS.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import expect, scheduler_for, serve

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy.zoo import (
    CacheAware,
    InterPrefillBudget,
    MinPrefillChunk,
    PPas,
    PPasPlus,
)

TOKEN = 0.125  # seconds


@pytest.mark.parametrize(
    ("policy", "requests", "batches"),
    [
        # 26 tokens are left beside two decodes: an eighth of 16, until the decodes end.
        (
            PPasPlus(16, large_prefill_threshold=20),
            "4+6 4+6 40+1@0.5",
            "* | * | 0:5+1 1:5+1 2:14+2 | 0:6+1 1:6+1 2:16+2 | 0:7+1 1:7+1 2:18+2 | "
            "0:8+1 1:8+1 2:20+2 | 2:22+16 | 2:38+2",
        ),
        # Fewer are left than the threshold after the fourth iteration.
        (
            PPasPlus(16, large_prefill_threshold=24),
            "4+6 4+6 40+1@0.5",
            "* | * | 0:5+1 1:5+1 2:14+2 | 0:6+1 1:6+1 2:16+2 | 0:7+1 1:7+1 2:18+14 | ...",
        ),
        (PPasPlus(16, large_prefill_threshold=20), "4+6 40+1@0.5", "* | * | 0:5+1 1:15+15 | ..."),
        (PPas(16), "4+6 4+6 40+1@0.5", "* | * | 0:5+1 1:5+1 2:14+14 | ..."),
    ],
)
def test_p_pas_plus_also_caps_a_single_large_prompt_beside_two_decodes(policy, requests, batches):
    expect(policy, requests, batches)


@pytest.mark.parametrize(
    ("requests", "batches"),
    [
        # 3 and 2 tokens go together, as many as 4.
        ("4+8 3+1@0.5 2+1@2.5", "* | 0:4+1 | 0:5+1 | 0:6+1 1:0+3 2:0+2 | ..."),
        # Alone 3 wait for three iterations.
        ("4+8 3+1@0.5", "* | 0:4+1 | 0:5+1 | 0:6+1 | 0:7+1 1:0+3 | ..."),
        ("4+8 14+1@0.5", "* | 0:4+1 1:0+14 | ..."),
        # Without decodes nothing waits.
        ("3+1 2+1@0.5", "0:0+3 | 1:0+2"),
    ],
)
def test_small_chunks_wait_for_others_beside_decodes_but_not_for_ever(requests, batches):
    policy = MinPrefillChunk(16, min_prefill_chunk=4, max_prefill_chunk_delay_steps=3)
    expect(policy, requests, batches)


def test_a_chunk_that_decodes_leave_no_room_for_is_refused():
    with pytest.raises(UserError, match="min_prefill_chunk=512 leaves max_num_batched_tokens=512"):
        scheduler_for(MinPrefillChunk(512, min_prefill_chunk=512))


def test_no_further_prompt_joins_those_that_occupy_the_device():
    batches = "0:0+6 | 0:6+1 1:0+2 2:0+3 | 0:7+1 3:0+7 | ..."
    expect(InterPrefillBudget(16, inter_prefill_budget=5), "6+4 2+1 3+1 7+1", batches)


# -- orders by what is cached ----------------------------------------------------------------------


def first_scheduled(policy: CacheAware, arrivals=(0.0, 2.0, 2.0, 2.0)) -> list[int]:
    """The order in which requests enter behind the first, whose 16 tokens two others share."""
    shared, other = np.arange(16, dtype=np.int32), np.arange(100, 140, dtype=np.int32)
    prompts = [shared, other[:6], np.append(shared, other[:12]), np.append(shared, other[:8])]
    requests = [
        Request(i, time, len(prompt), 1, prompt_token_ids=prompt)
        for i, (time, prompt) in enumerate(zip(arrivals, prompts, strict=True))
    ]
    blocks = BlockManager(100, 4, shares_prefixes=True)
    scheduler = Scheduler(policy, blocks, batch_size=1, max_model_len=40)
    schedule = serve(requests, scheduler).schedule
    return list(dict.fromkeys(batch[0][0] for batch in schedule))


@pytest.mark.parametrize(
    ("changed", "order"),
    [
        ({}, [0, 1, 3, 2]),  # 6, 12 and 8 tokens are not cached: 1, 3 and 2 blocks
        ({"order": "affinity"}, [0, 2, 3, 1]),  # 0, 16 and 16 are
        ({"max_wait": 1e-3, "order": "affinity"}, [0, 2, 1, 3]),  # later ones are older than that
    ],
)
def test_waiting_prompts_are_ordered_by_what_is_cached_and_old_ones_by_arrival(changed, order):
    assert first_scheduled(CacheAware(64, **changed)) == order
