"""The advised chunk against full sweeps, chunk=auto on the command line, and the price of
cutting.
"""

from __future__ import annotations

import json
import math
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from composed import config_of
from helpers import predicted, requests_of
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.experiment.advise import ChunkSearch, candidates, choose, marked
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.scenario import chunked
from sarathi_lab.policy import Sarathi, SarathiServe
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


def searched(requests, batch, iteration_time=COST.iteration_time, policy=Sarathi, **options):
    """A search among chunks of a policy."""
    slo = options.get("slo")
    return ChunkSearch(
        lambda chunk: predicted(requests, batch, iteration_time, policy(chunk), slo), **options
    )


def advised(requests, batch, **options):
    first = candidates(requests, batch, TILE)
    arrive = any(request.arrival_time for request in requests)
    return searched(requests, batch, tile=TILE, **options).search(first, arrive=arrive)


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
    engine = EngineConfig(Sarathi(4), 2, num_blocks=100, block_size=16)
    ledger = serve(requests, engine, SimulatedExecutor(tile_time))
    row = predicted(requests, 2, tile_time, Sarathi(4))
    assert row["throughput"] == pytest.approx(33 / ledger.iterations().end.max())
    gaps = np.concatenate([np.diff(times) for times in ledger.requests().token_times])
    assert row["tbt_p99"] == pytest.approx(np.quantile(gaps, 0.99))
    whole = predicted(requests, 2, tile_time, Sarathi(16))
    assert whole["kv_reread_factor"] == 1.0 < row["kv_reread_factor"]


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
    advice = advised(requests, batch, policy=policy)
    longest = max(request.prompt_len for request in requests) + batch - 1
    every_tile = searched(requests, batch, policy=policy)
    sweep = every_tile.among(range(TILE, longest + TILE, TILE)).table
    row = advice.table.set_index("chunk").loc[advice.chunk]
    assert row.throughput >= 0.99 * sweep.throughput.max()
    rivals = advice.table[advice.table.is_as_good]
    assert row.tbt_p99 == rivals.tbt_p99.min()


def test_the_advice_refines_between_its_candidates():
    advice = advised(requests_of(*[(2000, 48)] * 32), 8)
    tried = list(advice.table.chunk)
    best = tried[int(advice.table.throughput.argmax())]
    assert tried == sorted(set(tried))
    assert {best - TILE, best + TILE} <= set(tried)


def test_an_objective_rules_out_chunks_that_miss_it():
    def by_token(batch: Batch) -> float:
        return 1.0 + batch.num_tokens / 10

    requests = requests_of(*[(100, 20)] * 8)
    within = searched(requests, 4, by_token, slo=Slo(name="gaps", tbt=5.0))
    advice = within.among([16, 32, 64])
    assert advice.table.slo_met.tolist() == [True, True, False]
    assert advice.chunk == 32 < advice.table.chunk[advice.table.throughput.argmax()]
    assert advice.objective == "the most tokens/s under gaps (P99 TBT 5000 ms)"
    missed = searched(requests, 4, by_token, slo=Slo(name="gaps", tbt=0.1))
    assert missed.among([16, 32]).objective.endswith(", which no chunk meets")


def test_of_overloaded_runs_stalls_decide_before_tokens_a_second():
    """A P99 over all gaps is within its bound where each request has a stall of half a minute."""
    rows = [
        {"chunk": 256, "throughput": 9.0, "gap_bounds_missed": 0, "stall_class": 10},
        {"chunk": 512, "throughput": 5.0, "gap_bounds_missed": 1, "stall_class": 2},
    ]
    table = marked(pd.DataFrame(rows).assign(slo_met=False, is_steady=False))
    assert choose(table).chunk == 512


# -- chunk=auto ------------------------------------------------------------------------------------


def test_auto_runs_the_advised_chunk_and_says_why(tmp_path, capsys):
    assert main(["chunk=auto", "baselines=[request_level]", *SIMULATED, f"output={tmp_path}"]) == 0
    text = capsys.readouterr().out
    (run,) = [
        path.parent for path in tmp_path.rglob("run.json") if path.parent.parent.name != "baselines"
    ]
    labels, config = json.loads((run / "run.json").read_text()), OmegaConf.load(run / "config.yaml")
    chunk = advised(requests_of(*[(992, 32)] * 12), 6).chunk
    assert labels["chunk"] == config.policy.chunk == chunk
    assert f"chunk=auto is {chunk}" in text
    assert text.count("chunk=auto is") == 1  # the baseline has no chunk to choose
    assert "do not chunk here" not in text


def test_auto_says_where_the_best_chunk_cuts_nothing(tmp_path, capsys):
    fast = ["hardware=h100", "model=llama3-8b", "baselines=[]", f"output={tmp_path}"]
    short = [*SIMULATED, "workload.prompt_len=100", "workload.output_len=20"]
    assert main(["chunk=auto", *short, *fast]) == 0
    text = capsys.readouterr().out
    assert "do not chunk here: it leaves all prompts whole, the longest has 100" in text


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
    bench = CostBench(COST)
    losses = bench.losses(prompt_len, chunk)
    uncut = bench.seconds(chunked(prompt_len, prompt_len, emits=True)).value
    engine = EngineConfig(Sarathi(chunk, min_decodes=0), 1, num_blocks=200, block_size=16)
    ledger = serve(requests_of((prompt_len, 1)), engine, SimulatedExecutor(COST.iteration_time))
    assert uncut * (1 + losses["total"].value) == pytest.approx(
        ledger.iterations().end.max(), rel=1e-9
    )
    if chunk >= prompt_len:
        assert {extra.value for extra in losses.values()} == {0.0}


def test_each_part_of_the_loss_is_its_cause():
    class HandCost:
        has_operations = True
        uncertainty: ClassVar = {"matmul": 0.0, "attention": 0.0}

        def operation_times(self, batch: Batch) -> dict[str, float]:
            tiles = math.ceil(batch.num_tokens / 4)
            return {
                "qkv_proj": 2.0 * tiles,
                "prefill_attention": batch.prefill_kv_tokens,
                "sampling": 0.5,
                "overhead": 1.0,
            }

    losses = CostBench(HandCost()).losses(10, 3)
    # Chunks of 3, 3, 3, 1: four tiles for three, contexts 3 + 6 + 9 + 10 for 10.
    whole = 2.0 * 3 + 10 + 1.5
    causes = {"matmul": 2.0, "attention": 18.0, "fixed": 4.5, "experts": 0.0, "total": 24.5}
    assert {cause: extra.value for cause, extra in losses.items()} == {
        cause: seconds / whole for cause, seconds in causes.items()
    }
