"""The search for a capacity: the bracket, paired arrivals, a queue whose answer is known, and the
task.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
from composed import checked, run
from helpers import ScriptedExecutor, requests_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.extensions.under_load.search import (
    RateGrid,
    RateSearch,
    Server,
    at_rate,
    highest_passing,
    mean_rate,
)
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.policy import RequestLevel
from sarathi_lab.results.load import load_runs
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.run import main


@pytest.mark.parametrize("start", [-30, 0, 7, 30])
@pytest.mark.parametrize("last", [-20, 0, 7, 19])
def test_the_bracket_is_found_from_wherever_the_search_begins(start, last):
    tried = []

    def passes(step: int) -> bool:
        assert step not in tried, "no rate is tried twice"
        tried.append(step)
        return step <= last

    assert highest_passing(passes, start, -20, 20) == last
    assert len(tried) <= 14
    assert min(tried) >= -20
    assert max(tried) <= 20


def test_arrivals_are_stretched_to_the_rate_and_stay_paired():
    requests = requests_of((4, 1), (5, 2), (6, 3), arrivals=[1.0, 2.0, 5.0])
    assert mean_rate(requests) == 0.5
    fast = at_rate(requests, 2.0)
    assert [request.arrival_time for request in fast] == [0.0, 0.25, 1.0]  # gaps stay 1 : 3
    assert mean_rate(fast) == 2.0
    assert [(r.request_id, r.prompt_len, r.output_len) for r in fast] == [
        (0, 4, 1),
        (1, 5, 2),
        (2, 6, 3),
    ]
    with pytest.raises(UserError, match=r"2 requests come all at once.*workload.arrivals=poisson"):
        at_rate(requests_of((4, 1), (4, 1)), 1.0)


def queue(num: int = 40, *, output_len: int = 1, ends_early: bool = False) -> RateSearch:
    """One server that takes a second a token of a request, which come evenly: it can take one of
    one token a second.
    """
    requests = requests_of(*[(4, output_len)] * num, arrivals=list(map(float, range(num))))
    engine = EngineConfig(RequestLevel(), batch_size=1, num_blocks=16, block_size=4)
    server = Server(engine, ScriptedExecutor())
    return RateSearch(server, requests, RateGrid(0.05), ends_early)


def num_iterations(search: RateSearch) -> int:
    executor = search.server.executor
    assert isinstance(executor, ScriptedExecutor)
    return len(executor.schedule)


def test_the_capacity_of_a_queue_is_its_service_rate():
    search = queue()
    assert search.server.saturation_rate(search.requests) == 1.0
    found = search.capacity(Slo(name="x", ttft=1.0 + 1e-9), 1.0, 1.0, [20, 40])
    assert found.is_settled
    assert found.remark == ""
    assert found.rate == 1.0
    assert found.next_rate == pytest.approx(1.05)
    assert sorted({run.rate for run in search.runs.values()}) == pytest.approx([1.0, 1.05])


def test_a_front_end_bounds_what_is_served():
    """Of 40 requests the last is through after 80 seconds, and served in one more."""
    search = queue()
    server = replace(search.server, request_time=2.0)
    assert server.saturation_rate(search.requests) == pytest.approx(40 / 81)


def test_an_objective_that_allows_a_queue_has_more_capacity():
    search = queue()
    strict = search.capacity(Slo(name="x", ttft=1.001), 1.0, 1.0, [20, 40])
    loose = search.capacity(Slo(name="x", ttft=5.0), 1.0, 1.0, [20, 40])
    # Of 40 requests the last waits 39 (1 - 1/λ) seconds: 5 at λ = 1.14, of which the P99 is a
    # little less.
    assert strict.rate < loose.rate < 1.2
    before = len(search.runs)
    search.capacity(Slo(name="x", ttft=1.001), 1.0, 1.0, [20, 40])
    assert len(search.runs) == before, "what was served is not served again"


def test_runs_are_doubled_until_a_growing_queue_no_longer_passes():
    """At a rate λ above 1 the last of n waits n (1 - 1/λ): what passes falls to 1 as n grows."""
    slo, lengths = Slo(name="x", ttft=5.0), [20, 40, 80, 160, 320]
    found = queue(320).capacity(slo, 1.0, 1.0, lengths)
    assert found.is_settled
    assert found.num_requests == 80
    assert found.rate == pytest.approx(1.05), "a step of the grid less than with 40"
    confirmed = queue(320).capacity(slo, 1.0, 1.0, lengths, is_confirmed=True)
    assert confirmed.rate == pytest.approx(1.0), "320 requests wait too long at 1.05/s"
    cut = queue(40).capacity(slo, 1.0, 1.0, [20, 40])
    assert not cut.is_settled
    assert "1.22/s in runs of 20, 1.1/s in runs of 40" in cut.remark


def test_a_late_request_of_a_few_does_not_decide_that_no_rate_passes():
    """The second of two that come at once waits for the first at any rate."""
    search = queue(320)
    requests = [replace(request, arrival_time=0.0) for request in search.requests[:2]]
    search.requests = [*requests, *search.requests[2:]]
    slo = Slo(name="x", ttft=1.5)
    lengths = [20, 40, 80, 160, 320]
    assert search.capacity(slo, 1.0, 1.0, lengths).rate == 0.0
    capacity = search.capacity(slo, 1.0, 1.0, lengths, is_confirmed=True)
    assert capacity.rate == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("bound", [1.001, 2.5, 5.0])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99, 1.0])
def test_runs_that_end_when_the_objective_is_missed_give_the_same_capacity(bound, quantile):
    slo = Slo(name="x", ttft=bound, quantile=quantile)
    lengths = [20, 40, 80, 160, 320]
    whole = queue(320)
    ended = queue(320, ends_early=True)
    expected = whole.capacity(slo, 1.0, 1.0, lengths, is_confirmed=True)
    assert ended.capacity(slo, 1.0, 1.0, lengths, is_confirmed=True) == expected
    assert num_iterations(ended) < num_iterations(whole)


def test_a_search_tells_of_each_length_of_runs():
    """An objective that allows a queue is met by short runs, so that all lengths are searched."""
    told: list[int] = []
    search = replace(queue(160), on_length=told.append)
    lengths = [20, 40, 80, 160]
    capacity = search.capacity(Slo(name="x", ttft=8.0), 1.0, 1.0, lengths, is_confirmed=True)
    assert len(capacity.steps) == len(told) == 4


def slow_at_first(num_late: int) -> ScriptedExecutor:
    """An executor whose first iterations of decodes take three seconds in place of one."""
    late = iter([3.0] * num_late)
    return ScriptedExecutor(lambda batch: next(late, 1.0) if batch.num_decodes else 1.0)


@pytest.mark.parametrize(("num_late", "is_met"), [(1, True), (2, False)])
def test_runs_end_at_the_first_late_token_that_the_quantile_does_not_allow(num_late, is_met):
    """Two requests of 51 tokens have 100 gaps, of which one is allowed beyond their P99."""
    slo = Slo(name="x", tbt=1.5)
    numbers = []
    for ends_early in (False, True):
        search = queue(2, output_len=51, ends_early=ends_early)
        search.server = replace(search.server, executor=slow_at_first(num_late))
        assert search.passes(slo, 2, search.grid.step(0.01)) == is_met
        numbers.append(num_iterations(search))
    of_all, of_ended = numbers
    assert of_ended == (of_all if is_met else 3)


def test_what_the_limits_cut_off_is_said():
    search = queue()
    above = search.capacity(Slo(name="x", ttft=1e9), 1.0, 1.0, [20, 40])
    highest = RateGrid(0.05).rate(above.highest)
    assert above.remark == f"even {highest:.3g}/s, the highest rate tried, passes"
    assert above.is_lower_bound
    assert above.next_rate == math.inf
    below = search.capacity(Slo(name="x", ttft=0.5), 1.0, 1.0, [20, 40])
    assert below.rate == 0.0
    assert "the lowest rate tried, fails" in below.remark
    assert not below.is_lower_bound


# -- the task --------------------------------------------------------------------------------------

SMALL = [
    "task=capacity",
    "tracking=none",
    "workload=lognormal",
    "workload.num_requests=6",
    "batch=6",
]
SIMULATED = [
    *SMALL,
    "executor=simulated",
    "hardware=a100",
    "model=mistral-7b",
    "slo=mistral-7b-strict",
]


def test_a_sweep_over_policies_makes_a_table(tmp_path, capsys):
    args = [*SIMULATED, "slo.tbt=0.014", "task.precision=1.0", f"output={tmp_path}"]
    assert main(["policy=prefill_first,sarathi_serve", "-m", *args]) == 0
    text = capsys.readouterr().out
    assert text.count(" requests/s under ") == 2
    bounds = "whose bounds are P99 TBT 14 ms, P50 scheduling delay 2000 ms"
    assert f"under mistral-7b-strict,tbt=0.014, {bounds}" in text
    runs = load_runs(tmp_path).set_index("policy")
    assert set(runs.index) == {"prefill_first", "sarathi_serve"}
    assert "capacity" in text.split("All 2 runs of this sweep")[1]
    for policy, found in runs.iterrows():
        table = pd.read_parquet(f"{found['path']}/capacity.parquet")
        assert set(table.policy) == {policy}
        assert len(table) == found["capacity_trials"]
        assert set(table.seed) == {0}
        table = table[table.num_requests == table.num_requests.max()]
        assert found["capacity"] == pytest.approx(table[table.slo_met].rate.max())
        assert (table[table.slo_met].tbt_p99 <= 0.014).all()
        failing = table[~table.slo_met]
        assert ((failing.tbt_p99 > 0.014) | (failing.scheduling_delay_p50 > 2.0)).all()
        assert found["capacity"] < found["capacity_high"]
    assert (tmp_path.rglob("capacity.png").__next__()).stat().st_size > 10_000


def test_the_task_has_the_hosts_front_end(tmp_path):
    result = run(tmp_path, *SIMULATED, "task.precision=1.0", "host.request=0.5")
    assert result.summary["closed_rate"] < 2


def test_it_runs_on_a_real_device_with_a_relative_objective(tmp_path, monkeypatch):
    monkeypatch.setattr(TorchBackend, "peaks", lambda self: Peaks(1e12, 1e10, "given"))
    lengths = {"prompt_p50": 20, "prompt_p90": 40, "output_p50": 4, "output_p90": 8, "max_len": 64}
    small = [f"workload.{name}={length}" for name, length in lengths.items()]
    slo = ["slo=relaxed", "slo.tbt_factor=10000"]  # which noise can't exceed
    own = ["model=tiny", "device=cpu", "executor.threads=1", "policy=sarathi_serve", "chunk=64"]
    result = run(tmp_path, *SMALL, *own, *small, "task.precision=1.0", *slo)
    assert {"capacity", "capacity_trials", "closed_rate"} <= set(result.summary)
    assert " requests/s under " in result.shown[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["slo=none"], "slo=none has no bounds that a rate could meet; name an objective"),
        (
            ["workload.arrivals=poisson", "workload.rate=2"],
            "workload.rate=2 has no effect: task=capacity",
        ),
        (
            ["workload=trace", "workload.path=tests/data/trace.csv", "workload.max_requests=1"],
            "1 requests come all at once",
        ),
        (["chunk=auto"], "chunk=auto is advised for one load"),
    ],
)
def test_what_makes_no_search_is_one_line(args, words):
    is_other = args[0].startswith("workload=")
    own = [arg for arg in SIMULATED if not (is_other and arg.startswith("workload"))]
    with pytest.raises(UserError, match=words) as raised:
        checked(*own, *args)
    assert "\n" not in str(raised.value)
