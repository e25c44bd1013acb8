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
    assert set(load.COLUMNS) <= set(table.columns)
    assert list(table.y) == [2.0, 7.0]
    assert load.recorded(tmp_path) == ["fig08"]


def test_a_campaigns_figures_are_found_by_their_names(tmp_path):
    folder = tmp_path / "paper" / "results" / "nvidia-h200"
    folder.mkdir(parents=True)
    columns = {
        "figure": ["fig08", "fig03"],
        "panel": ["", "decode"],
        "series": "1K",
        "x": 2.0,
        "y": [8.0, 0.1],
    }
    extra = {
        "unit": "ratio",
        "source": "measured",
        "device": "NVIDIA H200, 13b",
        "uncertainty": 0.25,
    }
    pd.DataFrame({**columns, **extra}).to_csv(folder / "13b-points.csv", index=False)
    load.save(points(2.0), "fig08", "cpu", tmp_path)
    table = load.load("fig08", tmp_path).set_index("device")
    assert list(table.index) == ["cpu", "nvidia-h200"]
    found = table.loc["nvidia-h200"]
    assert (found.y, found.low, found.high, found.model) == (8.0, 6.0, 10.0, "13b")
    assert found.device_name == "NVIDIA H200, 13b"
    assert load.recorded(tmp_path) == ["fig03", "fig08"]


def test_a_campaigns_quantities_become_points(tmp_path):
    row = {
        "model": "13b",
        "prompt_len": 4096,
        "chunk": 256,
        "quantity": "time / whole",
        "unit": "ratio",
    }
    table = pd.DataFrame([{**row, "value": 1.4, "q20": 1.3, "q80": 1.6, "repetitions": 9}])
    load.save(table, "kv_reread", "nvidia-h200", tmp_path)
    (found,) = load.load("kv_reread", tmp_path).to_dict("records")
    assert (found["panel"], found["series"], found["x"], found["y"]) == (
        "time / whole",
        4096,
        256,
        1.4,
    )
    assert (found["low"], found["high"], found["num_pairs"]) == (1.3, 1.6, 9)


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
        path.parent.name
        for path in (EXPERIMENTS / experiment / "results").glob(f"*/{experiment}.csv")
    } <= set(table.device)
