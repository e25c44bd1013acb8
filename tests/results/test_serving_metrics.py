"""Latency, stalls, goodput and fairness against numbers worked out by hand, and the settings that
they read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import ScriptedExecutor, requests_of, scheduler_for
from omegaconf import OmegaConf
from simulated import TWO_LAYERS

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.model.roofline import Peaks, request_roofline, roofline_time
from sarathi_lab.policy import RequestLevel
from sarathi_lab.results.decode_cost import decode_iteration
from sarathi_lab.results.load import load_summary
from sarathi_lab.results.metrics import add_costs
from sarathi_lab.results.serving_metrics import (
    Slo,
    Targets,
    by_class,
    fairness,
    gaps,
    goodput,
    is_good,
    is_met,
    jain_index,
    latency,
    prompt_classes,
    serving_summary,
    stalls,
)
from sarathi_lab.results.window import ADMISSION, RunPart
from sarathi_lab.run import main

Row = tuple[int, float, float, list[float]]  # prompt, arrival, first scheduled, token times


def table(*rows: Row) -> pd.DataFrame:
    columns = ["prompt_len", "arrival_time", "first_scheduled_time", "token_times"]
    frame = pd.DataFrame(list(rows), columns=columns)
    first, last = (frame.token_times.map(lambda times, i=i: times[i]) for i in (0, -1))
    return frame.assign(
        first_token_time=first, finish_time=last, output_len=frame.token_times.map(len)
    )


# A short prompt with a stall of 3 s, a long one with even gaps of 0.5 s, and a single token.
THREE = table(
    (10, 0.0, 1.0, [2.0, 3.0, 6.0]), (100, 1.0, 1.0, [4.0, 4.5, 5.0]), (10, 2.0, 4.0, [5.0])
)
BOUNDS = (20, 50)
CLASSES = prompt_classes(THREE, BOUNDS)


def test_latencies_by_hand():
    expected = {
        "ttft_p50": 3.0,  # of 2, 3, 3
        "tbt_mean": (1 + 3 + 0.5 + 0.5) / 4,
        "tbt_p50": 0.75,
        "request_gap_mean": (3 + 0.5) / 2,  # the single token has none
        "tpot_mean": (4 / 2 + 1 / 2) / 2,  # the single token has none
        "latency_p50": 4.0,  # of 6, 4, 3
        "normalised_latency_mean": (6 / 3 + 4 / 3 + 3 / 1) / 3,
        "scheduling_delay_p50": 1.0,  # of 1, 0, 2
    }
    found = latency(THREE)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_undefined_quantities_are_left_out():
    assert latency(THREE[:0]) == serving_summary(THREE[:0], 1.0, Targets()) == {}
    assert not {"tbt_p50", "tpot_p50"} & latency(THREE[2:]).keys()
    assert stalls(THREE[2:], 1.0) == {}


def test_stalls_are_the_gaps_above_the_threshold():
    assert stalls(THREE, 0.9) == {
        "stall_threshold": 0.9,
        "num_stalls": 2.0,
        "stall_time": 4.0,
        "stalled_share": pytest.approx(1 / 3),
        "longest_gap": 3.0,
    }
    assert stalls(THREE, 3.0)["num_stalls"] == 0.0  # a gap of the threshold itself is none
    assert stalls(THREE, 3.0)["longest_gap"] == 3.0


def test_classes_begin_at_their_bounds():
    lengths = pd.DataFrame({"prompt_len": [1, 19, 20, 49, 50, 900]})
    names = ["short", "short", "medium", "medium", "long", "long"]
    assert prompt_classes(lengths, BOUNDS).tolist() == names
    found = by_class(THREE, CLASSES)
    assert (found["num_requests_short"], found["num_requests_long"]) == (2.0, 1.0)
    assert (found["ttft_short_mean"], found["tbt_short_p50"], found["tbt_long_p99"]) == (
        2.5,
        2,
        0.5,
    )
    assert not any("medium" in name for name in found)
    assert by_class(THREE, np.array(["long"] * 3)) == {}, "of one class the whole says it all"


def test_goodput_counts_requests_that_meet_every_bound():
    met = is_good(THREE, Slo(name="x", ttft=2.5, tbt=1.0, tpot=1.0))
    assert met["ttft"].tolist() == [True, False, False]
    assert met["tbt"].tolist() == met["tpot"].tolist() == [False, True, True]  # one token: no gap
    assert not met["all"].any()
    found = goodput(THREE, 10.0, Slo(name="x", ttft=3.0, tbt=1.0), CLASSES)
    assert found == {
        "slo_met": 0.0,
        "slo_attainment": pytest.approx(2 / 3),
        "goodput": pytest.approx(2 / 10),
        "slo_attainment_ttft": 1.0,
        "slo_attainment_tbt": pytest.approx(2 / 3),
        "slo_attainment_short": 0.5,
        "slo_attainment_long": 1.0,
    }
    assert goodput(THREE, 10.0, Slo(name="none"), CLASSES) == {}


def test_a_request_is_held_against_the_quantile_of_its_own_gaps():
    rows = table((10, 0.0, 0.0, [0.0, 1.0, 2.0, 7.0]))  # gaps 1, 1, 5
    assert is_good(rows, Slo(name="x", tbt=1.0, quantile=0.5))["tbt"].tolist() == [True]
    assert is_good(rows, Slo(name="x", tbt=1.0, quantile=0.99))["tbt"].tolist() == [False]


def test_every_bound_makes_a_request_good_or_not():
    delays = is_good(THREE, Slo(name="x", ttft=9.0, scheduling_delay=1.0))  # of 1, 0, 2
    assert delays["all"].tolist() == [True, True, False]


def test_a_run_meets_an_objective_by_its_quantiles():
    strict = Slo(name="x", tbt=1.0, scheduling_delay=1.0, quantile=0.5)
    assert not is_met(THREE, replace(strict, tbt=0.7))  # of 0.75 s
    assert is_met(THREE, strict)
    assert not is_met(THREE, Slo(name="x", tbt=1.0))  # P99 is near 3
    assert not is_met(THREE, Slo(name="x", scheduling_delay=0.9))


def test_fairness_is_of_slowdowns():
    assert jain_index(np.array([2.0, 2.0, 2.0])) == 1.0
    assert jain_index(np.array([1.0, 3.0])) == pytest.approx(16 / 20)
    alone = np.array([3.0, 1.0, 3.0])  # latencies 6, 4, 3: slowdowns 2, 4, 1
    found = fairness(THREE, alone, CLASSES)
    assert found["slowdown_p50"] == 2.0
    assert (found["slowdown_short_mean"], found["slowdown_long_mean"]) == (1.5, 4.0)
    assert found["slowdown_class_ratio"] == pytest.approx(4 / 1.5)
    assert found["slowdown_jain"] == pytest.approx(49 / (3 * 21))


@pytest.mark.parametrize(
    "peaks", [Peaks(1e3, 1e9, "compute-bound"), Peaks(1e9, 100.0, "memory-bound")]
)
def test_the_roofline_of_a_request_alone_is_that_of_its_iterations(peaks):
    ledger = Ledger()
    run_engine(requests_of((8, 5)), scheduler_for(RequestLevel()), ScriptedExecutor(), ledger)
    iterations = add_costs(ledger.iterations(), TWO_LAYERS, 2, peaks)
    expected = roofline_time(TWO_LAYERS, iterations, 2, peaks).sum()
    assert request_roofline(TWO_LAYERS, ledger.requests(), 2, peaks).tolist() == pytest.approx(
        [expected]
    )


def test_a_decode_iteration_is_timed_on_the_executor():
    executor = ScriptedExecutor(lambda b: 0.1 * b.num_decode_tokens + 0.001 * b.decode_kv_tokens)
    found = decode_iteration(executor, 4, 100, num_blocks=1000, block_size=4)
    assert found == pytest.approx(0.4 + 0.4)
    assert len(executor.schedule) == 6
    assert set(executor.schedule[0]) == {(i, 99, 1) for i in range(4)}
    short = decode_iteration(executor, 4, 100, num_blocks=8, block_size=4)  # two blocks each
    assert short == pytest.approx(0.4 + 4 * 8 * 0.001)


def test_a_relative_objective_becomes_seconds():
    relative = Slo(name="strict", tbt_factor=5.0, scheduling_delay=2.0)
    assert relative.resolved(None) is relative
    assert relative.resolved(0.02).bounds == {"tbt": pytest.approx(0.1), "scheduling_delay": 2.0}
    assert relative.describe() == "P99 TBT 5 decode iterations, P50 scheduling delay 2000 ms"
    assert relative.resolved(0.02).describe() == "P99 TBT 100 ms, P50 scheduling delay 2000 ms"
    assert Slo(name="none").describe() == "no bounds"


# -- runs ------------------------------------------------------------------------------------------

LOAD = ["executor=simulated", "tracking=none", "baselines=[]", "batch=8"]
LOAD += ["workload=uniform", "workload.max_len=3000"]


def summary_of(folder: Path, *args: str) -> dict[str, float]:
    assert main([*LOAD, *args, f"output={folder}", f"hydra.run.dir={folder}/run"]) == 0
    return load_summary(folder / "run")


def test_a_run_is_held_against_the_objective_and_its_settings_have_effects(tmp_path, capsys):
    slo = ["slo=strict", "slo.tbt_factor=1.1", "slo.scheduling_delay=null"]
    found = summary_of(tmp_path / "a", *slo)
    requests = pd.read_parquet(tmp_path / "a" / "run" / "requests.parquet")
    if "window_start" in found:
        part = RunPart(found["window_start"], found["window_end"], ADMISSION)
        requests = part.requests(requests)
    bounded = Slo(name="strict", tbt=1.1 * found["slo_decode_time"])
    assert 0 < found["slo_attainment"] == is_good(requests, bounded)["all"].mean() < 1
    rate = found["slo_attainment"] * len(requests) / found["duration"]
    assert found["goodput"] == pytest.approx(rate)
    assert found["num_stalls"] == (gaps(requests) > 0.2).sum()
    classes = {"ttft_short_p50", "ttft_medium_p99", "ttft_long_mean", "slowdown_class_ratio"}
    assert classes <= found.keys()
    more = ["slo.tbt_factor=15", "stall=0.01", "prompt_classes=[100,700]"]
    other = summary_of(tmp_path / "b", *slo, *more)
    for name in ("slo_attainment", "num_stalls", "num_requests_long"):
        assert other[name] > found[name]
    text = capsys.readouterr().out
    for words in ("requests within the SLO", "goodput", "generation stalls", "longest gap"):
        assert words in text


def test_the_objectives_are_the_papers():
    options = {path.stem: OmegaConf.load(path) for path in CONF.glob("slo/*-*-[sr]*.yaml")}
    found = {name: (one.tbt, one.scheduling_delay) for name, one in options.items() if "tbt" in one}
    strict = {"mistral-7b": 0.1, "yi-34b": 0.2, "llama2-70b": 1.0, "falcon-180b": 1.0}
    for model, bound in strict.items():
        assert found.pop(f"{model}-strict") == (pytest.approx(bound), 2.0)
        assert found.pop(f"{model}-relaxed") == (pytest.approx(5 * bound), 2.0)
    assert not any(tbt for tbt, _ in found.values())


def test_targets_without_a_command_line_are_the_defaults():
    assert Targets() == Targets(Slo(name="none"), 0.2, (512, 2048))
    with pytest.raises(UserError, match="stall=-1"):
        Targets(stall=-1)
    with pytest.raises(UserError, match="prompt_classes=0 is below 1"):
        Targets(prompt_classes=(0, 5))
