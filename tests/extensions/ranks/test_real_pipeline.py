"""The real pipeline's experiment: stages' times are fitted, measured stands beside simulated."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import pytest

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.extensions.ranks.experiments import StageTimes
from sarathi_lab.results import load
from sarathi_lab.run import main

DRY = ["experiment=real_bubbles", "task.setup=dry", "device=cpu", "tracking=none"]


def test_times_of_stages_are_fitted_to_what_they_took():
    """By hand: two stages, the second with the output head; sends take 1 ms and 10 us a token."""

    def seconds(batch) -> list[float]:
        own = 0.01 + 0.001 * batch.num_tokens + 1e-6 * batch.prefill_query_key_pairs
        return [own, own + 0.002 * batch.num_emits]

    names = ("prefill_tokens", "start", "emits", "num_decodes", "context")
    shapes = product((0, 8, 32, 64), (0, 100), (False, True), (0, 1, 4), (20, 90))
    batches = [
        make_batch(**dict(zip(names, shape, strict=True)))
        for shape in shapes
        if shape[0] or shape[3]
    ]
    timed = [(batch, seconds(batch), 1e-3 + 1e-5 * batch.num_tokens) for batch in batches]
    times = StageTimes.fit(timed)
    # between what was timed, and beyond the most tokens
    unseen = make_batch(prefill_tokens=48, start=30, num_decodes=2, context=20, emits=True)
    assert times.stage_times(unseen) == pytest.approx(seconds(unseen), rel=0.02)
    assert times.send_time(unseen) == pytest.approx(1e-3 + 50e-5)
    larger = make_batch(prefill_tokens=136)
    assert times.stage_times(larger)[0] == pytest.approx(2 * 0.078 + 1e-6 * 136 * 137 / 2, rel=0.05)


def test_measured_stands_beside_simulated(tmp_path, capsys):
    places = [f"output={tmp_path}", f"hydra.run.dir={tmp_path}/run", f"task.record={tmp_path}"]
    small = ["task.sizes.dry.longest=32", "task.sizes.dry.num_requests=[4]"]
    assert main([*DRY, "task.max_spread=50", *small, *places]) == 0
    table = load.load("real_bubbles", tmp_path)
    assert set(table.device) == {"cpu"}
    assert set(table.how) == {"measured", "simulated"}
    points = table.set_index(["panel", "series"]).y
    for panel in ("bubbles", "completion"):
        ratios = [points[panel, f"tiny, {how}"] for how in ("measured", "simulated")]
        assert np.isfinite(ratios).all()
    idle = table[table.panel == "idle share"]
    assert (idle.groupby(["how"]).y.sum() < 2).all()  # two policies, none idle all the time
    assert pd.read_parquet(tmp_path / "run" / "figure.parquet").source.eq("measured").all()
    assert (tmp_path / "run" / "real_bubbles.png").is_file()


def test_what_does_not_split_is_refused(tmp_path, capsys):
    assert main([*DRY, "task.sizes.dry.stages=[3]", f"output={tmp_path}"]) == 2
    assert "executor.pipeline_parallel=3 does not divide the 2" in capsys.readouterr().err
