"""Golden schedules of other systems' policies, worked out by hand from their rules; rows are
(request, start, tokens).

Iterations take one second. A comment tells what the rule says where the rows do not.
"""

from __future__ import annotations

import dataclasses

import pytest
from helpers import requests_of, rows, scheduler_for, serve
from hydra import compose, initialize_config_dir

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import (
    TGI,
    LightLLM,
    LlamaCpp,
    LMDeploy,
    LMDeployPytorch,
    OpenVINO,
    SGLang,
    TensorRTLLM,
    TransformersFIFO,
    TransformersPrefillFirst,
)
from sarathi_lab.policy.trtllm import tuned_batch_size, tuned_num_tokens
from sarathi_lab.tasks.plan import make_plan

TWO = requests_of((6, 2), (3, 2))
# Decodes first, then prompts in order within 4 tokens: what all of the plainest chunked policies do
# with TWO.
CHUNKED = [[(0, 0, 4)], [(0, 4, 2), (1, 0, 2)], [(0, 6, 1), (1, 2, 1)], [(1, 3, 1)]]


def schedule(policy, requests=TWO, **kwargs):
    return serve(requests, scheduler_for(policy, **kwargs)).schedule


def first_batch(policy, requests, **kwargs):
    scheduler = scheduler_for(policy, **kwargs)
    for request in requests:
        scheduler.add(request)
    return [
        (c.sequence.request.request_id, c.start, c.num_tokens)
        for c in scheduler.schedule(0.0).chunks
    ]


@pytest.mark.parametrize(
    "policy",
    [TGI(4), TransformersFIFO(4), LMDeploy(4), OpenVINO(4), TensorRTLLM(4, chunk_unit_size=1)],
    ids=lambda policy: policy.name,
)
def test_the_plainest_share_a_budget_between_decodes_and_prompts_in_order(policy):
    assert schedule(policy) == CHUNKED


class TestSGLang:
    # 5 blocks of 4 tokens. Once 0 has run, it holds 4 tokens and may take 7 more; 1 wants 4 + 4 and
    # a page of 1.
    TIGHT = requests_of((4, 8), (4, 4))

    def tight(self, **parameters):
        return schedule(SGLang(chunked_prefill_size=8, **parameters), self.TIGHT, num_blocks=5)

    def test_prompts_run_in_chunks_before_any_decode(self):
        assert schedule(SGLang(4), requests_of((6, 3), (3, 2))) == [
            [(0, 0, 4)],
            [(0, 4, 2), (1, 0, 2)],
            [(1, 2, 1)],  # 0 waits
            [(0, 6, 1), (1, 3, 1)],
            [(0, 7, 1)],
        ]

    def test_in_mixed_batches_decodes_ride_and_count(self):
        policy = SGLang(4, enable_mixed_chunk=True)
        requests = requests_of((4, 3), (6, 1))
        assert schedule(policy, requests) == rows("0:0+4 | 1:0+3 0:4+1 | 1:3+3 0:5+1")

    def test_page_size_rounds_what_a_prompt_counts(self):
        requests = requests_of((3, 2), (3, 2))
        assert schedule(SGLang(4), requests)[0] == [(0, 0, 3), (1, 0, 1)]
        assert schedule(SGLang(4, page_size=2), requests)[0] == [(0, 0, 3)]  # counts as 4
        assert schedule(SGLang(8, page_size=2), requests_of((3, 2), (5, 2)))[0] == [
            (0, 0, 3),
            (1, 0, 4),
        ]

    @pytest.mark.parametrize(
        ("first", "num_blocks", "is_admitted"),
        [(4, 5, False), (4, 6, True), (12, 7, False), (12, 8, True)],
    )
    def test_a_page_is_promised_to_each_prompt_of_the_batch(self, first, num_blocks, is_admitted):
        """Request 1 wants 4 + 2 tokens and a page, 10, and as much must be left beside the 2 tokens
        and a page, 6, that 0 will take, whether it enters or ends in this batch: 17 free tokens.
        """
        policy = SGLang(8, page_size=4)
        batches = schedule(policy, requests_of((first, 2), (4, 2)), num_blocks=num_blocks)
        last = next(rows for rows in batches if (0, first // 8 * 8, 4) in rows)
        assert last[1:] == ([(1, 0, 4)] if is_admitted else [])

    def test_max_prefill_tokens_ends_a_batch_of_prompts(self):
        requests = requests_of((3, 2), (3, 2))
        assert schedule(SGLang(8), requests)[0] == [(0, 0, 3), (1, 0, 3)]
        assert schedule(SGLang(8, max_prefill_tokens=3), requests)[0] == [(0, 0, 3)]

    def test_the_new_token_ratio_decides_when_a_prompt_enters(self):
        # 16 tokens are free; 9 are wanted, and 0.7 x 7 = 4.9 expected of request 0: 9 < 11.1.
        assert self.tight()[:2] == [[(0, 0, 4)], [(1, 0, 4)]]
        # 1.0 x 7 leaves 9, which is not more than 9.
        assert self.tight(init_new_token_ratio=1.0)[:2] == [[(0, 0, 4)], [(0, 4, 1)]]
        assert self.tight(schedule_conservativeness=2.0)[:2] == [[(0, 0, 4)], [(0, 4, 1)]]

    def test_the_ratio_decays_with_decode_iterations(self):
        # 12 tokens are free in the third iteration, 6 may come: 9 < 12 - 0.14 x 6, but not below 12
        # - 1.0 x 6.
        assert self.tight(init_new_token_ratio=1.0, new_token_ratio_decay_steps=1)[2] == [(1, 0, 4)]
        assert self.tight(init_new_token_ratio=1.0)[2] == [(0, 5, 1)]
        slow = self.tight(
            init_new_token_ratio=1.0, new_token_ratio_decay_steps=1, min_new_token_ratio_factor=1.0
        )
        assert slow[2] == [(0, 5, 1)]

    def test_clipping_the_expected_output_admits_both_at_once(self):
        assert self.tight(clip_max_new_tokens=1)[0] == [(0, 0, 4), (1, 0, 4)]

    def test_the_longest_prompt_of_the_least_output_is_retracted(self):
        # 8 blocks of 2. Before the fourth iteration 0 knows 9 tokens and 1 knows 7: two blocks
        # missing, one free.
        policy = SGLang(16, clip_max_new_tokens=1)
        batches = schedule(policy, requests_of((6, 8), (4, 8)), num_blocks=8, block_size=2)
        assert batches[:4] == rows("0:0+6 1:0+4 | 0:6+1 1:4+1 | 0:7+1 1:5+1 | 1:6+1")
        assert batches[8] == [(0, 0, 9)]  # after 1 is done

    def test_retract_decode_steps_are_kept_free_for_the_others(self):
        # 10 blocks of 2. When all know 7 tokens, 3 blocks are missing and 1 is free; without 2, 8
        # tokens are.
        requests, sizes = requests_of((4, 8), (4, 8), (4, 8)), {"num_blocks": 10, "block_size": 2}
        policy = SGLang(16, clip_max_new_tokens=1)
        assert schedule(policy, requests, **sizes)[3] == [(0, 6, 1)]
        eager = dataclasses.replace(policy, retract_decode_steps=4)
        assert schedule(eager, requests, **sizes)[3] == [(0, 6, 1), (1, 6, 1)]


class TestTensorRTLLM:
    THREE = requests_of((9, 2), (9, 2), (2, 2))

    def test_first_come_first_served(self):
        assert schedule(TensorRTLLM(10, chunk_unit_size=4), self.THREE) == [
            [(0, 0, 9)],  # one token is left: less than a unit, and than request 2
            [(0, 9, 1), (1, 0, 9)],
            [(1, 9, 1), (2, 0, 2)],
            [(2, 2, 1)],
        ]

    def test_a_short_prompt_passes_one_that_gets_no_unit(self):
        requests = requests_of((7, 2), (9, 2), (2, 2))
        assert schedule(TensorRTLLM(10, chunk_unit_size=4), requests)[0] == [(0, 0, 7), (2, 0, 2)]

    def test_equal_progress(self):
        policy = TensorRTLLM(10, context_chunking_policy="EQUAL_PROGRESS", chunk_unit_size=4)
        assert schedule(policy, self.THREE) == [
            [(0, 0, 4), (1, 0, 4), (2, 0, 2)],
            [(2, 2, 1), (0, 4, 5), (1, 4, 4)],  # 4 each, then the last token ends prompt 0
            [(0, 9, 1), (1, 8, 1)],
            [(1, 9, 1)],
        ]

    def test_force_chunk(self):
        policy = TensorRTLLM(10, context_chunking_policy="FORCE_CHUNK", chunk_unit_size=4)
        assert schedule(policy, self.THREE) == rows(
            "0:0+4 1:0+4 2:0+2 | 2:2+1 0:4+4 1:4+4 | 0:8+1 1:8+1 | 0:9+1 1:9+1"
        )
        assert schedule(policy, requests_of((9, 1))) == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 1)]]

    def test_chunk_unit_size_rounds_a_cut_down(self):
        requests = requests_of((9, 1), (9, 1))
        assert schedule(TensorRTLLM(14, chunk_unit_size=4), requests)[0] == [(0, 0, 9), (1, 0, 4)]
        assert schedule(TensorRTLLM(14, chunk_unit_size=1), requests)[0] == [(0, 0, 9), (1, 0, 5)]

    def test_the_capacity_scheduler_sets_aside_a_whole_request_or_its_prompt(self):
        # 5 blocks of 2 tokens: two prompts of 4, or one request of 4 + 4 and nothing beside.
        requests, sizes = requests_of((4, 4), (4, 4)), {"num_blocks": 5, "block_size": 2}
        sure = scheduler_for(TensorRTLLM(32), **sizes)
        assert serve(requests, sure).schedule[4] == [(1, 0, 4)]
        assert sure.num_preemptions == 0
        bold = scheduler_for(TensorRTLLM(32, capacity_scheduler_policy="MAX_UTILIZATION"), **sizes)
        assert serve(requests, bold).schedule[:2] == [[(0, 0, 4), (1, 0, 4)], [(0, 4, 1)]]
        assert bold.num_preemptions == 1

    def test_a_static_batch_runs_to_its_end(self):
        requests = requests_of((4, 3), (4, 2), (4, 2))
        static = TensorRTLLM(32, capacity_scheduler_policy="STATIC_BATCH")
        assert schedule(static, requests, batch_size=2)[2:4] == [[(0, 5, 1)], [(2, 0, 4)]]
        assert schedule(TensorRTLLM(32), requests, batch_size=2)[2] == [(0, 5, 1), (2, 0, 4)]

    def test_tuned_numbers(self):
        """The source's table and thresholds at their edges."""
        held = [1, 143, 144, 671, 672, 1663, 1664, 2047, 2048, 2175, 2176]
        assert [tuned_batch_size(n) for n in held] == [
            128,
            128,
            256,
            512,
            768,
            1536,
            1664,
            2047,
            2048,
            2048,
            2176,
        ]
        assert [tuned_num_tokens(8, ratio) for ratio in (31, 2.1, 2.0, 0.6, 0.5, 0.1)] == [
            8192,
            8192,
            4096,
            4096,
            2048,
            2048,
        ]
        assert tuned_num_tokens(300, 31) == 16384  # 9600, to the next power of two

    def test_max_num_tokens_tuning_and_its_window(self):
        requests = requests_of((3000, 6000), (3000, 10))
        fixed = TensorRTLLM(8192, context_chunking_policy="FIRST_COME_FIRST_SERVED")
        tuned = dataclasses.replace(fixed, enable_max_num_tokens_tuning=True)
        latest = dataclasses.replace(tuned, dynamic_batch_moving_average_window=1)
        sizes = {"max_model_len": 9000, "num_blocks": 9000}
        assert first_batch(fixed, requests, **sizes) == [(0, 0, 3000), (1, 0, 3000)]
        assert first_batch(tuned, requests, **sizes) == [
            (0, 0, 3000),
            (1, 0, 1088),
        ]  # input : output is 1: 4096
        assert first_batch(latest, requests, **sizes) == [(0, 0, 3000), (1, 0, 3000)]  # 300: 8192

    def test_batch_size_tuning(self):
        sizes = {"batch_size": 200, "num_blocks": 143}  # requests of one block
        policy = TensorRTLLM(256)
        requests = requests_of(*[(1, 1)] * 200)
        assert len(first_batch(policy, requests, **sizes)) == 143
        assert (
            len(
                first_batch(
                    dataclasses.replace(policy, enable_batch_size_tuning=True), requests, **sizes
                )
            )
            == 128
        )


class TestTGI:
    LATE = requests_of((4, 9), (4, 9), (4, 3), (4, 1), arrivals=[0, 0, 0.5, 1.5])

    def whole(self, **parameters):
        policy = TGI(20, chunking=False, **parameters)
        return schedule(policy, self.LATE, max_model_len=20)

    def test_prompts_pause_decodes_once_and_a_decode_follows(self):
        assert self.whole()[:5] == [
            [(0, 0, 4), (1, 0, 4)],
            [(2, 0, 4)],  # 0.3 x 2 running is less than one
            [(0, 4, 1), (1, 4, 1), (2, 4, 1)],  # 3 waits, though it would fit
            [(3, 0, 4)],
            [(0, 5, 1), (1, 5, 1), (2, 5, 1)],
        ]

    def test_waiting_served_ratio_asks_for_more_prompts_before_it_pauses(self):
        assert self.whole(waiting_served_ratio=1.0)[1:3] == rows("0:4+1 1:4+1 | 2:0+4 3:0+4")

    def test_max_waiting_tokens_ends_the_wait(self):
        late = requests_of((4, 9), (4, 9), (4, 3), arrivals=[0, 0, 0.5])
        patient = TGI(20, chunking=False, waiting_served_ratio=1.0)
        short = dataclasses.replace(patient, max_waiting_tokens=3)
        assert [
            2 in {row[0] for row in batch} for batch in schedule(short, late, max_model_len=20)
        ].index(True) == 3
        assert [
            2 in {row[0] for row in batch} for batch in schedule(patient, late, max_model_len=20)
        ].index(True) == 9

    def test_max_batch_prefill_tokens_bounds_whole_prompts(self):
        requests = requests_of((4, 1), (4, 1), (4, 1))
        policy = TGI(8, chunking=False)
        assert schedule(policy, requests, max_model_len=8)[0] == [(0, 0, 4), (1, 0, 4)]

    def test_a_prompt_whose_cached_beginning_goes_to_another_still_runs_whole(self):
        texts, arrivals = (
            [(1, 1, 1, 2), (*(3,) * 3, *(4,) * 4), (5,) * 6, (1, 1, 1, 9)],
            [0, 5, 9, 9],
        )
        requests = [
            Request(i, float(time), len(text), 1, text)
            for i, (text, time) in enumerate(zip(texts, arrivals, strict=True))
        ]
        blocks = BlockManager(5, 3, shares_prefixes=True)
        scheduler = Scheduler(TGI(20, chunking=False), blocks, batch_size=4, max_model_len=20)
        # Request 2 takes two blocks and the oldest cached one, in which the last prompt begins.
        assert serve(requests, scheduler).schedule[2:] == [[(2, 0, 6), (3, 0, 4)]]

    @pytest.mark.parametrize("chunking", [True, False])
    def test_max_batch_total_tokens_counts_prompts_and_outputs(self, chunking):
        requests, sizes = requests_of((4, 2), (4, 2)), {"max_model_len": 8}
        policy = TGI(8, chunking=chunking)
        assert schedule(policy, requests, **sizes)[0] == [(0, 0, 4), (1, 0, 4)]
        limited = dataclasses.replace(policy, max_batch_total_tokens=11)
        assert schedule(limited, requests, **sizes) == rows("0:0+4 | 0:4+1 | 1:0+4 | 1:4+1")

    @pytest.mark.parametrize("chunking", [True, False])
    def test_the_whole_request_is_set_aside(self, chunking):
        requests, sizes = (
            requests_of((4, 4), (4, 4)),
            {"max_model_len": 8, "num_blocks": 7, "block_size": 2},
        )
        assert schedule(TGI(8, chunking=chunking), requests, **sizes)[0] == [(0, 0, 4)]


class TestTransformers:
    def test_prefill_first_lets_a_prompt_under_way_go_before_decodes(self):
        requests = requests_of((4, 3), (12, 1))
        assert schedule(TransformersFIFO(4), requests)[:3] == rows(
            "0:0+4 | 0:4+1 1:0+3 | 0:5+1 1:3+3"
        )
        assert schedule(TransformersPrefillFirst(4), requests) == rows(
            "0:0+4 | 0:4+1 1:0+3 | 1:3+4 | 1:7+4 | 1:11+1 0:5+1"
        )

    @pytest.mark.parametrize("kind", [TransformersFIFO, TransformersPrefillFirst])
    def test_below_the_safety_margin_only_decodes_follow_the_first(self, kind):
        requests = requests_of((4, 2), (4, 2), (4, 2), arrivals=[0, 0.5, 0.5])
        roomy = schedule(kind(16, safety_margin=0.0), requests, num_blocks=5)
        scarce = schedule(
            kind(16, safety_margin=0.9), requests, num_blocks=5
        )  # 4 of 5 blocks are free
        assert roomy[1] == [(0, 4, 1), (1, 0, 4), (2, 0, 4)]
        assert scarce[1] == [(0, 4, 1)]

    def test_a_prompt_without_room_is_passed_over(self):
        requests = requests_of((5, 4), (8, 2), (2, 1))  # 3 blocks of 4: 2, 2 and 1
        assert schedule(TransformersPrefillFirst(16), requests, num_blocks=3)[0] == [
            (0, 0, 5),
            (2, 0, 2),
        ]

    def test_after_one_was_taken_out_nobody_enters_before_another_is_done(self):
        # 5 blocks of 2: the third token of each needs a sixth. Request 2 would fit in the third
        # iteration.
        requests = requests_of((4, 4), (4, 4), (2, 1), arrivals=[0, 0, 1.5])
        batches = schedule(
            TransformersFIFO(16, safety_margin=0.0), requests, num_blocks=5, block_size=2
        )
        assert batches[:5] == rows("0:0+4 1:0+4 | 0:4+1 | 0:5+1 | 0:6+1 | 1:0+5 2:0+2")


class TestLightLLM:
    LATE = requests_of((6, 6), (6, 2), (6, 1), arrivals=[0, 0, 3.5])
    POLICY = LightLLM(batch_max_tokens=8, chunked_prefill_size=4, router_max_wait_tokens=2)

    def test_two_forwards_by_turns(self):
        assert schedule(self.POLICY, self.LATE) == [
            [(0, 0, 4), (1, 0, 4)],
            [(0, 4, 2), (1, 4, 2)],  # nothing to decode
            [(0, 6, 1), (1, 6, 1)],
            [(0, 7, 1)],  # nobody waits at the end of the third turn
            [(0, 8, 1)],  # the fourth may not begin any
            [(2, 0, 4)],  # the fifth may
            [(0, 9, 1)],
            [(2, 4, 2)],  # and goes on in the next
            [(0, 10, 1)],
        ]

    def test_router_max_wait_tokens_is_how_long_a_prompt_waits(self):
        eager = dataclasses.replace(self.POLICY, router_max_wait_tokens=1)
        assert schedule(eager, self.LATE)[4] == [(2, 0, 4)]

    def test_chunked_prefill_size_cuts_each_prompt_and_batch_max_tokens_their_sum(self):
        requests = requests_of((6, 1), (6, 1), (6, 1))
        assert schedule(self.POLICY, requests)[0] == [(0, 0, 4), (1, 0, 4)]
        assert schedule(dataclasses.replace(self.POLICY, batch_max_tokens=12), requests)[0][2] == (
            2,
            0,
            4,
        )
        assert schedule(dataclasses.replace(self.POLICY, chunked_prefill_size=2), requests)[0][
            0
        ] == (0, 0, 2)
        half = dataclasses.replace(self.POLICY, chunked_prefill_size=None)
        assert schedule(half, requests) == schedule(self.POLICY, requests)

    def test_the_estimated_peak_must_stay_below_the_cache(self):
        # Each lives 1 turn for its prompt, 3 for its output and 6 to spare, and holds 5: together 2
        # x 10 + 2 x 5 = 30.
        requests = requests_of((4, 4), (4, 4))
        policy = LightLLM(batch_max_tokens=16)
        assert schedule(policy, requests, num_blocks=15, block_size=2)[0] == [(0, 0, 4)]
        assert schedule(policy, requests, num_blocks=16, block_size=2)[0] == [(0, 0, 4), (1, 0, 4)]


def test_turbomind_adds_decodes_on_top_of_its_prompts():
    assert schedule(LMDeploy(4), requests_of((4, 3), (8, 1)))[:2] == rows("0:0+4 | 0:4+1 1:0+4")


def test_the_executor_is_made_for_decodes_on_top():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plans = [
            make_plan(
                compose("config", ["executor=simulated", "chunk=64", "batch=8", f"policy={name}"])
            )
            for name in ("openvino", "lmdeploy")
        ]
    assert [plan.sizes.max_batch_tokens for plan in plans] == [64, 64 + 8]


class TestLMDeployPytorch:
    def test_decodes_go_on_for_an_interval_while_half_of_the_batch_runs(self):
        requests = requests_of((3, 6), (3, 6), (2, 1))
        batches = schedule(LMDeployPytorch(4, prefill_interval=2), requests)
        assert batches[:5] == [
            [(0, 0, 3)],
            [(1, 0, 3)],  # 1 of 4 is running
            [(0, 3, 1), (1, 3, 1)],
            [(0, 4, 1), (1, 4, 1)],
            [(2, 0, 2)],
        ]
        patient = schedule(LMDeployPytorch(4, prefill_interval=16), requests)
        assert patient[4] == [(0, 5, 1), (1, 5, 1)]

    def test_a_full_budget_of_waiting_tokens_ends_the_wait(self):
        requests = requests_of((3, 6), (3, 6), (4, 1))
        assert schedule(LMDeployPytorch(4), requests)[2] == [(2, 0, 4)]
        assert schedule(LMDeployPytorch(5), requests)[2] == [(0, 3, 1), (1, 3, 1)]

    def test_a_long_prompt_takes_turns_with_decodes(self):
        assert schedule(LMDeployPytorch(4), requests_of((3, 5), (10, 2)), batch_size=2) == [
            [(0, 0, 3)],
            [(1, 0, 4)],
            [(0, 3, 1)],
            [(1, 4, 4)],
            [(1, 8, 2)],  # its end comes at once
            [(0, 4, 1), (1, 10, 1)],
            [(0, 5, 1)],
            [(0, 6, 1)],
        ]


class TestOpenVINO:
    def test_prompts_take_only_the_slots_that_are_free(self):
        # 3 blocks of 4. A decode drives request 1 out in the second iteration; 1 then evicts
        # nobody.
        assert schedule(OpenVINO(16), requests_of((4, 5), (10, 1)), num_blocks=3) == rows(
            "0:0+4 1:0+8 | 0:4+1 1:0+4 | 0:5+1 | 0:6+1 | 0:7+1 | 1:4+6"
        )

    def test_without_split_fuse_whole_prompts_go_first(self):
        late = requests_of((5, 3), (5, 2), arrivals=[0, 1.5])
        policy = OpenVINO(10, dynamic_split_fuse=False)
        expected = [[(0, 0, 5)], [(0, 5, 1)], [(1, 0, 5)], [(0, 6, 1), (1, 5, 1)]]
        assert schedule(policy, late, max_model_len=10) == expected


class TestLlamaCpp:
    def test_decodes_ride_in_the_first_piece_of_a_round(self):
        late = requests_of((4, 4), (10, 2), arrivals=[0, 0.5])
        assert schedule(LlamaCpp(n_ubatch=4, n_batch=8), late) == rows(
            "0:0+4 | 0:4+1 1:0+3 | 1:3+4 | 0:5+1 1:7+3 | 0:6+1 1:10+1"
        )
        assert schedule(LlamaCpp(n_ubatch=4, n_batch=4), late)[2] == [(0, 5, 1), (1, 3, 3)]

    def test_a_prompt_that_comes_in_a_round_waits_for_the_next(self):
        late = requests_of((4, 4), (6, 1), (2, 1), arrivals=[0, 0.5, 1.5])
        assert schedule(LlamaCpp(n_ubatch=4, n_batch=16), late)[1:4] == rows(
            "0:4+1 1:0+3 | 1:3+3 | 0:5+1 2:0+2"
        )

    def test_each_slot_has_cache_for_the_longest_request(self):
        assert schedule(LlamaCpp(8, 8), TWO, num_blocks=5, max_model_len=12)[0] == [(0, 0, 6)]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (SGLang(10, page_size=4), "chunked_prefill_size=10 is not a multiple of page_size=4"),
        (TensorRTLLM(16), "chunk_unit_size=32 exceeds max_num_tokens=16"),
        (TGI(100, chunking=False), "max_batch_prefill_tokens=100 is below max_model_len=200"),
        (TGI(max_batch_total_tokens=100), "max_batch_total_tokens=100 is below max_model_len=200"),
        (LightLLM(8, chunked_prefill_size=9), "chunked_prefill_size=9 exceeds batch_max_tokens=8"),
        (
            OpenVINO(100, dynamic_split_fuse=False),
            "max_num_batched_tokens=100 is below max_model_len=200",
        ),
        (LlamaCpp(512, 256), "n_batch=256 is below n_ubatch=512"),
    ],
)
def test_bad_parameters_are_refused_by_name(policy, words):
    with pytest.raises(UserError, match=words):
        scheduler_for(policy)
