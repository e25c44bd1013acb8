"""The torch executor behind the real scheduler: greedy tokens, preemption, and simulation's
schedule.
"""

from __future__ import annotations

import every_policy
import pytest
import torch
from checkpoints import DEVICE, FAMILIES, greedy_tokens, make_checkpoint
from helpers import scheduler_for
from integrity import check_integrity
from toy_executors import requests_with_tokens

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.timeline import HostTimeline
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import (
    Orca,
    PrefillFirst,
    RequestLevel,
    Sarathi,
    SarathiServe,
)

BATCH_SIZE = 3
CHUNKED = [make(chunk=chunk) for make in (Sarathi, SarathiServe) for chunk in (3, 4, 16, 64)]
POLICIES = [
    RequestLevel(),
    Orca(),
    PrefillFirst(),
    *CHUNKED,
    Sarathi(chunk=5, min_decodes=0),
]
UNDER_ALL_POLICIES = ("llama gqa, llama3 rope", "mistral window")  # others: shapes, not schedules


def generated(requests, scheduler, model, **cache) -> dict[int, list[int]]:
    ledger = Ledger()
    run_engine(requests, scheduler, TorchExecutor(model, **cache), ledger)
    table = ledger.requests()
    return dict(zip(table.request_id, table.output_token_ids, strict=True))


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    """(our model, the greedy tokens of transformers' generate for every request) of one family."""
    directory = tmp_path_factory.mktemp("checkpoint")
    theirs = make_checkpoint(request.param, directory)
    greedy = greedy_tokens(theirs, requests_with_tokens())
    spec, found = AutoModel(str(directory)).resolve("unused")
    return load_model(spec, found, DEVICE, torch.float32, seed=0), greedy


@pytest.mark.parametrize("family", FAMILIES, indirect=True, ids=str)
def test_greedy_tokens_equal_generate(family, request):
    model, greedy = family
    is_one = request.node.callspec.params["family"] in UNDER_ALL_POLICIES
    for policy in POLICIES if is_one else (Orca(), Sarathi(chunk=3), SarathiServe(chunk=8)):
        scheduler = scheduler_for(
            policy, batch_size=BATCH_SIZE, num_blocks=40, block_size=4, max_model_len=28
        )
        found = generated(requests_with_tokens(), scheduler, model, num_blocks=40, block_size=4)
        assert found == greedy, policy


@pytest.fixture(scope="module")
def tiny() -> Transformer:
    return load_model(load_option("model", "tiny"), None, DEVICE, torch.float32, seed=0)


@pytest.mark.parametrize(
    "policy",
    [PrefillFirst(watermark=0.0), SarathiServe(chunk=8, watermark=0.0)],
    ids=str,
)
def test_preemption_by_recompute_loses_no_token(tiny, policy):
    requests = requests_with_tokens([(14, 12), (13, 12), (15, 12)], vocab_size=256)

    def serve(num_blocks: int):
        scheduler = scheduler_for(
            policy, batch_size=3, num_blocks=num_blocks, block_size=4, max_model_len=27
        )
        return generated(requests, scheduler, tiny, num_blocks=num_blocks, block_size=4), scheduler

    roomy, unlimited = serve(30)
    tight, pressed = serve(12)
    assert unlimited.num_preemptions == 0
    assert pressed.num_preemptions > 0
    assert tight == roomy
    check_integrity(pressed.blocks, [])


class Clock:
    """A clock that only moves when told, and that counts how long it was slept."""

    def __init__(self) -> None:
        self.time = 0.0
        self.slept = 0.0

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.slept += seconds


def seconds_of(num_tokens: int) -> float:
    """Step times that no schedule could confuse: dyadic, so that sums are exact in either order."""
    return 0.25 + num_tokens / 64


@pytest.mark.parametrize(
    "name",
    ["orca", "prefill_first", "sarathi", "sarathi_serve", "vllm_v1", "sglang_mixed_pages", "tgi"],
)
def test_same_step_times_give_the_same_schedule(tiny, name):
    arrivals = [0.0, 0.25, 1.0, 40.0, 40.125]
    requests = requests_with_tokens(vocab_size=256, arrivals=arrivals)

    def scheduler():
        return scheduler_for(
            every_policy.POLICIES[name],
            batch_size=BATCH_SIZE,
            num_blocks=24,
            block_size=4,
            max_model_len=28,
        )

    clock = Clock()

    def tick(module, args, output) -> None:
        clock.time += seconds_of(len(args[0].token_ids))

    handle = tiny.register_forward_hook(tick)
    real = Ledger()
    executor = TorchExecutor(
        tiny, num_blocks=24, block_size=4, timeline=HostTimeline(clock), sleep=clock.sleep
    )
    run_engine(requests, scheduler(), executor, real)
    handle.remove()
    simulated = Ledger()
    run_engine(
        requests,
        scheduler(),
        SimulatedExecutor(lambda batch: seconds_of(batch.num_tokens)),
        simulated,
    )

    assert clock.slept > 0
    of_a_device = ["host_time"]
    assert (
        real.iterations()
        .drop(columns=of_a_device)
        .equals(simulated.iterations().drop(columns=of_a_device))
    )
    columns = [
        "request_id",
        "first_scheduled_time",
        "first_token_time",
        "finish_time",
        "num_preemptions",
        "token_times",
    ]
    assert real.requests()[columns].equals(simulated.requests()[columns])


def test_executor_contract(tiny):
    executor = TorchExecutor(tiny, num_blocks=8, block_size=4)
    with pytest.raises(RuntimeError, match="nothing is in flight"):
        executor.collect()
    sequence_batch = Batch()
    scheduler = scheduler_for(Orca(), num_blocks=8, block_size=4, max_model_len=28)
    scheduler.add(requests_with_tokens(vocab_size=256)[0])
    sequence_batch = scheduler.schedule(0.0)
    executor.submit(sequence_batch)
    assert executor.num_in_flight == 1
    with pytest.raises(RuntimeError, match="in flight"):
        executor.submit(sequence_batch)
    result = executor.collect()
    assert result.end >= result.start >= 0
    assert len(result.token_ids) == 1
    assert 0 <= result.token_ids[0] < 256


def test_prompts_without_tokens_are_refused(tiny):
    scheduler = scheduler_for(Orca(), num_blocks=8, block_size=4, max_model_len=28)
    scheduler.add(Request(0, 0.0, 5, 2))
    with pytest.raises(ValueError, match="no token ids"):
        TorchExecutor(tiny, num_blocks=8, block_size=4).submit(scheduler.schedule(0.0))


@pytest.mark.parametrize("num_blocks", [1, 50])
def test_warm_up_fits_any_cache_and_disturbs_nothing(tiny, num_blocks):
    executor = TorchExecutor(tiny, num_blocks=num_blocks, block_size=4)
    executor.warm_up(batch_size=8, chunk_tokens=64, longest=28)
    assert executor.num_in_flight == 0
