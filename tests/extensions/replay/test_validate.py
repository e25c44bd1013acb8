"""Real servers' runs, replayed: the pinned ones as gates, and what is said of bad ones."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from composed import checked, config_of, kept, run
from matplotlib.figure import Figure

import sarathi_lab as lab
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.extensions.replay import validation
from sarathi_lab.extensions.replay.real_run import read_runs
from sarathi_lab.results import report
from sarathi_lab.run import main

RUNS = REPOSITORY / "experiments" / "lab" / "real_servers"
DENSE, MIXTURE = RUNS / "rtx-4090-llama-3.1-8b", RUNS / "rtx-pro-6000-qwen3-30b-a3b"
SERVER = {"model": "x", "vllm_version": "0.19.0"}
ANALYTIC = ["hardware=a100", "model=llama3.1-8b"]


def test_a_run_of_the_lab_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (real,) = read_runs((DENSE / "run").relative_to(REPOSITORY))
    assert len(real.requests) == 300


@pytest.mark.parametrize("folder", [DENSE, MIXTURE])
def test_the_files_of_a_pinned_run_do_not_differ(folder):
    (real,) = read_runs(folder / "run")
    assert "differ" not in " ".join(real.settings.notes())


@pytest.mark.parametrize(("folder", "largest"), [(DENSE, 0.05), (MIXTURE, 0.08)])
def test_the_replay_of_a_pinned_run_is_off_by_little(folder, largest, tmp_path):
    settings = [f"task.run={folder / 'run'}", f"hardware.tables={folder / 'tp1'}"]
    summary = run(tmp_path, "task=validate", *settings).summary
    errors = {name: value for name, value in summary.items() if name.startswith("error/")}
    # Times between tokens are not recorded.
    assert set(errors) == {"error/ttft", "error/tpot", "error/latency", "error/ttft_p99"}
    assert np.abs(list(errors.values())).max() <= largest


@pytest.fixture
def short_run(tmp_path):
    """The first 12 requests of a pinned run, and three seconds of its timeline."""
    folder = tmp_path / "run"
    shutil.copytree(DENSE / "run", folder)
    for name, number in (("requests.jsonl", 12), ("timeseries.csv", 4)):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:number]))
    return folder


def test_what_it_took_from_the_run_and_what_it_leaves(short_run, tmp_path, capsys):
    """With another GPU's formulas, so that nothing of tables is needed."""
    settings = ["task=validate", f"task.run={short_run}", *ANALYTIC, "tracking=none"]
    folder = kept(tmp_path / "kept", *settings)
    table = pd.read_csv(folder / "validation.csv")
    assert list(table.columns) == ["metric", "quantile", "unit", "real", "simulated", "error"]
    waits = table[table.metric.isin(["ttft", "tpot", "latency", "blocks_used"])]
    assert (waits.groupby("metric")["quantile"].agg(list).map(len) == 4).all()
    assert np.allclose(table.error, table.simulated / table.real - 1, equal_nan=True)
    assert {"output_throughput", "duration", "num_preemptions"} < set(table.metric)
    assert len(pd.read_csv(folder / "over_time.csv")) == 3
    assert (folder / "validation.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    for word in ("a100", "vllm 0.19.0", "2048 tokens", "256 sequences", "2587 x 16", "prefixes"):
        assert word in said


def test_settings_are_the_runs_unless_named(short_run):
    cfg = config_of("task=validate", f"task.run={short_run}", "hardware=a100")
    replay = build(cfg.task).check(cfg)[0].as_run
    assert (replay.spec.name, replay.backend.dtype_name) == ("llama3.1-8b", "bfloat16")
    assert replay.backend.host.overlaps
    assert replay.engine.shares_prefixes
    cfg = config_of(
        "task=validate", f"task.run={short_run}", "hardware=a100", "model=7b", "host=none"
    )
    replay = build(cfg.task).check(cfg)[0].as_run
    assert (replay.spec.name, replay.backend.host.overlaps) == ("7b", False)


@pytest.mark.parametrize(
    ("stated", "graphs"),
    [
        ({}, {"mode": "full_and_piecewise", "largest": 16}),
        ({"max_num_seqs": 400}, {"mode": "full_and_piecewise", "largest": 512}),
        ({"max_num_seqs": 200, "max_num_batched_tokens": 256}, {"largest": 256}),
        ({"max_cudagraph_capture_size": 2048}, {"largest": 1024}),
        ({"enforce_eager": True}, {"mode": "none"}),
        ({"compilation_config": {"cudagraph_mode": [2, 0]}}, {"mode": "full_decode_only"}),
        ({"compilation_config": '{"cudagraph_capture_sizes": [8, 2000]}'}, {"sizes": [8]}),
        ({"compilation_config": '{"cudagraph_mode": "PIECEWISE"}'}, {"mode": "piecewise"}),
    ],
    ids=str,
)
def test_graphs_are_those_of_the_servers_flags(stated, graphs, short_run):
    path = short_run / "meta.json"
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 1024}
    path.write_text(json.dumps({**SERVER, "engine_kwargs": {**sizes, **stated}}))
    cfg = config_of("task=validate", f"task.run={short_run}", *ANALYTIC)
    (case,) = build(cfg.task).check(cfg)
    replayed = case.as_run.backend.host.graphs
    assert graphs == {name: getattr(replayed, name) for name in graphs}


def edited(folder, **values):
    """Set values of the second request."""
    path = folder / "requests.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **values})
    path.write_text("\n".join(lines))


BROKEN = {
    "no meta": (
        lambda f: (f / "meta.json").unlink(),
        ["meta.json can't be read", "name the folder"],
    ),
    "no engine": (lambda f: (f / "meta.json").write_text("{}"), ["has no engine_kwargs"]),
    "no requests": (lambda f: (f / "requests.jsonl").write_text("\n"), ["requests.jsonl is empty"]),
    "no column": (
        lambda f: (f / "requests.jsonl").write_text('{"input_toks": 3}'),
        ["has no output_toks", "record"],
    ),
    "no series": (lambda f: (f / "timeseries.csv").write_text("t\n1\n"), ["has no running"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_refused_in_one_line(name, short_run):
    spoil, words = BROKEN[name]
    spoil(short_run)
    with pytest.raises(UserError) as error:
        checked("task=validate", f"task.run={short_run}", *ANALYTIC)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_a_broken_request_does_not_refuse_the_others(short_run):
    cfg = config_of("task=validate", f"task.run={short_run}", *ANALYTIC)
    for values, words in (
        ({"output_toks": 0}, "line 2: output_toks=0"),
        ({"output_toks": 769, "last_token_ts": 1.0}, "line 2: last_token_ts=1.0"),
    ):
        edited(short_run, **values)
        (case,) = build(cfg.task).check(cfg)
        assert len(case.run.requests) == 11
        caution = f"11 of 12 requests replayed; 1 damaged ({words})"
        assert caution in case.as_run.describe()


def test_what_else_is_refused(short_run):
    for settings, word in (
        ([f"task.run={short_run}", "executor=torch"], "in simulation"),
        ([f"task.run={short_run / 'none'}"], "is not a folder or a file"),
    ):
        with pytest.raises(UserError, match=word):
            checked("task=validate", *settings, *ANALYTIC)
    with pytest.raises(UserError, match=r"add task\.run=FILE"):
        checked("task=validate")


def test_other_settings_are_replayed_beside_the_run_as_it_was(short_run, tmp_path):
    settings = ["task=validate", f"task.run={short_run}", *ANALYTIC, "tracking=none"]
    folder = kept(tmp_path / "kept", *settings, "policy=sarathi_serve", "chunk=256", "batch=4")
    table = pd.read_csv(folder / "validation.csv")
    assert np.allclose(table.change, table.what_if / table.simulated - 1, equal_nan=True)
    runs = lab.load(folder).runs.set_index("policy")
    assert {*runs.index} == {"real", "as_run", "sarathi_serve"}
    assert runs.loc["sarathi_serve", "chunk"] == 256
    assert runs.loc["sarathi_serve", "throughput_vs_as_run"] != 1
    assert (
        runs.loc["as_run", "ttft_mean"]
        == table.set_index(["metric", "quantile"]).simulated["ttft", "mean"]
    )
    iterations = lab.load(folder).iterations
    of_run = iterations[iterations.policy == "sarathi_serve"]
    assert (of_run.num_prefill_tokens + of_run.num_decode_tokens).max() <= 256
    with pytest.raises(UserError, match="chunk=auto is chosen for a workload"):
        checked("task=validate", f"task.run={short_run}", *ANALYTIC, "chunk=auto")


def test_capture_sizes_are_other_settings(short_run):
    graphs = ["host=vllm_0_19", "host.graphs.largest=8"]
    cfg = config_of("task=validate", f"task.run={short_run}", *ANALYTIC, *graphs)
    (case,) = build(cfg.task).check(cfg)
    assert case.as_run.backend.host.graphs.largest == 512
    changed = case.what_if.backend.host.graphs
    assert (changed.mode, changed.largest) == ("full_and_piecewise", 8)
    graphs.append("host.graphs.mode=full_decode_only")
    cfg = config_of("task=validate", f"task.run={short_run}", *ANALYTIC, *graphs)
    path = short_run / "meta.json"
    meta = json.loads(path.read_text())
    meta["engine_kwargs"] |= {"cudagraph_capture_sizes": [1, 4], "cudagraph_mode": "piecewise"}
    path.write_text(json.dumps(meta))
    (case,) = build(cfg.task).check(cfg)
    recorded = case.as_run.backend.host.graphs
    assert (recorded.mode, list(recorded.sizes)) == ("piecewise", [1, 4])
    assert case.what_if.backend.host.graphs.largest == 8
    assert case.what_if.engine == case.as_run.engine


def test_a_sweep_shows_the_run_as_it_was_once(short_run, tmp_path, capsys, monkeypatch):
    # Pictures take seconds.
    monkeypatch.setattr(validation, "picture", lambda *_: Figure())
    monkeypatch.setattr(report, "save_picture", lambda folder, *_, **__: folder / "sweep.png")
    settings = ["task=validate", f"task.run={short_run}", *ANALYTIC, "tracking=none"]
    assert main([*settings, f"output={tmp_path}", "chunk=256,512", "-m"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("TTFT P99 [s]") == 1
    assert printed.count("replaying") == 1
    assert "what if" not in printed
