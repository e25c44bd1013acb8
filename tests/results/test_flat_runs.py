"""Tables of runs have a column for every setting, by the name that it is typed by."""

from __future__ import annotations

import pytest

from sarathi_lab.results.load import load_runs
from sarathi_lab.run import main

SMALL = ["executor=simulated", "model=tiny", "batch=3", "tracking=none", "baselines=[orca]"]
GRID = ["workload.arrivals=poisson", "workload.rate=2,5", "policy.min_decodes=0,1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flat")
    sizes = ["chunk=8", "seq_len=64", "pd_ratio=7", "workload.num_requests=4"]
    assert main([*SMALL, *sizes, *GRID, "-m", f"output={folder}"]) == 0
    return load_runs(folder)


def test_settings_are_columns_as_they_are_typed(runs):
    own = runs[~runs.is_baseline]
    assert sorted(zip(own["workload.rate"], own["policy.min_decodes"], strict=True)) == [
        (2, 0),
        (2, 1),
        (5, 0),
        (5, 1),
    ]
    assert set(own["policy"]) == {"sarathi"}  # the label, not the class
    assert set(own["hardware"]) == {"a6000"}  # the option's name
    assert set(own["prompt_classes"]) == {"[512,2048]"}
    assert not [name for name in runs if name.startswith("executor.hardware")]  # said once
    assert set(runs.attrs["settings"]) >= {"chunk", "workload.rate", "versions.torch"}
    assert "throughput" not in runs.attrs["settings"]
    assert own.attrs["settings"] is runs.attrs["settings"]  # no operation copies the names


def test_every_column_can_be_counted_and_compared(runs):
    assert runs.nunique()["workload.rate"] == 2
    assert len(runs.drop_duplicates()) == len(runs) == 6
    assert runs["versions.python"].nunique() == 1
    assert runs["baselines.orca"].notna().sum() == 4
    baselines = runs[runs.is_baseline]
    assert sorted(baselines["workload.rate"]) == [2, 5]
    assert baselines["policy.min_decodes"].isna().all()
