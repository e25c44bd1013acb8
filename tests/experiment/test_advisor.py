"""The advised chunk against full sweeps, chunk=auto on the command line, and the price of
cutting.
"""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
from composed import config_of
from helpers import prediction_of, requests_of
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.experiment.advisor import advise, candidates, choose
from sarathi_lab.experiment.clock import LossSplit, times_by
from sarathi_lab.policy import RequestLevel, Sarathi, SarathiServe
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.run import main
from sarathi_lab.tasks import plan
from sarathi_lab.workload.synthetic import Uniform

TILE = 128
COST = make_cost_model("analytic", load_option("model", "13b"), load_option("hardware", "a6000"), 2)
SIMULATED = ["executor=simulated", "tracking=none", "workload.num_requests=12", "batch=6"]


def tile_time(batch: Batch) -> float:
    """Half a second an iteration, and a second per tile of 4 tokens begun."""
    return 0.5 + math.ceil(batch.num_tokens / 4)


# -- candidates and predictions --------------------------------------------------------------------


@given(
    st.integers(1, 5000),
    st.integers(1, 500),
    st.integers(1, 400),
    st.sampled_from((1, 16, 64, 128)),
)
def test_candidates_suit_the_batch_and_the_last_cuts_nothing(prompt_len, output_len, batch, tile):
    chunks = candidates(requests_of((prompt_len, output_len)), batch, tile)
    assert chunks == sorted(set(chunks))
    assert all(chunk % tile == 0 and chunk >= batch for chunk in chunks)
    assert chunks[-1] >= prompt_len + batch - 1 > (chunks[-1] // 2 if chunks[-1] > tile else 0)


def test_a_prediction_is_what_the_engine_does():
    requests = requests_of(*[(8, 3)] * 3)
    table = prediction_of(requests, 2, tile_time).table([16, 4]).set_index("chunk")
    ledger = prediction_of(requests, 2, tile_time).serve(Sarathi(4))
    assert list(table.index) == [4, 16]
    assert table.throughput[4] == pytest.approx(33 / ledger.iterations().end.max())
    gaps = np.concatenate([np.diff(times) for times in ledger.requests().token_times])
    assert table.tbt_p99[4] == pytest.approx(np.quantile(gaps, 0.99))
    assert table.kv_reread_factor[16] == 1.0 < table.kv_reread_factor[4]
    assert table.throughput_vs_orca[16] == pytest.approx(
        1.0
    )  # never cut, so its schedule is Orca's
    whole = prediction_of(requests, 2, tile_time).serve(RequestLevel()).iterations().end.max()
    assert table.throughput_vs_request_level[4] == pytest.approx(
        whole / ledger.iterations().end.max()
    )


# -- the advice ------------------------------------------------------------------------------------

UNIFORM = {"num_requests": 24, "pd_ratio": 20, "seed": 3, "min_len": 128, "max_len": 1024}
WORKLOADS = {
    "paper, small batch": (requests_of(*[(980, 44)] * 18), 6),
    "long prompts": (requests_of(*[(2000, 48)] * 16), 8),
    "mixed lengths": (Uniform(**UNIFORM).generate(None).requests, 12),
    "arrivals": (Uniform(**UNIFORM, arrivals="poisson", rate=2.0).generate(None).requests, 12),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_advice_is_within_one_percent_of_a_full_sweep(name):
    requests, batch = WORKLOADS[name]
    policy = SarathiServe if name == "arrivals" else Sarathi
    prediction = prediction_of(requests, batch, COST.iteration_time, baselines=())
    advice = advise(prediction, TILE, policy=policy)
    longest = max(request.prompt_len for request in requests) + batch - 1
    sweep = prediction.table(range(TILE, longest + TILE, TILE), policy)
    row = advice.table.set_index("chunk").loc[advice.chunk]
    assert row.throughput >= 0.99 * sweep.throughput.max()
    rivals = advice.table[advice.table.is_as_good]
    assert row.tbt_p99 == rivals.tbt_p99.min()


def test_the_advice_refines_between_its_candidates():
    requests = requests_of(*[(2000, 48)] * 32)
    advice = advise(prediction_of(requests, 8, COST.iteration_time), TILE)
    tried = list(advice.table.chunk)
    best = tried[int(advice.table.throughput.argmax())]
    assert tried == sorted(set(tried))
    assert {best - TILE, best + TILE} <= set(tried)


# -- chunk=auto ------------------------------------------------------------------------------------


def test_auto_runs_the_advised_chunk_and_says_why(tmp_path, capsys):
    assert main(["chunk=auto", "baselines=[request_level]", *SIMULATED, f"output={tmp_path}"]) == 0
    text = capsys.readouterr().out
    (run,) = [
        path.parent for path in tmp_path.rglob("run.json") if path.parent.parent.name != "baselines"
    ]
    labels, config = json.loads((run / "run.json").read_text()), OmegaConf.load(run / "config.yaml")
    chunk = advise(
        prediction_of(requests_of(*[(992, 32)] * 12), 6, COST.iteration_time), TILE
    ).chunk
    assert labels["chunk"] == config.policy.chunk == chunk
    assert f"chunk=auto is {chunk}" in text
    assert "request_level" in text
    assert text.count("chunk=auto is") == 1  # the baseline has no chunk to choose


def test_auto_is_chosen_anew_for_another_server():
    small = ["chunk=auto", "baselines=[]", *SIMULATED]
    others = ["hardware=a100", "pd_ratio=10", "batch=4", "cache.num_blocks=100"]
    plain, *found = (plan.make_plan(config_of(*small, *other)) for other in ([], *zip(others)))
    assert all(not each.advice.table.equals(plain.advice.table) for each in found)


def test_auto_finds_where_a_bound_is_crossed_beside_a_servers_sequences():
    fast = ["executor=simulated", "hardware=h100", "model=llama3-8b", "chunk=auto", "baselines=[]"]
    load = ["workload.rate=8", "workload.num_requests=40", "slo.tbt=0.012", "policy=vllm_v1"]
    advice = plan.make_plan(config_of(*fast, *load)).advice
    table = advice.table
    met = table[table.tbt_p99 <= 0.012].chunk
    missed = table[table.tbt_p99 > 0.012].chunk
    assert met.max() < missed.min() <= 1.1 * met.max()
    assert advice.chunk in set(met)
    assert "which no chunk meets" not in advice.objective


# -- the price of cutting --------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_loss_adds_up_exactly(prompt_len, chunk):
    split = LossSplit.of(times_by(COST.operation_times), prompt_len, chunk)
    ledger = prediction_of(requests_of((prompt_len, 1)), 1, COST.iteration_time).serve(
        Sarathi(max(chunk, 1), min_decodes=0)
    )
    assert split.whole + split.total == pytest.approx(ledger.iterations().end.max(), rel=1e-9)
    if chunk >= prompt_len:
        assert (split.attention, split.matmul, split.fixed) == (0.0, 0.0, 0.0)


def test_each_part_of_the_loss_is_its_cause():
    def times(batch: Batch) -> dict[str, float]:
        tiles = math.ceil(batch.num_tokens / 4)
        return {
            "qkv_proj": 2.0 * tiles,
            "prefill_attention": batch.prefill_kv_tokens,
            "sampling": 0.5,
            "overhead": 1.0,
        }

    split = LossSplit.of(times_by(times), 10, 3)
    # Chunks of 3, 3, 3, 1: four tiles for three, contexts 3 + 6 + 9 + 10 for 10.
    assert (split.whole, split.matmul, split.attention, split.fixed) == (17.5, 2.0, 18.0, 4.5)
    assert split.total == 24.5


def test_where_whole_prompts_serve_more_it_says_not_to_chunk():
    def by_iteration(batch: Batch) -> float:  # whatever it holds: fewer iterations are better
        return 1.0

    prediction = prediction_of(requests_of(*[(100, 2)] * 8), 4, by_iteration)
    advice = advise(prediction, 16, chunks=[16, 32])
    assert advice.objective == "the most tokens/s"
    assert advice.do_not_chunk.startswith("request_level, which keeps prompts whole, serves ")
    whole = advise(dataclasses.replace(prediction, baselines=()), 16, chunks=[16, 128])
    assert whole.do_not_chunk == "a chunk of 128 holds the longest prompt, 100 tokens, whole"


def test_an_objective_rules_out_chunks_and_whole_prompts_that_miss_it():
    def by_token(batch: Batch) -> float:
        return 1.0 + batch.num_tokens / 10

    requests, slo = requests_of(*[(100, 20)] * 8), Slo(name="gaps", tbt=5.0)
    gaps = prediction_of(requests, 4, by_token, baselines=["orca"], slo=slo)
    advice = advise(gaps, 16, chunks=[16, 32, 64])
    assert advice.table.slo_met.tolist() == [True, True, False]
    assert advice.chunk == 32 < advice.table.chunk[advice.table.throughput.argmax()]
    assert "under gaps (P99 TBT 5000 ms)" in advice.objective
    assert advice.do_not_chunk is None
    none = advise(dataclasses.replace(gaps, slo=Slo(name="gaps", tbt=0.1)), 16, chunks=[16, 32])
    assert none.objective.endswith(", which no chunk meets")


def test_of_overloaded_runs_stalls_decide_before_tokens_a_second():
    """A P99 over all gaps is within its bound where each request has a stall of half a minute."""
    rows = [
        {"chunk": 256, "throughput": 9.0, "gap_bounds_missed": 0, "stall_class": 10},
        {"chunk": 512, "throughput": 5.0, "gap_bounds_missed": 1, "stall_class": 2},
    ]
    table = pd.DataFrame(rows).assign(slo_met=False, is_steady=False, is_as_good=True)
    assert choose(table).chunk == 512
