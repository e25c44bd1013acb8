"""Long prompts among short ones, and one through a pipeline, on executors whose times are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import ScriptedExecutor

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.extensions.after_sarathi.long_prompts import one_by_one
from sarathi_lab.extensions.under_load.bench import ServingBench, policy_of
from sarathi_lab.policy import SarathiServe, VllmV1
from sarathi_lab.policy.zoo import DynamicChunks


def bench_of(sizes, executor, num_stages: int = 1) -> ServingBench:
    engine = EngineConfig(VllmV1(), 4, 200, 4, 64, num_stages)
    return ServingBench(sizes, "tiny", engine, executor, policy_of, None)


def test_who_serves_the_short_first_spares_them_and_the_long_prompt_pays():
    sizes = CATALOG["long_prompts"].sizes("dry") | {
        "policies": ["sarathi_serve", "shortest_remaining", "lars"],  # no device says its times
        "bound": 0.1,
    }
    executor = ScriptedExecutor(lambda batch: 0.01 * batch.num_tokens)
    points = CATALOG["long_prompts"].make(bench_of(sizes, executor), 0, **sizes)
    found = {(dict(p.labels)["quantity"], p.series): p.y.value for p in points}
    fixed, first = "sarathi_serve", "shortest_remaining"
    assert found["TTFT P99, short", first] < found["TTFT P99, short", fixed]
    assert found["TTFT, long", first] > found["TTFT, long", fixed]
    ratio = found["TTFT P99, short", first] / found["TTFT P99, short", fixed]
    assert found["TTFT P99, short / sarathi_serve", first] == pytest.approx(ratio)
    assert (
        found["over the bound, short", "no long prompts"] <= found["over the bound, short", fixed]
    )
    assert {series for _, series in found} == {fixed, first, "threshold", "no long prompts"}


def test_a_pipeline_is_as_fast_as_its_stages_where_chunks_follow_one_another():
    """Four chunks of 4 tokens, a second a token and stage: 5 x 4 s, where one stage takes 32."""
    executor = PipelineExecutor(2, lambda batch: [1.0 * batch.num_tokens] * 2)
    bench, requests = bench_of({}, executor, 2), [Request(0, 0.0, 16, 3)]
    alike = DynamicChunks(4, smooth_factor=0.0)
    assert one_by_one(bench, alike, requests) == (20.0, 32 / 20)
    assert one_by_one(bench, SarathiServe(chunk=4), requests) == (32.0, 1.0)
    halved = replace(alike, chunk=2, smooth_factor=0.0)
    small = replace(bench, engine=replace(bench.engine, batch_size=2))
    assert one_by_one(small, halved, requests)[0] == pytest.approx(18.0)
