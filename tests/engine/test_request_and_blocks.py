"""Chunks, batches and block accounting, by hand."""

from __future__ import annotations

from helpers import requests_of
from integrity import check_integrity

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Batch, SequenceState


def sequence(prompt_len=10, output_len=5, num_computed=0, num_generated=0):
    made = SequenceState(requests_of((prompt_len, output_len))[0], order=0)
    made.num_computed = num_computed
    made.output_token_ids = [7] * num_generated
    return made


def test_a_last_prompt_token_is_prefill_not_decode():
    batch = Batch()
    batch.add(sequence(num_computed=9), 1)
    (chunk,) = batch.chunks
    assert (chunk.is_decode, chunk.emits_token) == (False, True)
    assert (batch.num_prefill_tokens, batch.num_decode_tokens) == (1, 0)


def test_a_recompute_chunk_that_leaves_one_token_pending_emits_nothing():
    preempted = sequence(num_generated=3)  # 13 tokens known, none computed
    batch = Batch()
    batch.add(preempted, 12)
    assert not batch.chunks[0].emits_token
    assert not batch.chunks[0].is_decode
    preempted.in_flight, preempted.num_computed = False, 12
    follow = Batch()
    follow.add(preempted, 1)
    assert follow.chunks[0].is_decode
    assert follow.chunks[0].emits_token


def test_batch_sums_by_hand():
    batch = Batch()
    batch.add(
        sequence(prompt_len=10, num_computed=4), 3
    )  # queries at 4,5,6 see 5+6+7 keys, read 7 tokens of KV
    batch.add(sequence(prompt_len=10, num_computed=10, num_generated=1), 1)  # reads 11 tokens of KV
    assert (batch.num_prefills, batch.num_prefill_tokens, batch.num_decode_tokens) == (1, 3, 1)
    assert (batch.prefill_kv_tokens, batch.decode_kv_tokens, batch.prefill_query_key_pairs) == (
        7,
        11,
        18,
    )
    assert batch.num_emits == 1
    assert batch.num_tokens == 4


def test_grow_is_all_or_nothing():
    blocks = BlockManager(num_blocks=3, block_size=4)
    first, second = sequence(), sequence()
    assert blocks.grow(first, 8)
    assert first.block_ids == [0, 1]
    assert not blocks.grow(second, 5)
    assert second.block_ids == []
    assert blocks.grow(second, 4)
    assert blocks.num_free == 0
    check_integrity(blocks, [first, second])
