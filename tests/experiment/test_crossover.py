"""The map of where chunked prefill pays: its steady state, the cells that a device can run, the
picture, and loads that can't be mapped.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from composed import config_of, refusal_of, run
from helpers import requests_of
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from sarathi_lab.config.instantiate import is_model_stated, load_option
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.experiment.crossover import CacheBench, crossover
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.scenario import Scenario, request_times
from sarathi_lab.model.layers import CachedWindow, Window
from sarathi_lab.policy import Orca, RequestLevel, Sarathi

SPEC = load_option("model", "13b")
COST = make_cost_model("analytic", SPEC, load_option("hardware", "a6000"), 2)
LOADS = {"pd_ratios": [1, 50], "seq_lens": [256, 512], "batches": [4, 16], "chunks": [8, 128, 256]}


def steady_throughput(policy, prompt_len, num_decodes, batch_size):
    scenario = Scenario(policy, prompt_len, num_decodes, batch_size)
    return (prompt_len + num_decodes) / sum(request_times(COST.operation_times, scenario).values())


@pytest.mark.parametrize("policy", [Orca(), Sarathi(256)], ids=str)
def test_the_steady_state_is_that_of_a_long_run(policy):
    """Within a few percent: a run that starts with equal requests decodes in step at first."""
    requests = requests_of(*[(992, 33)] * (40 * 8))
    engine = EngineConfig(policy, 8, num_blocks=1000, block_size=16)
    end = serve(requests, engine, SimulatedExecutor(COST.iteration_time)).iterations().end.max()
    assert steady_throughput(policy, 992, 32, 8) == pytest.approx(
        len(requests) * 1024 / end, rel=0.04
    )


def points_of(
    kv_tokens: int = 6000, state_tokens: int = 0, window: CachedWindow | None = None
) -> pd.DataFrame:
    bench = CacheBench(COST, kv_tokens, state_tokens, window)
    points = [point for part in crossover(SPEC, **LOADS) for point in part.points(bench)]
    return pd.DataFrame(points, columns=Point._fields)


def test_cells_that_a_device_can_not_run_are_left_out():
    points = points_of()
    batch = points.series.str.extract(r"B=(\d+)")[0].astype(int)
    # 16 sequences of 512 tokens exceed the cache, a chunk of 8 holds no batch of 16.
    assert not ((batch == 16) & (points.panel.str.startswith("512") | (points.x == 8))).any()
    assert len(points) == 2 * 2 * (3 + 3 + 2)
    # Prompt, decodes and the token that comes with the prompt: 513 a sequence.
    assert len(points_of(4 * 528, 15)) == len(points_of(4 * 528 - 1, 15)) + 2 * 2 * 3
    assert points_of(4 * 256).empty
    # Layers with a window of 16 tokens hold as many blocks of a token, half as large.
    window = CachedWindow(Window(1, 16), 0.5)
    assert len(points_of(4 * 521, 0, window)) == len(points_of(4 * 521 - 1, 0, window)) + 2 * 2 * 3


def test_a_model_by_its_files_is_a_choice():
    cfg = config_of("experiment=crossover", "executor=simulated")
    assert not is_model_stated(cfg)
    cfg.model.path = "somewhere"
    assert is_model_stated(cfg)


def test_a_gain_is_the_ratio_of_steady_throughputs():
    points = points_of().set_index(["panel", "series", "x"]).y
    load = (502, 10, 4)
    served = steady_throughput(Sarathi(256), *load)
    for panel, baseline in (("512", RequestLevel()), ("512 over Orca", Orca())):
        gain = served / steady_throughput(baseline, *load)
        assert points[panel, "B=4 P:D=50", 256].value == pytest.approx(gain)


SIZES = ["pd_ratios=[10,50]", "seq_lens=[512]", "batches=[4,16]", "chunks=[128,512]"]
SMALL = ["task=measure", "executor=simulated", "task.processes=1", "task.experiment=crossover"]
SMALL += [f"task.sizes.paper.{size}" for size in SIZES]
LLAMA = ["hardware=h100", "model=llama3-8b"]


def test_a_map_is_described_and_drawn(tmp_path):
    result = run(tmp_path, *SMALL, *LLAMA)
    table = result.tables["simulated-h100"]
    (described,) = result.shown
    row = described.rows[0]
    cells = table[table.panel == "512"]
    is_gain = cells.low > 1.02
    is_loss = cells.high < 0.98
    num_undecided = len(cells) - is_gain.sum() - is_loss.sum()
    assert num_undecided > 0
    counted = row["gain / neutral / undecided / loss"]
    assert counted == f"{is_gain.sum()} / 0 / {num_undecided} / {is_loss.sum()}"
    assert row["best"] == f"{cells.y.max() - 1:+.0%}"
    figure = result.figures["crossover"]
    assert isinstance(figure, Figure)
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    numbers = 100 * (cells.y - 1)
    shown = numbers.map("{:+.0f}".format).where(is_gain | is_loss, numbers.map("~{:+.0f}".format))
    assert sorted(texts) == sorted(shown)
    meshes = [mesh for ax in figure.axes for mesh in ax.collections if isinstance(mesh, QuadMesh)]
    shades = np.concatenate([np.ravel(mesh.get_array()) for mesh in meshes])
    coloured = numbers[is_gain | is_loss]
    assert sorted(shades[shades != 0]) == pytest.approx(sorted(coloured))


def test_what_is_stated_is_mapped(tmp_path):
    others = ("hardware=a100", "executor.cost_model=profiled", "executor.tensor_parallel=2")
    more = (*others, "task.sizes.paper.min_decodes=3")
    gains = [
        run(tmp_path, *SMALL, *LLAMA, *other).tables["figure.parquet"].y.to_list()
        for other in ([], *zip(more))
    ]
    assert all(gains[0] != each for each in gains[1:])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["executor.pipeline_parallel=2"], ["pipeline_parallel=2", "one batch at a time", "use 1"]),
        (["task.sizes.paper.chunks=[2]"], ["chunks [2] are all below the batches [4, 16]"]),
        (["task.sizes.paper.batches=[500]", "task.sizes.paper.chunks=[512]"], ["cache"]),
        (["task.sizes.paper.min_decodes=9"], ["min_decodes=9 exceeds"]),
        (["executor.cost_model=profiled", "model=7b"], ["no tables of model 7b (available: 13b)"]),
        (["executor.tensor_parallel=2", "model=auto"], ["tensor_parallel=2 has no effect"]),
        (["executor.cost_model=measured_kernels", "hardware=h100"], ["measured sizes only"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_can_not_be_mapped_is_one_line(args, words):
    said = refusal_of(*SMALL, "model=13b", *args)
    assert all(word in said for word in words), said
