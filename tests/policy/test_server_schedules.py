"""Schedules of the served systems' policies, worked out by hand from their rules.

Iterations take one second; `expect` explains the notation. Comments explain what the rows do not.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from helpers import expect, scheduler_for, serve
from plans import plan_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import (
    TGI,
    Ascend,
    AscendDynamic,
    AscendV09,
    FastDeploy,
    LightLLM,
    LlamaCpp,
    LMDeploy,
    LMDeployPytorch,
    NanoVllm,
    OpenVINO,
    SGLang,
    SplitFuse,
    TensorRTLLM,
    TransformersFIFO,
    TransformersPrefillFirst,
    VllmV0Chunked,
    VllmV1,
)
from sarathi_lab.policy.ascend import (
    ProfileTable,
    Row,
    make_profile_table,
    read_profile_table,
)
from sarathi_lab.policy.vllm import rules_of

THREE = "5+3 5+2 5+2"
# 8 tokens an iteration, the last prompt cut: 5 + 3, then 1 + 2 + 5.
CUT = "0:0+5 1:0+3 | 0:5+1 1:3+2 2:0+5 | 0:6+1 1:5+1 2:5+1"
FIVE_OF_TWO = {"num_blocks": 5, "block_size": 2}


@pytest.mark.parametrize(
    "policy",
    [TGI(4), TransformersFIFO(4), LMDeploy(4), OpenVINO(4), TensorRTLLM(4, chunk_unit_size=1)],
    ids=lambda policy: policy.name,
)
def test_the_plainest_share_a_budget_between_decodes_and_prompts_in_order(policy):
    expect(policy, "6+2 3+2", "0:0+4 | 0:4+2 1:0+2 | 0:6+1 1:2+1 | 1:3+1")


def test_splitfuse():
    expect(SplitFuse(8), THREE, CUT)
    # Two prompts fill four of five blocks. 0 takes the fifth, and 1 waits and keeps its blocks.
    # When 0 needs a sixth, none can run: 1 is flushed, and its 5 tokens do not fit beside 0.
    expect(
        SplitFuse(8),
        "4+4 4+4",
        "0:0+4 1:0+4 | 0:4+1 | 0:5+1 | 0:6+1 | 1:0+5 | 1:5+1 | 1:6+1",
        **FIVE_OF_TWO,
    )
    # A prompt enters only if all of it fits: two blocks are left, it needs three.
    expect(SplitFuse(10), "8+2 12+2", "0:0+8 | ...", num_blocks=4)


def test_vllm_v0_with_chunks():
    # Prompts stand before decodes.
    expect(VllmV0Chunked(8), THREE, "0:0+5 1:0+3 | 1:3+2 2:0+5 0:5+1 | 0:6+1 1:5+1 2:5+1")
    long_and_short = "20+1 20+1 5+2 4+2"
    expect(VllmV0Chunked(8), long_and_short, "0:0+8 | 0:8+8 | 0:16+4 1:0+4 | ...")
    # 8 / 2 each, and the second long one is passed over. Where only one prompt may run, it has all;
    # one that lacks a token is not long any more.
    partial = VllmV0Chunked(8, max_num_partial_prefills=2, long_prefill_token_threshold=6)
    expect(
        partial,
        long_and_short,
        "0:0+4 2:0+4 | 0:4+4 2:4+1 3:0+3 | 0:8+4 3:3+1 2:5+1 | 0:12+7 3:4+1 | 0:19+1 1:0+4 | "
        "1:4+8 | 1:12+8",
    )
    for changed, first in (
        ({"max_num_batched_tokens": 12}, "0:0+6 2:0+5 3:0+1"),
        ({"max_num_partial_prefills": 4}, "0:0+2 2:0+2 3:0+2"),  # three may run: 8 // 3 each
        ({"max_long_partial_prefills": 2}, "0:0+4 1:0+4"),
        ({"long_prefill_token_threshold": 30}, "0:0+4 1:0+4"),  # none is long
        ({"long_prefill_token_threshold": 0}, "0:0+4 2:0+4"),  # 4 % of 200 is 8
    ):
        expect(replace(partial, **changed), long_and_short, f"{first} | ...")


def test_vllm_v1():
    expect(VllmV1(8), THREE, CUT)
    limited = VllmV1(8, long_prefill_token_threshold=2)
    expect(limited, THREE, "0:0+2 1:0+2 2:0+2 | 0:2+2 1:2+2 2:2+2 | ...")
    # The order of running is kept, whatever they need: 2 enters behind the long 1 when it can.
    late = "3+4 14+2@0.5 3+3@0.5"
    expect(
        VllmV1(8), late, "0:0+3 | 0:3+1 1:0+7 | 0:4+1 1:7+7 | 0:5+1 1:14+1 2:0+3 | 2:3+1 | 2:4+1"
    )
    expect(VllmV1(10), "8+2 12+2", "0:0+8 | ...", num_blocks=4)
    eager = VllmV1(10, scheduler_reserve_full_isl=False)
    expect(eager, "8+2 12+2", "0:0+8 1:0+2 | ...", num_blocks=4)
    expect(VllmV1(8, enable_chunked_prefill=False), THREE, "0:0+5 | ...", max_model_len=8)
    # 7 blocks of 2: three prompts take two each; 0 and 1 need one more each, so 2 is preempted.
    # None is admitted then, though the urgent 3, which came meanwhile, would fit.
    requests = [Request(i, 0.0, 4, 3, priority=i) for i in range(3)] + [Request(3, 0.5, 1, 1)]
    expect(
        VllmV1(20),
        requests,
        "0:0+4 1:0+4 2:0+4 | 0:4+1 1:4+1 | 0:5+1 1:5+1 3:0+1 | ...",
        num_blocks=7,
        block_size=2,
        queue_order="priority",
    )


def test_a_sequence_evicted_for_itself_leaves_its_blocks_to_others():
    """The first to run is the least urgent and the cache is full: vLLM's step is empty, its next
    one is not.
    """
    requests = [Request(0, 0.0, 3, 4, priority=1), Request(1, 0.5, 3, 4)]
    expect(
        VllmV1(20),
        requests,
        "0:0+3 | 0:3+1 1:0+3 | 1:3+1 | ...",
        num_blocks=7,
        block_size=1,
        queue_order="priority",
    )


def test_what_vllm_changed_in_0_33():
    """Others join the iteration in which one was evicted for itself, but none is admitted there."""
    requests = [Request(0, 0.0, 3, 4, priority=1), Request(1, 0.5, 3, 4), Request(2, 1.5, 1, 1)]
    sizes = {"num_blocks": 7, "block_size": 1, "queue_order": "priority"}
    before, since = VllmV1(20, version="0.32"), VllmV1(20)
    expect(before, requests, "0:0+3 | 0:3+1 1:0+3 | 1:3+1 2:0+1 | ...", **sizes)
    expect(since, requests, "0:0+3 | 0:3+1 1:0+3 | 1:3+1 | 1:4+1 2:0+1 | ...", **sizes)
    # The interval counts from the last iteration with a prompt, no longer from an idle engine.
    before = VllmV1(8, prefill_schedule_interval=3, version="0.32")
    since = VllmV1(8, prefill_schedule_interval=3)
    expect(before, "8+9 4+2@4.5", "* | * | * | * | * | 0:12+1 | 0:13+1 1:0+4 | ...")
    expect(since, "8+9 4+2@4.5", "* | * | * | * | * | 0:12+1 1:0+4 | ...")
    expect(since, "8+9 4+2@1.5", "* | * | 0:9+1 | 0:10+1 1:0+4 | ...")


@pytest.mark.parametrize("version", [0.32, "0.32"])  # as YAML reads it, and in Python
def test_a_version_of_vllm_is_one_whose_rules_are_known(version):
    assert VllmV1(version=version).is_older
    with pytest.raises(UserError, match=r"version=0\.4 is unknown.*; use one of 0\.32, 0\.33"):
        VllmV1(version=0.4).validate(1, 8)


def test_the_rules_of_a_server_are_those_of_its_version():
    versions = {"0.19.1": "0.32", "0.32.0": "0.32", "0.33": "0.33", "1.2": "0.33", "": "0.33"}
    assert {version: rules_of(version) for version in versions} == versions


def test_nano_vllm_cuts_only_the_first_prompt_and_prefers_prompts():
    expect(
        NanoVllm(8),
        "5+3 5+2 10+2",
        "0:0+5 | 1:0+5 | 2:0+8 | 2:8+2 | 0:5+1 1:5+1 2:10+1 | 0:6+1",
    )
    expect(NanoVllm(10), THREE, "0:0+5 1:0+5 | ...")


def test_fastdeploy():
    expect(FastDeploy(8), THREE, "0:0+5 | 0:5+1 1:0+5 | 0:6+1 1:5+1 2:0+5 | 2:5+1")
    two = FastDeploy(8, max_num_partial_prefills=2)
    expect(two, THREE, CUT)
    # A prompt of 4 takes two of 5 blocks, and is to leave two for its decodes.
    expect(two, "4+4 4+4", "0:0+4 | ...", **FIVE_OF_TWO)
    expect(replace(two, static_decode_blocks=0), "4+4 4+4", "0:0+4 1:0+4 | ...", **FIVE_OF_TWO)
    # The first decode takes blocks 2 and 3 of 5. With 6 of their 12 slots left the next takes the
    # fourth only if 6 is at most the threshold; the second request, which comes then, needs two.
    for threshold, third in ((0, "0:5+1 1:0+4"), (12, "0:5+1")):
        policy = FastDeploy(8, prealloc_dec_block_slot_num_threshold=threshold)
        expect(policy, "4+12 4+1@1.5", f"* | * | {third} | ...", num_blocks=5)


def test_ascend_passes_over_a_prompt_that_does_not_fit():
    requests = "6+3 6+2 4+2"
    expected = "0:0+6 2:0+4 | 1:0+6 | 0:6+1 2:4+1 1:6+1 | 0:7+1"
    expect(AscendV09(10), requests, expected, max_model_len=10)
    expect(AscendV09(), requests, "0:0+6 1:0+6 2:0+4 | ...")


def test_ascend_with_chunks_is_vllm_v1():
    requests, chunked = "300+3 300+2 20+2", {"enable_chunked_prefill": True, "watermark": 0.0}
    expected = "0:0+256 | 0:256+44 1:0+212 | 0:300+1 1:212+88 2:0+20 | 0:301+1 1:300+1 2:20+1"
    for policy in (AscendV09(256, **chunked), VllmV1(256)):
        expect(policy, requests, expected, max_model_len=400)
    limited = Ascend(256, long_prefill_token_threshold=100, **chunked)
    expect(limited, requests, "0:0+100 1:0+100 2:0+20 | ...", max_model_len=400)


@pytest.mark.parametrize(
    ("most", "threshold", "first"),
    [
        (1, 5, "0:0+6 2:0+4"),
        (2, 5, "0:0+6 1:0+6 2:0+4"),
        (1, 6, "0:0+6 1:0+6 2:0+4"),
        (1, 0, "0:0+6 1:0+6 2:0+4"),  # 4 % of 200 is 8
    ],
)
def test_ascend_limits_long_prompts(most, threshold, first):
    policy = Ascend(max_long_partial_prefills=most, long_prefill_token_threshold=threshold)
    expect(policy, "6+1 6+1 4+1", f"{first} | ...")


TABLE = ProfileTable(
    (
        *(Row(16, 1, 128, 40.0), Row(8, 1, 128, 20.0), Row(4, 1, 128, 10.0)),
        *(Row(8, 2, 128, 60.0), Row(6, 2, 128, 30.0), Row(4, 1, 256, 20.0)),
    )
)


def test_the_profile_table_gives_the_largest_chunk_within_the_slo():
    for context, num_decodes, slo, budget in (
        (5, 1, 30, 8),
        (5, 1, 40, 16),
        (128, 1, 10, 4),
        (128.5, 1, 30, 4),  # rounded up to 256
        (5, 2, 20, None),  # no rows of two decodes are within 20 ms
        (5, 3, 90, None),
        (300, 1, 90, None),
        (200, 2, 60, None),  # 256 tokens and 2 decodes are in the table, but not together
    ):
        assert TABLE.budget(context, num_decodes, slo) == budget


def test_ascend_dynamic_takes_the_budget_of_the_table():
    policy, requests = AscendDynamic(16, 30, TABLE), "4+4 20+2"
    # Without decodes the budget is max_num_batched_tokens.
    expected = "0:0+4 1:0+12 | 0:4+1 1:12+7 | 0:5+1 1:19+1 | 0:6+1 1:20+1"
    expect(policy, requests, expected)
    for changed, second in (
        ({"slo_limits_for_dynamic_batch": 10}, "0:4+1 1:12+3"),
        ({"slo_limits_for_dynamic_batch": 5}, "0:4+1 1:12+8"),  # no row: the 16 of an iteration
        ({"long_prefill_token_threshold": 2}, "0:2+2 1:2+2"),
    ):
        expect(replace(policy, **changed), requests, f"* | {second} | ...")


def test_a_profile_table_is_read_from_a_file_and_made_from_a_cost_model(tmp_path):
    made = make_profile_table(lambda batch: batch.num_tokens / 1000, 4, max_model_len=200)
    frame, path = pd.DataFrame(made.rows), str(tmp_path / "table.csv")
    assert (set(frame.d_num), set(frame.ctx_len)) == ({1, 2, 4}, {128, 256})
    assert (frame.cost == frame.chunk_size).all()  # a millisecond a token
    frame.to_csv(path, index=False)
    assert read_profile_table(path) == made
    assert made.budget(150, 3, slo=100) == 96  # of 64, 96 and 128
    policy = AscendDynamic(100).on_device(lambda: Predictor(lambda batch: {"all": 0.001}), 4, 200)
    assert policy.profile_table.budget(10, 1, slo=1) == 2048  # all that are tried


def test_a_device_without_cost_model_needs_a_table(tmp_path):
    with pytest.raises(UserError, match="needs profile_table here"):
        scheduler_for(AscendDynamic(100).on_device(lambda: None, 4, 200))
    pd.DataFrame({"chunk_size": [1]}).to_csv(tmp_path / "other.csv")
    for name, words in (("none.csv", "can't be read"), ("other.csv", "with the columns")):
        with pytest.raises(UserError, match=words):
            scheduler_for(AscendDynamic(100, profile_table=str(tmp_path / name)))


def test_sglang_prefills_in_chunks_before_any_decode():
    expected = "0:0+4 | 0:4+2 1:0+2 | 1:2+1 | 0:6+1 1:3+1 | 0:7+1"
    expect(SGLang(4), "6+3 3+2", expected)
    # In mixed batches decodes ride along and count.
    mixed = SGLang(4, enable_mixed_chunk=True)
    expect(mixed, "4+3 6+1", "0:0+4 | 1:0+3 0:4+1 | 1:3+3 0:5+1")
    expect(SGLang(8), "3+2 3+2", "0:0+3 1:0+3 | ...")
    expect(SGLang(8, max_prefill_tokens=3), "3+2 3+2", "0:0+3 | ...")


def test_sglang_counts_pages():
    expect(SGLang(4), "3+2 3+2", "0:0+3 1:0+1 | ...")
    expect(SGLang(4, page_size=2), "3+2 3+2", "0:0+3 | ...")  # counts as 4
    expect(SGLang(8, page_size=2), "3+2 5+2", "0:0+3 1:0+4 | ...")
    # Request 1 wants 4 + 2 tokens and a page, 10, and as much must be left beside the 2 tokens and
    # a page, 6, that 0 will take, whether it enters or ends in this batch: 17 free tokens.
    policy = SGLang(8, page_size=4)
    expect(policy, "4+2 4+2", "0:0+4 | ...", num_blocks=5)
    expect(policy, "4+2 4+2", "0:0+4 1:0+4 | ...", num_blocks=6)
    expect(policy, "12+2 4+2", "* | 0:8+4 | ...", num_blocks=7)
    expect(policy, "12+2 4+2", "* | 0:8+4 1:0+4 | ...", num_blocks=8)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # Once 0 has run, it holds 4 tokens of 20 and may take 7 more. 1 wants 4 + 4 and a page:
        # 9 < 16 - 0.7 x 7, but not below 16 - 1.0 x 7.
        ({}, "0:0+4 | 1:0+4"),
        ({"init_new_token_ratio": 1.0}, "0:0+4 | 0:4+1 | 0:5+1"),
        ({"schedule_conservativeness": 2.0}, "0:0+4 | 0:4+1"),
        # Decayed: 12 are free in the third iteration, 6 may come: 9 < 12 - 0.14 x 6.
        ({"init_new_token_ratio": 1.0, "new_token_ratio_decay_steps": 1}, "* | 0:4+1 | 1:0+4"),
        (
            {"schedule_conservativeness": 2.0, "new_token_ratio_decay_steps": 1}
            | {"min_new_token_ratio_factor": 1.0},
            "* | 0:4+1 | 0:5+1",
        ),
        ({"clip_max_new_tokens": 1}, "0:0+4 1:0+4"),
    ],
)
def test_sglang_admits_by_the_new_token_ratio(changed, expected):
    expect(SGLang(8, **changed), "4+8 4+4", f"{expected} | ...", num_blocks=5)


def test_sglang_retracts_the_longest_prompt_of_the_least_output():
    # 8 blocks of 2. Before the fourth iteration 0 knows 9 tokens and 1 knows 7: two blocks are
    # missing, one is free. 0 returns when 1 is done.
    expected = "0:0+6 1:0+4 | 0:6+1 1:4+1 | 0:7+1 1:5+1 | 1:6+1 | * | * | * | * | 0:0+9 | ..."
    policy, blocks = SGLang(16, clip_max_new_tokens=1), {"block_size": 2}
    expect(policy, "6+8 4+8", expected, num_blocks=8, **blocks)
    # 10 blocks. When all know 7 tokens, 3 blocks are missing and 1 is free; without 2, 8 are.
    blocks["num_blocks"] = 10
    expect(policy, "4+8 4+8 4+8", "* | * | * | 0:6+1 | ...", **blocks)
    eager = replace(policy, retract_decode_steps=4)
    expect(eager, "4+8 4+8 4+8", "* | * | * | 0:6+1 1:6+1 | ...", **blocks)


def test_trtllm_chunks():
    requests, sizes = "9+2 9+2 2+2", {"chunk_unit_size": 4}
    # One token is left at first: less than a unit, and than request 2.
    in_order = TensorRTLLM(10, **sizes)
    expect(in_order, requests, "0:0+9 | 0:9+1 1:0+9 | 1:9+1 2:0+2 | 2:2+1")
    expect(in_order, "7+2 9+2 2+2", "0:0+7 2:0+2 | ...")  # 1 gets no unit
    # 4 each, then the last token ends prompt 0.
    equal = TensorRTLLM(10, "EQUAL_PROGRESS", **sizes)
    expected = "0:0+4 1:0+4 2:0+2 | 2:2+1 0:4+5 1:4+4 | 0:9+1 1:8+1 | 1:9+1"
    expect(equal, requests, expected)
    force = TensorRTLLM(10, "FORCE_CHUNK", **sizes)
    expected = "0:0+4 1:0+4 2:0+2 | 2:2+1 0:4+4 1:4+4 | 0:8+1 1:8+1 | 0:9+1 1:9+1"
    expect(force, requests, expected)
    expect(force, "9+1", "0:0+4 | 0:4+4 | 0:8+1")
    expect(TensorRTLLM(14, **sizes), "9+1 9+1", "0:0+9 1:0+4 | ...")  # a cut is rounded down
    expect(TensorRTLLM(14, chunk_unit_size=1), "9+1 9+1", "0:0+9 1:0+5 | ...")


def test_trtllm_capacity():
    # 5 blocks of 2 tokens: two prompts of 4, or one request of 4 + 4 and nothing beside.
    expect(TensorRTLLM(32), "4+4 4+4", "* | * | * | * | 1:0+4 | ...", **FIVE_OF_TWO)
    bold = TensorRTLLM(32, capacity_scheduler_policy="MAX_UTILIZATION")
    expect(bold, "4+4 4+4", "0:0+4 1:0+4 | 0:4+1 | ...", **FIVE_OF_TWO)
    static = TensorRTLLM(32, capacity_scheduler_policy="STATIC_BATCH")
    expect(static, "4+3 4+2 4+2", "* | * | 0:5+1 | 2:0+4 | ...", batch_size=2)
    expect(TensorRTLLM(32), "4+3 4+2 4+2", "* | * | 0:5+1 2:0+4 | ...", batch_size=2)


def test_tgi_without_chunks_pauses_decodes():
    whole, late = TGI(20, chunking=False), "4+9 4+9 4+3@0.5 4+1@1.5"
    # 0.3 x 2 running is less than one; then a decode follows, and 3 waits, though it would fit.
    first = "0:0+4 1:0+4 | 2:0+4 | 0:4+1 1:4+1 2:4+1 | 3:0+4 | 0:5+1 1:5+1 2:5+1 | ..."
    expect(whole, late, first, max_model_len=20)
    patient = replace(whole, waiting_served_ratio=1.0)
    expect(patient, late, "* | 0:4+1 1:4+1 | 2:0+4 3:0+4 | ...", max_model_len=20)
    decodes = [f"0:{at}+1 1:{at}+1" for at in range(4, 12)]
    for most, num_decodes in ((3, 2), (20, 8)):  # a step of prompts counts as one
        policy = replace(patient, max_waiting_tokens=most)
        expected = " | ".join(["*", *decodes[:num_decodes], "2:0+4", "..."])
        expect(policy, "4+9 4+9 4+3@0.5", expected, max_model_len=20)
    expect(
        replace(whole, max_batch_prefill_tokens=8),
        "4+1 4+1 4+1",
        "0:0+4 1:0+4 | ...",
        max_model_len=8,
    )


@pytest.mark.parametrize("chunking", [True, False])
def test_tgi_reserves_whole_requests(chunking):
    policy = TGI(8, chunking=chunking)
    expect(policy, "4+2 4+2", "0:0+4 1:0+4 | ...", max_model_len=8)
    expect(policy, "4+4 4+4", "0:0+4 | ...", max_model_len=8, num_blocks=7, block_size=2)


def test_tgi_runs_a_prompt_whole_whose_cached_beginning_goes_to_another():
    texts = [(1, 1, 1, 2), (3, 3, 3, 4, 4, 4, 4), (5,) * 6, (1, 1, 1, 9)]
    times = [0.0, 5.0, 9.0, 9.0]
    requests = [Request(i, times[i], len(text), 1, text) for i, text in enumerate(texts)]
    blocks = BlockManager(5, 3, shares_prefixes=True)
    scheduler = Scheduler(TGI(20, chunking=False), blocks, batch_size=4, max_model_len=20)
    # Request 2 takes two blocks and the oldest cached one, in which the last prompt begins.
    assert serve(requests, scheduler).schedule[2:] == [[(2, 0, 6), (3, 0, 4)]]


def test_transformers():
    expect(TransformersFIFO(4), "4+3 12+1", "0:0+4 | 0:4+1 1:0+3 | 0:5+1 1:3+3 | ...")
    # Prompts under way go before decodes.
    first = TransformersPrefillFirst(4)
    expect(first, "4+3 12+1", "0:0+4 | 0:4+1 1:0+3 | 1:3+4 | 1:7+4 | 1:11+1 0:5+1")
    for kind in (TransformersFIFO, TransformersPrefillFirst):  # 4 of 5 blocks are free
        late = "4+2 4+2@0.5 4+2@0.5"
        expect(kind(16, 0.0), late, "* | 0:4+1 1:0+4 2:0+4 | ...", num_blocks=5)
        expect(kind(16, 0.9), late, "* | 0:4+1 | ...", num_blocks=5)
    # 3 blocks of 4, of which they need 2, 2 and 1: one without room is passed over.
    expect(TransformersPrefillFirst(16), "5+4 8+2 2+1", "0:0+5 2:0+2 | ...", num_blocks=3)
    # 5 blocks of 2: the third token of each needs a sixth. After the preemption none enters before
    # another is done, though 2 would fit in the third iteration.
    expect(
        TransformersFIFO(16, safety_margin=0.0),
        "4+4 4+4 2+1@1.5",
        "0:0+4 1:0+4 | 0:4+1 | 0:5+1 | 0:6+1 | 1:0+5 2:0+2 | ...",
        **FIVE_OF_TWO,
    )


def test_lightllm_takes_turns():
    policy = LightLLM(8, chunked_prefill_size=4, router_max_wait_tokens=2)
    late = "6+6 6+2 6+1@3.5"
    # No decodes before the third batch; the fourth turn may not begin any, the fifth may, and its
    # prompt goes on in the next.
    expect(
        policy,
        late,
        "0:0+4 1:0+4 | 0:4+2 1:4+2 | 0:6+1 1:6+1 | 0:7+1 | 0:8+1 | 2:0+4 | 0:9+1 | 2:4+2 | 0:10+1",
    )
    expect(replace(policy, router_max_wait_tokens=1), late, "* | * | * | * | 2:0+4 | ...")
    three = "6+1 6+1 6+1"
    for piece in (4, None):  # half of batch_max_tokens
        expect(replace(policy, chunked_prefill_size=piece), three, "0:0+4 1:0+4 | ...")
    expect(replace(policy, batch_max_tokens=12), three, "0:0+4 1:0+4 2:0+4 | ...")
    expect(replace(policy, chunked_prefill_size=2), three, "0:0+2 1:0+2 2:0+2 | ...")
    # Each lives 1 turn for its prompt, 3 for its output and 6 to spare, and holds 5: together
    # 2 x 10 + 2 x 5 = 30 tokens, which must be less than the cache.
    expect(LightLLM(16), "4+4 4+4", "0:0+4 | ...", num_blocks=15, block_size=2)
    expect(LightLLM(16), "4+4 4+4", "0:0+4 1:0+4 | ...", num_blocks=16, block_size=2)


def test_turbomind_adds_decodes_on_top_of_its_prompts():
    expect(LMDeploy(4), "4+3 8+1", "0:0+4 | 0:4+1 1:0+4 | ...")
    for name, tokens in (("openvino", 64), ("lmdeploy", 64 + 8)):
        plan = plan_of(name, "executor=simulated", "chunk=64", "batch=8")
        assert plan.sizes.max_batch_tokens == tokens


def test_lmdeploy_pytorch():
    # At first 1 of 4 is running; then decodes go on for an interval.
    expected = "0:0+3 | 1:0+3 | 0:3+1 1:3+1 | 0:4+1 1:4+1 | 2:0+2 | ..."
    expect(LMDeployPytorch(4, prefill_interval=2), "3+6 3+6 2+1", expected)
    expect(LMDeployPytorch(4), "3+6 3+6 2+1", "* | * | * | * | 0:5+1 1:5+1 | ...")
    # As many waiting tokens as the budget end the wait.
    expect(LMDeployPytorch(4), "3+6 3+6 4+1", "* | * | 2:0+4 | ...")
    expect(LMDeployPytorch(5), "3+6 3+6 4+1", "* | * | 0:3+1 1:3+1 | ...")
    # A long prompt takes turns with decodes, but its end comes at once.
    expect(
        LMDeployPytorch(4),
        "3+5 10+2",
        "0:0+3 | 1:0+4 | 0:3+1 | 1:4+4 | 1:8+2 | 0:4+1 1:10+1 | 0:5+1 | 0:6+1",
        batch_size=2,
    )


def test_openvino():
    # 3 blocks of 4. A decode evicts request 1 in the second iteration; 1 then evicts none.
    expected = "0:0+4 1:0+8 | 0:4+1 1:0+4 | 0:5+1 | 0:6+1 | 0:7+1 | 1:4+6"
    expect(OpenVINO(16), "4+5 10+1", expected, num_blocks=3)


def test_llama_cpp():
    # Decodes are in the first piece of a round.
    expected = "0:0+4 | 0:4+1 1:0+3 | 1:3+4 | 0:5+1 1:7+3 | 0:6+1 1:10+1"
    expect(LlamaCpp(4, n_batch=8), "4+4 10+2@0.5", expected)
    expect(LlamaCpp(4, n_batch=4), "4+4 10+2@0.5", "* | * | 0:5+1 1:3+3 | ...")
    # A prompt that comes in a round waits for the next.
    expected = "* | 0:4+1 1:0+3 | 1:3+3 | 0:5+1 2:0+2 | ..."
    expect(LlamaCpp(4, n_batch=16), "4+4 6+1@0.5 2+1@1.5", expected)
    # Each slot has cache for the longest request.
    expect(LlamaCpp(8, 8), "6+2 3+2", "0:0+6 | ...", num_blocks=5, max_model_len=12)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (SGLang(10, page_size=4), "chunked_prefill_size=10 is not a multiple of page_size=4"),
        (TensorRTLLM(16), "chunk_unit_size=32 exceeds max_num_tokens=16"),
        (TGI(100, chunking=False), "max_batch_prefill_tokens=100 is below max_model_len=200"),
        (LightLLM(8, chunked_prefill_size=9), "chunked_prefill_size=9 exceeds batch_max_tokens=8"),
        (LlamaCpp(512, 256), "n_ubatch=512 exceeds n_batch=256"),
        (VllmV0Chunked(8, max_num_partial_prefills=9), "=9 leaves each less than a token"),
        (VllmV0Chunked(max_long_partial_prefills=2), "=2 exceeds max_num_partial_prefills=1"),
        (VllmV0Chunked(long_prefill_token_threshold=9), "=9 has no effect on one prompt"),
        (VllmV1(long_prefill_token_threshold=200), "=200 has no effect, as max_model_len"),
        (VllmV1(100, enable_chunked_prefill=False), "max_num_batched_tokens=100 is below"),
        (AscendV09(100), "max_num_batched_tokens=100 is below max_model_len=200"),
        (AscendV09(300, enable_chunked_prefill=True), "=300 .* use a multiple of 256"),
        (AscendV09(enable_chunked_prefill=True), "max_num_batched_tokens=None"),
        (
            Ascend(256, True, max_long_partial_prefills=2),
            "max_long_partial_prefills=2 has no effect",
        ),
        (Ascend(long_prefill_token_threshold=9), "no effect without max_long_partial_prefills"),
        (Ascend(max_long_partial_prefills=0), "0 would never run a long prompt"),
        (AscendDynamic(16), "needs profile_table here"),
    ],
)
def test_bad_parameters_are_refused_by_name(policy, words):
    with pytest.raises(UserError, match=words):
        scheduler_for(policy)
