"""Loading of result folders, the paper's points, and pictures that show what is in the table."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.axes import Axes

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.results.columns import factor, heading
from sarathi_lab.results.load import (
    find_runs,
    load_iterations,
    load_paper,
    load_requests,
    load_runs,
)
from sarathi_lab.results.plots import sweeps

LABELS = {
    "is_baseline": False,
    "policy": "sarathi",
    "batch": 8,
    "seq_len": 1024,
    "workload": "paper_grid",
}
LABELS |= {
    "model": "tiny",
    "device": "cpu",
    "dtype": "float32",
    "seed": 0,
    "pd_ratio": 31,
    "chunk": None,
}
SUMMARY = {"num_prompt_tokens": 992.0 * 4, "num_requests": 4.0, "kv_reread_factor": 1.0}


def write_run(path: Path, summary: dict[str, float], **labels: object) -> None:
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(SUMMARY | summary))
    name = {"name": path.name, "started_at": "2026-01-01T00:00:00"}
    (path / "run.json").write_text(json.dumps({**LABELS, **name, **labels}))


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Chunks 128 and 512 over two P:D, with an orca and a request_level baseline for each P:D."""
    for i, (chunk, ratio) in enumerate([(128, 8), (512, 8), (128, 32), (512, 32)]):
        summary = {
            "throughput": 100.0 + i,
            "decode_time_alone": 0.004,
            "decode_time_marginal": 0.001 * (i + 1),
        }
        write_run(
            tmp_path / "s" / str(i),
            summary | {"ttft_p50": 1.0, "tbt_p99": 0.1},
            chunk=chunk,
            pd_ratio=ratio,
        )
    for ratio, throughput in ((8, 50.0), (32, 100.0)):
        for policy, gain in (("orca", 1.5), ("request_level", 1.0)):
            path = tmp_path / "s" / "baselines" / f"{policy}-{ratio}"
            write_run(
                path,
                {"throughput": throughput * gain},
                policy=policy,
                is_baseline=True,
                pd_ratio=ratio,
            )
    return tmp_path


def lines_of(ax: Axes) -> dict[str, list[float]]:
    return {str(line.get_label()): list(line.get_ydata()) for line in ax.get_lines()}


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_runs_and_baselines_are_found_in_their_sweep(sweep):
    runs = load_runs(sweep)
    assert len(runs) == 8
    assert set(runs["sweep"]) == {str(sweep / "s")}
    assert runs.is_baseline.sum() == 4


def test_unfinished_hidden_and_broken_folders_are_left_out(sweep):
    (sweep / "s" / "4").mkdir()
    write_run(sweep / "s" / "baselines" / ".orca-8.123", {})
    (sweep / "s" / "0" / "summary.json").write_text("{")
    runs = load_runs(sweep)
    assert len(runs) == 7
    assert runs.attrs["skipped"] == [str(sweep / "s" / "0")]
    assert load_runs(sweep / "nothing").empty


def test_jobs_are_in_the_order_of_their_numbers(tmp_path):
    for job in ("10", "9", "1"):
        write_run(tmp_path / job, {})
    assert [path.name for path in find_runs(tmp_path)] == ["1", "9", "10"]


def test_tables_load_by_run(tmp_path):
    table = pd.DataFrame({"a": [1, 2]})
    table.to_parquet(tmp_path / "iterations.parquet")
    table.to_parquet(tmp_path / "requests.parquet")
    assert load_iterations(tmp_path).equals(table)
    assert load_requests(str(tmp_path)).equals(table)


def test_single_runs_of_a_day_are_no_sweep(tmp_path):
    for time, chunk in (("07-00-00", 128), ("08-00-00", 256)):
        write_run(tmp_path / time, {}, chunk=chunk)
        write_run(tmp_path / time / "baselines" / "orca-1", {}, policy="orca", is_baseline=True)
    runs = load_runs(tmp_path)
    assert runs.groupby("sweep").size().to_dict() == {
        str(tmp_path / "07-00-00"): 2,
        str(tmp_path / "08-00-00"): 2,
    }


@pytest.mark.parametrize(
    "figure", sorted(path.stem for path in (EXPERIMENTS / "sarathi" / "paper").glob("*.csv"))
)
def test_every_paper_table_loads_and_is_described(figure):
    assert not load_paper(figure).isna().any().any()
    assert f"`{figure}.csv`" in (EXPERIMENTS / "sarathi" / "paper" / "README.md").read_text()


def test_an_unknown_figure_is_refused():
    with pytest.raises(UserError, match="fig99 is not there; use one of fig03"):
        load_paper("fig99")


def test_ratios_are_taken_on_the_same_requests(sweep):
    runs = sweeps.relative(load_runs(sweep), "throughput", to="request_level")
    ratio = runs.set_index(["policy", "pd_ratio", runs.chunk.fillna(0)]).throughput_vs_request_level
    assert ratio["sarathi", 8, 128] == 2.0
    assert ratio["sarathi", 32, 512] == pytest.approx(1.03)
    assert ratio["orca", 32, 0] == 1.5
    assert ratio["request_level", 8, 0] == 1.0
    own = load_runs(sweep).query("not is_baseline")
    assert sweeps.relative(own, "throughput", to="request_level") is own


def test_a_device_that_differs_by_its_threads_only_is_one_axis(tmp_path):
    for threads in (1, 2):
        labels = {"threads": threads, "device": f"cpu (x, {threads} threads)"}
        write_run(
            tmp_path / "s" / str(threads),
            {"throughput": 1.0, "ttft_p50": 1.0, "tbt_p99": 1.0},
            **labels,
        )
    runs = load_runs(tmp_path / "s")
    assert sweeps.varying_labels(runs) == ["threads"]
    assert sweeps.sweep_overview(runs).get_suptitle() == "tiny, float32 on cpu (x)"
    assert sweeps.varying_labels(runs.assign(device=["a", "b"], threads=1)) == ["device"]


def test_a_metric_draws_a_line_per_series_and_a_level_per_baseline(sweep, ax):
    runs = load_runs(sweep).query("pd_ratio == 8")
    sweeps.metric(runs, "throughput", x="chunk", ax=ax)
    assert lines_of(ax) == {
        "sarathi": [100.0, 101.0],
        "orca": [75.0, 75.0],
        "request_level": [50.0, 50.0],
    }
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["128", "512"]
    assert ax.get_ylim()[0] == 0.0


def test_a_grid_of_two_labels_has_a_line_for_each(sweep, ax):
    sweeps.metric(load_runs(sweep), "throughput", x="pd_ratio", ax=ax)
    drawn = lines_of(ax)
    assert drawn["sarathi, chunk=128"] == [100.0, 102.0]
    assert drawn["orca"] == [75.0, 150.0]


def colours_of(ax: Axes) -> dict[str, str]:
    return {str(line.get_label()): str(line.get_color()) for line in ax.get_lines()}


@pytest.mark.parametrize("query", ["pd_ratio == 8", "index == index"])
def test_a_series_has_one_colour_in_all_panels(sweep, query):
    for path in sweep.glob("s/baselines/*/summary.json"):  # baselines have a latency too
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"ttft_p50": 2.0, "tbt_p99": 0.2})
        )
    runs = load_runs(sweep).query(query)
    _, (left, right) = plt.subplots(1, 2)
    x = sweeps.varying_labels(runs)[0]
    sweeps.metric(runs, "throughput", x=x, ax=left)
    sweeps.latency(runs, x=x, ax=right)
    assert colours_of(left) == colours_of(right)
    assert len(set(colours_of(left).values())) == len(colours_of(left)) > 2
    plt.close("all")


def test_the_legend_covers_no_data(sweep):
    runs = load_runs(sweep)  # lines at 4.3, 2.6 and 1 leave no room for four entries
    runs["kv_reread_factor"] = runs.chunk.map({128: 4.3, 512: 2.6}).fillna(1.0)
    figure, ax = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    sweeps.metric(runs, "kv_reread_factor", x="pd_ratio", ax=ax)
    figure.draw_without_rendering()
    frame = ax.get_legend().get_window_extent()
    for line in ax.get_lines():
        start, end = ax.transData.transform(line.get_xydata())
        along = [start + (end - start) * step / 20 for step in range(21)]
        assert not any(frame.contains(*point) for point in along), line.get_label()
    plt.close(figure)


def test_decode_times_are_in_milliseconds(sweep, ax):
    sweeps.decode_time(load_runs(sweep).query("pd_ratio == 8"), x="chunk", ax=ax)
    assert lines_of(ax) == {"alone": [4.0, 4.0], "piggybacked": [1.0, 2.0]}


def test_kv_theory_is_drawn_beside_the_count(sweep, ax):
    sweeps.kv_reread(load_runs(sweep).query("pd_ratio == 8"), ax=ax)
    # chunks of 128 - 7 and 512 - 7 prompt tokens: 992 takes 9 and 2
    assert lines_of(ax)["(N+1)/2, P=992, B=8"] == [5.0, 1.5]


@pytest.mark.parametrize(
    "query", ["pd_ratio == 8", "chunk != 512", "index == index", "name == '0'"]
)
def test_every_sweep_has_an_overview(sweep, query, tmp_path):
    sweeps.sweep_overview(load_runs(sweep).query(query)).savefig(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_what_is_not_there_is_said(sweep, ax):
    sweeps.metric(load_runs(sweep), "mfu", x="chunk", ax=ax)
    assert ax.texts[0].get_text() == "no run has MFU"


def test_headings_carry_units_and_factors():
    assert heading("ttft_p50") == "TTFT P50 [ms]"
    assert heading("throughput_vs_orca") == "throughput / orca"
    assert heading("something_new") == "something_new"
    assert (factor("ttft_p50"), factor("ttft_p50_vs_orca"), factor("kv_read_bytes")) == (
        1e3,
        1,
        1e-9,
    )
