"""The pipeline's schedule and bubbles worked out by hand, driven by the engine, and shared by
replicas.
"""

from __future__ import annotations

import pytest
from helpers import requests_of, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Orca, Sarathi, SarathiServe

SPEC = ModelSpec(
    name="toy",
    num_layers=6,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=4,
    ffn_size=32,
    vocab_size=10,
)


def prefill(num_tokens: int) -> Batch:
    batch = Batch()
    batch.add(SequenceState(Request(0, 0.0, num_tokens + 1, 2), order=0), num_tokens)
    return batch


def decode() -> Batch:
    batch = Batch()
    sequence = SequenceState(Request(0, 0.0, 4, 2), order=0)
    sequence.num_computed = 4
    sequence.output_token_ids.append(0)
    batch.add(sequence, 1)
    return batch


def pipeline(num_stages: int, send_time: float = 0.0) -> PipelineExecutor:
    """A second a token on every stage."""
    return PipelineExecutor(
        num_stages, lambda batch: [float(batch.num_tokens)] * num_stages, lambda batch: send_time
    )


def served(requests, policy, executor, batch_size=3) -> Ledger:
    ledger = Ledger()
    scheduler = scheduler_for(policy, batch_size=batch_size, num_micro_batches=executor.capacity)
    run_engine(requests, scheduler, executor, ledger)
    return ledger


def test_two_stages_by_hand():
    executor = pipeline(2)
    results = []
    for batch in (prefill(4), prefill(2), decode(), decode(), prefill(3)):
        if executor.num_in_flight == executor.capacity:
            results.append(executor.collect())
        executor.submit(batch)
    results += [executor.collect() for _ in range(2)]
    assert [result.stages for result in results] == [
        [(0, 4), (4, 8)],
        [(4, 6), (8, 10)],
        [(8, 9), (10, 11)],  # submitted when the first one left at 8
        [(10, 11), (11, 12)],
        [(11, 14), (14, 17)],
    ]
    assert [bubble for result in results for bubble in result.bubbles] == [
        (0, 6, 8, "PB2", 2),
        (0, 9, 10, "PB3", 3),
        (1, 12, 14, "PB2", 4),
    ]
    spans = [(0, 8), (4, 10), (8, 11), (10, 12), (11, 17)]
    assert [(result.start, result.end) for result in results] == spans
    assert executor.now == 17


def test_three_stages_by_hand_with_prefills_of_different_length():
    executor = pipeline(3)
    for batch in (prefill(1), prefill(3), decode()):
        executor.submit(batch)
    results = [executor.collect() for _ in range(3)]
    assert [result.stages for result in results] == [
        [(0, 1), (1, 2), (2, 3)],
        [(1, 4), (4, 7), (7, 10)],
        [(4, 5), (7, 8), (10, 11)],
    ]
    assert results[1].bubbles == [(1, 2, 4, "PB1", 1), (2, 3, 7, "PB1", 1)]
    assert not results[0].bubbles
    assert not results[2].bubbles


def test_a_worker_goes_on_after_its_turnaround():
    """On the first stage when that and a place are free."""
    times = [0.5, 0.25]
    executor = PipelineExecutor(2, lambda batch: [float(batch.num_tokens)] * 2, turnarounds=times)
    executor.submit(prefill(4))
    executor.submit(prefill(2))
    results = [executor.collect()]
    executor.submit(decode())
    results += [executor.collect() for _ in range(2)]
    assert [result.stages for result in results] == [
        [(0.5, 4.5), (4.5, 8.5)],
        [(5, 7), (8.75, 10.75)],
        [(9, 10), (11, 12)],
    ]


def test_a_gap_without_requests_to_run_is_not_the_micro_batches_fault():
    ledger = served(requests_of((4, 1), (4, 1), arrivals=[0.0, 50.0]), Orca(), pipeline(2))
    assert ledger.bubbles().to_dict("list") == {
        "stage": [0, 1],
        "start": [4.0, 8.0],
        "end": [50.0, 54.0],
        "cause": ["starved", "starved"],
        "iteration": [1, 1],
    }
    assert ledger.requests().bubble_time.tolist() == [0.0, 92.0]


def test_a_request_enters_a_pipeline_with_room_when_it_arrives():
    """Not only when the micro-batch before it has left the last stage, at 20."""
    ledger = served(requests_of((10, 1), (4, 1), arrivals=[0.0, 3.0]), Orca(), pipeline(2))
    assert ledger.stages().start.tolist() == [0, 10, 10, 20]
    assert ledger.requests().first_scheduled_time.tolist() == [0.0, 3.0]
    assert ledger.bubbles().empty


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12)), min_size=1, max_size=20),
    num_stages=st.integers(1, 4),
    policy=st.sampled_from([Orca(), Sarathi(chunk=8), SarathiServe(chunk=8)]),
)
def test_busy_time_and_bubbles_fill_every_stage(lengths, num_stages, policy):
    executor = PipelineExecutor(
        num_stages,
        lambda batch: [0.5 + 0.25 * (stage + 1) * batch.num_tokens for stage in range(num_stages)],
        lambda batch: 0.125,
    )
    ledger = served(requests_of(*lengths), policy, executor)
    stages, bubbles = ledger.stages(), ledger.bubbles()
    assert len(stages) == num_stages * len(ledger.iterations())
    for stage, spans in stages.groupby("stage"):
        assert (spans.start.iloc[1:].to_numpy() >= spans.end.iloc[:-1].to_numpy()).all()
        gaps = bubbles[bubbles.stage == stage]
        busy, idle = (spans.end - spans.start).sum(), (gaps.end - gaps.start).sum()
        assert busy + idle == pytest.approx(spans.end.max() - spans.start.min())
    starts, ends = (
        stages[column].to_numpy().reshape(-1, num_stages) for column in ("start", "end")
    )
    assert (starts[:, 1:] >= ends[:, :-1] + 0.125).all()
    iterations = ledger.iterations()
    assert (iterations.start == starts[:, 0]).all()
    assert (iterations.end == ends[:, -1]).all()
    assert iterations.num_emits.sum() == sum(output_len for _, output_len in lengths)


def test_parallel_degrees_must_divide_the_model():
    parallel = Parallel(tensor=2, pipeline=3)
    parallel.check(SPEC)
    assert (parallel.num_devices, parallel.layers_per_stage(SPEC)) == (6, 2)
    with pytest.raises(
        UserError,
        match=r"executor\.pipeline_parallel=4 does not divide the 6 layers of model toy; use "
        r"one of 1, 2",
    ):
        Parallel(pipeline=4).check(SPEC)
    with pytest.raises(UserError, match=r"executor\.tensor_parallel=3 does not divide the 4 heads"):
        Parallel(tensor=3).check(SPEC)
