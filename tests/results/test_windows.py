"""The part of a run that counts, and the test for a steady state."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from helpers import requests_of, scheduler_for

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.policy import Orca
from sarathi_lab.results.load import load_summary
from sarathi_lab.results.window import (
    NUM_BATCHES,
    RunPart,
    Window,
    delay_trend,
)
from sarathi_lab.run import main
from sarathi_lab.workload import LoadedRequests
from sarathi_lab.workload.synthetic import PaperGrid

# Three requests, one after the other: arrival, prompt tokens, times of the output tokens.
ROWS = [(0.0, 10, [1.0, 2.0, 3.0]), (2.0, 20, [4.0, 5.0]), (4.0, 30, [6.0, 7.0, 8.0, 9.0])]
REQUESTS = pd.DataFrame(
    {
        "arrival_time": [arrival for arrival, _, _ in ROWS],
        "prompt_len": [prompt for _, prompt, _ in ROWS],
        "first_token_time": [times[0] for _, _, times in ROWS],
        "finish_time": [times[-1] for _, _, times in ROWS],
        "token_times": [times for _, _, times in ROWS],
    }
)
ITERATIONS = pd.DataFrame({"start": np.arange(9.0), "end": np.arange(1.0, 10.0)})


def poisson(rate: float, num_requests: int = 400, seed: int = 0) -> LoadedRequests:
    settings = {"num_requests": num_requests, "seq_len": 4, "pd_ratio": 3, "seed": seed}
    return PaperGrid(**settings, arrivals="poisson", rate=rate).generate(None)


def served(load: LoadedRequests) -> Ledger:
    """One request after the other on a device that takes a second for each."""
    ledger = Ledger()
    scheduler = scheduler_for(Orca(), batch_size=1, num_blocks=2000, max_model_len=4)
    run_engine(load.arrivals(), scheduler, SimulatedExecutor(lambda batch: 1.0), ledger)
    return ledger


@pytest.mark.parametrize(
    ("warmup", "cooldown", "start", "end"),
    [
        (1.5, None, 1.5, 9.0),
        (None, 2, 0.0, 7.0),
        ("34%", None, 2.0, 9.0),  # roofline(0.34 * 3) = 1 request is left out
        ("33%", None, 0.0, 9.0),
        ("34 %", "34.0%", 2.0, 4.0),
    ],
)
def test_windows_by_hand(warmup, cooldown, start, end):
    assert Window(warmup, cooldown).of(ITERATIONS, REQUESTS) == RunPart(start, end)


def test_shares_are_whole_requests():
    requests = pd.concat([REQUESTS.iloc[:1]] * 100, ignore_index=True)
    requests = requests.assign(arrival_time=np.arange(100) / 10)
    assert Window("29%", "58%").of(ITERATIONS, requests) == RunPart(29 / 10, 42 / 10)


def test_what_a_part_counts_by_hand():
    """From 2 to 6 s: the second request's prompt and the third's, tokens at 3, 4, 5 and 6 (that at
    2 is of the iteration before), and two that finish.
    """
    part = RunPart(2.0, 6.0)
    assert part.requests(REQUESTS).prompt_len.tolist() == [20, 30]
    assert part.spans(ITERATIONS).start.tolist() == [2, 3, 4, 5]
    assert part.throughput(REQUESTS) == {
        "window_start": 2.0,
        "window_end": 6.0,
        "duration": 4.0,
        "num_prompt_tokens": 50.0,
        "num_output_tokens": 4.0,
        "throughput": 54 / 4,
        "output_throughput": 4 / 4,
        "request_throughput": 2 / 4,
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup": -1}, "window.warmup=-1"),
        ({"warmup": "many"}, "window.warmup=many is neither"),
        ({"cooldown": "100%"}, "window.cooldown=100% is neither"),
        ({"cooldown": True}, "window.cooldown=True is not a number"),
        ({"warmup": "60%", "cooldown": "40%"}, "leave nothing"),
    ],
)
def test_windows_that_are_none(settings, words):
    with pytest.raises(UserError, match=words):
        Window(**settings)


def test_windows_that_the_requests_give_no_meaning_to():
    closed = LoadedRequests("x", requests_of((4, 1), (4, 1)))
    Window("10%").check(closed)  # it cuts by admission
    late = LoadedRequests("x", requests_of((4, 1), (4, 1), arrivals=[0.0, 3.0]))
    with pytest.raises(UserError, match=r"warmup=5 is longer than the 3\.0 s"):
        Window(5).check(late)
    Window(2).check(late)
    Window().check(closed)
    with pytest.raises(RunError, match="leave nothing of a run of 9"):
        Window(None, 9.5).of(ITERATIONS, REQUESTS)
    with pytest.raises(RunError, match="leave nothing"):
        Window(3.9, 4.5).of(ITERATIONS, REQUESTS)  # a request, but no whole iteration


def delays_table(delays) -> pd.DataFrame:
    arrivals = np.arange(len(delays), dtype=float)
    return pd.DataFrame({"arrival_time": arrivals, "first_scheduled_time": arrivals + delays})


def test_the_trend_test_by_hand():
    """Of ten values without a trend, 0.83 % of the orders reach Kendall's S = 27 and 1.43 % reach
    25: the 1 % lies between.
    """

    def of(means):
        return delay_trend(delays_table(np.repeat(np.array(means, dtype=float), 2)))

    growing = of(range(10))
    assert growing.is_growing
    assert (growing.first, growing.last, growing.slope) == (0.0, 9.0, 0.5)
    assert "grew from 0.00 to 9.00 s (0.500 s a second)" in growing.caution()
    assert of([9, 0, 1, 2, 3, 4, 5, 6, 7, 8]).is_growing  # 9 of 45 pairs descend: S = 36 - 9
    assert not of([9, 1, 0, 2, 3, 4, 5, 6, 7, 8]).is_growing  # 10 of 45: S = 35 - 10
    assert not of(range(10, 0, -1)).is_growing
    assert not of([0] * 10).is_growing
    assert not of(np.arange(10.0) / 100).is_growing  # 0.005 s a second


def test_few_requests_and_those_that_come_at_once_have_no_trend():
    assert delay_trend(delays_table(np.arange(2 * NUM_BATCHES - 1.0))) is None
    assert delay_trend(delays_table(np.arange(40.0)).assign(arrival_time=0.0)) is None


def test_loads_beside_the_capacity():
    """A device that serves one request a second: 0.7 a second are steady, 1.3 add 0.3 s of delay a
    second.
    """
    steady, overloaded = (
        [delay_trend(served(poisson(rate, seed=seed)).requests()) for seed in range(3)]
        for rate in (0.7, 1.3)
    )
    assert sum(trend.is_growing for trend in steady) <= 1
    assert all(trend.is_growing for trend in overloaded)
    assert np.mean([trend.slope for trend in overloaded]) == pytest.approx(0.3, abs=0.1)


SIMULATED = ["executor=simulated", "tracking=none", "workload.num_requests=100", "seq_len=256"]


def test_an_overloaded_run_says_so_and_a_window_changes_what_it_counts(tmp_path, capsys):
    summaries = {}
    for name, more in {"whole": [], "part": ["window.warmup=10%", "window.cooldown=20%"]}.items():
        folder = tmp_path / name
        args = [*SIMULATED, "workload.arrivals=poisson", "workload.rate=30", *more, "baselines=[]"]
        assert main([*args, f"output={tmp_path}", f"hydra.run.dir={folder}"]) == 0
        assert "not steady: the scheduling delay grew from" in capsys.readouterr().out
        summaries[name] = load_summary(folder)
        assert len(pd.read_parquet(folder / "requests.parquet")) == 100  # all are kept
    whole, part = summaries["whole"], summaries["part"]
    assert whole["is_steady"] == part["is_steady"] == 0
    assert (whole["num_requests"], part["num_requests"]) == (100, 70)
    assert part["duration"] == part["window_end"] - part["window_start"] < whole["duration"]
    assert part["num_iterations"] < whole["num_iterations"]
    assert part["ttft_p50"] != whole["ttft_p50"]
    assert part["throughput"] != whole["throughput"]
