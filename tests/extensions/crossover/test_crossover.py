"""Where chunked prefill pays: the steady state, the cells of the map, its picture, and the task
that draws it.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pandas as pd
import pytest
from composed import refusal_of, run, settings_of
from helpers import requests_of
from matplotlib.figure import Figure

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.experiment.advisor import BASELINES, Prediction
from sarathi_lab.experiment.scenario import Scenario, request_times, serve
from sarathi_lab.extensions.crossover import (
    Crossover,
    at_best_chunk,
    gains_of,
    loads_that_fit,
    over_rounds,
)
from sarathi_lab.extensions.crossover.picture import STRONGEST, crossover_map
from sarathi_lab.policy import Orca, RequestLevel, Sarathi
from sarathi_lab.run import main

COST = make_cost_model("analytic", load_option("model", "13b"), load_option("hardware", "a6000"), 2)
TIMES = COST.operation_times


def seconds(scenario):
    return sum(request_times(TIMES, scenario).values())


def steady_throughput(policy, prompt_len, num_decodes, batch_size):
    tokens = prompt_len + num_decodes
    return tokens / seconds(Scenario(policy, prompt_len, num_decodes, batch_size))


def test_request_level_batches_start_together_and_others_keep_the_batch_full():
    for policy, is_kept_full in ((RequestLevel(), False), (Orca(), True), (Sarathi(256), True)):
        decodes = set()

        def cost(batch, decodes=decodes):
            decodes.add(batch.num_decode_tokens)
            return {"all": 1.0}

        request_times(cost, Scenario(policy, 500, 50, 4))
        assert decodes == ({0, 1, 2, 3, 4} if is_kept_full else {0, 4})


@pytest.mark.parametrize(
    ("prompt_len", "num_decodes", "batch"), [(992, 32, 18), (980, 44, 6), (512, 512, 4)]
)
def test_request_level_batching_is_in_the_steady_state_from_the_start(
    prompt_len, num_decodes, batch
):
    requests = requests_of(*[(prompt_len, num_decodes + 1)] * (3 * batch))
    end = (
        Prediction(requests, batch, COST.iteration_time)
        .serve(RequestLevel())
        .iterations()
        .end.max()
    )
    steady_state = steady_throughput(RequestLevel(), prompt_len, num_decodes, batch)
    assert steady_state == pytest.approx(len(requests) * (prompt_len + num_decodes) / end)


@pytest.mark.parametrize("policy", [Orca(), Sarathi(256), Sarathi(512)], ids=str)
def test_the_steady_state_is_that_of_a_long_run(policy):
    """Within a few percent: a run that starts with equal requests decodes in step at first."""
    requests = requests_of(*[(992, 33)] * (40 * 8))
    end = Prediction(requests, 8, COST.iteration_time).serve(policy).iterations().end.max()
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


def test_outcomes_are_gains_by_class(cells):
    assert (cells.gain[cells.outcome == "gains"] > 0.02).all()
    assert (cells.gain[cells.outcome == "loses"] <= -0.02).all()
    assert set(cells.outcome[cells.chunk == 8]) <= {
        "loses",
        "neutral",
    }  # a tile of 128 for 8 tokens
    assert "gains" in set(cells.outcome)


def test_a_gain_is_the_ratio_of_steady_throughputs(cells):
    row = cells[
        (cells.chunk == 256) & (cells.batch == 4) & (cells.pd_ratio == 50) & (cells.seq_len == 512)
    ]
    load = (502, 10, 4)
    for name, baseline in BASELINES.items():
        gain = steady_throughput(Sarathi(256), *load) / steady_throughput(baseline, *load) - 1
        assert row.gain[row.baseline == name].item() == pytest.approx(gain)


def test_the_best_chunk_of_a_load_is_the_one_that_gains_most(cells):
    best = at_best_chunk(cells)
    assert len(best) == 2 * 3 * 3
    for row in best.itertuples():
        load = (
            (cells.pd_ratio == row.pd_ratio)
            & (cells.seq_len == row.seq_len)
            & (cells.batch == row.batch)
        )
        assert row.gain == cells.gain[load & (cells.baseline == row.baseline)].max()


@pytest.mark.parametrize(
    ("samples", "outcome"),
    [
        ([0.03, 0.05, 0.04, 0.021, 0.06, 0.05], "gains"),
        ([0.03, 0.05, 0.04, 0.019, 0.06, 0.05], "undecided"),  # one round is below 2 %
        ([0.05] * 5, "undecided"),  # no interval of five reaches 95 %
        ([0.01, -0.01, 0.0, 0.019, -0.019, 0.0], "neutral"),
        ([-0.03, -0.05, -0.04, -0.021, -0.06, -0.05], "loses"),
        ([-0.05, 0.05] * 3, "undecided"),
    ],
)
def test_a_measured_cell_is_decided_by_its_whole_interval(cells, samples, outcome):
    cell = cells[:1]
    measured = over_rounds([cell.assign(gain=gain) for gain in samples])
    assert measured.outcome.item() == outcome
    assert measured.gain.item() == pytest.approx(pd.Series(samples).median())
    assert measured.samples.item() == " ".join(f"{gain:.6g}" for gain in samples)


@pytest.mark.parametrize("policy", [Orca(), Sarathi(64), Sarathi(256)], ids=str)
def test_what_a_device_is_timed_for_is_the_steady_state_that_is_computed(policy):
    scenario = Scenario(policy, 349, 35, 8, policy.budget)
    served = serve(SimulatedExecutor(COST.iteration_time), scenario, num_blocks=256, block_size=16)
    assert served.seconds_per_request == pytest.approx(seconds(scenario), rel=0.03)


@pytest.mark.parametrize("y", ["batch", "seq_len"])
def test_the_map_has_a_panel_per_chunk_and_a_number_per_cell(cells, y):
    figure = crossover_map(cells, "13b on a device", y=y)
    assert figure.get_suptitle().startswith("13b on a device: gain")
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 3 * 2
    assert sum(bool(ax.get_title()) for ax in figure.axes) == 3  # above the columns
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    texts = [text for text in texts if text[0] in "+-"]  # without the rows' names
    shown = cells[cells.baseline == "request_level"]
    assert sorted(texts) == sorted(f"{100 * gain:+.0f}" for gain in shown.gain)


def test_the_map_marks_what_is_undecided_and_what_did_not_run(cells):
    table = cells.assign(outcome=["undecided", *cells.outcome[1:]])
    shown = table[table.baseline == "request_level"]
    figure = crossover_map(table.drop(shown.index[-1]), "13b on a device")
    (text,) = (t.get_text() for ax in figure.axes for t in ax.texts if t.get_text()[-1] == "?")
    assert text == f"{100 * cells.gain[0]:+.0f}?"
    heat = [ax.collections[0] for ax in figure.axes if ax.collections]
    assert {mesh.get_clim() for mesh in heat} == {(-STRONGEST, STRONGEST)}
    assert "not run: exceeds the cache" in figure.legends[0].get_texts()[3].get_text()


# -- the task --------------------------------------------------------------------------------------

SMALL = ["task=crossover", "task.pd_ratios=[10,50]", "task.seq_lens=[512]", "task.batches=[4,16]"]
WORDS = (("gains", "gain"), ("neutral", "neutral"), ("loses", "lose"))


def test_the_task_writes_and_describes_table_and_map(tmp_path, capsys):
    device = ["hardware=h100", "model=llama3-8b", "tracking=none", f"output={tmp_path}"]
    assert main([*SMALL, "task.chunks=[128,512]", *device]) == 0
    text = capsys.readouterr().out
    (path,) = tmp_path.rglob("crossover.csv")
    assert path.with_name("crossover.png").stat().st_size > 10_000
    assert path.with_name("config.yaml").is_file()
    assert f"figure  {path.with_name('crossover.png')}" in text
    table = pd.read_csv(path)
    cost = make_cost_model(
        "analytic", load_option("model", "llama3-8b"), load_option("hardware", "h100"), 2
    )
    expected = gains_of(
        [(pd_ratio, 512, batch) for pd_ratio in (10, 50) for batch in (4, 16)],
        [128, 512],
        lambda one: sum(request_times(cost.operation_times, one).values()),
    )
    assert table.gain.to_list() == pytest.approx(expected.gain.to_list())
    summary = json.loads(path.with_name("summary.json").read_text())
    for name in BASELINES:
        cells = table[table.baseline == name]
        numbers = {outcome: int((cells.outcome == outcome).sum()) for outcome, _ in WORDS}
        assert {outcome: summary[f"{outcome}_vs_{name}"] for outcome in numbers} == numbers
        counts = [f"{numbers[outcome]} {word}" for outcome, word in WORDS]
        assert f"over {name}: 8 cells of 4 loads" in text
        assert f"tokens: {', '.join(counts)}; with the best chunk" in text
        assert f"best {cells.gain.max():+.1%} at" in text
        assert f"worst {cells.gain.min():+.1%} at" in text
    assert "simulated h100" in text


def test_hardware_model_policy_cost_model_and_picture_are_read(tmp_path):
    one = ["task=crossover", "task.pd_ratios=[5,20]", "task.seq_lens=[300]", "task.batches=[8]"]
    others = (
        "hardware=a100",
        "model=7b",
        "policy=sarathi_serve",
        "policy.min_decodes=3",
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


def test_a_device_is_measured_in_rounds(tmp_path):
    settings = ["task=crossover", "executor=torch", "model=tiny", "dtype=float32", "device=cpu"]
    settings += ["task.pd_ratios=[4]", "task.seq_lens=[20]", "task.batches=[2]", "task.chunks=[8]"]
    result = run(tmp_path, *settings, "task.rounds=6")
    table = result.tables["crossover"]
    assert (table.samples.str.split().str.len() == 6).all()
    assert (table.confidence > 0.95).all()
    assert set(table["dtype"]) == {"float32"}
    assert sum(result.summary.values()) == len(table)
    written = pd.read_csv(tmp_path / "crossover.csv", dtype={"samples": str})
    pd.testing.assert_frame_equal(written, table, check_dtype=False)


NOTHING = "names nothing to map"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batches": []}, f"task.batches=[] {NOTHING}; use a list such as [8,16]"),
        ({"seq_lens": 4}, f"task.seq_lens=4 {NOTHING}; use a list"),
        ({"chunks": [256, 256]}, "task.chunks=[256, 256] names a value twice"),
        ({"pd_ratios": [0]}, "task.pd_ratios=0 must be a finite number above 0"),
        ({"pd_ratios": ["a"]}, "task.pd_ratios=a is not a number"),
        ({"seq_lens": [1]}, "task.seq_lens=1 is below 2"),
        ({"batches": [2.5]}, "task.batches=2.5 is not a whole number"),
        (
            {"baseline": "sarathi"},
            "task.baseline=sarathi is unknown; use one of request_level, orca",
        ),
    ],
)
def test_settings_that_name_nothing_to_map(settings, words):
    with pytest.raises(UserError, match=re.escape(words)):
        Crossover(**{**settings_of("crossover"), **settings})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["task.rounds=7"], ["task.rounds=7 has no effect", "use executor=torch"]),
        (["executor=torch", "model=tiny", "executor.tensor_parallel=2"], ["one device, not 2"]),
        (["executor.pipeline_parallel=2"], ["pipeline_parallel=2 is not predicted", "use 1"]),
        (["policy=orca"], ["policy=orca has no chunk", "policy=sarathi"]),
        (["policy.chunk=300"], ["policy.chunk=300 has no effect", "task.chunks"]),
        (["task.chunks=[2]"], ["task.chunks=[2] are all below the batches", "[4, 16]"]),
        (["task.batches=[5000]"], ["exceed the cache of 27073 tokens"]),
        (["policy.min_decodes=9"], ["min_decodes=9 exceeds"]),
        (["model=33b"], ["model 33b needs 64.6 GB"]),
        (["executor.cost_model=profiled", "model=7b"], ["no tables of model 7b (available: 13b)"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_mapped_is_one_line(args, words):
    said = refusal_of(*SMALL, *args)
    assert all(word in said for word in words), said
