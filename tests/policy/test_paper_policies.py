"""Schedules of the paper's, vLLM's first and Sarathi-Serve's policies, and of what all share (queue
order, preemption), worked out by hand from their rules; `expect` explains the notation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import expect, requests_of, scheduler_for, serve

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Request
from sarathi_lab.policy import (
    ChunkedOnly,
    Orca,
    PrefillFirst,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SarathiServeDynamic,
)

THREE = "5+3 5+2 5+2"
# Two prompts of 4 fill four of five blocks; the third token of each needs a sixth.
TIGHT = {"num_blocks": 5, "block_size": 2}
SERVE = SarathiServe(chunk=100, watermark=0.0)


def test_request_level_admits_none_until_its_batch_is_done():
    expected = "0:0+5 1:0+5 | 0:5+1 1:5+1 | 0:6+1 | 2:0+5 | 2:5+1"
    expect(RequestLevel(), THREE, expected, batch_size=2)


def test_orca_adds_whole_prompts_to_the_decodes():
    expected = "0:0+5 | 0:5+1 1:0+5 | 0:6+1 1:5+1 | 2:0+5 | 2:5+1"
    expect(Orca(), THREE, expected, batch_size=2)
    expect(Orca(max_prefills=None), THREE, "0:0+5 1:0+5 2:0+5 | ...", batch_size=3)
    hybrid_only = Orca(max_prefills=None, reserve="prompt")
    expect(hybrid_only, "5+3 5+2@0.5 5+1@0.5", "* | 0:5+1 1:0+5 2:0+5 | ...")


def test_prefill_first_never_mixes_and_prefers_prompts():
    expect(PrefillFirst(), "5+3 5+2@1.5", "0:0+5 | 0:5+1 | 1:0+5 | 0:6+1 1:5+1")
    limited = PrefillFirst(max_num_batched_tokens=10)
    expect(limited, THREE, "0:0+5 1:0+5 | 2:0+5 | ...", max_model_len=8)
    # In the third iteration the prompt has waited 0.5 s of the 1 s that the last one took.
    delayed = PrefillFirst(delay_factor=1.0)
    expect(delayed, "5+4 5+2@1.5", "0:0+5 | 0:5+1 | 0:6+1 | 1:0+5 | ...")


def test_sarathi_fills_its_chunk_with_decodes_and_one_prompt():
    expected = "0:0+4 | 0:4+2 | 0:6+1 1:0+3 | 0:7+1 1:3+3 | 0:8+1 1:6+1"
    expect(Sarathi(4, min_decodes=0), "6+4 6+2", expected, batch_size=2)
    # A prompt runs whole when no decode rides along.
    expected = "0:0+6 | 0:6+1 1:0+3 | 1:3+3 | 1:6+1"
    expect(Sarathi(4, min_decodes=1), "6+2 6+2", expected, batch_size=2)
    expect(Sarathi(8, min_decodes=0), THREE, "0:0+5 | ...", batch_size=3)
    two = Sarathi(8, min_decodes=0, max_prefills=2)
    expect(two, THREE, "0:0+5 1:0+3 | ...", batch_size=3)


def test_sarathi_decodes_wait_for_enough_of_them_while_prompts_run_whole():
    # Two decodes are missing at first; 0 ends in the second iteration, 2 in the fourth.
    expected = "0:0+6 1:0+6 | 0:6+1 1:6+1 2:0+2 | 2:2+4 | 1:7+1 2:6+1 3:0+2 | 3:2+4 | 1:8+1 3:6+1"
    policy = Sarathi(4, min_decodes=2)
    expect(policy, "6+2 6+4 6+2 6+2", expected, batch_size=3)
    # They do not wait for prompts that cannot start.
    sizes = {"batch_size": 3, "num_blocks": 3, "max_model_len": 12}
    expect(policy, "8+3 8+1", "0:0+8 | 0:8+1 | 0:9+1 | 1:0+8", **sizes)


def test_sarathi_with_full_chunk_is_orca_best():
    orca, sarathi = (
        serve(requests_of(*[(8, 5)] * 6), scheduler_for(policy)).schedule
        for policy in (Orca(), Sarathi(chunk=64))
    )
    assert sarathi == orca


def test_sarathi_serve_fills_the_budget_over_prompts_beside_all_decodes():
    expected = "0:0+4 | 0:4+1 1:0+2 | 0:5+1 1:2+1"
    expect(SarathiServe(chunk=4), "5+2 2+2", expected, batch_size=2)


def test_chunked_only_takes_turns():
    # Without decodes the prompts' turn comes again; none is admitted beside a running prompt.
    expected = "0:0+4 | 0:4+2 | 0:6+1 | 1:0+4 | 0:7+1 | 1:4+2 | 1:6+1"
    expect(ChunkedOnly(chunk_size=4), "6+3 6+2", expected, batch_size=2)


def test_longer_turns_of_chunks_and_of_decodes():
    # The third chunk of 1 follows a turn of decodes that ends early, as none is left.
    first = "0:0+4 | 0:4+2 | 0:6+1 | 0:7+1 | 0:8+1"
    expected = f"{first} | 1:0+4 | 1:4+4 | 0:9+1 | 0:10+1 | 1:8+4 | 1:12+1"
    policy = ChunkedOnly(chunk_size=4, chunks_per_turn=2, decodes_per_turn=3)
    expect(policy, "6+6 12+2", expected, batch_size=2)


@pytest.mark.parametrize(
    ("changed", "sizes"),
    [
        # Stages of 128 tokens: 128, 96, 64 and 32. 224 tokens are in the second stage still.
        ({}, [128, 96, 96, 30, 1]),
        ({"high_chunk_size": 160}, [160, 128, 62, 1]),  # 160, 117 -> 128, 74 -> 64, 32
        ({"low_chunk_size": 96}, [128, 128, 94, 1]),  # 128, 117 -> 128, 106 -> 96, 96
        ({"chunk_schedule_max_tokens": 256}, [128, 64, 32, 32, 32, 32, 30, 1]),  # of 64 tokens
        ({"chunk_schedule_stages": 2}, [128, 128, 32, 32, 30, 1]),  # 128 up to 256, then 32
    ],
)
def test_chunks_of_the_dynamic_schedule_shrink_by_the_stage(changed, sizes):
    policy = replace(SarathiServeDynamic(128, chunk_schedule_max_tokens=512), **changed)
    served = serve(requests_of((350, 2)), scheduler_for(policy, max_model_len=400))
    assert [row[2] for batch in served.schedule for row in batch] == sizes


def test_dynamic_chunks_leave_the_decodes_their_tokens():
    policy = SarathiServeDynamic(64, 32, chunk_schedule_max_tokens=64, chunk_schedule_stages=2)
    expected = "* | 0:10+1 1:0+63 | 0:11+1 1:63+31 | 0:12+1 1:94+6 | ..."
    expect(policy, "10+4 100+1@0.5", expected)


def test_admission_reserves_cache():
    # Beside the watermark, for whole prompts or for a chunk.
    expect(SERVE, "8+2 8+2", "0:0+8 1:0+8 | ...", num_blocks=6)
    expect(replace(SERVE, watermark=0.5), "8+2 8+2", "0:0+8 | ...", num_blocks=6)
    for reserve, first in (("prompt", "0:0+8"), ("chunk", "0:0+8 1:0+2")):
        policy = replace(SERVE, chunk=10, reserve=reserve)
        expect(policy, "8+2 16+2", f"{first} | ...", num_blocks=5)


@pytest.mark.parametrize(
    "policy", [RequestLevel(), Orca(max_prefills=None), PrefillFirst(watermark=0.0), SERVE]
)
def test_reserve_decides_how_many_are_admitted(policy):
    """The cache is for 2.5 requests of max_model_len, or five prompts."""
    for reserve, most in (("max_model_len", 2), ("prompt", 4)):
        scheduler = scheduler_for(replace(policy, reserve=reserve), num_blocks=10, max_model_len=16)
        batches = serve(requests_of(*[(8, 6)] * 4), scheduler).schedule
        assert max(map(len, batches)) == most


def test_preemption_recomputes_prompt_and_output_of_the_newest():
    # 0 takes the fifth block and evicts 1, which recomputes its prompt and one generated token.
    first = "0:0+4 1:0+4 | 0:4+1 | 0:5+1 | 0:6+1 | "
    expect(SERVE, "4+4 4+4", f"{first}1:0+5 | 1:5+1 | 1:6+1", **TIGHT)
    expected = "* | * | * | 0:6+1 | 1:0+5 2:0+2 | ..."
    expect(SERVE, "4+4 4+4 2+1@2.5", expected, **TIGHT)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Sarathi(chunk=3), "chunk=3 is smaller than the 3 decodes and 1 prompt token"),
        (SarathiServe(watermark=1.0), "watermark=1.0"),
        (RequestLevel(reserve="some"), "reserve=some is unknown"),
        (PrefillFirst(max_num_batched_tokens=50), "max_num_batched_tokens=50 is below"),
        (SarathiServeDynamic(high_chunk_size=100), "high_chunk_size=100 is not a multiple of 32"),
        (SarathiServeDynamic(high_chunk_size=32, low_chunk_size=64), "low_chunk_size=64 exceeds"),
    ],
)
def test_bad_parameters_are_refused_by_name(policy, words):
    with pytest.raises(UserError, match=words):
        scheduler_for(policy)


def test_a_request_that_can_never_fit_is_refused_when_added():
    scheduler = scheduler_for(SarathiServe(), num_blocks=4, block_size=4)
    for lengths, words in (
        ((20, 4), r"request 0 of 20 \+ 4 tokens can never fit the KV cache"),
        ((199, 4), "exceeds max_model_len=200"),
    ):
        with pytest.raises(UserError, match=words):
            scheduler.add(requests_of(lengths)[0])


def test_the_queue_order_decides_which_is_admitted_first_and_evicted():
    lengths, priorities = (6, 4, 5, 4), (2, 1, 0, 0)
    requests = [Request(i, 0.0, lengths[i], 1, priority=priorities[i]) for i in range(4)]
    for order, batches in (
        ("fcfs", "0:0+6 | 1:0+4 | 2:0+5 | 3:0+4"),
        ("priority", "2:0+5 | 3:0+4 | 1:0+4 | 0:0+6"),
        ("shortest", "1:0+4 | 3:0+4 | 2:0+5 | 0:0+6"),
    ):
        expect(Orca(), requests, batches, queue_order=order)
    requests = [Request(i, 0.0, 4, 4, priority=1 - i) for i in range(2)]
    expect(SERVE, requests, "1:0+4 0:0+4 | 1:4+1 | ...", queue_order="priority", **TIGHT)
