"""Experts by measured rows: of their own shape, of the nearest, split, and shared by replicas."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from simulated import LINKED, SPEC

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.experts import Experts
from sarathi_lab.executor.simulated.interpolation import RatioInterpolation
from sarathi_lab.executor.tables import read_tables
from sarathi_lab.extensions.cluster.lockstep import Lockstep, SharedExperts

MIXTURE = replace(SPEC, num_experts=8, experts_per_token=2, gated_ffn=True)
ROWS = pd.DataFrame(
    {
        "tokens": [1, 2, 4, 8, 64],
        "activated_experts": [2, 4, 8, 8, 8],
        "time_us": [200.0, 300.0, 500.0, 550.0, 900.0],
    }
)


def with_shape(rows=ROWS, expert_size=MIXTURE.ffn_size, **shape):
    own = {"hidden_size": MIXTURE.hidden_size, "num_experts": 8, "top_k": 2, **shape}
    return rows.assign(**own, expert_size=expert_size)


@pytest.mark.parametrize("rows", [ROWS, with_shape()])
def test_measured_rows_are_reproduced_and_the_edge_is_scaled_by_the_formula(rows):
    experts, formula = Experts(MIXTURE, LINKED, 2, rows=rows), Experts(MIXTURE, LINKED, 2)
    for row in ROWS.itertuples():
        time = experts.time(2 * row.tokens, row.activated_experts)
        assert 1e6 * time == pytest.approx(row.time_us)
    beyond = experts.time(2000, 8) / formula.time(2000, 8)
    assert beyond == pytest.approx(experts.time(128, 8) / formula.time(128, 8))


@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_split_experts_take_the_rows_of_their_share(tokens):
    half = MIXTURE.ffn_size // 2
    slower = ROWS.assign(time_us=3 * ROWS.time_us)
    rows = pd.concat([with_shape(), with_shape(slower, expert_size=half)])
    split, narrow = (
        Experts(MIXTURE, LINKED, 2, rows=rows, tensor=2),
        Experts(replace(MIXTURE, ffn_size=half), LINKED, 2, rows=with_shape(slower, half)),
    )
    assert split.seconds(tokens) == pytest.approx(narrow.seconds(tokens))
    assert f"{MIXTURE.hidden_size} x {half} " in split.caution


@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_replicas_that_share_experts_move_the_pairs_of_the_others_too(tokens):
    alone = Experts(MIXTURE, replace(LINKED, link_latency=0.0), 2, ROWS)
    shared = SharedExperts(alone, Lockstep(num=2))
    pairs = tokens  # on each: two experts a token, half of them
    chosen = MIXTURE.share_of_experts(2 * tokens) * 4
    own = shared.time(2 * pairs, chosen)
    entries = 2 * tokens * (2 * MIXTURE.hidden_size + 8)
    sent = entries * 2 / 2 / LINKED.link_rate
    # zeros of both products, and the activation and the sum over these
    moved = 2 * pairs * (5 * MIXTURE.ffn_size + 2 * MIXTURE.hidden_size) * 2
    expected = own + sent + moved / LINKED.memory_rate
    assert shared.of_all((tokens, tokens)) == pytest.approx(expected)
    alone.hardware = replace(LINKED, link_latency=1.0)  # to gather and to scatter
    assert SharedExperts(alone, Lockstep(num=2)).of_all((tokens, tokens)) == expected + 2


@pytest.mark.parametrize("gpu", ["h100", "rtx-pro-6000"])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_the_committed_tables_have_the_experts_of_known_mixtures(gpu, model):
    hardware, spec = load_option("hardware", gpu), load_option("model", model)
    backend = SimulatedBackend(hardware, cost_model="profiled", tensor_parallel=2)
    said = " ".join(backend.cautions(spec))
    assert f"{spec.hidden_size} x {spec.ffn_size // 2} on a device" in said
    rows = read_tables(hardware.tables).frames["moe"]
    own = rows[(rows.hidden_size == spec.hidden_size) & (rows.expert_size == spec.ffn_size // 2)]
    last = own.loc[own.tokens.idxmax()]
    predicted = Experts(spec, hardware, 2, rows=rows, tensor=2).seconds(int(last.tokens))
    assert 1e6 * predicted == pytest.approx(last.time_us, rel=1e-6)


def test_ratios_are_linear_in_logarithms_and_constant_past_their_edge():
    grid = RatioInterpolation([1, 1, 4, 4], [2, 8, 2, 8], [1.0, 4.0, 2.0, 32.0])
    assert grid.ratio(1, 4) == pytest.approx(2)
    assert grid.ratio(2, 4) == pytest.approx(4)  # between 2 and 8
    assert grid.ratio(9, 99) == pytest.approx(32)
    assert grid.ratio(0.1, 0.1) == pytest.approx(1)
