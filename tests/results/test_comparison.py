"""Runs side by side, from local folders, W&B's offline files and its server: the same run reads the
same everywhere.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.comparison import ComparedRun, compared_metrics, differing_settings, load
from sarathi_lab.results.plots import sweeps
from sarathi_lab.run import main


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    args = [
        "executor=simulated",
        "model=tiny",
        "batch=3",
        "seq_len=64",
        "pd_ratio=7",
        "workload.num_requests=4",
    ]
    assert (
        main(["chunk=8,16", "-m", *args, "baselines=[]", "tracking=wandb", f"output={folder}"]) == 0
    )
    return folder


@pytest.fixture(scope="module")
def local(output):
    return load(*output.glob("20*"))


def test_local_runs_differ_in_their_chunk_alone(local):
    table = differing_settings(local)
    assert table.loc["chunk"].tolist() == ["8", "16"]
    assert set(table.index) == {"chunk", "policy.chunk"}


def test_an_offline_wandb_run_reads_as_its_folder_does(output, local):
    offline = {run.settings["chunk"]: run for run in load(output / "wandb")}
    for run in local:
        same = offline[run.settings["chunk"]]
        assert same.settings["policy"] == "sarathi"
        assert differing_settings([run, same]).empty
        for name, value in run.summary.items():
            assert same.summary[name] == pytest.approx(value), name
        assert (
            same.iterations.num_decode_tokens.tolist() == run.iterations.num_decode_tokens.tolist()
        )
        assert same.iterations.busy.tolist() == pytest.approx(run.iterations.busy.tolist())


def test_a_run_on_the_server_reads_the_same(local, monkeypatch):
    run = local[0]
    rows = [{"_step": 0, "sweep": "a table"}, {"_step": 1, "iteration": 0, "iterations/busy": 0.5}]
    found = SimpleNamespace(
        name="online",
        path=["me", "lab", "abc"],
        config={
            "policy": "sarathi",
            "chunk": 8,
            "settings": {"seed": 0, "policy": {"_target_": "x", "chunk": 8}},
        },
        summary={**run.summary, "_runtime": 3, "table": {"path": "x"}},
        history=lambda samples, pandas: rows,
    )
    asked = []
    api = SimpleNamespace(
        run=lambda where: asked.append(where) or found, runs=lambda where: [found, found]
    )
    monkeypatch.setattr("wandb.Api", lambda: api)
    (online,) = load("me/lab/abc")
    assert asked == ["me/lab/abc"]
    assert online.source == "me/lab/abc"
    assert online.settings == {"policy": "sarathi", "chunk": 8, "seed": 0, "policy.chunk": 8}
    assert online.summary == run.summary
    assert online.iterations.to_dict("records") == [{"iteration": 0, "busy": 0.5}]
    assert [each.name for each in load("me/lab")] == ["online (1)", "online (2)"]


def made(name: str, **summary: float) -> ComparedRun:
    iterations = pd.DataFrame(
        {"iteration": [0, 1], "end": [0.5, 1.0], "busy": [0.5, 0.25], "num_decode_tokens": [0, 2]}
    )
    return ComparedRun(name, "made", {"chunk": name}, summary, iterations)


def test_metrics_have_the_units_of_their_headings_and_ratios_to_the_reference():
    runs = [made("a", throughput=100.0, ttft_p50=0.5), made("b", throughput=150.0, unknown=1.0)]
    table = compared_metrics(runs)
    assert table.index.tolist() == ["throughput [tokens/s]", "TTFT P50 [ms]"]
    assert table.loc["throughput [tokens/s]"].tolist() == [100.0, 1.0, 150.0, 1.5]
    assert table.loc["TTFT P50 [ms]"].tolist()[:2] == [500.0, 1.0]
    assert math.isnan(table.loc["TTFT P50 [ms]", ("b", "ratio")])
    assert compared_metrics(runs, "b").loc[
        "throughput [tokens/s]", ("a", "ratio")
    ] == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="reference=c is not among the runs; use one of a, b"):
        compared_metrics(runs, "c")


def test_curves_and_ratios_have_a_line_and_dots_for_every_run():
    runs = [made("a", throughput=100.0), made("b", throughput=150.0)]
    decodes, busy = sweeps.curves(runs).axes
    assert [line.get_ydata().tolist() for line in decodes.get_lines()] == [[0, 2], [0, 2]]
    assert busy.get_lines()[0].get_ydata().tolist() == [500.0, 250.0]
    assert len({(line.get_marker(), line.get_linestyle()) for line in busy.get_lines()}) == 2
    (ax,) = sweeps.ratios(compared_metrics(runs)).axes
    assert np.nanmax(np.concatenate([line.get_xdata() for line in ax.get_lines()])) == 1.5
    plt.close("all")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("missing", "missing is not there; name a folder, a .wandb file, or entity/project/run"),
        ("empty", "empty holds no finished run and no .wandb file"),
        ("torn", "can't be read"),
    ],
)
def test_a_place_without_runs_is_refused(place, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"name": "x"}')
    with pytest.raises(UserError, match=words):
        load(place)


def test_a_file_that_is_no_run_of_wandb_is_refused(tmp_path):
    (tmp_path / "run-x.wandb").write_text("nothing")
    with pytest.raises(UserError, match=r"run-x\.wandb"):
        load(tmp_path / "run-x.wandb")


def test_a_server_that_gives_nothing_is_one_line(monkeypatch):
    def refuse() -> None:
        raise ValueError("no such project\nmore")

    monkeypatch.setattr("wandb.Api", refuse)
    with pytest.raises(
        UserError, match=r"W&B gives no runs of me/lab \(no such project\); check"
    ) as error:
        load("me/lab")
    assert "\n" not in str(error.value)
