"""The advised chunk against full sweeps, chunk=auto on the command line, the price of cutting, and the crossover."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pandas as pd
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from helpers import requests_of
from sarathi_lab.advisor import Prediction, advise, candidates, chunking_loss, predict
from sarathi_lab.crossover import crossover, steady_throughput
from sarathi_lab.errors import UserError
from sarathi_lab.paths import CONF
from sarathi_lab.plots_crossover import crossover_map
from sarathi_lab.policy import Orca, RequestLevel, Sarathi, SarathiServe
from sarathi_lab.request import Batch
from sarathi_lab.run import main
from sarathi_lab.simulator.analytic import AnalyticCostModel
from sarathi_lab.workload.synthetic import Uniform

TILE = 128
COST = AnalyticCostModel(
    instantiate(OmegaConf.load(CONF / "model" / "13b.yaml")),
    instantiate(OmegaConf.load(CONF / "hardware/a6000.yaml")),
    2,
)
SIMULATED = ["executor=simulated", "tracking=none", "workload.num_requests=12", "batch=6"]


def tile_time(batch: Batch) -> float:
    """Half a second an iteration, and a second per tile of 4 tokens begun."""
    return 0.5 + math.ceil(batch.num_tokens / 4)


# -- candidates and predictions ----------------------------------------------------------------------------------


def test_candidates_are_powers_of_two_tiles_and_the_neighbours_of_the_optimum():
    assert candidates(requests_of((992, 32)), 18, TILE) == [128, 256, 512, 640, 1024]  # 31 x 17 = 527
    assert candidates(requests_of((100, 10)), 20, TILE) == [128]  # whole beside 19 decodes
    assert candidates(requests_of((100, 10)), 40, TILE) == [128, 256]
    assert candidates(requests_of((992, 32)), 18, 64) == [64, 128, 256, 512, 576, 1024]


@given(st.integers(1, 5000), st.integers(1, 500), st.integers(1, 400), st.sampled_from((1, 16, 64, 128)))
def test_candidates_suit_the_batch_and_the_last_cuts_nothing(prompt_len, output_len, batch, tile):
    chunks = candidates(requests_of((prompt_len, output_len)), batch, tile)
    assert chunks == sorted(set(chunks))
    assert all(chunk % tile == 0 and chunk >= batch for chunk in chunks)
    assert chunks[-1] >= prompt_len + batch - 1 > (chunks[-1] // 2 if chunks[-1] > tile else 0)


def test_a_prediction_is_what_the_engine_does():
    requests = requests_of(*[(8, 3)] * 3)
    table = predict([16, 4], requests, 2, tile_time).set_index("chunk")
    ledger = Prediction(requests, 2, tile_time).serve(Sarathi(4))
    assert list(table.index) == [4, 16]
    assert table.throughput[4] == pytest.approx(33 / ledger.iterations().end.max())
    gaps = np.concatenate([np.diff(times) for times in ledger.requests().token_times])
    assert table.tbt_p99[4] == pytest.approx(np.quantile(gaps, 0.99))
    assert table.kv_reread_factor[16] == 1.0 < table.kv_reread_factor[4]
    assert table.throughput_vs_orca[16] == pytest.approx(1.0)  # never cut, so its schedule is Orca's
    whole = Prediction(requests, 2, tile_time).serve(RequestLevel()).iterations().end.max()
    assert table.throughput_vs_request_level[4] == pytest.approx(whole / ledger.iterations().end.max())


def test_the_rows_within_one_percent_of_the_best_are_marked():
    table = predict(range(128, 1152, 128), requests_of(*[(992, 32)] * 36), 18, COST.iteration_time)
    best = table.throughput.max()
    assert (table.throughput[table.is_best] == best).all()
    assert (table.is_as_good == (table.throughput >= 0.99 * best)).all()
    assert table.is_as_good.sum() >= table.is_best.sum() >= 1


def test_outputs_of_one_token_have_no_time_between_tokens():
    assert predict([4], requests_of((8, 1), (8, 1)), 2, tile_time).tbt_p99.isna().all()
    assert advise(requests_of((8, 1), (8, 1)), 2, tile_time, 4).chunk in (4, 8, 12, 16)


def test_model_length_and_cache_are_the_servers():
    requests = requests_of(*[(200, 40)] * 8)

    def throughput(**server: int) -> float:
        return predict([TILE], requests, 4, COST.iteration_time, **server).throughput[0]

    assert throughput(num_blocks=60, block_size=16) == throughput()  # room for four sequences of 240
    assert throughput(num_blocks=30, block_size=16) < throughput()
    assert throughput(num_blocks=60, block_size=16, max_model_len=480) < throughput()
    assert throughput(num_blocks=60, block_size=8) < throughput()
    with pytest.raises(UserError, match="chunk=2 is smaller"):
        predict([2], requests, 4, COST.iteration_time)


# -- the advice --------------------------------------------------------------------------------------------------

WORKLOADS = {
    "paper, small batch": (requests_of(*[(980, 44)] * 36), 6),
    "paper, full batch": (requests_of(*[(992, 32)] * 72), 18),
    "long prompts": (requests_of(*[(2000, 48)] * 32), 8),
    "decodes dominate": (requests_of(*[(200, 200)] * 24), 8),
    "mixed lengths": (
        Uniform(num_requests=48, pd_ratio=20, seed=3, min_len=128, max_len=1024).generate(None).requests,
        12,
    ),
    "arrivals": (
        Uniform(num_requests=24, pd_ratio=20, seed=3, min_len=128, max_len=1024, arrivals="poisson", rate=2.0)
        .generate(None)
        .requests,
        12,
    ),
}


@pytest.mark.parametrize("policy", [Sarathi, SarathiServe])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_advice_is_within_one_percent_of_a_full_sweep(name, policy):
    requests, batch = WORKLOADS[name]
    advice = advise(requests, batch, COST.iteration_time, TILE, policy=policy)
    longest = max(request.prompt_len for request in requests) + batch - 1
    sweep = predict(range(TILE, longest + TILE, TILE), requests, batch, COST.iteration_time, policy=policy)
    row = advice.table.set_index("chunk").loc[advice.chunk]
    assert row.throughput >= 0.99 * sweep.throughput.max()
    rivals = advice.table[advice.table.is_as_good]
    assert row.tbt_p99 == rivals.tbt_p99.min()


def test_the_advice_refines_between_its_candidates():
    requests = requests_of(*[(2000, 48)] * 32)
    advice = advise(requests, 8, COST.iteration_time, TILE)
    tried = list(advice.table.chunk)
    best = tried[int(advice.table.throughput.argmax())]
    assert tried == sorted(set(tried))
    assert {best - TILE, best + TILE} <= set(tried)


# -- chunk=auto --------------------------------------------------------------------------------------------------


def test_auto_runs_the_advised_chunk_and_says_why(tmp_path, capsys):
    assert main(["chunk=auto", "baselines=[request_level]", *SIMULATED, f"output={tmp_path}"]) == 0
    text = capsys.readouterr().out
    (run,) = [path.parent for path in tmp_path.rglob("run.json") if path.parent.parent.name != "baselines"]
    labels, config = json.loads((run / "run.json").read_text()), OmegaConf.load(run / "config.yaml")
    chunk = advise(requests_of(*[(992, 32)] * 12), 6, COST.iteration_time, TILE).chunk
    assert labels["chunk"] == config.policy.chunk == chunk
    assert f"chunk=auto is {chunk}" in text
    assert "x request_level" in text
    assert text.count("chunk=auto is") == 1  # the baseline has no chunk to choose
    predicted = next(line for line in text.splitlines() if line.split()[:2] == [str(chunk), "*"]).split()[2]
    summary = json.loads((run / "summary.json").read_text())
    assert float(predicted) == pytest.approx(summary["throughput"], abs=0.5)


def test_auto_is_chosen_anew_for_every_job_of_a_sweep(tmp_path, capsys):
    small = ["executor=simulated", "tracking=none", "workload.num_requests=8", "baselines=[]", f"output={tmp_path}"]
    assert main(["chunk=auto,1024", "batch=4,8", "-m", *small]) == 0
    runs = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
    chunks = {(run["batch"], run["name"].split()[1]): run["chunk"] for run in runs}
    assert chunks[4, "chunk=1024"] == chunks[8, "chunk=1024"] == 1024
    for batch in (4, 8):
        assert (
            chunks[batch, "chunk=auto"] == advise(requests_of(*[(992, 32)] * 8), batch, COST.iteration_time, TILE).chunk
        )


def test_a_policy_with_a_chosen_chunk_is_not_its_own_baseline(tmp_path):
    assert main(["chunk=auto", "baselines=[sarathi]", *SIMULATED, f"output={tmp_path}"]) == 0
    assert len(list(tmp_path.rglob("run.json"))) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["chunk=auto", "model=tiny", "device=cpu"],
            ["chunk=auto needs a cost model", "chunk=256", "executor=simulated"],
        ),
        (["chunk=fast", "executor=simulated"], ["chunk=fast is not a whole number", "auto"]),
        (["chunk=auto", "policy=orca", "executor=simulated"], ["chunk=auto has no effect"]),
    ],
)
def test_what_cannot_be_chosen_is_one_line(args, words, tmp_path, capsys):
    assert main([*args, "tracking=none", "seq_len=64", f"output={tmp_path}/out"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words)
    assert not (tmp_path / "out").exists()


# -- the price of cutting ----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_loss_adds_up_exactly(prompt_len, chunk):
    split = chunking_loss(prompt_len, chunk, COST.operation_times)
    ledger = Prediction(requests_of((prompt_len, 1)), 1, COST.iteration_time).serve(
        Sarathi(max(chunk, 1), min_decodes=0)
    )
    assert split.whole + split.total == pytest.approx(ledger.iterations().end.max(), rel=1e-9)
    if chunk >= prompt_len:
        assert (split.attention, split.matmul, split.fixed) == (0.0, 0.0, 0.0)


def test_each_part_of_the_loss_is_its_cause():
    def times(batch: Batch) -> dict[str, float]:
        tiles = math.ceil(batch.num_tokens / 4)
        return {"qkv_proj": 2.0 * tiles, "prefill_attention": batch.prefill_kv_tokens, "sampling": 0.5, "overhead": 1.0}

    split = chunking_loss(10, 3, times)  # chunks of 3, 3, 3, 1: four tiles for three, contexts 3 + 6 + 9 + 10 for 10
    assert (split.whole, split.matmul, split.attention, split.fixed) == (6.0 + 10.0 + 1.5, 2.0, 18.0, 4.5)
    assert split.total == 24.5


# -- the crossover -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_len", "output_len", "batch"), [(992, 32, 18), (980, 44, 6), (512, 512, 4)])
@pytest.mark.parametrize("policy", [RequestLevel(), Orca(), Sarathi(128), Sarathi(256), Sarathi(512)], ids=str)
def test_the_steady_state_is_that_of_a_long_run(prompt_len, output_len, batch, policy):
    long = Prediction(requests_of(*[(prompt_len, output_len)] * (64 * batch)), batch, COST.iteration_time)
    iterations = long.serve(policy).iterations()
    tokens = (iterations.num_prefill_tokens + iterations.num_decode_tokens).sum()
    steady = steady_throughput(policy, prompt_len, output_len, batch, COST.iteration_time)
    assert steady == pytest.approx(tokens / iterations.end.max(), rel=0.01)


@pytest.fixture(scope="module")
def cells() -> pd.DataFrame:
    return crossover([1, 10, 50], [512, 1024], [4, 16], [8, 128, 256], COST.iteration_time, kv_tokens=12_000)


def test_cells_that_cannot_run_are_left_out(cells):
    assert set(cells.baseline) == {"request_level", "orca"}
    assert not ((cells.batch == 16) & ((cells.seq_len == 1024) | (cells.chunk == 8))).any()
    assert len(cells) == 2 * 3 * (3 + 3 + 2)  # batch 4 at both lengths, batch 16 at 512 without the chunk of 8
    assert len(crossover([1], [1024], [16], [128], COST.iteration_time, kv_tokens=100)) == 0


def test_outcomes_are_gains_by_class(cells):
    assert (cells.gain[cells.outcome == "gains"] > 0.02).all()
    assert (cells.gain[cells.outcome == "loses"] <= -0.02).all()
    assert set(cells.outcome[cells.chunk == 8]) <= {"loses", "neutral"}  # a tile of 128 for 8 tokens
    assert "gains" in set(cells.outcome)


def test_a_gain_is_the_ratio_of_steady_throughputs(cells):
    row = cells[(cells.chunk == 256) & (cells.batch == 4) & (cells.pd_ratio == 50) & (cells.seq_len == 1024)]
    load = (1004, 20, 4, COST.iteration_time)
    for name, baseline in (("request_level", RequestLevel()), ("orca", Orca())):
        gain = steady_throughput(Sarathi(256), *load) / steady_throughput(baseline, *load) - 1
        assert row.gain[row.baseline == name].item() == pytest.approx(gain)


@pytest.mark.parametrize("y", ["batch", "seq_len"])
def test_the_map_has_a_panel_per_chunk_and_a_number_per_cell(cells, y):
    figure = crossover_map(cells, y=y)
    assert isinstance(figure, Figure)
    assert sum(bool(ax.get_title()) for ax in figure.axes) == 3 * 2
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    shown = cells[cells.baseline == "request_level"]
    assert sorted(texts) == sorted(f"{100 * gain:+.0f}" for gain in shown.gain)


def test_a_few_hundred_cells_take_less_than_a_minute():
    start = time.monotonic()
    table = crossover([5, 20, 80], [1024], [4, 8], [128, 256], COST.iteration_time)
    assert (time.monotonic() - start) / (len(table) / 2) < 0.2  # seconds a cell
