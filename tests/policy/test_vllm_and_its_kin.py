"""Schedules of vLLM's, Sarathi-Serve's and their kin's policies, by hand; rows are (request, start,
tokens).
"""

from __future__ import annotations

import pandas as pd
import pytest
from helpers import requests_of, rows, scheduler_for, serve

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.request import Request
from sarathi_lab.extensions.after_sarathi import PPas
from sarathi_lab.policy import (
    Ascend,
    AscendDynamic,
    AscendV09,
    ChunkedOnly,
    FastDeploy,
    NanoVllm,
    Orca,
    SarathiServeDynamic,
    SplitFuse,
    VllmV0Chunked,
    VllmV1,
)
from sarathi_lab.policy.ascend_dynamic import (
    ProfileTable,
    Row,
    make_profile_table,
    read_profile_table,
)

THREE = requests_of((5, 3), (5, 2), (5, 2))
# What a budget of 8 makes of them where the last prompt of an iteration is cut: 5 + 3, then 1 + 2 +
# 5.
CUT = rows("0:0+5 1:0+3 | 0:5+1 1:3+2 2:0+5 | 0:6+1 1:5+1 2:5+1")


def schedule(policy, requests=THREE, **kwargs):
    return serve(requests, scheduler_for(policy, **kwargs)).schedule


# -- Sarathi-Serve ---------------------------------------------------------------------------------


def test_chunked_only_takes_turns():
    assert schedule(ChunkedOnly(chunk_size=4), requests_of((6, 3), (6, 2)), batch_size=2) == [
        [(0, 0, 4)],
        [
            (0, 4, 2)
            # nobody decodes yet, so the prompts' turn comes again; it admits nobody beside a
            # running prompt
        ],
        [(0, 6, 1)],
        [(1, 0, 4)],
        [(0, 7, 1)],
        [(1, 4, 2)],
        [(1, 6, 1)],
    ]


def test_hybrid_only_is_whole_prompts_beside_the_decodes():
    policy = Orca(max_prefills=None, reserve="prompt")
    late = requests_of((5, 3), (5, 2), (5, 1), arrivals=[0, 0.5, 0.5])
    assert schedule(policy, late)[1] == [(0, 5, 1), (1, 0, 5), (2, 0, 5)]


def test_dynamic_chunks_shrink_by_the_stage():
    # 4 stages of 512 / 4 = 128 tokens: 32, 64, 96 and 128 from the last to the first.
    policy = SarathiServeDynamic(128, 32, chunk_schedule_max_tokens=512, chunk_schedule_stages=4)
    assert policy.chunk_sizes == [128, 96, 64, 32]
    assert schedule(policy, requests_of((350, 2)), max_model_len=400) == [
        [(0, 0, 128)],
        [(0, 128, 96)],
        [(0, 224, 96)],  # 224 is in the second stage still
        [(0, 320, 30)],  # of the 64 of the third
        [(0, 350, 1)],
    ]


@pytest.mark.parametrize(
    ("changed", "sizes"),
    [
        ({}, [128, 96, 96, 30, 1]),
        ({"high_chunk_size": 160}, [160, 128, 62, 1]),  # 160, 117 -> 128, 74 -> 64, 32
        ({"low_chunk_size": 96}, [128, 128, 94, 1]),  # 128, 117 -> 128, 106 -> 96, 96
        (
            {"chunk_schedule_max_tokens": 256},
            [128, 64, 32, 32, 32, 32, 30, 1],
        ),  # stages of 64 tokens
        (
            {"chunk_schedule_stages": 2},
            [128, 128, 32, 32, 30, 1],
        ),  # stages of 256 tokens: 128 up to 256, then 32
    ],
)
def test_every_parameter_of_the_dynamic_schedule_counts(changed, sizes):
    parameters = {
        "high_chunk_size": 128,
        "chunk_schedule_max_tokens": 512,
        "chunk_schedule_stages": 4,
        **changed,
    }
    batches = schedule(SarathiServeDynamic(**parameters), requests_of((350, 2)), max_model_len=400)
    assert [row[2] for batch in batches for row in batch] == sizes


def test_dynamic_chunks_leave_the_decodes_their_tokens():
    policy = SarathiServeDynamic(64, 32, chunk_schedule_max_tokens=64, chunk_schedule_stages=2)
    batches = schedule(policy, requests_of((10, 4), (100, 1), arrivals=[0, 0.5]))
    assert batches[1:4] == rows("0:10+1 1:0+63 | 0:11+1 1:63+31 | 0:12+1 1:94+6")


# -- DeepSpeed -------------------------------------------------------------------------------------


def test_splitfuse_cuts_the_last_prompt():
    assert schedule(SplitFuse(max_ragged_batch_size=8)) == CUT


def test_splitfuse_decodes_wait_for_blocks_and_a_deadlock_flushes_the_newest():
    # 5 blocks of 2 tokens: two prompts of 4 fill four.
    scheduler = scheduler_for(SplitFuse(max_ragged_batch_size=8), num_blocks=5, block_size=2)
    assert serve(requests_of((4, 4), (4, 4)), scheduler).schedule == [
        [(0, 0, 4), (1, 0, 4)],
        [(0, 4, 1)],  # takes the fifth block, and 1 waits without giving its own back
        [(0, 5, 1)],
        [
            (0, 6, 1)
        ],  # needs a sixth: nobody can run, so 1 is flushed; its 5 tokens don't fit beside
        [(1, 0, 5)],
        [(1, 5, 1)],
        [(1, 6, 1)],
    ]
    assert scheduler.num_preemptions == 1


def test_splitfuse_admits_a_prompt_only_if_all_of_it_fits():
    # 4 blocks of 4 tokens: beside the first prompt's two there are two, the second needs three.
    batches = schedule(
        SplitFuse(max_ragged_batch_size=10), requests_of((8, 2), (12, 2)), num_blocks=4
    )
    assert batches[0] == [(0, 0, 8)]


# -- vLLM v0 ---------------------------------------------------------------------------------------


def test_vllm_v0_chunked_puts_prompts_before_decodes():
    assert schedule(VllmV0Chunked(max_num_batched_tokens=8)) == [
        CUT[0],
        [(1, 3, 2), (2, 0, 5), (0, 5, 1)],
        CUT[2],
    ]


LONG_AND_SHORT = requests_of((20, 1), (20, 1), (5, 2), (4, 2))


def test_vllm_v0_partial_prefills_share_the_budget_and_short_ones_overtake():
    policy = VllmV0Chunked(8, max_num_partial_prefills=2, long_prefill_token_threshold=6)
    assert schedule(policy, LONG_AND_SHORT) == [
        [(0, 0, 4), (2, 0, 4)],  # 8 / 2 each; the second long one is passed over
        [(0, 4, 4), (2, 4, 1), (3, 0, 3)],
        [(0, 8, 4), (3, 3, 1), (2, 5, 1)],
        [(0, 12, 7), (3, 4, 1)],  # only one prompt may run, so it has all
        [(0, 19, 1), (1, 0, 4)],  # one that lacks a token is not long any more
        [(1, 4, 8)],
        [(1, 12, 8)],
    ]


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, [(0, 0, 4), (2, 0, 4)]),
        ({"max_num_batched_tokens": 12}, [(0, 0, 6), (2, 0, 5), (3, 0, 1)]),
        (
            {"max_num_partial_prefills": 4},
            [(0, 0, 2), (2, 0, 2), (3, 0, 2)],
        ),  # three prompts may run: 8 // 3 each
        ({"max_long_partial_prefills": 2}, [(0, 0, 4), (1, 0, 4)]),
        ({"long_prefill_token_threshold": 30}, [(0, 0, 4), (1, 0, 4)]),  # none is long
        ({"long_prefill_token_threshold": 0}, [(0, 0, 4), (2, 0, 4)]),  # 4 % of 200 is 8
    ],
)
def test_every_parameter_of_vllm_v0_counts(changed, first):
    parameters = {
        "max_num_batched_tokens": 8,
        "max_num_partial_prefills": 2,
        "long_prefill_token_threshold": 6,
    }
    assert schedule(VllmV0Chunked(**(parameters | changed)), LONG_AND_SHORT)[0] == first


def test_vllm_v0_without_partial_prefills_does_not_let_short_ones_overtake():
    assert schedule(VllmV0Chunked(8), LONG_AND_SHORT)[:3] == rows("0:0+8 | 0:8+8 | 0:16+4 1:0+4")


# -- vLLM v1 ---------------------------------------------------------------------------------------


def test_vllm_v1_lets_all_catch_up_in_order():
    assert schedule(VllmV1(max_num_batched_tokens=8)) == CUT


def test_vllm_v1_limits_what_a_prompt_takes_at_a_time():
    policy = VllmV1(max_num_batched_tokens=8, long_prefill_token_threshold=2)
    assert schedule(policy)[:2] == rows("0:0+2 1:0+2 2:0+2 | 0:2+2 1:2+2 2:2+2")


def test_vllm_v1_keeps_the_order_of_running_whatever_they_need():
    # 0 decodes from the second iteration on, 1 is the long prompt; 2 comes in behind it when there
    # is room again.
    late = requests_of((3, 4), (14, 2), (3, 3), arrivals=[0, 0.5, 0.5])
    assert schedule(VllmV1(max_num_batched_tokens=8), late) == rows(
        "0:0+3 | 0:3+1 1:0+7 | 0:4+1 1:7+7 | 0:5+1 1:14+1 2:0+3 | 2:3+1 | 2:4+1"
    )


@pytest.mark.parametrize(
    ("reserves", "first"), [(True, [(0, 0, 8)]), (False, [(0, 0, 8), (1, 0, 2)])]
)
def test_vllm_v1_may_admit_a_prompt_that_does_not_fit_whole(reserves, first):
    policy = VllmV1(max_num_batched_tokens=10, scheduler_reserve_full_isl=reserves)
    assert schedule(policy, requests_of((8, 2), (12, 2)), num_blocks=4)[0] == first


@pytest.mark.parametrize(
    ("chunked", "first"), [(True, [(0, 0, 5), (1, 0, 3)]), (False, [(0, 0, 5)])]
)
def test_vllm_v1_without_chunks_admits_what_fits(chunked, first):
    policy = VllmV1(max_num_batched_tokens=8, enable_chunked_prefill=chunked)
    assert schedule(policy, max_model_len=8)[0] == first


def test_vllm_v1_admits_nobody_when_it_preempts():
    # 7 blocks of 2: three prompts take two each. The next tokens of 0 and 1 need a block each and
    # one is left, so 2 gives way and leaves a block; the urgent 3, which came meanwhile, would fit
    # it.
    requests = [Request(i, 0.0, 4, 3, priority=i) for i in range(3)] + [Request(3, 0.5, 1, 1)]
    scheduler = scheduler_for(VllmV1(20), num_blocks=7, block_size=2, queue_order="priority")
    assert serve(requests, scheduler).schedule[:3] == rows(
        "0:0+4 1:0+4 2:0+4 | 0:4+1 1:4+1 | 0:5+1 1:5+1 3:0+1"
    )


# -- P-PAS -----------------------------------------------------------------------------------------

PRESSURE = requests_of((4, 6), (20, 1), (20, 1), arrivals=[0, 0.5, 0.5])


def test_p_pas_caps_prompts_while_several_press_on_decodes():
    batches = schedule(PPas(max_num_batched_tokens=16), PRESSURE)  # the cap is 16 / 8
    assert batches == [
        [(0, 0, 4)],
        *([(0, 4 + i, 1), (1, 2 * i, 2)] for i in range(5)),  # 1 runs and 2 waits
        [(1, 10, 10), (2, 0, 6)],  # 0 is done: nobody is left to be delayed
        [(2, 6, 14)],
    ]


@pytest.mark.parametrize(
    ("changed", "second"),
    [
        ({}, [(0, 4, 1), (1, 0, 2)]),
        ({"prefill_cap": 5}, [(0, 4, 1), (1, 0, 5)]),
        ({"min_active_prefills": 3}, [(0, 4, 1), (1, 0, 15)]),
        ({"max_num_batched_tokens": 32}, [(0, 4, 1), (1, 0, 4)]),
    ],
)
def test_every_parameter_of_p_pas_counts(changed, second):
    assert schedule(PPas(**{"max_num_batched_tokens": 16, **changed}), PRESSURE)[1] == second


# -- nano-vLLM -------------------------------------------------------------------------------------


def test_nano_vllm_cuts_only_the_first_prompt_and_prefers_prompts():
    assert schedule(
        NanoVllm(max_num_batched_tokens=8), requests_of((5, 3), (5, 2), (10, 2))
    ) == rows("0:0+5 | 1:0+5 | 2:0+8 | 2:8+2 | 0:5+1 1:5+1 2:10+1 | 0:6+1")
    assert schedule(NanoVllm(max_num_batched_tokens=10))[0] == [(0, 0, 5), (1, 0, 5)]


# -- FastDeploy ------------------------------------------------------------------------------------


def test_fastdeploy_prefills_one_prompt_at_a_time():
    assert schedule(FastDeploy(max_num_batched_tokens=8)) == rows(
        "0:0+5 | 0:5+1 1:0+5 | 0:6+1 1:5+1 2:0+5 | 2:5+1"
    )


def test_fastdeploy_with_more_partial_prefills_fills_the_budget():
    assert schedule(FastDeploy(max_num_batched_tokens=8, max_num_partial_prefills=2)) == CUT


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, [(0, 0, 5)]),  # more than 4 tokens are long
        ({"max_long_partial_prefills": 2}, CUT[0]),
        ({"long_prefill_token_threshold": 5}, CUT[0]),
        ({"long_prefill_token_threshold": 0}, CUT[0]),  # 4 % of 200 is 8
    ],
)
def test_fastdeploy_limits_long_prompts(changed, first):
    parameters = {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 4, **changed}
    assert schedule(FastDeploy(max_num_batched_tokens=8, **parameters))[0] == first


@pytest.mark.parametrize(("blocks", "first"), [(2, [(0, 0, 4)]), (0, [(0, 0, 4), (1, 0, 4)])])
def test_fastdeploy_admits_beside_the_blocks_that_its_decodes_will_take(blocks, first):
    # 5 blocks of 2: a prompt of 4 takes two, and is to leave two for its decodes.
    policy = FastDeploy(
        max_num_batched_tokens=8, max_num_partial_prefills=2, static_decode_blocks=blocks
    )
    assert schedule(policy, requests_of((4, 4), (4, 4)), num_blocks=5, block_size=2)[0] == first


@pytest.mark.parametrize(("threshold", "third"), [(0, [(0, 5, 1), (1, 0, 4)]), (12, [(0, 5, 1)])])
def test_fastdeploy_takes_blocks_ahead_of_need(threshold, third):
    # The first decode takes blocks 2 and 3 of 5. With 6 of their 12 slots left the next takes the
    # fourth only if 6 is at most the threshold; the second request, which comes then, needs two.
    policy = FastDeploy(max_num_batched_tokens=8, prealloc_dec_block_slot_num_threshold=threshold)
    requests = requests_of((4, 12), (4, 1), arrivals=[0, 1.5])
    assert schedule(policy, requests, num_blocks=5)[2] == third


# -- Ascend ----------------------------------------------------------------------------------------


def test_ascend_passes_over_a_prompt_that_does_not_fit():
    requests = requests_of((6, 3), (6, 2), (4, 2))
    assert schedule(AscendV09(max_num_batched_tokens=10), requests, max_model_len=10) == rows(
        "0:0+6 2:0+4 | 1:0+6 | 0:6+1 2:4+1 1:6+1 | 0:7+1"
    )
    assert schedule(AscendV09(), requests)[0] == [(0, 0, 6), (1, 0, 6), (2, 0, 4)]


def test_ascend_with_chunks_is_vllm_v1():
    requests = requests_of((300, 3), (300, 2), (20, 2))
    chunked = schedule(
        AscendV09(256, enable_chunked_prefill=True, watermark=0.0), requests, max_model_len=400
    )
    assert chunked == schedule(VllmV1(max_num_batched_tokens=256), requests, max_model_len=400)
    limited = Ascend(
        256, enable_chunked_prefill=True, long_prefill_token_threshold=100, watermark=0.0
    )
    expected = schedule(VllmV1(256, long_prefill_token_threshold=100), requests, max_model_len=400)
    assert schedule(limited, requests, max_model_len=400) == expected != chunked


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, [(0, 0, 6), (2, 0, 4)]),
        ({"max_long_partial_prefills": 2}, [(0, 0, 6), (1, 0, 6), (2, 0, 4)]),
        ({"long_prefill_token_threshold": 6}, [(0, 0, 6), (1, 0, 6), (2, 0, 4)]),
        ({"long_prefill_token_threshold": 0}, [(0, 0, 6), (1, 0, 6), (2, 0, 4)]),  # 4 % of 200 is 8
    ],
)
def test_ascend_limits_long_prompts(changed, first):
    policy = Ascend(
        **{"max_long_partial_prefills": 1, "long_prefill_token_threshold": 5, **changed}
    )
    assert schedule(policy, requests_of((6, 1), (6, 1), (4, 1)))[0] == first


def test_ascend_prefills_all_before_anyone_decodes():
    requests = requests_of((4, 3), (4, 3), (4, 3))
    policy = Ascend(max_num_seqs=1, enable_pd_transfer=True, decode_max_num_seqs=2)
    assert schedule(policy, requests) == rows(
        "0:0+4 | 1:0+4 | 2:0+4 | 0:4+1 1:4+1 | 0:5+1 1:5+1 | 2:4+1 | 2:5+1"
    )
    three = Ascend(max_num_seqs=1, enable_pd_transfer=True, decode_max_num_seqs=3)
    assert schedule(three, requests)[3] == [(0, 4, 1), (1, 4, 1), (2, 4, 1)]
    assert schedule(Ascend(max_num_seqs=1), requests)[:4] == rows("0:0+4 | 0:4+1 | 0:5+1 | 1:0+4")
    assert schedule(Ascend(enable_pd_transfer=True), requests)[0] == [
        (0, 0, 4),
        (1, 0, 4),
        (2, 0, 4),
    ]


TABLE = ProfileTable(
    tuple(
        Row(*row)
        for row in (
            (16, 1, 128, 40.0),
            (8, 1, 128, 20.0),
            (4, 1, 128, 10.0),
            (8, 2, 128, 60.0),
            (6, 2, 128, 30.0),
            (4, 1, 256, 20.0),
        )
    )
)


@pytest.mark.parametrize(
    ("context", "num_decodes", "slo", "budget"),
    [
        (5, 1, 30, 8),
        (5, 1, 40, 16),
        (128, 1, 10, 4),
        (128.5, 1, 30, 4),  # rounded up to 256
        (5, 2, 30, 6),
        (5, 2, 20, None),  # no rows of two decodes are within 20 ms
        (5, 3, 90, None),
        (300, 1, 90, None),
        (200, 2, 60, None),  # 256 tokens and 2 decodes are in the table, but not together
    ],
)
def test_the_profile_table_gives_the_largest_chunk_within_the_slo(
    context, num_decodes, slo, budget
):
    assert TABLE.budget(context, num_decodes, slo) == budget


def test_ascend_dynamic_takes_the_budget_of_the_table():
    requests = requests_of((4, 4), (20, 2))
    policy = AscendDynamic(16, slo_limits_for_dynamic_batch=30, profile_table=TABLE)
    assert schedule(policy, requests) == [
        [(0, 0, 4), (1, 0, 12)],  # no decodes: max_num_batched_tokens
        [(0, 4, 1), (1, 12, 7)],
        [(0, 5, 1), (1, 19, 1)],
        [(0, 6, 1), (1, 20, 1)],
    ]


@pytest.mark.parametrize(
    ("changed", "second"),
    [
        ({}, [(0, 4, 1), (1, 12, 7)]),
        ({"slo_limits_for_dynamic_batch": 10}, [(0, 4, 1), (1, 12, 3)]),
        (
            {"slo_limits_for_dynamic_batch": 5},
            [(0, 4, 1), (1, 12, 8)],
        ),  # no row: the 16 of an iteration
        ({"long_prefill_token_threshold": 2}, [(0, 2, 2), (1, 2, 2)]),
    ],
)
def test_every_parameter_of_ascend_dynamic_counts(changed, second):
    parameters = {"slo_limits_for_dynamic_batch": 30, "profile_table": TABLE, **changed}
    assert schedule(AscendDynamic(16, **parameters), requests_of((4, 4), (20, 2)))[1] == second


def test_a_profile_table_is_read_from_a_file_and_made_from_a_cost_model(tmp_path):
    made = make_profile_table(
        lambda batch: batch.num_tokens / 1000, batch_size=4, max_model_len=200
    )
    frame = made.frame()
    assert set(frame.d_num) == {1, 2, 4}
    assert set(frame.ctx_len) == {128, 256}
    assert (frame.cost == frame.chunk_size).all()  # a millisecond a token
    assert (frame.p_len + frame.d_num == frame.chunk_size).all()
    frame.to_csv(tmp_path / "table.csv", index=False)
    assert read_profile_table(str(tmp_path / "table.csv")) == made
    assert made.budget(150, 3, slo=100) == 96  # of 64, 96 and 128
    policy = AscendDynamic(100).on_device(lambda: Predictor(lambda batch: {"all": 0.001}), 4, 200)
    assert policy.profile_table.budget(10, 1, slo=1) == 2048  # all that are tried
    assert AscendDynamic(100, profile_table=str(tmp_path / "table.csv")).on_device(
        lambda: None, 4, 200
    )


def test_a_device_without_cost_model_asks_for_a_table(tmp_path):
    with pytest.raises(UserError, match="needs profile_table here"):
        AscendDynamic(100).on_device(lambda: None, 4, 200)
    pd.DataFrame({"chunk_size": [1]}).to_csv(tmp_path / "other.csv")
    for name, words in (
        ("none.csv", "can't be read"),
        ("other.csv", "use a CSV file with the columns"),
    ):
        with pytest.raises(UserError, match=words):
            scheduler_for(AscendDynamic(100, profile_table=str(tmp_path / name)))


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (SarathiServeDynamic(high_chunk_size=100), "high_chunk_size=100 is not a multiple of 32"),
        (SarathiServeDynamic(high_chunk_size=32, low_chunk_size=64), "low_chunk_size=64 exceeds"),
        (
            VllmV0Chunked(8, max_num_partial_prefills=9),
            "max_num_partial_prefills=9 leaves each less than a token",
        ),
        (
            VllmV0Chunked(max_long_partial_prefills=2),
            "max_long_partial_prefills=2 exceeds max_num_partial_prefills=1",
        ),
        (
            VllmV0Chunked(long_prefill_token_threshold=9),
            "long_prefill_token_threshold=9 has no effect on one prompt",
        ),
        (
            VllmV1(long_prefill_token_threshold=200),
            "long_prefill_token_threshold=200 has no effect, as max_model_len",
        ),
        (
            VllmV1(100, enable_chunked_prefill=False),
            "max_num_batched_tokens=100 is below max_model_len=200",
        ),
        (PPas(prefill_cap=16384), "prefill_cap=16384 has no effect"),
        (FastDeploy(max_long_partial_prefills=2), "max_long_partial_prefills=2 exceeds"),
        (AscendV09(100), "max_num_batched_tokens=100 is below max_model_len=200"),
        (
            AscendV09(300, enable_chunked_prefill=True),
            "max_num_batched_tokens=300 .* use a multiple of 256",
        ),
        (AscendV09(enable_chunked_prefill=True), "max_num_batched_tokens=None"),
        (
            Ascend(256, enable_chunked_prefill=True, max_num_seqs=2),
            "max_num_seqs=2 has no effect with",
        ),
        (Ascend(long_prefill_token_threshold=9), "has no effect without max_long_partial_prefills"),
        (Ascend(max_long_partial_prefills=0), "0 would never run a long prompt"),
        (Ascend(max_num_seqs=5), "max_num_seqs or decode_max_num_seqs=5 exceeds batch=4"),
        (
            Ascend(decode_max_num_seqs=3),
            "decode_max_num_seqs=3 has no effect unless enable_pd_transfer",
        ),
        (AscendDynamic(16), "needs profile_table here"),
    ],
)
def test_bad_parameters_are_refused_by_name(policy, words):
    with pytest.raises(UserError, match=words):
        scheduler_for(policy)
