"""Layered prefill: a schedule by hand, what groups of layers count, and what iterations take."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from helpers import ScriptedExecutor, requests_of, rows, scheduler_for, serve
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.extensions.check_policy import check_policy
from sarathi_lab.extensions.layered import LayeredBatch, LayeredPrefill, Layers

POLICY = LayeredPrefill(chunk=4, max_num_batched_tokens=16)


class Layered(ScriptedExecutor):
    """Of six layers; keeps which of them prompts pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Layers | None] = []

    def submit(self, batch: Batch) -> None:
        self.layers.append(batch.group)
        super().submit(batch)


def layered(batch: Batch, group: Layers) -> LayeredBatch:
    """Copy `batch`, with prompts that pass only `group`."""
    copied = LayeredBatch(**{one.name: getattr(batch, one.name) for one in fields(batch)})
    copied.restrict_to(group)
    return copied


def test_decodes_go_on_while_prompts_pass_groups_of_layers():
    """Four tokens make a group: the first prompt passes at once, twelve tokens in three groups. Who
    comes meanwhile waits for their end; what does not fit into a pass goes on in the next.
    """
    requests = requests_of((4, 6), (8, 2), (4, 1), (18, 1), arrivals=[0.0, 1.0, 1.0, 2.0])
    executor = serve(requests, scheduler_for(POLICY), Layered())
    assert executor.schedule == rows(
        "0:0+4 | 0:4+1 1:0+8 2:0+4 | 0:5+1 1:0+8 2:0+4 | 0:6+1 1:0+8 2:0+4 | "
        "0:7+1 1:8+1 3:0+16 | 0:8+1 3:0+16 | 3:0+16 | 3:0+16 | 3:16+2"
    )
    groups = [(0, 2), (2, 4), (4, 6), (0, 1), (1, 3), (3, 4), (4, 6)]
    assert executor.layers == [None, *(Layers(*group, 6) for group in groups), None]


def test_there_are_as_many_groups_as_asked_for_and_as_layers_at_most():
    def groups(**changes):
        executor = serve(requests_of((16, 1)), scheduler_for(replace(POLICY, **changes)), Layered())
        return len(executor.layers)

    assert groups(chunk=16) == 1
    assert groups(groups=2) == 2
    assert groups(groups=16) == groups(chunk=1) == 6


def test_a_prompt_that_gives_way_between_layers_starts_anew():
    """A decode takes the last block, which the prompt had: what this had in a third of the layers
    is lost, and counted twice.
    """
    requests = requests_of((3, 6), (8, 1), arrivals=[0.0, 3.0])
    policy = replace(POLICY, groups=3, watermark=0.0)
    scheduler, executor, ledger = scheduler_for(policy, num_blocks=3), Layered(), Ledger()
    run_engine(requests, scheduler, executor, ledger)
    assert executor.schedule == [
        *[[(0, 0, 3)]] * 3,
        [(0, 3, 1), (1, 0, 8)],
        *[[(0, position, 1)] for position in range(4, 8)],
        *[[(1, 0, 8)]] * 3,
    ]
    assert executor.layers[-3:] == [Layers(0, 2, 6), Layers(2, 4, 6), Layers(4, 6, 6)]
    assert ledger.iterations().num_prefill_tokens.sum() == 3 + 8 // 3 + 8


@given(st.integers(0, 50), st.integers(2, 40), st.integers(0, 5), st.integers(1, 6))
def test_the_groups_of_a_pass_count_its_tokens_once(start, num_tokens, num_decodes, num_groups):
    sums = ("num_prefill_tokens", "prefill_kv_tokens", "prefill_query_key_pairs", "num_emits")
    sizes = {"prefill_tokens": num_tokens, "start": start, "emits": True}
    whole, found, share = make_batch(**sizes), [0] * len(sums), 0.0
    batch = make_batch(**sizes, num_decodes=num_decodes, context=3)
    for group in range(num_groups):
        own = layered(batch, Layers(6 * group // num_groups, 6 * (group + 1) // num_groups, 6))
        parts = {layers == own.layers: part for layers, part in own.passes(6)}
        assert sum(len(layers) for layers, part in own.passes(6) if part.chunks) == (
            6 if num_decodes else len(own.layers)
        )
        assert parts[True].num_prefill_tokens == num_tokens
        if False in parts:
            assert parts[False].num_tokens == parts[False].num_emits == num_decodes
        found = [a + getattr(own, name) for a, name in zip(found, sums, strict=True)]
        found[-1] -= num_decodes
        share += own.layer_share
    assert found == [getattr(whole, name) for name in sums]
    assert share == pytest.approx(1)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-8b"])
def test_the_groups_of_a_prompt_alone_take_what_it_takes_whole(model):
    """But for the iterations' own seconds; beside decodes a layer's experts are read for both."""
    spec, hardware = load_option("model", model), load_option("hardware", "h100")
    cost = make_cost_model("analytic", spec, hardware, 2)

    def seconds(num_decodes: int) -> list[float]:
        times = []
        for start in range(0, spec.num_layers, spec.num_layers // 4):
            batch = make_batch(
                prefill_tokens=2048, num_decodes=num_decodes, context=500, emits=True
            )
            group = Layers(start, start + spec.num_layers // 4, spec.num_layers)
            batch = layered(batch, group)
            times.append(cost.iteration_time(batch))
            assert sum(cost.operation_times(batch).values()) == pytest.approx(times[-1])
        return times

    whole = cost.iteration_time(make_batch(prefill_tokens=2048, emits=True))
    assert sum(seconds(0)) - 3 * hardware.iteration_overhead == pytest.approx(whole, rel=1e-6)
    decodes = cost.iteration_time(make_batch(num_decodes=32, context=500))
    both = cost.iteration_time(
        make_batch(prefill_tokens=2048, num_decodes=32, context=500, emits=True)
    )
    assert sum(seconds(32)) == pytest.approx(both + 3 * decodes, rel=0.01)


def test_weights_are_read_for_prompts_in_their_layers_alone():
    spec = load_option("model", "qwen3-30b-a3b")
    batch = layered(make_batch(prefill_tokens=2048, num_decodes=4), Layers(0, 12, 48))
    (_, inside), (_, outside) = batch.passes(48)
    expected = 0.25 * spec.weight_read_bytes(inside, 2) + 0.75 * spec.weight_read_bytes(outside, 2)
    assert spec.weight_read_bytes(batch, 2) == pytest.approx(expected)
    ledger = Ledger()
    run_engine(requests_of((16, 2)), scheduler_for(POLICY), ScriptedExecutor(), ledger)
    assert ledger.iterations().layer_share.tolist() == pytest.approx([1 / 6, 1 / 3] * 2 + [1])


def test_it_runs_wherever_a_policy_is_tried_or_advised():
    """By rooflines before a run, by `check_policy`, and by the prediction behind chunk=auto."""
    plan = plan_of("layered_prefill", "executor=simulated", "chunk=auto", "workload.num_requests=4")
    assert plan.advice is not None
    assert plan.roofline(plan.backend.peaks()) > 0
    check_policy(POLICY, num_queues=20)


def test_a_pipeline_is_refused_in_a_line():
    with pytest.raises(
        UserError, match=r"layered_prefill .* pipelines, ranks.* use executor.pipeline"
    ):
        run_engine([], scheduler_for(POLICY), PipelineExecutor(2, lambda b: [1.0, 1.0]), Ledger())
