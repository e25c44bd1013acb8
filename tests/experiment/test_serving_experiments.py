"""Sarathi-Serve's experiments under load: rounds on a scripted engine, the task on both executors,
and pictures.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pandas as pd
import pytest
from helpers import ScriptedExecutor

from sarathi_lab.config.paths import EXPERIMENTS as FOLDERS
from sarathi_lab.experiment.capacity import Engine, mean_rate
from sarathi_lab.experiment.experiments import EXPERIMENTS
from sarathi_lab.experiment.serving import ROUNDS, ServingBench, longest_gaps
from sarathi_lab.experiment.serving_setups import SETUPS, dry_setup
from sarathi_lab.policy import Orca, PrefillFirst, SarathiServe
from sarathi_lab.results import load
from sarathi_lab.results.plots import serving
from sarathi_lab.run import main

SERVING = [name for name, own in EXPERIMENTS.items() if own.is_serving]


def make_policy(name: str, budget: int):
    makers = {
        "sarathi_serve": lambda: SarathiServe(chunk=budget),
        "prefill_first": PrefillFirst,
        "orca": Orca,
    }
    return makers[name]() if name in makers else None  # as where a policy is not there


@pytest.fixture
def bench() -> ServingBench:
    """Iterations of 5 ms and 1 ms a token: whole prompts of 20 tokens stall, chunks of 8 do not."""
    setup = dry_setup("tiny")
    executor = ScriptedExecutor(lambda batch: 0.005 + 0.001 * batch.num_tokens)
    engine = Engine(executor, setup.batch, setup.longest, num_blocks=200, block_size=4)
    return ServingBench(setup, engine, make_policy, None)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_has_the_same_points_whatever_its_seed_and_its_ratios_are_of_its_own_values(
    name, bench
):
    rounds = [{point[:3]: point[3] for point in ROUNDS[name](bench, seed)} for seed in (1, 2)]
    assert set(rounds[0]) == set(rounds[1]) != set()
    assert rounds[0] != rounds[1] or name == "sarathi_serve_capacity"  # on a coarse grid
    assert all(np.isfinite(value) and value > 0 for value in rounds[0].values())
    absolute = {key: value for key, value in rounds[0].items() if key[0].endswith("]")}
    for (panel, series, x), value in rounds[0].items():
        whole, _, reference = panel.rpartition(" / ")
        if not reference or panel.endswith("]"):
            continue
        unit = " [1/s]" if reference == "own" else " [s]"
        own = absolute[f"{whole.removesuffix(' of sarathi_serve')}{unit}", series, x]
        names = {
            "both": "hybrid and chunked",
            "largest budget": "sarathi_serve",
            "own": "sarathi_serve",
        }
        at = max(bench.setup.budgets) if reference == "largest budget" else x
        key = (
            f"{whole.removesuffix(' of sarathi_serve')}{unit}",
            names.get(reference, reference),
            float(at),
        )
        expected = absolute[key] / own if reference == "own" else own / absolute[key]
        assert value == pytest.approx(expected), panel


def test_policies_of_a_round_get_the_same_arrivals_at_the_rate_of_the_setup(bench):
    first, again, other = (bench.requests("tiny", 8, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert bench.rate("tiny") == 40.0
    served = bench.serve("orca", Orca(), "tiny", 0)
    gaps = np.diff(np.sort(served.arrival_time))
    assert (len(served) - 1) / gaps.sum() == pytest.approx(40.0)
    assert mean_rate(first) != 40.0


def test_smaller_budgets_shorten_gaps_and_whole_prompts_lengthen_them(bench):
    points = {point[:3]: point[3] for point in ROUNDS["sarathi_serve_budget"](bench, 0)}
    tbt = [points["tiny: TBT P99 [s]", "sarathi_serve", float(budget)] for budget in (8, 16, 64)]
    assert tbt[0] < tbt[1] < tbt[2]
    points = {point[:3]: point[3] for point in ROUNDS["sarathi_serve_ablation"](bench, 0)}
    assert points["tiny: TBT P99 / both", "hybrid only", 0.0] > 1.0
    assert not any(series == "chunked only" for _, series, _ in points), (
        "conf/policy need not have it"
    )


def test_the_longest_gaps_by_time_by_hand():
    requests = pd.DataFrame(
        {"token_times": [[0.0, 1.0, 4.0], [3.0, 3.5]], "finish_time": [4.0, 3.5]}
    )
    assert longest_gaps(requests, 4) == [
        (1.0, 1.0),
        (4.0, 3.0),
    ]  # of 3 and 0.5 in the last second the longer
    assert longest_gaps(requests, 1) == [(4.0, 3.0)]


@pytest.mark.parametrize("model", ["mistral-7b", "yi-34b", "13b"])
def test_the_papers_setup_has_its_objectives_and_lengths(model):
    setup = SETUPS["paper"](model)
    assert {name: dataset.max_len for name, dataset in setup.datasets.items()} == {
        "openchat_sharegpt4": 8192,
        "arxiv_summarization": 16384,
    }
    expected = {"mistral-7b": (0.1, 0.5), "yi-34b": (0.2, 1.0), "13b": (None, None)}[model]
    assert tuple(setup.slos[kind].tbt for kind in ("strict", "relaxed")) == expected
    assert setup.slos["strict"].is_relative == (model == "13b")
    assert setup.slo_budgets == {"strict": 512, "relaxed": 2048}


# -- the task --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sarathi_serve_stalls"])
def test_it_is_measured_and_recorded_on_a_device(name, tmp_path):
    places = [
        f"output={tmp_path}",
        f"hydra.run.dir={tmp_path}/run",
        f"task.record={tmp_path}/records",
    ]
    small = ["model=tiny", "device=cpu", "task.setup=dry", "task.seconds=0.1", "task.max_spread=50"]
    assert main([f"experiment={name}", *small, *places, "tracking=none"]) == 0
    table = load.load(name, tmp_path / "records")
    assert set(load.COLUMNS) <= set(table.columns)
    assert set(table.device) == {"cpu"}
    assert table.y.notna().all()
    units = {
        unit for panel, unit in zip(table.panel, table.unit, strict=True) if panel.endswith("[s]")
    }
    assert units == {"s"}
    assert (tmp_path / "run" / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["executor=simulated", "task.every=2"],
            "task.every=2 has no effect: it is for the paper's curves",
        ),
        (
            ["executor=simulated", "task.setup=small"],
            "task.setup=small has no effect: it is for measuring",
        ),
        (["executor=simulated", "task.max_spread=0.2"], "task.max_spread=0.2 has no effect"),
        (["executor=simulated", "model=33b", "hardware=a6000"], "model 33b needs 64.6 GB"),
        (["workload=zipf"], "workload=zipf has no effect"),
    ],
)
def test_bad_input_is_one_line(args, words, tmp_path, capsys):
    assert (
        main(["experiment=sarathi_serve_budget", *args, "tracking=none", f"output={tmp_path}/o"])
        == 2
    )
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert not (tmp_path / "o").exists()


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVING)
def test_a_picture_has_a_panel_per_device_and_data_set(name, bench):
    values = defaultdict(list)
    for seed in (0, 1):
        for panel, series, x, y in ROUNDS[name](bench, seed):
            values[panel, series, x].append(y)
    rows = [(name, *key, own[0], min(own), max(own)) for key, own in values.items()]
    points = pd.DataFrame(rows, columns=["figure", "panel", "series", "x", "y", "low", "high"])
    points["unit"] = points.panel.str.extract(r"\[(.+)\]$", expand=False).fillna("ratio")
    both = pd.concat(
        [
            points.assign(device=f"cpu (a processor, 2 threads), {model}")
            for model in ("tiny", "30m")
        ]
    )
    figure = serving.draw(name, both)
    titles = [ax.get_title() for ax in figure.axes if ax.has_data()]
    num_panels = 2 if name in ("sarathi_serve_ablation", "sarathi_serve_capacity") else 1
    assert len(titles) == 2 * num_panels
    assert {title.splitlines()[0] for title in titles} == {"cpu, tiny", "cpu, 30m"}
    assert figure.get_suptitle().replace("\n", " ") == serving.TITLES[name]


def test_the_papers_values_are_marked_at_their_bars(bench):
    points = [
        ("cpu, tiny", "a: TTFT P50 [s]", series, 1.0)
        for series in ("hybrid only", "hybrid and chunked")
    ]
    papers = [
        ("paper", "a: TTFT P50 [s]", "hybrid only", 0.5),
        ("paper", "b: TTFT P50 [s]", "hybrid only", 9.0),
    ]
    table = pd.DataFrame([*points, *papers], columns=["device", "panel", "series", "y"]).assign(
        unit="s", x=0.0
    )
    (ax,) = serving.draw("sarathi_serve_ablation", table).axes
    assert [line.get_ydata().tolist() for line in ax.get_lines()] == [[0.5]]
    assert [line.get_xdata().tolist() for line in ax.get_lines()] == [[0]]


def test_the_papers_ablation_is_table_4():
    table = pd.read_csv(FOLDERS / "sarathi_serve" / "sarathi_serve_ablation" / "paper.csv")
    found = table.pivot(index="series", columns="panel", values="y")
    assert found.loc["hybrid only"].tolist() == [1.38, 3.78, 0.68, 0.53]
    assert found.loc["hybrid and chunked"].tolist() == [0.17, 3.90, 0.14, 0.76]
