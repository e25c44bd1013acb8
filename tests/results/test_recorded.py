"""Recorded results load by experiment, whichever way they came to be."""

from __future__ import annotations

import pandas as pd
import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.results import load


def points(y: float, **labels: object) -> pd.DataFrame:
    row = {
        "figure": "fig08",
        "panel": "",
        "series": "1K",
        "x": 4.0,
        "y": y,
        "low": y - 1,
        "high": y + 1,
    }
    return pd.DataFrame(
        [{**row, "num_pairs": 5, "unit": "ratio", "reason": None, "model": "30m", **labels}]
    )


def test_what_is_saved_is_loaded_with_its_device(tmp_path):
    load.save(points(2.0), "fig08", "cpu", tmp_path)
    load.save(points(7.0), "fig08", "simulated-a6000", tmp_path)
    table = load.load("fig08", tmp_path)
    assert list(table.columns[:2]) == ["device", "is_simulated"]
    assert dict(zip(table.device, table.is_simulated, strict=True)) == {
        "cpu": False,
        "simulated-a6000": True,
    }
    assert set(load.POINT_COLUMNS) <= set(table.columns)
    assert list(table.y) == [2.0, 7.0]
    assert load.recorded(tmp_path) == ["fig08"]


def test_an_experiment_without_results_is_refused(tmp_path):
    load.save(points(2.0), "fig08", "cpu", tmp_path)
    with pytest.raises(
        UserError, match="experiment fig99 has no recorded results; use one of fig08"
    ):
        load.load("fig99", tmp_path)


@pytest.mark.parametrize("experiment", load.recorded())
def test_every_recorded_table_loads(experiment):
    table = load.load(experiment)
    assert len(table)
    assert (table.is_simulated == table.device.str.startswith("simulated-")).all()
    assert {
        path.parent.name for path in EXPERIMENTS.glob(f"*/{experiment}/results/*/{experiment}.csv")
    } <= set(table.device)
