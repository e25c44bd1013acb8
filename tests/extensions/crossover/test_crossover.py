"""Where chunked prefill pays: the steady state, the cells of the map, its picture, and the task
that draws it.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pandas as pd
import pytest
from composed import refusal_of, run
from helpers import prediction_of, requests_of
from matplotlib.figure import Figure

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.experiment.advisor import BASELINES
from sarathi_lab.experiment.scenario import Scenario, request_times
from sarathi_lab.extensions.crossover import (
    gains_of,
    loads_that_fit,
)
from sarathi_lab.extensions.crossover.picture import crossover_map
from sarathi_lab.policy import Orca, Sarathi
from sarathi_lab.run import main

COST = make_cost_model("analytic", load_option("model", "13b"), load_option("hardware", "a6000"), 2)
TIMES = COST.operation_times


def seconds(scenario):
    return sum(request_times(TIMES, scenario).values())


def steady_throughput(policy, prompt_len, num_decodes, batch_size):
    tokens = prompt_len + num_decodes
    return tokens / seconds(Scenario(policy, prompt_len, num_decodes, batch_size))


@pytest.mark.parametrize("policy", [Orca(), Sarathi(256)], ids=str)
def test_the_steady_state_is_that_of_a_long_run(policy):
    """Within a few percent: a run that starts with equal requests decodes in step at first."""
    requests = requests_of(*[(992, 33)] * (40 * 8))
    end = prediction_of(requests, 8, COST.iteration_time).serve(policy).iterations().end.max()
    assert steady_throughput(policy, 992, 32, 8) == pytest.approx(
        len(requests) * 1024 / end, rel=0.04
    )


@pytest.fixture(scope="module")
def cells() -> pd.DataFrame:
    loads = loads_that_fit([1, 10, 50], [256, 512], [4, 16], kv_tokens=6000)
    return gains_of(loads, [8, 128, 256], seconds)


def test_cells_that_cannot_run_are_left_out(cells):
    assert set(cells.baseline) == {"request_level", "orca"}
    assert not ((cells.batch == 16) & ((cells.seq_len == 512) | (cells.chunk == 8))).any()
    # Batch 4 at both lengths, batch 16 at 256 without the chunk of 8.
    assert len(cells) == 2 * 3 * (3 + 3 + 2)
    assert len(gains_of([], [128], seconds)) == 0
    # Prompt, decodes and the token that comes with the prompt: 1,025 a sequence.
    assert loads_that_fit([31], [1024], [4], 4100) == [(31, 1024, 4)]
    assert loads_that_fit([31], [1024], [4], 4099) == []


def test_a_gain_is_the_ratio_of_steady_throughputs(cells):
    row = cells[
        (cells.chunk == 256) & (cells.batch == 4) & (cells.pd_ratio == 50) & (cells.seq_len == 512)
    ]
    load = (502, 10, 4)
    for name, baseline in BASELINES.items():
        gain = steady_throughput(Sarathi(256), *load) / steady_throughput(baseline, *load) - 1
        assert row.gain[row.baseline == name].item() == pytest.approx(gain)


def test_the_map_has_a_panel_per_chunk_and_a_number_per_cell(cells):
    figure = crossover_map(cells, "13b on a device")
    assert figure.get_suptitle().startswith("13b on a device: gain")
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 3 * 2
    assert sum(bool(ax.get_title()) for ax in figure.axes) == 3  # above the columns
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    texts = [text for text in texts if text[0] in "+-"]  # without the rows' names
    shown = cells[cells.baseline == "request_level"]
    assert sorted(texts) == sorted(f"{100 * gain:+.0f}" for gain in shown.gain)


# -- the task --------------------------------------------------------------------------------------

SMALL = ["task=crossover", "task.pd_ratios=[10,50]", "task.seq_lens=[512]", "task.batches=[4,16]"]
WORDS = (("gains", "gain"), ("neutral", "neutral"), ("loses", "lose"))


def test_the_task_writes_and_describes_table_and_map(tmp_path, capsys):
    device = ["hardware=h100", "model=llama3-8b", "tracking=none", f"output={tmp_path}"]
    assert main([*SMALL, "task.chunks=[128,512]", *device]) == 0
    text = capsys.readouterr().out
    (path,) = tmp_path.rglob("crossover.csv")
    assert path.with_name("crossover.png").stat().st_size > 10_000
    table = pd.read_csv(path)
    summary = json.loads(path.with_name("summary.json").read_text())
    for name, cells in table.groupby("baseline"):
        numbers = {outcome: int((cells.outcome == outcome).sum()) for outcome, _ in WORDS}
        assert {outcome: summary[f"{outcome}_vs_{name}"] for outcome in numbers} == numbers
        counts = [f"{numbers[outcome]} {word}" for outcome, word in WORDS]
        assert f"over {name}: 8 cells of 4 loads" in text
        assert f"tokens: {', '.join(counts)}; with the best chunk" in text
        assert f"best {cells.gain.max():+.1%} at" in text


def test_hardware_model_policy_cost_model_and_picture_are_read(tmp_path):
    one = ["task=crossover", "task.pd_ratios=[5,20]", "task.seq_lens=[300]", "task.batches=[8]"]
    others = (
        "hardware=a100",
        "policy=sarathi_serve",
        "executor.cost_model=profiled",
        "task.baseline=orca",
    )
    results = [run(tmp_path, *one, "task.chunks=[256]", *other) for other in ([], *zip(others))]
    gains = [result.tables["crossover"].gain.to_list() for result in results]
    titles = [result.figures["crossover"].get_suptitle().split() for result in results]
    assert gains[0] == gains[-1]
    assert all(gains[0] != each for each in gains[1:-1])
    assert ("over", "request_level") in pairwise(titles[0])
    assert ("over", "orca") in pairwise(titles[-1])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["executor=torch", "model=tiny"], ["executor=torch has no cost model"]),
        (["executor.pipeline_parallel=2"], ["pipeline_parallel=2 is not predicted", "use 1"]),
        (["task.chunks=[2]"], ["task.chunks=[2] are all below the batches", "[4, 16]"]),
        (["task.batches=[5000]"], ["exceed the cache of 23740 tokens"]),
        (["policy.min_decodes=9"], ["min_decodes=9 exceeds"]),
        (["executor.cost_model=profiled", "model=7b"], ["no tables of model 7b (available: 13b)"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_mapped_is_one_line(args, words):
    said = refusal_of(*SMALL, *args)
    assert all(word in said for word in words), said
