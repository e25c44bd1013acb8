"""A tracked sweep: contents of its W&B runs, and its folders read back."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from wandb_records import records_of, summary_of

import sarathi_lab as lab
from sarathi_lab.api.results import Results
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.results.load import load_summary
from sarathi_lab.results.result import Result, track
from sarathi_lab.results.tracking import WandbTracker
from sarathi_lab.results.wandb_writer import TrackedRun, Writer
from sarathi_lab.run import main

SMALL = ["executor=simulated", "workload.num_requests=3", "batch=2"]
SUMMARY = {
    *("throughput", "decode_throughput", "decode_time_marginal", "ms/decode_time_marginal"),
    *("decode_speedup", "throughput_vs_orca", "throughput_vs_request_level"),
    *("decode_throughput_vs_orca", "kv_reread_factor"),
    *("mfu", "mbu", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "ms/ttft_p50", "ms/tbt_p99"),
    *("throughput_orca", "throughput_request_level", "ms/tbt_p99_orca"),
}


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """A tracked sweep of two chunks with both baselines."""
    folder = tmp_path_factory.mktemp("out")
    assert main([*SMALL, "chunk=128,256", "-m", f"output={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def local(output: Path) -> Results:
    return lab.load(*output.glob("20*"))


def by_name(output: Path) -> dict[str, Path]:
    return {summary_of(path)["name"]: path for path in output.rglob("run-*.wandb")}


@pytest.fixture(scope="module")
def runs(output: Path) -> dict[str, Path]:
    """The records of the sweep by name."""
    return by_name(output)


@pytest.fixture(scope="module")
def detailed(output: Path, tmp_path_factory) -> Path:
    """The record of a run of the sweep with its history and tables."""
    folder = tmp_path_factory.mktemp("detailed")
    (point,) = output.glob("20*/*/1")
    shutil.copytree(point, folder / "1")
    tables = {"has_history": True, "has_tables": True, "artifact": "sarathi-1"}
    run = TrackedRun("sarathi", "a group", "serve", str(folder / "1"), **tables)
    WandbTracker("offline", "test", str(folder)).leave(run)
    writer = Writer()
    writer.write(folder / "1")
    writer.close()
    assert writer.warnings == []
    return by_name(folder)["sarathi"]


def test_a_sweep_is_a_run_a_point_and_its_own_in_a_group_named_by_what_varies(runs):
    assert runs.keys() == {"sarathi chunk=128", "sarathi chunk=256", "sweep of chunk"}
    opened = {name: records_of(path)["run"][0] for name, path in runs.items()}
    (group,) = {run["run_group"] for run in opened.values()}
    assert group.startswith("chunk on simulated a6000, ")
    (command,) = {run["notes"].partition(" output=")[0] for run in opened.values()}
    assert command.endswith("-m executor=simulated workload.num_requests=3 batch=2 chunk=128,256")
    types = {name: run["job_type"] for name, run in opened.items()}
    assert types == {**dict.fromkeys(runs, "serve"), "sweep of chunk": "sweep"}
    assert opened["sarathi chunk=256"]["tags"] == ["sarathi", "13b", "simulated a6000", "simulated"]
    (folder,) = {path.parent.parent for path in runs.values()}
    named = sorted(path.name.split("-", 3)[3].rpartition("_")[0] for path in folder.glob("off*"))
    assert named == ["sarathi_chunk=128", "sarathi_chunk=256", "sweep_of_chunk"]


def test_a_light_run_has_stated_settings_and_its_baselines_as_columns(runs, output):
    shown, records = summary_of(runs["sarathi chunk=256"]), records_of(runs["sarathi chunk=256"])
    config = shown["config"]
    flat = {"policy": "sarathi", "model": "13b", "executor": "simulated", "chunk": 256}
    flat |= {"batch": 2, "pd_ratio": 31, "hostname": platform.node(), "where": "simulated a6000"}
    flat |= {"policy_where": "sarathi 256, simulated a6000", "is_baseline": False}
    assert {name: config[name] for name in flat} == flat
    assert config["baselines"].keys() == {"orca", "request_level"}
    assert config["settings"] == {"workload": {"num_requests": 3}}
    assert not {"history", "artifact", "files"} & records.keys()
    (folder,) = output.glob("20*/*")
    stored = load_summary(folder / "1")
    for path in (folder / "baselines").iterdir():
        baseline = load_summary(path)
        name = path.name.rpartition("-")[0]
        stored |= {f"{quantity}_{name}": value for quantity, value in baseline.items()}
    summary = {name: value for name, value in shown["summary"].items() if name[0] != "_"}
    assert {name: value for name, value in summary.items() if "ms/" not in name} == stored
    assert summary.keys() >= SUMMARY
    assert summary["ms/tbt_p99"] == pytest.approx(1000 * summary["tbt_p99"])
    parts = runs["sarathi chunk=256"].parent.rglob("*")
    assert sum(part.lstat().st_blocks * 512 for part in parts) <= 50_000


def test_the_sweeps_run_has_its_table_and_picture(runs):
    shown = summary_of(runs["sweep of chunk"])["summary"]
    assert shown["sweep"]["nrows"] == 4
    assert "ncols" not in shown["picture/sweep"]
    assert "history" not in records_of(runs["sweep of chunk"])  # sizes of tables are no curves
    folder = runs["sweep of chunk"].parent / "files" / "media"
    assert len(list(folder.rglob("*.png"))) == 1
    (table,) = folder.rglob("*.table.json")
    content = json.loads(table.read_text())
    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    assert [row["chunk"] for row in rows if not row["is_baseline"]] == [128, 256]
    assert {row["policy"] for row in rows} == {"sarathi", "orca", "request_level"}


def test_a_history_has_three_x_axes(detailed):
    records = records_of(detailed)
    steps = {metric["name"]: metric.get("step_metric") for metric in records["metric"]}
    columns = ("mfu", "mbu", "num_waiting", "kv_bytes")
    axes = ["tokens", "tokens", "time", "iteration"]
    assert [steps[f"iterations/{column}"] for column in columns] == axes
    rows = [row["item"] for row in records["history"] if "iteration" in row["item"]]
    assert [row["iteration"] for row in rows] == list(range(len(rows)))
    assert rows[-1]["tokens"] == 3 * 1024 - 3  # the last token of a request is never computed
    assert all(row["time"] == row["iterations/end"] for row in rows)


def test_tables_are_versions_of_one_artifact_and_displayed(detailed):
    records = records_of(detailed)
    (artifact,) = [record for record in records["artifact"] if record["type"] == "tables"]
    assert artifact["name"] == "sarathi-1"
    contents = {entry["path"]: entry["local_path"] for entry in artifact["manifest"]["contents"]}
    assert contents.keys() >= {"iterations.parquet", "requests.parquet"}
    # `wandb sync` reads them from there.
    assert all(Path(path).is_file() for path in contents.values())
    assert summary_of(detailed)["summary"]["requests"]["nrows"] == 3


def test_a_measured_run_is_of_its_machine_and_has_no_simulated_hardware(tmp_path):
    context = RunContext(tmp_path, tmp_path, "a run", "a group", command="typed")
    executor = {"_target_": "Torch", "device": "cpu"}
    config = {"executor": executor, "hardware": {"name": "a6000"}, "host": {"name": "none"}}
    labels = {"policy": "sarathi", "executor": "torch", "device": "a CPU"}
    tracked = []
    tracker = SimpleNamespace(leave=tracked.append, keeps_tables=lambda *, is_measured: is_measured)
    track(Result(labels=labels, config=config), context, tracker, is_run=True)
    found = tracked[0].config
    assert found["settings"] == {"executor": executor}
    assert found["where"] == f"a CPU ({platform.node()})"
    assert (found["hostname"], found["command"]) == (platform.node(), "typed")


# -- runs read back --------------------------------------------------------------------------------


def test_settings_are_columns_as_they_are_typed(local, output):
    runs = local.runs
    assert (local.varying, "sarathi, chunk 128" in local.names) == (["chunk"], True)
    own = runs[~runs.is_baseline]
    assert sorted(own.chunk) == [128, 256]
    assert set(own.policy) == {"sarathi"}  # the label, not the class
    assert set(own.hardware) == {"a6000"}  # the option's name
    assert set(own.prompt_classes) == {"[512,2048]"}
    assert not [name for name in runs if name.startswith("executor.hardware")]  # listed once
    assert set(local.settings) >= {"chunk", "workload.num_requests", "versions.torch"}
    assert "throughput" not in local.settings
    assert len(runs.drop_duplicates()) == len(runs) == 4
    assert own["baselines.orca"].notna().all()
    assert runs[runs.is_baseline].chunk.isna().all()
    (name,) = lab.find_sweeps(output)
    assert ", 2 runs: -m executor=simulated" in name
    assert " chunk=128,256" in name


def test_curves_have_a_line_for_every_run_that_is_named(local):
    name = "sarathi, chunk 256"
    axes = local.plot_iterations(name).axes
    own = local.iterations[local.iterations.name == "sarathi chunk=256"]
    lines = [ax.get_lines() for ax in axes]
    assert [len(line) for line in lines] == [1] * len(axes)
    assert lines[1][0].get_ydata().tolist() == own.num_decode_tokens.tolist()
    both = local.plot_iterations(x="iteration").axes
    assert [len(ax.get_lines()) for ax in both] == [3] * len(axes)
    with pytest.raises(UserError, match=r"is not one of the runs.*; use some of"):
        local.plot_iterations("sglang")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("missing", "missing holds no finished run; name a folder such as outputs, or a recorded"),
        ("empty", "empty holds no finished run; name a folder"),
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
