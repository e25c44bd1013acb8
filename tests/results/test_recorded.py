"""Recorded results load by experiment, whichever way they came to be."""

from __future__ import annotations

import pandas as pd
import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.results import load


def points(y: float) -> pd.DataFrame:
    row = {"figure": "fig08", "panel": "", "series": "1K", "x": 4.0, "y": y, "low": y - 1}
    row |= {"high": y + 1, "num_pairs": 5, "unit": "ratio", "reason": None, "model": "30m"}
    return pd.DataFrame([row])


def test_what_is_saved_is_loaded_with_its_device(tmp_path):
    load.save(points(2.0), "fig08", "cpu", tmp_path)
    load.save(points(7.0), "fig08", "simulated-a6000", tmp_path)
    table = load.load("fig08", tmp_path)
    assert list(table.columns[:2]) == ["device", "is_simulated"]
    rows = table[["device", "is_simulated", "y"]].to_numpy().tolist()
    assert rows == [["cpu", False, 2.0], ["simulated-a6000", True, 7.0]]
    assert set(load.POINT_COLUMNS) <= set(table.columns)
    assert load.recorded(tmp_path) == ["fig08"]
    with pytest.raises(UserError, match="fig99 has no recorded results; use one of fig08"):
        load.load("fig99", tmp_path)
