"""The time of attention: tiles of queries, occupancy and cache reads by hand."""

from __future__ import annotations

import dataclasses

import pytest
from simulated import TOY

from sarathi_lab.executor.simulated.kernel_times import AttentionTimes, occupancy

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "kv_head_bytes": 16}


@pytest.mark.parametrize(
    ("blocks", "max_splits", "share"),
    [
        (4, 1, 1.0),
        (5, 1, 5 / 8),  # two waves for five blocks on four SMs
        (5, 3, 15 / 16),  # in thirds: four waves for fifteen
        (1, 1, 1 / 4),
        (1, 4, 1.0),
        (3, 16, 1.0),  # in quarters
    ],
)
def test_occupancy(blocks, max_splits, share):
    assert occupancy(blocks, 4, max_splits) == pytest.approx(share)


def test_prefill_attention_by_hand():
    # 64 queries of 4 heads fill 4 SMs. 64 x 100 dense pairs at 0.5, 64 x 64 masked at 0.25: 4*4*8
    # FLOPs each of 8e9; 164 tokens of 2*2*8*2 = 64 bytes at 5e8 a second take 20.992 us, which
    # overlaps with the products
    fast = dataclasses.replace(TOY, bytes_per_second=1e15)
    compute = 128 * (6400 / 0.5 + 4096 / 0.25) / 8e9
    assert AttentionTimes(fast, **HEADS).prefill([(100, 64)]) == pytest.approx(3 + compute)
    both = (compute**3 + 20.992e-6**3) ** (1 / 3)
    assert AttentionTimes(TOY, **HEADS).prefill([(100, 64)]) - 3 == pytest.approx(both)


def test_decode_attention_by_hand():
    # 2 sequences of 2 KV heads fill 4 SMs: 1000 tokens of 64 bytes at 5e8 bytes/s
    assert AttentionTimes(TOY, **HEADS).decode(2, 1000) == pytest.approx(3 + 128e-6)
    # 33 sequences: 66 blocks take 17 waves of 4, and no cut into up to 16 fills the last better
    # than 15/16 does
    assert AttentionTimes(TOY, **HEADS).decode(33, 1000) == pytest.approx(
        3 + 128e-6
    )  # in halves: 33 whole waves
    assert AttentionTimes(TOY, **HEADS).decode(0, 0) == 0.0


# -- what sets today's kernels apart: none of it is on by default ----------------------------------

FAST = dataclasses.replace(TOY, bytes_per_second=1e15)


def test_each_tile_of_queries_starts_and_ends():
    ramped = dataclasses.replace(FAST, query_ramp=50.0)
    one, two = (
        AttentionTimes(ramped, **HEADS).prefill([(100, tokens)])
        - AttentionTimes(FAST, **HEADS).prefill([(100, tokens)])
        for tokens in (64, 128)
    )
    assert one == pytest.approx(128 * 64 * 50 / 0.5 / 8e9)  # as 50 keys before the chunk
    assert two == pytest.approx(2 * one)


def test_prompts_move_queries_and_outputs_too():
    slow = dataclasses.replace(TOY, flops_per_second=1e18, prompt_efficiency=0.1)
    num_bytes = 2 * 164 * 2 * 16 + 2 * 64 * 4 * 8 * 2
    time = AttentionTimes(slow, **HEADS).prefill([(100, 64)])
    assert time == pytest.approx(3 + num_bytes / (0.1 * 2e9))


def test_keys_of_a_chunk_are_cut_only_as_far_as_kernels_do():
    shape = {**HEADS, "num_heads": 1, "num_kv_heads": 1}
    whole = dataclasses.replace(FAST, chunk_splits=1)
    one, cut = (AttentionTimes(gpu, **shape).prefill([(1000, 64)]) for gpu in (whole, FAST))
    assert one - 3 == pytest.approx(4 * (cut - 3))  # one of four SMs


def test_a_sequence_keeps_a_multiprocessor_however_short():
    gpu = dataclasses.replace(FAST, decode_block_time=1e-3)
    assert AttentionTimes(gpu, **HEADS).decode(100, 100) - 3 == pytest.approx(
        100 * 2 / 4 * 1e-3, rel=1e-6
    )
    slow = dataclasses.replace(TOY, decode_block_time=1e-9)  # hidden behind the memory
    assert AttentionTimes(slow, **HEADS).decode(2, 10**6) == pytest.approx(3 + 0.128)


def test_decodes_need_keys_to_reach_their_rate():
    gpu = dataclasses.replace(TOY, decode_fill=1.0)
    none, half, full = (
        AttentionTimes(gpu, **HEADS).decode(2, tokens)
        - AttentionTimes(TOY, **HEADS).decode(2, tokens)
        for tokens in (0, 256, 10**6)  # 2 heads on 4 SMs: 128 of 256 keys each, and more
    )
    assert (none, half, full) == pytest.approx((0, 0.5, 1.0))


def test_queries_of_grouped_heads_are_put_in_order():
    gpu = dataclasses.replace(TOY, regroup_time=0.5, decode_launch=7.0, ungrouped_splits=1)
    grouped = AttentionTimes(gpu, **HEADS).decode(2, 1000)
    alone = AttentionTimes(gpu, **HEADS).decode(1, 1000)
    assert grouped - 7.5 == pytest.approx(alone - 7.0) == pytest.approx(128e-6)
    # A KV head for each of two heads: nothing to group, and one sequence occupies 2 of 4 SMs.
    ungrouped = AttentionTimes(gpu, **{**HEADS, "num_heads": 2}).decode(1, 1000)
    assert ungrouped - 7.0 == pytest.approx(2 * 128e-6)


def test_decodes_without_grouped_heads_may_have_fixed_costs_of_their_own():
    costs = {"decode_launch": 7.0, "decode_block_time": 20.0}
    own = {"ungrouped_launch": 5.0, "ungrouped_block_time": 10.0}
    gpu = dataclasses.replace(TOY, **costs, **own)
    as_others = dataclasses.replace(TOY, **costs)
    ungrouped = {**HEADS, "num_heads": 2}
    assert AttentionTimes(gpu, **HEADS).decode(1, 10) == AttentionTimes(as_others, **HEADS).decode(
        1, 10
    )
    blocks = 2 / TOY.num_sms
    difference = AttentionTimes(as_others, **ungrouped).decode(1, 10)
    difference -= AttentionTimes(gpu, **ungrouped).decode(1, 10)
    assert difference == pytest.approx(2.0 + 10.0 * blocks, rel=1e-3)


# -- one call over chunks and decodes --------------------------------------------------------------

ONE_CALL = dataclasses.replace(TOY, num_sms=8, flops_per_second=1e13, bytes_per_second=1e12)


def one_call(hardware, num_decodes, context, chunks=((0, 64),)):
    tokens = num_decodes * context
    return AttentionTimes(hardware, **HEADS).hybrid(list(chunks), num_decodes, tokens)


def test_tiles_that_fit_together_last_as_long_as_the_longest():
    # 4 heads of the chunk and of one decode are 8 tiles on 8 SMs.
    gpu = dataclasses.replace(ONE_CALL, bytes_per_second=1e18)
    alone = AttentionTimes(gpu, **HEADS).hybrid([(0, 64)], 1, 1000)
    longer_chunk = AttentionTimes(gpu, **HEADS).hybrid([(500, 64)], 1, 1000)
    assert alone == longer_chunk
    assert one_call(gpu, 2, 1000) - 3 > 1.2 * (alone - 3)


def test_a_longer_chunk_gives_every_decode_empty_tiles():
    # 1,000 tiles of 4 heads on 8 SMs, which compute and memory do not hide.
    gpu = dataclasses.replace(ONE_CALL, flops_per_second=9e18, bytes_per_second=9e18)
    short, long = (one_call(gpu, 1000, 1, [(0, tokens)]) - 3 for tokens in (64, 128))
    assert short == pytest.approx(0, abs=1e-9)
    assert long == pytest.approx(1000 * 4 / 8 * 0.35e-6, rel=1e-3)


def test_memory_reads_keys_for_each_head_past_the_cache():
    # A KV head's keys and values are 32 bytes a token; two query heads share each.
    gpu = dataclasses.replace(ONE_CALL, flops_per_second=9e18, l2_bytes=32e6)
    read_once = dataclasses.replace(gpu, l2_bytes=None)
    tokens = {"held": 700, "lost": 1300}  # of each of 1,000 decodes
    ratio = {
        name: (one_call(gpu, 1000, context) - 3) / (one_call(read_once, 1000, context) - 3)
        for name, context in tokens.items()
    }
    assert ratio["held"] == pytest.approx(1)
    assert ratio["lost"] == pytest.approx(2, rel=1e-3)
    # Enough SMs take both heads at the same time.
    wide = dataclasses.replace(gpu, num_sms=4000)
    once = dataclasses.replace(wide, l2_bytes=None)
    assert one_call(wide, 1000, 1300) == pytest.approx(one_call(once, 1000, 1300))
