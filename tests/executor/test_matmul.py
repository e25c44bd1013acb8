"""The time of a matrix product: tiles and waves by hand, and the steps of Fig 7."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest
from simulated import TOY, batch_of

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.kernel_times import matmul_time, overlapped
from sarathi_lab.results.load import load_paper

# Launches of a second and memory too fast to matter: what is left of 4 SMs of 1e9 FLOP/s is waves
# of tiles.
WAVES = dataclasses.replace(TOY, bytes_per_second=1e15)
FIG_7_COLUMNS = {
    "preproj": ["qkv_proj"],
    "postproj": ["out_proj"],
    "ffn": ["ffn_up", "activation", "ffn_down"],
}


@pytest.mark.parametrize(
    ("rows", "milliseconds"),
    [
        # [rows, 100] x [100, 256]; a step of a 64 x 64 tile is 2*64*64 + 20*(64 + 64) = 10,752
        # FLOPs
        (1, 1.0752),  # 4 tiles of 64 x 64 on 4 SMs, 100 steps: one wave
        (64, 1.0752),
        (
            65,
            2.0224,
            # 4 tiles of 64 x 128: 2*64*128 + 20*192 = 20,224 FLOPs a step (64 x 64: 2 waves)
        ),
        (128, 2.0224),
        (129, 3.2256),  # 12 tiles of 64 x 64: three waves
        (256, 3.7888),  # 4 tiles of 128 x 128: 2*128*128 + 20*256 = 37,888 FLOPs a step
    ],
)
def test_the_fastest_tile_in_whole_waves(rows, milliseconds):
    assert matmul_time(rows, 100, 256, WAVES, 2) == pytest.approx(
        1.0 + milliseconds / 1e3, rel=1e-9
    )


def test_a_last_wave_may_be_spread_over_all_multiprocessors():
    # 129 rows: 12 tiles of 64 x 64 are three waves, or 6 of 64 x 128 one and a half
    spread = dataclasses.replace(WAVES, partial_waves=True)
    assert matmul_time(129, 100, 256, spread, 2) == pytest.approx(1.0 + 1.5 * 2.0224e-3, rel=1e-6)
    assert matmul_time(64, 100, 128, spread, 2) == matmul_time(64, 100, 128, WAVES, 2)  # no less


def test_split_k_occupies_idle_multiprocessors_for_a_second_launch():
    # [64, 1e6] x [1e6, 64]: one tile of 64 x 64 leaves 3 of 4 SMs idle; in 4 parts each has a
    # quarter of the steps
    assert matmul_time(64, 10**6, 64, WAVES, 2) == pytest.approx(2.0 + 10.752 / 4, rel=1e-6)
    assert matmul_time(64, 10**5, 64, WAVES, 2) == pytest.approx(
        1.0 + 1.0752, rel=1e-6
    )  # not worth the launch


def test_memory_bound_products_take_their_bytes():
    fast = dataclasses.replace(TOY, flops_per_second=1e18)
    weights, activations = 3000 * 5000, 7 * (3000 + 5000)
    assert matmul_time(7, 3000, 5000, fast, 2) == pytest.approx(
        1.0 + 2 * (weights + activations) / 1e9, rel=1e-6
    )


def test_compute_and_memory_overlap_but_not_wholly():
    assert overlapped(3.0, 3.0) == pytest.approx(3.0 * 2 ** (1 / 3))
    assert overlapped(1.0, 10.0) == pytest.approx(10.0, rel=1e-3)


@pytest.fixture(scope="module")
def fig_7() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Milliseconds by column of Fig 7, measured and predicted; no row emits, so no output head is
    in them.
    """
    measured = load_paper("fig07").pivot(index="x", columns="series", values="y")
    cost = make_cost_model(
        "analytic",
        load_option("model", "13b"),
        dataclasses.replace(load_option("hardware", "a6000"), iteration_overhead=0.0),
        2,
    )
    rows = []
    for num_tokens in measured.index:
        times = cost.operation_times(batch_of(chunk=num_tokens))
        columns = {
            name: sum(times[part] for part in parts) for name, parts in FIG_7_COLUMNS.items()
        }
        rows.append({**columns, "total": sum(times.values())})
    return measured, pd.DataFrame(rows, index=measured.index) * 1e3


@pytest.mark.parametrize("tokens", [128, 256, 384, 512, 640, 768, 896, 1024])
def test_fig_7_steps_where_the_paper_has_them(fig_7, tokens):
    """One token past a tile costs at least a quarter of what it costs in the paper, the token
    before it nothing.
    """
    measured, predicted = (table.total for table in fig_7)
    assert predicted[tokens + 1] / predicted[tokens] - 1 > 0.25 * (
        measured[tokens + 1] / measured[tokens] - 1
    )
    assert predicted[tokens] / predicted[tokens - 1] - 1 < 0.01
