"""What every policy must keep on random queues (POLICIES' invariants), whatever the executor's
capacity.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from helpers import ScriptedExecutor, scheduler_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import (
    TGI,
    Ascend,
    AscendDynamic,
    AscendV09,
    ChunkedOnly,
    FastDeploy,
    LightLLM,
    LlamaCpp,
    LMDeploy,
    LMDeployPytorch,
    NanoVllm,
    OpenVINO,
    Orca,
    PPas,
    PrefillFirst,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SarathiServeDynamic,
    SGLang,
    SplitFuse,
    TensorRTLLM,
    TransformersFIFO,
    TransformersPrefillFirst,
    VllmV0Chunked,
    VllmV1,
)
from sarathi_lab.policy.profile_table import ProfileTable, Row

MAX_LEN = 40
# 8 tokens beside a decode, 6 beside up to two, nothing beside more.
TABLE = ProfileTable((Row(8, 1, 64, 10.0), Row(6, 2, 64, 10.0), Row(12, 4, 64, 20.0)))
POLICIES = {
    "request_level": RequestLevel(),
    "request_level_prompt": RequestLevel(reserve="prompt"),
    "orca": Orca(),
    "orca_unlimited_prompt": Orca(max_prefills=None, reserve="prompt"),
    "prefill_first": PrefillFirst(max_num_batched_tokens=MAX_LEN, watermark=0.05),
    "prefill_first_delay": PrefillFirst(delay_factor=1.5),
    "sarathi": Sarathi(chunk=8, min_decodes=0),
    "sarathi_full_house": Sarathi(chunk=8, min_decodes=3, reserve="prompt"),
    "sarathi_paper": Sarathi(chunk=8),
    "sarathi_many_prompt": Sarathi(chunk=8, max_prefills=None, reserve="prompt"),
    "sarathi_serve": SarathiServe(chunk=8),
    "sarathi_serve_chunk": SarathiServe(chunk=8, reserve="chunk", watermark=0.0),
    "sglang": SGLang(chunked_prefill_size=8),
    "sglang_mixed_pages": SGLang(chunked_prefill_size=8, page_size=4, enable_mixed_chunk=True),
    "sglang_bold": SGLang(chunked_prefill_size=8, init_new_token_ratio=0.0, retract_decode_steps=2),
    "trtllm": TensorRTLLM(max_num_tokens=8, chunk_unit_size=4),
    "trtllm_turns_pausing": TensorRTLLM(8, "EQUAL_PROGRESS", 4, "MAX_UTILIZATION"),
    "trtllm_forced_static": TensorRTLLM(8, "FORCE_CHUNK", 4, "STATIC_BATCH", True, True),
    "tgi": TGI(max_batch_prefill_tokens=8),
    "tgi_whole": TGI(MAX_LEN, chunking=False, max_batch_total_tokens=60, max_waiting_tokens=3),
    "transformers_fifo": TransformersFIFO(max_batch_tokens=8),
    "transformers_prefill_first": TransformersPrefillFirst(max_batch_tokens=8),
    "transformers_prefill_first_margin": TransformersPrefillFirst(
        max_batch_tokens=8, safety_margin=0.3
    ),
    "lightllm": LightLLM(batch_max_tokens=8),
    "lightllm_eager": LightLLM(
        batch_max_tokens=16, chunked_prefill_size=5, router_max_wait_tokens=2
    ),
    "lmdeploy": LMDeploy(max_prefill_token_num=6),
    "lmdeploy_pytorch": LMDeployPytorch(max_prefill_token_num=8),
    "lmdeploy_pytorch_eager": LMDeployPytorch(max_prefill_token_num=12, prefill_interval=1),
    "openvino": OpenVINO(max_num_batched_tokens=8),
    "openvino_whole": OpenVINO(max_num_batched_tokens=MAX_LEN, dynamic_split_fuse=False),
    "llama_cpp": LlamaCpp(n_ubatch=8, n_batch=20),
    "chunked_only": ChunkedOnly(chunk_size=8),
    "chunked_only_chunk": ChunkedOnly(chunk_size=8, reserve="chunk"),
    "sarathi_serve_dynamic": SarathiServeDynamic(
        64, 32, chunk_schedule_max_tokens=20, chunk_schedule_stages=4
    ),
    "splitfuse": SplitFuse(max_ragged_batch_size=8),
    "vllm_v0_chunked": VllmV0Chunked(max_num_batched_tokens=8),
    "vllm_v0_chunked_chunk": VllmV0Chunked(max_num_batched_tokens=8, reserve="chunk"),
    "vllm_v0_chunked_partial": VllmV0Chunked(8, 3, 1, 6),
    "vllm_v1": VllmV1(max_num_batched_tokens=8),
    "vllm_v1_threshold": VllmV1(
        8, long_prefill_token_threshold=3, scheduler_reserve_full_isl=False
    ),
    "vllm_v1_whole": VllmV1(MAX_LEN, enable_chunked_prefill=False, watermark=0.1),
    "p_pas": PPas(max_num_batched_tokens=16),
    "p_pas_cap": PPas(max_num_batched_tokens=16, prefill_cap=5, min_active_prefills=1),
    "nano_vllm": NanoVllm(max_num_batched_tokens=8),
    "fastdeploy": FastDeploy(max_num_batched_tokens=8),
    "fastdeploy_partial": FastDeploy(
        8, 3, 2, 6, static_decode_blocks=1, prealloc_dec_block_slot_num_threshold=2
    ),
    "ascend_v0_9": AscendV09(max_num_batched_tokens=MAX_LEN),
    "ascend_long": Ascend(max_long_partial_prefills=1, long_prefill_token_threshold=5),
    "ascend_phases": Ascend(max_num_seqs=2, enable_pd_transfer=True, decode_max_num_seqs=3),
    "ascend_chunked": Ascend(256, enable_chunked_prefill=True, long_prefill_token_threshold=4),
    "ascend_dynamic": AscendDynamic(10, slo_limits_for_dynamic_batch=15, profile_table=TABLE),
}
# Those that let a later request pass an earlier one that has no room, or is long.
OUT_OF_ORDER = (
    "trtllm",
    "transformers",
    "ascend_v0_9",
    "ascend_long",
    "ascend_phases",
    "vllm_v0_chunked_partial",
)
IN_ORDER = [name for name in POLICIES if not name.startswith(OUT_OF_ORDER)]

lengths = st.tuples(st.integers(1, 24), st.integers(1, MAX_LEN - 24))
queues = st.lists(st.tuples(lengths, st.floats(0, 30)), min_size=1, max_size=12)


class Checker(Ledger):
    """A ledger that checks every iteration while it is recorded."""

    def __init__(self, scheduler: Scheduler, budget: int | None, whole_if_no_decodes: bool) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.budget = budget
        self.whole_if_no_decodes = whole_if_no_decodes
        self.finished_ids: list[int] = []
        self.computed: dict[int, int] = defaultdict(int)

    def record(self, result, finished):
        super().record(result, finished)
        scheduler = self.scheduler
        assert len(self._iterations) < 5000, "sequences evict one another and none gets done"
        chunks = result.batch.chunks
        ids = [chunk.sequence.request.request_id for chunk in chunks]
        assert len(ids) == len(set(ids)), "a sequence twice in one batch"
        assert len(chunks) <= scheduler.batch_size
        assert all(chunk.num_tokens > 0 for chunk in chunks)
        exempt = self.whole_if_no_decodes and result.batch.num_decode_tokens == 0
        if self.budget is not None and not exempt:
            num_decodes = result.batch.num_decode_tokens
            budget = self.budget + (num_decodes if scheduler.policy.decodes_on_top else 0)
            assert result.batch.num_tokens <= max(budget, num_decodes)
        scheduler.blocks.check_integrity(scheduler.running, scheduler.swapped)
        assert all(not sequence.block_ids for sequence in [*scheduler.waiting, *scheduler.swapped])
        self.finished_ids += [sequence.request.request_id for sequence in finished]


@pytest.mark.parametrize(("capacity", "feeds_tokens"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    queue=queues,
    num_blocks=st.integers(11, 40),
    num_host_blocks=st.integers(0, 20),
    queue_order=st.sampled_from(["fcfs", "priority", "shortest"]),
)
def test_invariants(name, capacity, feeds_tokens, queue, num_blocks, num_host_blocks, queue_order):
    policy = POLICIES[name]
    requests = [Request(i, time, p, d, priority=i % 3) for i, ((p, d), time) in enumerate(queue)]
    scheduler = scheduler_for(
        policy,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        preemption="swap" if num_host_blocks else "recompute",
        queue_order=queue_order,
        max_model_len=MAX_LEN,
        num_micro_batches=1 if feeds_tokens else capacity,
        batch_size=4,
    )
    checker = Checker(scheduler, policy.budget, policy.budget is not None and not policy.is_capped)
    executor = ScriptedExecutor(
        lambda batch: 0.5 + 0.1 * batch.num_tokens, capacity, feeds_tokens=feeds_tokens
    )

    run_engine(requests, scheduler, executor, checker)

    table = checker.requests()
    assert table.request_id.tolist() == [request.request_id for request in requests]
    assert [len(times) for times in table.token_times] == [
        request.output_len for request in requests
    ]
    assert all(list(times) == sorted(times) for times in table.token_times)
    assert (table.first_scheduled_time >= table.arrival_time).all()
    assert scheduler.blocks.num_free == num_blocks
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.swapped
    iterations = checker.iterations()
    emitted = iterations.num_emits.sum()
    assert emitted == sum(request.output_len for request in requests)
    if not scheduler.num_preemptions:
        total = sum(request.total_len - 1 for request in requests)
        assert iterations.num_prefill_tokens.sum() + iterations.num_decode_tokens.sum() == total


@pytest.mark.parametrize("name", IN_ORDER)
@settings(max_examples=25, deadline=None)
@given(queue=queues)
def test_requests_are_first_scheduled_in_order_of_arrival(name, queue):
    requests = sorted(
        (Request(i, time, p, d) for i, ((p, d), time) in enumerate(queue)),
        key=lambda request: request.arrival_time,
    )
    ledger = Ledger()
    run_engine(
        requests,
        scheduler_for(POLICIES[name], num_blocks=25, max_model_len=MAX_LEN),
        ScriptedExecutor(),
        ledger,
    )
    table = (
        ledger.requests().set_index("request_id").loc[[request.request_id for request in requests]]
    )
    assert table.first_scheduled_time.is_monotonic_increasing


def test_sequences_in_flight_elsewhere_do_not_drive_an_older_one_out():
    """Found by the test above: with three batches in flight, each sequence gave way to the next,
    for ever.
    """
    lengths = [(7, 8), (23, 16), (20, 11), (19, 13), (22, 9), (13, 1)]
    arrivals = [10.6, 0.0, 0.0, 2.9, 0.0, 5.7]
    requests = [
        Request(i, time, p, d)
        for i, ((p, d), time) in enumerate(zip(lengths, arrivals, strict=True))
    ]
    policy = POLICIES["sarathi_serve_chunk"]
    scheduler = scheduler_for(policy, num_blocks=11, max_model_len=MAX_LEN, num_micro_batches=3)
    checker = Checker(scheduler, policy.chunk, False)
    run_engine(
        requests,
        scheduler,
        ScriptedExecutor(lambda batch: 0.5 + 0.1 * batch.num_tokens, 3),
        checker,
    )
    assert len(checker.finished_ids) == len(requests)


def test_memory_pressure_preempts_and_loses_nothing():
    requests = [Request(i, 0.0, 12, 16) for i in range(8)]
    scheduler = scheduler_for(
        SarathiServe(chunk=16, watermark=0.0), num_blocks=12, max_model_len=28
    )
    ledger = Ledger()
    run_engine(requests, scheduler, ScriptedExecutor(), ledger)
    table = ledger.requests()
    assert scheduler.num_preemptions > 0
    assert (
        table.num_preemptions.sum()
        == scheduler.num_preemptions
        == ledger.iterations().num_preemptions.sum()
    )
    assert (
        table.output_len.tolist() == [len(tokens) for tokens in table.output_token_ids] == [16] * 8
    )


def test_a_sequence_in_the_batch_is_never_evicted_for_a_later_one():
    """Two decodes need the last block; the older takes it and the newer must give way, not the
    batch's own.
    """
    scheduler = scheduler_for(
        SarathiServe(chunk=16, watermark=0.0), num_blocks=4, block_size=4, max_model_len=12
    )
    executor = ScriptedExecutor()
    run_engine([Request(i, 0.0, 8, 4) for i in range(2)], scheduler, executor, Ledger())
    assert executor.schedule[1] == [(0, 8, 1)]
