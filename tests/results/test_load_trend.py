"""Whether a run under load is steady, overloaded or too short, and what a sweep states of it."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.artist import Artist

from sarathi_lab.results.conclusion import conclusion
from sarathi_lab.results.load_trend import load_trend
from sarathi_lab.results.plots.sweeps import draw_sweep
from sarathi_lab.results.report import (
    OF_ALL,
    assumptions,
    sweep_table,
    unsteady_note,
)

SECONDS = np.arange(100.0)  # one request a second


def requests_of(arrivals: np.ndarray, latencies: np.ndarray, delays: float = 0.0) -> pd.DataFrame:
    starts = arrivals + delays
    return pd.DataFrame(
        {
            "arrival_time": arrivals,
            "first_scheduled_time": starts,
            "finish_time": arrivals + latencies,
        }
    )


def test_a_server_without_a_queue_is_overloaded_by_what_it_has_in_service() -> None:
    """Prompts begin at once, and each request takes 0.6 s longer than the one before."""
    trend = load_trend(requests_of(SECONDS, 5 + 0.6 * SECONDS))
    assert trend is not None
    assert not trend.delay.is_growing
    assert (trend.is_overloaded, trend.is_steady) == (True, False)
    caution = str(trend.caution())
    assert "the requests in service grew from 9 to 39, where 14 would be" in caution
    # So few may be more by chance.
    assert caution.startswith("too short to judge")
    assert "workload.num_requests=1000 may show whether" in caution
    assert trend.metrics()["is_overloaded"] == 0
    longer = trend._replace(num_requests=1_000)
    assert str(longer.caution()).startswith("not steady")
    assert longer.metrics()["is_overloaded"] == 1


@pytest.mark.parametrize("num_requests", [1_000, 1_440])
def test_a_server_that_fills_is_not_called_overloaded(num_requests: int) -> None:
    """No request waits for another: whatever grows is the server that fills, and chance."""
    num_growing = 0
    num_overloaded = 0
    for seed in range(25):
        draws = np.random.default_rng(seed)
        arrivals = np.cumsum(draws.exponential(1 / 3, num_requests))
        latencies = 30 * draws.lognormal(-0.5, 1.0, num_requests)
        trend = load_trend(requests_of(arrivals, latencies))
        assert trend is not None
        num_growing += trend.crowd.is_growing
        num_overloaded += int(trend.metrics()["is_overloaded"])
    assert num_growing > 0  # as if it were overloaded
    assert num_overloaded <= 1


def shared(load: float, num_requests: int, seed: int) -> pd.DataFrame:
    """Requests in a server that shares itself: each of n in service has 1 / (20 + n) of a second's
    work a second, so that the rate of work of all tends to 1.
    """
    draws = np.random.default_rng(seed)
    arrivals = np.cumsum(draws.exponential(1 / load, num_requests))
    sizes = draws.exponential(1.0, num_requests)
    ends = np.empty(num_requests)
    in_service: list[tuple[float, int]] = []  # by the work of each at which a request ends
    work = 0.0  # that each in service would have had since the start
    now = 0.0
    next_request = 0
    while next_request < num_requests or in_service:
        seconds_a_work = 20 + len(in_service)
        arrival = arrivals[next_request] if next_request < num_requests else math.inf
        end = now + (in_service[0][0] - work) * seconds_a_work if in_service else math.inf
        if arrival <= end:
            work += (arrival - now) / seconds_a_work
            now = arrival
            heapq.heappush(in_service, (work + sizes[next_request], next_request))
            next_request += 1
        else:
            work, request = heapq.heappop(in_service)
            now = ends[request] = end
    return requests_of(arrivals, ends - arrivals)


@pytest.mark.parametrize(("load", "fewest", "most"), [(0.9, 0, 2), (1.2, 10, 15), (1.5, 15, 15)])
def test_a_server_that_shares_itself_is_overloaded_above_its_capacity(load, fewest, most) -> None:
    """At 0.9 it fills for as long as such a run takes, which is no overload."""
    num_overloaded = 0
    for seed in range(15):
        trend = load_trend(shared(load, 1_000, seed))
        assert trend is not None
        num_overloaded += int(trend.metrics()["is_overloaded"])
    assert fewest <= num_overloaded <= most


def test_answers_that_end_together_hide_no_overload() -> None:
    """Those of an iteration of a large batch: each is as late as the last one."""
    for seed in range(5):
        requests = shared(1.5, 1_000, seed)
        together = 10 * np.ceil(requests.finish_time / 10)
        trend = load_trend(requests.assign(finish_time=together))
        assert trend is not None
        assert trend.metrics()["is_overloaded"] == 1


@pytest.mark.parametrize(
    "requests",
    [
        requests_of(SECONDS, np.full(100, 5.0)),
        # A burst: the last ones come ten times as fast, and take as long.
        requests_of(np.where(SECONDS < 70, SECONDS, 70 + 0.1 * (SECONDS - 70)), np.full(100, 5.0)),
        requests_of(SECONDS, 5 + 4 * np.sin(SECONDS)),
        # The first ones meet an empty server: all later ones take twice as long.
        requests_of(SECONDS, np.where(SECONDS < 10, 5.0, 11 + 0.01 * SECONDS)),
    ],
)
def test_bursts_noise_and_an_empty_server_are_no_overload(requests: pd.DataFrame) -> None:
    trend = load_trend(requests)
    assert trend is not None
    assert trend.is_steady
    assert trend.caution() is None


def test_a_run_that_ends_while_it_fills_is_too_short() -> None:
    trend = load_trend(requests_of(SECONDS[:40], np.full(40, 100.0)))
    assert trend is not None
    assert (trend.is_overloaded, trend.is_steady) == (False, False)
    assert "too short for its load; raise workload.num_requests" in str(trend.caution())
    assert load_trend(requests_of(SECONDS[:19], np.full(19, 100.0))) is None
    assert load_trend(requests_of(np.zeros(40), np.full(40, 9.0))) is None


def swept(**columns: object) -> pd.DataFrame:
    """Orca as the baseline, and two servers, at two rates."""
    policies = ["orca", "vllm_v1", "sglang"]
    rows = [(policy, rate) for policy in policies for rate in (2, 8)]
    runs = pd.DataFrame(rows, columns=["policy", "workload.rate"])
    return runs.assign(
        is_baseline=runs.policy == "orca",
        swept="[policy,workload.rate]",
        executor="simulated",
        arrives_over_time=True,
        is_overloaded=1 - np.array([1, 0, 1, 0, 1, 1]),
        is_steady=[1, 0, 1, 0, 1, 0],
        throughput=[100.0, 100, 100.5, 105, 100.5, 110],
        ttft_p50=[0.2, 7, 0.2, 4, 0.1, 2],
        ttft_p99=[0.7, 20, 0.8, 8, 0.7, 3],
        tbt_p99=[0.25, 0.3, 0.15, 0.2, 0.04, 0.04],
        request_gap_p99=[0.55, 0.56, 0.17, 0.21, 17.0, 17.0],
        **columns,
    )


def test_a_sweep_states_which_runs_are_not_steady() -> None:
    table = sweep_table(swept(), "All")
    assert [row["policy"] for row in table.rows] == [
        *("orca *", "vllm_v1", "sglang", "orca * !", "vllm_v1 !", "sglang !"),
    ]
    assert "!: not steady" in table.title
    targets = swept().policy.map("my_policies.{}".format)
    names = swept(**{"policy._target_": targets}).assign(swept="[policy._target_,workload.rate]")
    assert list(sweep_table(names, "All").rows[0])[:2] == ["policy", "rate"]
    overloaded, short = unsteady_note(swept())
    assert overloaded.startswith(
        "overloaded (!): orca workload.rate=8, vllm_v1 workload.rate=8; requests"
    )
    assert overloaded.endswith("; lower workload.rate or workload.users, or use task=capacity")
    full, _ = unsteady_note(swept(fitting_sequences=[math.nan, 32, 24, 32, 32, 32]))
    assert full.endswith("; the KV cache has room for about batch=32 (--max-num-seqs)")
    assert short.startswith("too short (!): sglang workload.rate=8; whether")
    drawn = {"workload.arrivals": "poisson", "workload.num_requests": 180}
    assert unsteady_note(swept(**drawn))[1].endswith("workload.num_requests=1440 may show")


def test_a_steady_run_with_short_waits_is_best_and_waits_without_a_limit_are_not_judged() -> None:
    """SGLang has the lowest P99 between tokens, and 17 s without a token once a request."""
    first, of_steady, second, of_unsteady, _ = conclusion(swept(**{"workload.arrivals": "poisson"}))
    assert first.startswith("\nvllm_v1 workload.rate=2 beside orca: better in TBT P99 150 against")
    assert "longest gap of a request P99 170 against 550 ms (0.31 times)" in first
    assert "worse in TTFT P99 800 against 700 ms" in first
    assert first.endswith("equal in TTFT P50.")
    # Of runs that are not steady the most tokens/s decide.
    words = (
        "sglang workload.rate=8 beside orca: sglang is not steady and orca does not keep up with"
    )
    assert second.startswith(words)
    assert second.endswith("better in throughput 110 against 100 tokens/s (1.10 times).")
    # The other server on each workload.
    assert of_steady.startswith("vllm_v1 workload.rate=2 beside sglang: better in")
    assert "P99 0.17 against 17 s (0.01 times); worse in TTFT P50 200 against 100" in of_steady
    words = "sglang workload.rate=8 beside vllm_v1: sglang is not steady and vllm_v1 does not"
    assert of_unsteady.startswith(words)
    keeps_up = swept().assign(is_steady=[1, 0, 1, 1, 1, 0])
    steady_beside_unsteady = conclusion(keeps_up)[2]
    assert "orca does not keep up with the load, so that waits are not" in steady_beside_unsteady
    both = conclusion(swept().assign(is_steady=0, is_overloaded=1))[0]
    assert ": vllm_v1 and orca do not keep up with the load, so that waits are not" in both


def test_a_replay_says_how_far_it_misses_and_asks_for_no_other_draw() -> None:
    replays = swept(**{"workload.arrivals": "recorded", "error/ttft": -0.7, "error/tpot": 0.02})
    last = conclusion(replays)[-1]
    assert last.startswith("The simulation misses your run by -70% in TTFT, so that")
    assert "single draws" not in " ".join(conclusion(replays))
    assert not conclusion(replays.assign(**{"error/ttft": 0.03}))[-1].startswith("The simulation")


def test_the_picture_crosses_waits_of_runs_that_are_not_steady() -> None:
    figure = draw_sweep(swept(), y=["ttft_p99"])
    labels = [text.get_text() for legend in _legends(figure) for text in legend.get_texts()]
    words = "not steady: waits depend on the length of the run"
    assert words in [" ".join(label.split()) for label in labels]
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert sum(len(line.get_xdata()) for line in crosses) == 3


def _legends(figure: Artist) -> list:
    return [one for one in figure.get_children() if hasattr(one, "get_texts")]


def test_a_sweep_names_the_defaults_of_each_server_once() -> None:
    implied = "workload.arrivals=poisson, as workload.rate is set"
    vllm = "batch=256, as vLLM 0.32's defaults on a100"
    sglang = "chunk=8192 batch=4096, as SGLang 0.5's defaults on a100"
    texts = {
        "orca": f"{implied}; chunk=2048 {vllm}{OF_ALL}",
        "vllm_v1": f"{implied}; chunk=2048 {vllm}",
        "sglang": f"{implied}; {sglang}",
    }
    runs = swept()
    assert assumptions(runs.assign(assumed=runs.policy.map(texts))) == [
        f"assumed unless stated: {implied}",
        f"assumed unless stated, for orca, vllm_v1: chunk=2048 {vllm}",
        f"assumed unless stated, for sglang: {sglang}",
    ]
    assert assumptions(runs) == []


def test_defaults_that_hang_on_the_budget_name_the_runs_that_have_them() -> None:
    runs = swept(chunk=[None, None, 512, 2048, 512, 512])
    runs = runs.assign(swept="[policy,chunk,workload.rate]")
    large = "batch=256, as vLLM 0.32's defaults on a100"
    small = "batch=128 (of 256, as many as the budget has tokens for), as vLLM 0.32's defaults"
    by_run = runs.assign(assumed=[large, large, small, large, small, None])
    assert assumptions(by_run) == [
        f"assumed unless stated, for orca, vllm_v1 chunk=2048 workload.rate=8: {large}",
        "assumed unless stated, for vllm_v1 chunk=512 workload.rate=2, sglang chunk=512 "
        f"workload.rate=2: {small}",
    ]
