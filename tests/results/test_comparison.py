"""Runs side by side, from local folders, W&B's offline files and its server: the same run reads the
same everywhere.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import sarathi_lab as lab
from sarathi_lab.config.errors import UserError
from sarathi_lab.results import sweep_analysis, wandb_runs
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
    return lab.load(*output.glob("20*"))


def test_local_runs_are_called_by_what_differs(local):
    assert local.varying == ["chunk"]
    assert local.names == ["sarathi, chunk 8", "sarathi, chunk 16"]


def test_an_offline_wandb_run_reads_as_its_folder_does(output, local):
    offline = lab.load(output / "wandb")
    assert offline.varying == local.varying
    assert sorted(offline.names) == sorted(local.names)
    both = (found.runs.set_index("chunk").sort_index() for found in (offline, local))
    own, folder = both
    same = [name for name in folder if sweep_analysis.is_setting(name)]
    assert own[same].map(sweep_analysis.text).equals(folder[same].map(sweep_analysis.text))
    numbers = folder.select_dtypes("number").columns.difference(same)
    assert len(numbers) > 50
    assert own[numbers].to_numpy() == pytest.approx(folder[numbers].to_numpy(), nan_ok=True)
    own, folder = (
        found.iterations.sort_values(["chunk", "iteration"]) for found in (offline, local)
    )
    for name in ("num_decode_tokens", "busy"):
        assert own[name].tolist() == pytest.approx(folder[name].tolist())


def test_a_run_on_the_server_reads_the_same(local, monkeypatch):
    summary = {name: float(local.runs[name][0]) for name in ("throughput", "ttft_p50")}
    rows = [{"_step": 0, "sweep": "a table"}, {"_step": 1, "iteration": 0, "iterations/busy": 0.5}]
    found = SimpleNamespace(
        name="online",
        path=["me", "lab", "abc"],
        config={
            "policy": "sarathi",
            "chunk": 8,
            "settings": {"seed": 0, "policy": {"_target_": "x", "chunk": 8}},
        },
        summary={**summary, "_runtime": 3, "table": {"path": "x"}},
        history=lambda samples, pandas: rows,
    )
    asked = []
    api = SimpleNamespace(
        run=lambda where: asked.append(where) or found, runs=lambda where: [found, found]
    )
    monkeypatch.setattr("wandb.Api", lambda: api)
    (online,) = wandb_runs.load("me/lab/abc")
    assert asked == ["me/lab/abc"]
    assert online.source == "me/lab/abc"
    assert online.settings == {"policy": "sarathi", "chunk": 8, "seed": 0, "policy.chunk": 8}
    assert online.summary == summary
    assert online.iterations.to_dict("records") == [{"iteration": 0, "busy": 0.5}]
    assert lab.load("me/lab").names == ["sarathi", "sarathi (2)"]


def test_curves_have_a_line_for_every_run_that_is_named(local):
    name = local.names[1]
    axes = local.plot_iterations(name).axes
    own = local.iterations[local.iterations.chunk == 16]
    lines = [ax.get_lines() for ax in axes]
    assert [len(line) for line in lines] == [1] * len(axes)
    assert lines[1][0].get_ydata().tolist() == own.num_decode_tokens.tolist()
    both = local.plot_iterations(x="iteration").axes
    assert [len(ax.get_lines()) for ax in both] == [2] * len(axes)
    with pytest.raises(UserError, match="is not one of the runs; use some of"):
        local.plot_iterations("orca")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("missing", "missing is not there; name a folder, a .wandb file, or entity/project/run"),
        ("empty", "empty holds no finished run and no .wandb file"),
        ("torn", "holds no run that can be read"),
    ],
)
def test_a_place_without_runs_is_refused(place, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"name": "x"}')
    with pytest.raises(UserError, match=words):
        lab.load(place)


def test_a_file_that_is_no_run_of_wandb_is_refused(tmp_path):
    (tmp_path / "run-x.wandb").write_text("nothing")
    with pytest.raises(UserError, match=r"run-x\.wandb"):
        lab.load(tmp_path / "run-x.wandb")


def test_a_server_that_gives_nothing_is_one_line(monkeypatch):
    def refuse() -> None:
        raise ValueError("no such project\nmore")

    monkeypatch.setattr("wandb.Api", refuse)
    with pytest.raises(
        UserError, match=r"W&B gives no runs of me/lab \(no such project\); check"
    ) as error:
        lab.load("me/lab")
    assert "\n" not in str(error.value)
