"""Packed and padded inputs: what kernels read, for every shape, without a kernel."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_kernels.attention.plan import (
    MAX_PARTS,
    PADDING,
    PART_TOKENS,
)
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch import shapes
from sarathi_lab.executor.torch.packing import Packer
from sarathi_lab.executor.torch.shapes import (
    ITERATIONS,
    LARGEST_HYBRID,
    Limits,
    PaddedShapes,
    Parts,
    Shape,
    bucket_sizes,
    hybrid_sizes,
)
from sarathi_lab.model.roofline import TILE
from sarathi_lab.model.spec import ModelSpec

CPU = torch.device("cpu")
SPEC = ModelSpec(
    name="toy",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    ffn_size=32,
    vocab_size=99,
)
LIMITS = Limits(SPEC, block_size=4, num_sms=132)
PADDED = PaddedShapes(LIMITS, batch_size=6, max_tokens=128, longest=40)


def sequence(
    order: int, prompt_len: int, num_computed: int, output: list[int], blocks: BlockManager
) -> SequenceState:
    made = SequenceState(
        Request(order, 0.0, prompt_len, 9, np.arange(prompt_len, dtype=np.int32) + 10 * order),
        order,
    )
    made.output_token_ids += output
    made.num_computed = num_computed
    blocks.grow(made, made.num_known)
    return made


def batch_of(*parts: tuple[SequenceState, int]) -> Batch:
    batch = Batch()
    for part, num_tokens in parts:
        batch.add(part, num_tokens)
    return batch


@pytest.fixture
def mixed():
    """A chunk at an offset, a decode the host knows and one it does not, and the last token of a
    prompt.
    """
    blocks = BlockManager(30, 4)
    chunk = sequence(1, 11, 3, [], blocks)
    known = sequence(2, 5, 5, [77], blocks)
    unknown = sequence(3, 6, 7, [70, NO_TOKEN], blocks)
    last = sequence(4, 4, 3, [], blocks)
    return batch_of((known, 1), (unknown, 1), (chunk, 6), (last, 1)), [*[known] * 5, unknown]


@pytest.mark.parametrize("is_padded", [False, True])
def test_fields(mixed, is_padded):
    batch, newest = mixed
    shape = PADDED.all[0] if is_padded else LIMITS.exact(batch)
    packer = Packer(LIMITS, CPU)
    packer.fill(batch, shape, newest)
    inputs = packer.send(shape)
    plan = inputs.attention
    assert inputs.token_ids[:9].tolist() == [77, 0, 13, 14, 15, 16, 17, 18, 43]
    assert inputs.feed_rows[:9].tolist() == [-1, 5, -1, -1, -1, -1, -1, -1, -1]
    assert inputs.positions[:9].tolist() == [5, 7, 3, 4, 5, 6, 7, 8, 3]
    owners = [chunk.sequence for chunk in batch.chunks for _ in range(chunk.num_tokens)]
    for owner, position, slot in zip(
        owners, inputs.positions.tolist(), inputs.slots.tolist(), strict=False
    ):
        assert slot == 4 * owner.block_ids[position // 4] + position % 4
    assert inputs.emit_rows[:3].tolist() == [0, 1, 8]
    assert plan.query_starts[:5].tolist() == [0, 1, 2, 8, 9]
    assert plan.kv_lens[:4].tolist() == [6, 8, 9, 4]
    assert plan.decodes[:3].tolist() == [0, 1, 3]
    assert plan.tiles[:1].tolist() == [[2, 0]]
    for i, chunk in enumerate(batch.chunks):
        needed = -(-(chunk.start + chunk.num_tokens) // 4)
        assert plan.block_table[i, :needed].tolist() == chunk.sequence.block_ids[:needed]
    if not is_padded:
        assert [len(inputs.token_ids), len(inputs.emit_rows), plan.num_decodes, plan.num_tiles] == [
            9,
            3,
            3,
            1,
        ]
        return
    assert len(inputs.token_ids) == 128
    assert set(inputs.slots[9:].tolist()) == {PADDING}
    assert set(inputs.feed_rows[9:].tolist()) == {PADDING}
    assert set(plan.decodes[3:].tolist()) == {PADDING}
    assert set(plan.tiles[1:].flatten().tolist()) == {PADDING}
    assert set(plan.kv_lens[4:].tolist()) == {0}
    assert set(plan.query_starts[5:].tolist()) == {9}


def test_a_buffer_is_not_filled_while_a_batch_in_flight_may_read_it(mixed):
    batch, newest = mixed
    shape = LIMITS.exact(batch)
    packer = Packer(LIMITS, CPU)
    filled = []
    for _ in range(3):
        packer.fill(batch, shape, newest)
        filled.append(packer.host.sized(1).data_ptr())
    assert filled[0] != filled[1]
    assert filled[0] == filled[2]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_what_is_kept_from_batch_to_batch_is_what_is_made_anew(data):
    """Sequences grow, are evicted and come back with other blocks, or end and make way for new
    ones; a batch has any of them, of any context, and as a rule those of the batch before.
    """
    blocks, packer, running, made = BlockManager(24, 4), Packer(LIMITS, CPU), [], 0
    padded = PaddedShapes(LIMITS, batch_size=6, max_tokens=32, longest=96)
    for _ in range(data.draw(st.integers(1, 12))):
        is_next = data.draw(st.booleans())  # of the batch before
        evicted = st.lists(st.sampled_from(running), unique=True) if running else st.just([])
        for one in [] if is_next else data.draw(evicted):
            blocks.free(one)
            one.num_computed, one.num_preemptions = 0, one.num_preemptions + 1
            if data.draw(st.booleans()):
                running.remove(one)
                one.is_running = False
        if len(running) < 6 and not is_next:
            one = sequence(made, data.draw(st.integers(1, 9)), 0, [], blocks)
            running, made, one.is_running = [*running, one], made + 1, True
        batch = Batch()
        for one in running if is_next else data.draw(st.permutations(running)):
            num_tokens = data.draw(st.sampled_from([1, one.num_pending]))
            if blocks.grow(one, one.num_computed + num_tokens):
                batch.add(one, num_tokens)
        if not batch.chunks:
            continue
        shape = data.draw(st.sampled_from([LIMITS.exact(batch), padded.choose(batch)]))
        packers = packer, Packer(LIMITS, CPU)
        for each in packers:
            each.fill(batch, shape, running)
        kept, anew = (each.send(shape) for each in packers)
        for name in ("token_ids", "positions", "slots", "feed_rows"):
            assert torch.equal(getattr(kept, name), getattr(anew, name)), name
        for name in ("query_starts", "kv_lens", "block_table", "tiles", "decodes"):
            assert torch.equal(getattr(kept.attention, name), getattr(anew.attention, name)), name
        for one, start, num_tokens, _, emits in batch.chunks:
            one.in_flight, one.num_computed = False, start + num_tokens
            if emits:
                one.output_token_ids.append(data.draw(st.sampled_from([7, NO_TOKEN])))


def test_decodes_go_to_the_next_bucket():
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    assert bucket_sizes(27) == [1, 2, 4, 8, 16, 24, 27]
    padded = PaddedShapes(LIMITS, batch_size=27, max_tokens=64, longest=40)
    blocks = BlockManager(400, 4)
    for count, bucket in ((1, 1), (3, 4), (9, 16), (24, 24), (27, 27)):
        decodes = [sequence(i, 4, 4, [1], blocks) for i in range(count)]
        assert padded.choose(batch_of(*((decode, 1) for decode in decodes))).num_tokens == bucket


@pytest.mark.parametrize("most", [239, 700, 9000])
def test_padding_a_batch_with_prompts_adds_no_tile_to_its_products(most):
    sizes = hybrid_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, LARGEST_HYBRID)
    for num_tokens in range(1, sizes[-1] + 1):
        padded = sizes[bisect_left(sizes, num_tokens)]
        assert -(-padded // TILE) == -(-num_tokens // TILE)
        assert padded - num_tokens < (64 if padded <= 512 else 128)


def test_chunks_their_tails_and_whole_prompts_go_to_the_next_bucket():
    blocks = BlockManager(4000, 4)
    padded = PaddedShapes(LIMITS, batch_size=4, max_tokens=9000, longest=6000)
    assert len(hybrid_sizes(9000)) == 36
    decode = sequence(0, 4, 4, [1], blocks)
    for num_tokens, bucket in ((2, 64), (127, 128), (128, 192), (511, 512), (3000, 3072)):
        prompt = sequence(1, 6000, 0, [], blocks)
        decode.in_flight = False
        chosen = padded.choose(batch_of((decode, 1), (prompt, num_tokens)))
        blocks.free(prompt)
        assert chosen.num_tokens == bucket
        assert chosen in padded.all
    alone = padded.choose(batch_of((sequence(1, 6000, 0, [], blocks), 512)))
    assert (alone.num_tokens, alone.num_decodes, alone.num_parts) == (512, 0, 0)
    batch = batch_of((sequence(1, 6000, 0, [], blocks), 5000))
    assert padded.choose(batch) == LIMITS.exact(batch), "its launches hide behind the work"


def require_cover(parts, reductions, sequences, kv_lens, window):
    """Each sequence has all that it sees in its parts, and knows which they are."""
    for sequence, kv_len in zip(sequences, kv_lens, strict=True):
        own = np.flatnonzero(parts[:, 0] == sequence)
        begins, ends = parts[own, 1], parts[own, 2]
        assert begins[0] <= max(0, kv_len - (window or kv_len))
        assert ends[-1] == kv_len
        assert (begins[1:] == ends[:-1]).all()
        assert (begins % PART_TOKENS == 0).all()
        assert 1 <= len(own) <= MAX_PARTS
        assert (parts[own, 3] == (len(own) > 1)).all()
        reduced = reductions[reductions[:, 0] == sequence, 1:].tolist()
        assert reduced == ([[own[0], len(own)]] if len(own) > 1 else [])


@pytest.mark.parametrize("window", [None, 700])
def test_parts_grow_with_the_contexts_and_are_planned_anew_where_others_come(window, monkeypatch):
    planned, plan = [], shapes.plan_parts
    monkeypatch.setattr(shapes, "plan_parts", lambda *given: planned.append(given) or plan(*given))
    parts = Parts(Limits(replace(SPEC, sliding_window=window), block_size=4, num_sms=132))
    kv_lens = np.random.default_rng(1).integers(1, 3000, 9)
    sizes = {"num_tokens": 9, "num_sequences": 9, "num_emits": 0, "num_decodes": 9, "tile_rows": 64}
    both = [Shape(**sizes, num_parts=num_parts) for num_parts in (900, 9)]
    for steps, decodes, shape in (
        (ITERATIONS + 2, np.arange(9), both[0]),  # of which the last plans again
        (2, np.arange(1, 9), both[0]),
        (2, np.arange(1, 9), both[1]),  # no room for more than one of each
        (2, np.arange(9), both[0]),
    ):
        for _ in range(steps):
            kv_lens += 1
            found, reductions = parts.of(decodes, kv_lens, shape)
            require_cover(found, reductions, decodes, kv_lens[decodes], window)
            assert len(reductions) <= shape.num_reductions
        kv_lens[0] += 1  # a decode that is elsewhere meanwhile
    assert len(planned) == 5
