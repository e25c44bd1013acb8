"""What no policy and chunk can do: limits that no simulated run passes, and what they spare."""

from __future__ import annotations

import numpy as np
import pytest
from composed import config_of

from sarathi_lab.config.instantiate import build
from sarathi_lab.engine.loop import serve
from sarathi_lab.extensions.advise.limits import MARGIN, Limits, out_of_reach, too_many
from sarathi_lab.extensions.advise.task import Advice, Advise
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.tasks.plan import Plan, make_plan

CARD = ("executor=simulated", "hardware=l4", "model=llama3.1-8b")
LOAD = ("workload.prompt_len=3000", "workload.output_len=40", "workload.num_requests=24")


def plan_of(*settings: str) -> Plan:
    return make_plan(config_of("policy=vllm_v1", *CARD, *LOAD, *settings))


def advice_of(*settings: str) -> Advice:
    cfg = config_of("task=advise", *CARD, *LOAD, "task.chunks=[256]", *settings)
    task: Advise = build(cfg.task)
    return task.advise(task.check(cfg))


@pytest.mark.parametrize("chunk", [128, 640, 2048])
@pytest.mark.parametrize("policy", ["vllm_v1", "sglang", "trtllm"])
def test_no_run_passes_the_limits(chunk: int, policy: str) -> None:
    plan = plan_of("workload.rate=50", "batch=64", f"chunk={chunk}", f"policy={policy}")
    limits = Limits(plan)
    requests = serve(plan.load.arrivals(), plan.engine, plan.build()[1]).requests()
    assert MARGIN * limits.rate > len(requests) / requests.finish_time.max()
    waits = requests.first_token_time - requests.arrival_time
    assert waits.min() > limits.first_token(3000, chunk) / MARGIN
    assert np.diff(requests.token_times[0]).min() > limits.gap / MARGIN


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen3-30b-a3b"])
def test_many_short_prompts_in_large_iterations_do_not_pass_the_limit(model: str) -> None:
    """An iteration of many prompts pays their attention's launches once."""
    load = ("workload.prompt_len=32", "workload.output_len=2", "workload.num_requests=600")
    server = ("hardware=h100", f"model={model}", "batch=600", "chunk=32768")
    plan = plan_of(*server, *load, "workload.rate=50000")
    requests = serve(plan.load.arrivals(), plan.engine, plan.build()[1]).requests()
    assert MARGIN * Limits(plan).rate > len(requests) / requests.finish_time.max()


def test_bounds_that_a_request_misses_alone_are_named() -> None:
    plan = plan_of("workload.rate=1")
    gap, first_token = out_of_reach(plan, Slo(name="", tbt=0.05, ttft=0.1))
    assert gap == (
        "no rate meets slo.tbt=0.05: a decode takes 64.5 ms even alone, with executor.weights=fp8 "
        "36 ms"
    )
    assert first_token.startswith("no rate meets slo.ttft=0.1: a prompt of 3,000 tokens takes ")
    assert out_of_reach(plan, Slo(name="", tbt=0.07, ttft=2)) == []
    assert too_many(plan) == []


def test_drafts_and_cached_prefixes_have_no_limits() -> None:
    strict = Slo(name="", tbt=0.001, ttft=0.001)
    for setting in ("speculation=assumed", "cache.prefix=true"):
        plan = plan_of("workload.rate=50", setting)
        assert out_of_reach(plan, strict) == too_many(plan) == []


def test_other_policies_are_not_simulated_where_none_keeps_up() -> None:
    advice = advice_of("workload.rate=50", "slo.ttft=2", "task.policies=[trtllm]")
    (limit,) = advice.limits
    assert limit.startswith("no policy serves 50 requests/s of these: the devices compute at most")
    assert list(advice.compared) == ["vllm_v1"]
    assert advice.left_out == ["trtllm was not simulated, as no policy meets it"]
    assert not advice_of("workload.rate=0.1", "slo.ttft=2", "task.policies=[trtllm]").limits
