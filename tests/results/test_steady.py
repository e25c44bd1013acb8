"""The steady part of runs whose requests all wait from the start: a sweep agrees with Fig 9."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from plans import plan_of, serve_plan

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.experiment.scenario import Scenario, request_times
from sarathi_lab.policy import RequestLevel
from sarathi_lab.results.load import load_summary
from sarathi_lab.results.steady import (
    drift,
    requests_for_steady_part,
    sequences_in_cache,
    steady_part,
)
from sarathi_lab.results.window import ADMISSION, RunPart
from sarathi_lab.run import main
from sarathi_lab.tasks.plan import Plan

SIMULATED = ("executor=simulated", "tracking=none")


def requests_table(admitted: list[float], finished: list[float]) -> pd.DataFrame:
    columns = {"first_scheduled_time": admitted, "finish_time": finished}
    return pd.DataFrame(columns).assign(prompt_len=4, output_len=2)


# Batches of two, one after the other, each of three seconds.
BATCHES = requests_table(np.repeat(np.arange(5) * 3.0, 2).tolist(), [3.0] * 2 + [6.0] * 8)


@pytest.mark.parametrize(
    ("num_requests", "end"), [(6, 6.0), (7, 6.0), (8, 9.0), (9, 9.0), (10, 12.0)]
)
def test_the_steady_part_is_whole_batches_by_hand(num_requests, end):
    assert steady_part(BATCHES[:num_requests], num_slots=2) == RunPart(3.0, end, ADMISSION)


def test_a_run_of_less_than_three_batches_has_no_steady_part():
    assert steady_part(BATCHES[:5], num_slots=2) is None
    assert requests_for_steady_part(BATCHES[:5], num_slots=2) == 6
    # All are in flight at once: there may be more places than that.
    assert requests_for_steady_part(BATCHES[:2], num_slots=8) == 24


def test_places_that_the_cache_does_not_allow_are_none():
    assert steady_part(BATCHES, num_slots=8) == RunPart(3.0, 12.0, ADMISSION)


def test_a_device_that_is_scheduled_ahead_has_no_more_places():
    """Its next requests are admitted while their predecessors end."""
    ahead = BATCHES.assign(first_scheduled_time=BATCHES.first_scheduled_time - 0.5)
    assert steady_part(ahead, num_slots=2) == RunPart(2.5, 11.5, ADMISSION)


def test_drift_is_of_the_later_batches_over_the_earlier():
    admitted = np.repeat([0.0, 4.0, 8.0, 10.0, 12.0], 2).tolist()
    slower_first = requests_table(admitted, [*admitted[2:], 14.0, 14.0])
    part = steady_part(slower_first, 2)
    assert drift(slower_first, part, 2) == pytest.approx(-0.5)
    assert drift(BATCHES, steady_part(BATCHES, 2), 2) == 0.0
    unequal = slower_first.assign(prompt_len=range(10))
    assert drift(unequal, part, 2) == 0.0


# -- simulated -------------------------------------------------------------------------------------


def rates_of(policy: str, **settings: Any) -> tuple[Plan, dict[str, float]]:
    """The plan of a simulated run, and the rates of the part of it that counts."""
    plan = plan_of(policy, *SIMULATED, changes=settings)
    ledger = serve_plan(plan)
    requests = ledger.requests()
    part = plan.counted_part(ledger.iterations(), requests)
    assert part is not None
    return plan, part.throughput(requests)


def gain_of_figure(plan: Plan, policy: str, chunk: int | None = None) -> float:
    """The gain over request-level batching as Fig 9 and 11 compute it, on the plan's requests."""
    request = plan.load.requests[0]
    size = (request.prompt_len, request.output_len - 1, plan.engine.batch_size)
    scenario = Scenario(policy, *size, chunk)
    times_of = plan.backend.predictor(plan.spec).operation_times
    seconds, baseline = (
        sum(request_times(times_of, each).values()) for each in (scenario, scenario.baseline)
    )
    return baseline / seconds


# Of the paper's grid on an A6000, with decodes for all chunks: batch, length, chunk, P:D.
POINTS = [
    *[(18, 1024, 256, pd_ratio) for pd_ratio in (5, 7, 10, 14)],
    *[(18, 1024, 512, pd_ratio) for pd_ratio in (14, 20)],
    *[(18, 1024, 128, 6), (10, 2048, 256, 27), (10, 2048, 512, 50), (6, 3072, 256, 50)],
]


@pytest.mark.parametrize(("batch", "seq_len", "chunk", "pd_ratio"), POINTS)
def test_a_run_gains_what_figure_9_says_on_the_same_requests(batch, seq_len, chunk, pd_ratio):
    size = {"batch": batch, "seq_len": seq_len, "pd_ratio": pd_ratio, "chunk": chunk}
    plan, sarathi = rates_of("sarathi", **size)
    _, baseline = rates_of("request_level", **size)
    gain = sarathi["throughput"] / baseline["throughput"]
    assert gain == pytest.approx(gain_of_figure(plan, "sarathi", chunk), rel=0.005)


@pytest.mark.parametrize("pd_ratio", [5, 14, 50])
@pytest.mark.parametrize("max_prefills", [1, None])
def test_orca_gains_what_figure_11_says(pd_ratio, max_prefills):
    size = {"batch": 18, "pd_ratio": pd_ratio}
    plan, orca = rates_of("orca", **size, **{"policy.max_prefills": max_prefills})
    _, baseline = rates_of("request_level", **size)
    expected = gain_of_figure(plan, "orca_best" if max_prefills else "orca_worst")
    assert orca["throughput"] / baseline["throughput"] == pytest.approx(expected, rel=0.001)


SMALL = {"batch": 6, "seq_len": 512, "pd_ratio": 14, "chunk": 256}


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        *[(policy, {}) for policy in ("prefill_first", "sglang", "tgi", "p_pas", "vllm_v1")],
        ("sarathi", {"executor.pipeline_parallel": 2}),
        ("request_level", {"executor.pipeline_parallel": 2}),
        ("sarathi", {"executor.tensor_parallel": 2}),
        ("vllm_v1", {"cache.num_blocks": 110}),  # three of its six requests at a time
    ],
)
def test_more_requests_give_the_same_rate(policy, settings):
    _, default = rates_of(policy, **SMALL, **settings)
    _, long = rates_of(policy, **SMALL, **settings, **{"workload.num_requests": 240})
    assert default["throughput"] == pytest.approx(long["throughput"], rel=0.01)


def test_drawn_lengths_have_no_bias_from_filling_and_draining():
    """The steady part of short runs has the rate of a run in which both ends hardly count."""
    options = (*SIMULATED, "workload=uniform")
    steady_rates = []
    whole_rates = []
    for seed in range(4):
        size = {**SMALL, "workload.num_requests": 96, "seed": seed}
        plan = plan_of("sarathi", *options, changes=size)
        ledger = serve_plan(plan)
        requests, iterations = ledger.requests(), ledger.iterations()
        part = plan.counted_part(iterations, requests)
        steady_rates.append(part.throughput(requests)["throughput"])
        whole_rates.append(rate_of_all(plan, iterations))
    many = plan_of("sarathi", *options, changes={**SMALL, "workload.num_requests": 1500})
    expected = rate_of_all(many, serve_plan(many).iterations())
    assert np.mean(steady_rates) == pytest.approx(expected, rel=0.01)
    assert np.mean(whole_rates) < 0.98 * expected


def rate_of_all(plan: Plan, iterations: pd.DataFrame) -> float:
    """Tokens per second of a run, filling and draining included."""
    num_tokens = sum(request.total_len for request in plan.load.requests)
    return num_tokens / iterations.end.max()


@pytest.mark.parametrize("cluster", ["replicas", "disaggregated"])
def test_several_engines_have_a_steady_part(cluster, tmp_path):
    """Twice the engines give twice the rate, as nothing is left of filling and draining."""
    size = [f"{name}={value}" for name, value in SMALL.items()]
    many = [*SIMULATED, *size, "baselines=[]", "hardware=a100", "model=llama3-8b"]
    many += [f"cluster={cluster}", f"output={tmp_path}", f"hydra.run.dir={tmp_path}/run"]
    assert main(many) == 0
    summary = load_summary(tmp_path / "run")
    assert 0 < summary["window_start"] < summary["window_end"]
    if cluster == "replicas":
        plan = plan_of("sarathi", *SIMULATED, "hardware=a100", "model=llama3-8b", changes=SMALL)
        requests = serve_plan(plan).requests()
        part = plan.steady_part(requests)
        alone = part.throughput(requests)["throughput"]
        assert summary["throughput"] == pytest.approx(2 * alone, rel=0.01)


# -- by command ------------------------------------------------------------------------------------


def summary_of(folder, *settings: str) -> dict[str, float]:
    places = [f"output={folder}", f"hydra.run.dir={folder}/run"]
    assert main([*SIMULATED, *places, *settings]) == 0
    return load_summary(folder / "run")


def test_the_readmes_point_gains_what_the_paper_counts(tmp_path, capsys):
    summary = summary_of(tmp_path, "chunk=256", "batch=18", "pd_ratio=14")
    assert summary["throughput_vs_request_level"] == pytest.approx(1.254, abs=0.002)
    assert summary["throughput_vs_orca"] == pytest.approx(1.208, abs=0.002)
    num_tokens = summary["num_prompt_tokens"] + summary["num_output_tokens"]
    assert num_tokens / summary["duration"] == pytest.approx(summary["throughput"])
    assert summary["num_requests"] == 108
    iterations = pd.read_parquet(tmp_path / "run" / "iterations.parquet")
    assert iterations.end.max() > summary["window_end"]  # the tables have all of the run
    out = " ".join(capsys.readouterr().out.split())
    assert "between filling and draining: 108 of 144 requests" in out


def test_a_run_that_is_too_short_names_the_requests_that_show_the_steady_state(tmp_path, capsys):
    size = ("batch=4", "seq_len=64", "pd_ratio=1")
    few = summary_of(tmp_path / "few", *size, "workload.num_requests=10")
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("not steady: filling and draining count, too, as 10 requests") == 1
    assert "workload.num_requests=12 shows the steady state" in out
    assert "window_start" not in few
    summary_of(tmp_path / "more", *size, "workload.num_requests=12")
    assert "not steady" not in capsys.readouterr().out


def test_a_stated_window_is_used_where_all_requests_wait(tmp_path, capsys):
    size = ("batch=4", "seq_len=64", "workload.num_requests=40", "baselines=[]")
    whole = summary_of(tmp_path / "whole", *size, "window.warmup=0")
    assert (whole["window_start"], whole["num_requests"]) == (0.0, 40)
    half = summary_of(tmp_path / "half", *size, "window.warmup=25%", "window.cooldown=25%")
    assert half["num_requests"] == 20
    assert half["duration"] < whole["duration"]


@pytest.mark.parametrize(
    ("batch_size", "num_stages", "most_used", "fitting"),
    [(2, 1, 20, 10), (2, 1, 91, None), (3, 1, 20, None), (1, 2, 20, 5)],
)
def test_a_cache_with_room_holds_more_sequences_where_all_are_in_use(
    batch_size, num_stages, most_used, fitting
):
    """Two at a time, of one batch or of a batch for each of two stages."""
    requests = pd.DataFrame({"first_scheduled_time": [0, 1, 5], "finish_time": [5, 6, 9]})
    used = pd.Series([0, most_used, 10])
    engine = EngineConfig(
        RequestLevel(), batch_size, num_blocks=100, block_size=16, num_micro_batches=num_stages
    )
    assert sequences_in_cache(used, requests, engine) == fitting


def test_requests_that_stay_in_step_are_named(tmp_path, capsys):
    size = ("batch=18", "chunk=256", "pd_ratio=14", "policy.min_decodes=17", "baselines=[]")
    summary_of(tmp_path, *size)
    out = " ".join(capsys.readouterr().out.split())
    assert "not steady: later batches of requests took -" in out


def test_the_roofline_is_predicted_of_the_part_that_counts():
    plan = plan_of("sarathi", *SIMULATED, changes=SMALL)
    peaks = plan.backend.peaks()
    whole = plan_of("sarathi", *SIMULATED, changes={**SMALL, "window.warmup": 0})
    share = plan.roofline(peaks) / whole.roofline(peaks)
    assert 0.6 < share < 0.8  # six of eight batches


def test_a_sweeps_table_has_both_gains(tmp_path, capsys):
    command = ["policy=orca", "pd_ratio=7,14", "batch=18", "baselines=[request_level]", "-m"]
    assert main([*SIMULATED, *command, f"output={tmp_path}"]) == 0
    out = capsys.readouterr().out
    table = out[out.index("All 4 runs") :]
    assert "x orca" in table
    assert "request" in table
