"""Sarathi-Serve's experiments under load: rounds on a scripted engine, the task on both executors,
and pictures.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest
from composed import config_of
from helpers import ScriptedExecutor

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.engine.config import EngineConfig, Topology
from sarathi_lab.engine.executor import Executor, Predictor
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.experiment.measure import measure
from sarathi_lab.experiment.points import Part, table_of
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.extensions.cluster.cluster import Link
from sarathi_lab.extensions.under_load.bench import ServingBench, datasets, longest, policy_of
from sarathi_lab.extensions.under_load.sarathi_serve import longest_gaps
from sarathi_lab.extensions.under_load.search import mean_rate
from sarathi_lab.policy import Orca, Policy
from sarathi_lab.results import load
from sarathi_lab.results.plots.panels import draw
from sarathi_lab.run import main

SERVING = [name for name, figure in CATALOG.items() if figure.is_in_rounds]
COARSE = ("sarathi_serve_capacity", "disaggregation")
LINK = Link(bytes_per_second=1e6, latency=1e-4, bytes_per_token=2)


def make_policy(name: str, budget: int) -> Policy:
    """A policy of conf/policy that predicts 5 ms an iteration and 1 ms a token."""

    def operation_times(batch: Batch) -> dict[str, float]:
        return {"all": 0.005 + 0.001 * batch.num_tokens}

    return policy_of(name, budget).on_device(lambda: Predictor(operation_times), 4, 200)


def make_bench(name: str) -> ServingBench:
    """Iterations of 5 ms and 1 ms a token: whole prompts of 20 tokens stall, chunks of 8 do not."""
    sizes = CATALOG[name].sizes("dry")
    executor = ScriptedExecutor(lambda batch: 0.005 + 0.001 * batch.num_tokens)
    engine = EngineConfig(Orca(), sizes["batch"], 200, 4, longest(sizes))

    def executors(cluster: Topology) -> Executor:
        seconds = partial(SimulatedExecutor, lambda batch: 0.005 + 0.001 * batch.num_tokens)
        return cluster.executor(seconds, LINK)

    # The blocks of a tiny model that fill a whole card take seconds to list.
    card = replace(load_option("hardware", "a100"), memory_bytes=2.0**30)
    own = {"executors": executors, "backend": SimulatedBackend(card)}
    return ServingBench(sizes, "tiny", engine, executor, make_policy, None, **own)


@cache
def make_points(name: str, seed: int) -> list:
    return list(CATALOG[name].make(make_bench(name), seed, **CATALOG[name].sizes("dry")))


@pytest.mark.parametrize("name", SERVING)
def test_a_round_has_the_same_points_whatever_its_seed_and_its_ratios_are_of_its_own_values(name):
    first, second = (
        {(point.panel, point.series, point.x): point for point in make_points(name, seed)}
        for seed in (1, 2)
    )
    assert set(first) == set(second) != set()
    values = [{key: point.y.value for key, point in own.items()} for own in (first, second)]
    assert values[0] != values[1] or name in COARSE  # on a coarse grid
    assert all(np.isfinite(value) and value > 0 for value in values[0].values())
    largest = float(max(CATALOG[name].sizes("dry").get("budgets", [0])))
    absolute = {
        (dict(point.labels)["slo"], dict(point.labels)["quantity"], point.series, point.x): point
        for point in first.values()
        if point.unit != "ratio"
    }
    for point in first.values():
        labels = dict(point.labels)
        if point.unit != "ratio" or CATALOG[name].is_simulated:
            continue
        quantity, _, reference = labels["quantity"].partition(" / ")
        quantity = quantity.removesuffix(" of sarathi_serve")
        own = absolute[labels["slo"], quantity, point.series, point.x].y.value
        names = {"both": "hybrid and chunked", "hindsight": "hindsight", "no drafts": "no drafts"}
        names |= {"reserved for all": "reserved for all"}
        at = largest if reference == "largest budget" else point.x
        is_series = (labels["slo"], quantity, reference, at) in absolute
        series = reference if is_series else names.get(reference, "sarathi_serve")
        other = absolute[labels["slo"], quantity, series, at].y.value
        expected = other / own if reference == "own" else own / other
        assert point.y.value == pytest.approx(expected), point.panel


def test_a_goodput_at_the_highest_rate_is_a_bound_that_no_ratio_is_made_of():
    values = {point.series: point for point in make_points("disaggregation", 3)}
    reached = values["replicas"]
    low, high = reached.resolution.widened(reached.y.value, reached.y.value)
    assert reached.y.value == 256.0  # of 512 requests/s on two engines
    assert (low, high) == (128.0, math.inf)  # a step is a factor of two
    assert math.isnan(values["disaggregated"].y.value)


def test_policies_of_a_round_get_the_same_arrivals_at_the_rate_of_the_setup():
    bench = make_bench("sarathi_serve_stalls")
    first, again, other = (bench.requests("tiny", 8, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert bench.rate("tiny") == 40.0
    served = bench.serve("orca", Orca(), "tiny", 0)
    gaps = np.diff(np.sort(served.arrival_time))
    assert (len(served) - 1) / gaps.sum() == pytest.approx(40.0)
    assert mean_rate(first) != 40.0


def values(name: str) -> dict[tuple[str, str, float], float]:
    return {(point.panel, point.series, point.x): point.y.value for point in make_points(name, 0)}


def test_smaller_budgets_shorten_gaps_and_whole_prompts_lengthen_them():
    points = values("sarathi_serve_budget")
    tbt = [points["tiny: TBT P99 [s]", "sarathi_serve", float(budget)] for budget in (8, 16, 64)]
    assert tbt[0] < tbt[1] < tbt[2]
    points = values("sarathi_serve_ablation")
    assert points["tiny: TBT P99 / both", "hybrid only", 0.0] > 1.0


def test_a_policy_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"a policy of task\.sizes=sarathi_serv is unknown"):
        policy_of("sarathi_serv", 512)


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
    sizes = CATALOG["sarathi_serve_capacity"].sizes("paper")
    assert {name: dataset.max_len for name, dataset in datasets(sizes).items()} == {
        "openchat_sharegpt4": 8192,
        "arxiv_summarization": 16384,
    }
    executor = ScriptedExecutor(lambda batch: 0.01)
    engine = EngineConfig(Orca(), 128, 200_000, 16, longest(sizes))
    bench = ServingBench(sizes, model, engine, executor, make_policy, None)
    # Of an iteration of decodes where the model has none of its own: 5 and 25 times.
    expected = {"mistral-7b": (0.1, 0.5), "yi-34b": (0.2, 1.0), "13b": (0.05, 0.25)}[model]
    found = tuple(bench.slo(kind).tbt for kind in ("strict", "relaxed"))
    assert found == pytest.approx(expected)
    assert sizes["slo_budgets"] == {"strict": 512, "relaxed": 2048}


# -- the task --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sarathi_serve_stalls"])
def test_it_is_measured_and_recorded_on_a_device(name, tmp_path):
    places = [
        f"output={tmp_path}",
        f"hydra.run.dir={tmp_path}/run",
        f"task.record={tmp_path}/records",
    ]
    rate = "task.sizes.dry.rates={any:{tiny:400.0}}"  # else it waits for arrivals for 3 s
    small = ["model=tiny", "device=cpu", "task.setup=dry", "task.seconds=0.1", "task.max_spread=50"]
    assert main([f"experiment={name}", rate, *small, *places, "tracking=none"]) == 0
    table = load.load(name, tmp_path / "records")
    assert set(load.POINT_COLUMNS) <= set(table.columns)
    assert set(table.device) == {"cpu"}
    assert table.y.notna().all()
    assert set(table.unit[table.quantity == "TBT P99"]) == {"s"}
    assert set(table.dataset) == {"tiny"}
    assert (tmp_path / "run" / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("chosen", [[], ["hardware=h200"]])
def test_the_papers_models_are_served_on_its_gpus_or_as_many_of_the_chosen_kind(chosen):
    cfg = config_of("experiment=sarathi_serve_capacity", "executor=simulated", *chosen)
    jobs = build(cfg.task).jobs(cfg, build(cfg.executor))
    kind = "h200" if chosen else "a100"
    on = [(job.spec.name, job.backend) for job in jobs]
    found = [(model, own.hardware.name, own.tensor_parallel) for model, own in on]
    assert found == [("mistral-7b", kind, 1), ("yi-34b", kind, 2)]


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVING)
def test_a_picture_has_a_panel_per_device_and_data_set(name):
    rounds = [Part(lambda bench, seed: make_points(name, seed), seed=0)]
    samples = measure(rounds, None, max_rounds=2)
    points = table_of(name, samples, np.inf).assign(source="measured")
    points["y"] = points.q20  # of two rounds, which say no number
    both = pd.concat([points.assign(device=f"cpu, {model}") for model in ("tiny", "30m")])
    figure = draw(replace(CATALOG[name].look, title="A title"), both)
    titles = [ax.get_title() for ax in figure.axes if ax.has_data()]
    one = ("sarathi_serve_stalls", "disaggregation", "dynamic_chunks")
    num_panels = {"agentic": 4, "prefill_cadence": 3}.get(name, 1 if name in one else 2)
    assert len(titles) == 2 * num_panels
    assert {title.splitlines()[0] for title in titles} == {"cpu, tiny", "cpu, 30m"}
    assert figure.get_suptitle() == "A title"


def test_the_papers_values_are_marked_at_their_bars():
    columns = ["device", "source", "dataset", "series", "y"]
    points = [
        ("a100, tiny", "measured", "a", series, 1.0)
        for series in ("hybrid only", "hybrid and chunked")
    ]
    papers = [("paper", "paper", name, "hybrid only", y) for name, y in (("a", 0.5), ("b", 9.0))]
    table = pd.DataFrame([*points, *papers], columns=columns)
    table = table.assign(unit="s", x=0.0, slo="", quantity="TTFT P50", hardware="a100")
    table = table.assign(low=np.nan, high=np.nan)
    (ax,) = draw(CATALOG["sarathi_serve_ablation"].look, table).axes
    assert [line.get_ydata().tolist() for line in ax.get_lines()] == [[0.5]]
    (line,), bar = ax.get_lines(), ax.patches[0]
    assert line.get_xdata().tolist() == [bar.get_x() + bar.get_width() / 2]
