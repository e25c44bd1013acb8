"""Golden schedules, worked out by hand from each policy's rule; rows are (request, start,
tokens).
"""

from __future__ import annotations

import dataclasses

import pytest
from helpers import requests_of, rows, scheduler_for, serve

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Request
from sarathi_lab.policy import Orca, PrefillFirst, RequestLevel, Sarathi, SarathiServe

THREE = requests_of((5, 3), (5, 2), (5, 2))


def schedule(policy, requests=THREE, **kwargs):
    return serve(requests, scheduler_for(policy, **kwargs)).schedule


def test_request_level_prefills_a_batch_and_admits_nobody_until_it_is_done():
    assert schedule(RequestLevel(), batch_size=2) == rows(
        "0:0+5 1:0+5 | 0:5+1 1:5+1 | 0:6+1 | 2:0+5 | 2:5+1"
    )


def test_orca_adds_one_whole_prompt_to_the_decodes():
    assert schedule(Orca(), batch_size=2) == rows(
        "0:0+5 | 0:5+1 1:0+5 | 0:6+1 1:5+1 | 2:0+5 | 2:5+1"
    )


def test_orca_without_limit_starts_all_that_fit_together():
    assert schedule(Orca(max_prefills=None), batch_size=3)[0] == [(0, 0, 5), (1, 0, 5), (2, 0, 5)]


def test_prefill_first_never_mixes_and_prefers_prompts():
    late = requests_of((5, 3), (5, 2), arrivals=[0, 1.5])
    assert schedule(PrefillFirst(), late) == rows("0:0+5 | 0:5+1 | 1:0+5 | 0:6+1 1:5+1")


def test_prefill_first_cuts_batches_at_the_token_budget():
    policy = PrefillFirst(max_num_batched_tokens=10)
    assert schedule(policy, max_model_len=8)[:2] == [[(0, 0, 5), (1, 0, 5)], [(2, 0, 5)]]


def test_prefill_first_delay_lets_decodes_go_before_a_young_prompt():
    late = requests_of((5, 4), (5, 2), arrivals=[0, 1.5])
    assert schedule(PrefillFirst(delay_factor=1.0), late)[:4] == [
        [(0, 0, 5)],
        [(0, 5, 1)],
        [(0, 6, 1)],  # the prompt has waited 0.5 s of the 1 s that the last one took
        [(1, 0, 5)],
    ]


def test_sarathi_chunk_and_decodes_add_up_to_the_chunk_size():
    assert schedule(
        Sarathi(chunk=4, min_decodes=0), requests_of((6, 4), (6, 2)), batch_size=2
    ) == rows("0:0+4 | 0:4+2 | 0:6+1 1:0+3 | 0:7+1 1:3+3 | 0:8+1 1:6+1")


def test_sarathi_runs_a_prompt_whole_when_no_decode_rides_along():
    assert schedule(
        Sarathi(chunk=4, min_decodes=1), requests_of((6, 2), (6, 2)), batch_size=2
    ) == rows("0:0+6 | 0:6+1 1:0+3 | 1:3+3 | 1:6+1")


def test_sarathi_decodes_wait_for_a_full_house_while_prompts_run_whole():
    requests = requests_of((6, 2), (6, 4), (6, 2), (6, 2))
    assert schedule(Sarathi(chunk=4, min_decodes=2), requests, batch_size=3) == [
        [(0, 0, 6), (1, 0, 6)],  # two are missing
        [(0, 6, 1), (1, 6, 1), (2, 0, 2)],  # 0 is done
        [(2, 2, 4)],  # one is missing, so the rest runs whole and 1 waits
        [(1, 7, 1), (2, 6, 1), (3, 0, 2)],  # 2 is done
        [(3, 2, 4)],
        [(1, 8, 1), (3, 6, 1)],
    ]


def test_sarathi_decodes_do_not_wait_for_prompts_that_cannot_start():
    one_fits = {"batch_size": 3, "num_blocks": 3, "block_size": 4, "max_model_len": 12}
    batches = schedule(Sarathi(chunk=4, min_decodes=2), requests_of((8, 3), (8, 1)), **one_fits)
    assert batches == [[(0, 0, 8)], [(0, 8, 1)], [(0, 9, 1)], [(1, 0, 8)]]


def test_sarathi_with_full_chunk_is_orca_best():
    requests = requests_of(*[(8, 5)] * 6)
    assert schedule(Sarathi(chunk=64), requests) == schedule(Orca(), requests)


def test_sarathi_more_prefills_fill_the_rest_of_the_chunk():
    one, two = (
        schedule(Sarathi(chunk=8, min_decodes=0, max_prefills=n), batch_size=3) for n in (1, 2)
    )
    assert one[0] == [(0, 0, 5)]
    assert two[0] == [(0, 0, 5), (1, 0, 3)]


def test_sarathi_serve_fills_the_budget_over_prompts_and_never_starves_decodes():
    assert schedule(SarathiServe(chunk=4), requests_of((5, 2), (2, 2)), batch_size=2) == rows(
        "0:0+4 | 0:4+1 1:0+2 | 0:5+1 1:2+1"
    )


def test_sarathi_serve_admits_only_prompts_whose_blocks_fit_beside_the_watermark():
    requests = requests_of((8, 2), (8, 2))
    together = schedule(SarathiServe(chunk=100, watermark=0.0), requests, num_blocks=6)
    apart = schedule(SarathiServe(chunk=100, watermark=0.5), requests, num_blocks=6)
    assert together[0] == [(0, 0, 8), (1, 0, 8)]
    assert apart[0] == [(0, 0, 8)]


def test_preemption_recomputes_prompt_and_output_of_the_newest():
    # 5 blocks of 2 tokens: two prompts of 4 fill four; the third token of each needs a sixth block.
    requests = requests_of((4, 4), (4, 4))
    scheduler = scheduler_for(SarathiServe(chunk=100, watermark=0.0), num_blocks=5, block_size=2)
    assert serve(requests, scheduler).schedule == [
        [(0, 0, 4), (1, 0, 4)],
        [(0, 4, 1)],  # takes the fifth block; evicts request 1 in its own turn
        [(0, 5, 1)],
        [(0, 6, 1)],
        [(1, 0, 5)],  # prompt and its one generated token
        [(1, 5, 1)],
        [(1, 6, 1)],
    ]
    assert scheduler.num_preemptions == 1


@pytest.mark.parametrize(
    "policy",
    [
        RequestLevel(),
        Orca(max_prefills=None),
        PrefillFirst(),
        Sarathi(chunk=64),
        SarathiServe(chunk=64),
    ],
)
def test_reserve_decides_how_many_are_admitted(policy):
    """With the cache for 2.5 sequences of max_model_len, "max_model_len" admits fewer at once than
    "prompt".
    """
    requests = requests_of(*[(8, 6)] * 4)
    peaks = {}
    for reserve in ("max_model_len", "prompt"):
        chosen = dataclasses.replace(policy, reserve=reserve)
        if hasattr(policy, "watermark") and "watermark" in {
            field.name for field in dataclasses.fields(policy)
        }:
            chosen = dataclasses.replace(chosen, watermark=0.0)
        batches = schedule(chosen, requests, num_blocks=10, block_size=4, max_model_len=16)
        peaks[reserve] = max(len(batch) for batch in batches)
    assert peaks["max_model_len"] == 2
    assert peaks["prompt"] > 2


def test_reserving_per_chunk_admits_a_prompt_that_does_not_fit_whole_yet():
    requests = requests_of((8, 2), (16, 2))
    prompt, chunk = (
        schedule(
            SarathiServe(chunk=10, watermark=0.0, reserve=reserve),
            requests,
            num_blocks=5,
            block_size=4,
        )
        for reserve in ("prompt", "chunk")
    )
    assert prompt[0] == [(0, 0, 8)]
    assert chunk[0] == [(0, 0, 8), (1, 0, 2)]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Sarathi(chunk=3), "chunk=3 is smaller than the 3 decodes and 1 prompt token"),
        (SarathiServe(watermark=1.0), "watermark=1.0"),
        (RequestLevel(reserve="some"), "reserve=some is unknown"),
        (
            PrefillFirst(max_num_batched_tokens=50),
            "max_num_batched_tokens=50 is below max_model_len=200",
        ),
    ],
)
def test_bad_parameters_are_refused_by_name(policy, words):
    with pytest.raises(UserError, match=words):
        scheduler_for(policy)


def test_a_request_that_can_never_fit_is_refused_when_added():
    scheduler = scheduler_for(SarathiServe(), num_blocks=4, block_size=4)
    with pytest.raises(UserError, match=r"request 0 of 20 \+ 4 tokens can never fit the KV cache"):
        scheduler.add(requests_of((20, 4))[0])
    with pytest.raises(UserError, match="exceeds max_model_len=200"):
        scheduler.add(requests_of((199, 4))[0])


def test_the_queue_order_decides_who_is_admitted_first():
    requests = [
        Request(0, 0.0, 6, 1, priority=2),
        Request(1, 0.0, 4, 1, priority=1),
        Request(2, 0.0, 5, 1, priority=0),
        Request(3, 0.0, 4, 1, priority=0),
    ]

    def admitted(queue_order):
        batches = schedule(Orca(), requests, queue_order=queue_order)
        return [row[0] for batch in batches for row in batch if row[1] == 0]

    assert admitted("fcfs") == [0, 1, 2, 3]
    assert admitted("priority") == [2, 3, 1, 0]
    assert admitted("shortest") == [1, 3, 2, 0]


def test_by_priority_the_least_urgent_gives_way():
    # Blocks of 2 tokens, 5 of them: two prompts of 4 fill four, and the third token of each needs a
    # fifth and a sixth.
    requests = [Request(0, 0.0, 4, 4, priority=1), Request(1, 0.0, 4, 4, priority=0)]
    policy = SarathiServe(chunk=100, watermark=0.0)
    batches = schedule(policy, requests, num_blocks=5, block_size=2, queue_order="priority")
    assert batches[:2] == [[(1, 0, 4), (0, 0, 4)], [(1, 4, 1)]]


def test_preemption_by_swap_computes_nothing_again():
    requests = requests_of((4, 4), (4, 4))
    policy = SarathiServe(chunk=100, watermark=0.0)
    scheduler = scheduler_for(
        policy, num_blocks=5, block_size=2, num_host_blocks=5, preemption="swap"
    )
    executor = serve(requests, scheduler)
    assert executor.schedule == [
        [(0, 0, 4), (1, 0, 4)],
        [(0, 4, 1)],  # takes the fifth block; 1 goes to host memory
        [(0, 5, 1)],
        [(0, 6, 1)],
        [(1, 4, 1)],  # and comes back as it was
        [(1, 5, 1)],
        [(1, 6, 1)],
    ]
    assert scheduler.num_preemptions == 1
    directions = [[copy.is_out for copy in copies] for copies in executor.copies]
    assert directions == [[], [True, True], [], [], [False, False], [], []]


def test_a_full_host_cache_leaves_recomputing():
    requests = requests_of((4, 4), (4, 4))
    policy = SarathiServe(chunk=100, watermark=0.0)
    scheduler = scheduler_for(
        policy, num_blocks=5, block_size=2, num_host_blocks=1, preemption="swap"
    )
    assert serve(requests, scheduler).schedule[4] == [(1, 0, 5)]


def test_swapped_sequences_come_back_before_anyone_is_admitted():
    # Request 2 would fit beside 0 as soon as it is there, 1 does not before 0 is done.
    requests = requests_of((4, 4), (4, 4), (2, 1), arrivals=[0, 0, 2.5])
    policy = SarathiServe(chunk=100, watermark=0.0)
    sizes = {"num_blocks": 5, "block_size": 2}
    swapped = schedule(policy, requests, num_host_blocks=5, preemption="swap", **sizes)
    assert swapped[3:5] == [[(0, 6, 1)], [(1, 4, 1), (2, 0, 2)]]
    recomputed = schedule(policy, requests, **sizes)
    assert recomputed[3:5] == [[(0, 6, 1)], [(1, 0, 5), (2, 0, 2)]]
