"""Loading of result folders, the paper's points, and pictures that show what is in the table."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.api.results import Results
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.results import load, sweep_analysis
from sarathi_lab.results.conclusion import conclusion
from sarathi_lab.results.load import (
    find_runs,
    load_iterations,
    load_paper,
    load_requests,
    load_runs,
    load_summary,
)
from sarathi_lab.results.plots import sweeps
from sarathi_lab.results.report import sweep_table
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.results.table import COLUMNS, RESULTS, factor, heading, rows_of_run
from sarathi_lab.tasks import plot

LABELS = {"is_baseline": False, "policy": "sarathi", "batch": 8, "seq_len": 1024, "seed": 0}
LABELS |= {"workload": "paper_grid", "model": "tiny", "device": "cpu", "dtype": "float32"}
LABELS |= {"pd_ratio": 31, "chunk": None}
SWEPT = ["chunk", "pd_ratio"]
SUMMARY = {"num_prompt_tokens": 992.0 * 4, "num_requests": 4.0, "kv_reread_factor": 1.0}


def write_run(path: Path, summary: dict[str, float], **labels: object) -> None:
    path.mkdir(parents=True)
    name = {"name": path.name, "started_at": "2026-01-01T00:00:00", "swept": SWEPT}
    labels = {**LABELS, **name, **labels}
    rows_of_run(SUMMARY | summary, labels).to_parquet(path / RESULTS)
    (path / "run.json").write_text(json.dumps(labels))


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Chunks 128 and 512 over two P:D, with an orca and a request_level baseline for each P:D."""
    for i, (chunk, ratio) in enumerate([(128, 8), (512, 8), (128, 32), (512, 32)]):
        summary = {"throughput": 100.0 + i, "ttft_p50": 1.0, "tbt_p99": 0.1}
        summary |= {"decode_time_alone": 0.004, "decode_time_marginal": 0.001 * (i + 1)}
        write_run(tmp_path / "s" / str(i), summary, chunk=chunk, pd_ratio=ratio)
    for ratio, throughput in ((8, 50.0), (32, 100.0)):
        for policy, gain in (("orca", 1.5), ("request_level", 1.0)):
            path = tmp_path / "s" / "baselines" / f"{policy}-{ratio}"
            labels = {"policy": policy, "is_baseline": True, "pd_ratio": ratio}
            write_run(path, {"throughput": throughput * gain}, **labels)
    return tmp_path


def lines_of(ax: Axes) -> list[list[float]]:
    return [list(line.get_ydata()) for line in ax.get_lines()]


def legend_of(figure: Figure) -> list[str]:
    return [" ".join(text.get_text().split()) for text in figure.legends[0].get_texts()]


def test_finished_runs_and_baselines_are_found_in_their_sweep(sweep):
    runs = load_runs(sweep)
    assert (len(runs), runs.is_baseline.sum()) == (8, 4)
    assert set(runs["sweep"]) == {str(sweep / "s")}
    (sweep / "s" / "4").mkdir()
    write_run(sweep / "s" / "baselines" / ".orca-8.123", {})
    (sweep / "s" / "0" / RESULTS).write_bytes(b"half")
    runs = load_runs(sweep)
    assert len(runs) == 7
    assert runs.attrs["skipped"] == (str(sweep / "s" / "0"),)
    assert load_runs(sweep / "nothing").empty


def test_jobs_are_in_the_order_of_their_numbers_and_single_runs_are_no_sweep(tmp_path):
    for job in ("10", "9", "1"):
        write_run(tmp_path / job, {})
    assert [path.name for path in find_runs(tmp_path)] == ["1", "9", "10"]
    for time in ("07-00-00", "08-00-00"):
        write_run(tmp_path / "day" / time, {})
        write_run(tmp_path / "day" / time / "baselines" / "orca-1", {}, is_baseline=True)
    sweeps = load_runs(tmp_path / "day").groupby("sweep").size()
    day = tmp_path / "day"
    assert sweeps.to_dict() == {str(day / "07-00-00"): 2, str(day / "08-00-00"): 2}


def test_tables_load_by_run(tmp_path):
    table = pd.DataFrame({"a": [1, 2]})
    for name, read in (("iterations", load_iterations), ("requests", load_requests)):
        table.to_parquet(tmp_path / f"{name}.parquet")
        assert read(tmp_path).equals(table)


def test_every_paper_table_loads_and_is_described():
    folder = EXPERIMENTS / "sarathi" / "paper"
    for path in folder.glob("*.csv"):
        assert not load_paper(path.stem).isna().any().any()
        assert f"`{path.name}`" in (folder / "points.md").read_text()
    with pytest.raises(UserError, match=r"figure=fig99 is unknown .*use one of fig03"):
        load_paper("fig99")


def test_ratios_are_taken_on_the_same_requests(sweep):
    runs = sweep_analysis.relative(load_runs(sweep), "throughput", to="request_level")
    ratio = runs.set_index(["policy", "pd_ratio", runs.chunk.fillna(0)]).throughput_vs_request_level
    assert ratio["sarathi", 8, 128] == 2.0
    assert ratio["sarathi", 32, 512] == pytest.approx(1.03)
    assert ratio["orca", 32, 0] == 1.5
    assert ratio["request_level", 8, 0] == 1.0


def test_a_sweep_varies_what_the_sweeper_stored_and_runs_put_together_vary_in_what_differs(sweep):
    runs = load_runs(sweep).query("chunk == 128").assign(threads=[1, 2])
    assert runs.swept.unique().tolist() == ["[chunk,pd_ratio]"]
    assert sweep_analysis.varied(runs) == ["pd_ratio"]
    assert sweep_analysis.varied(runs.drop(columns="swept").assign(pd_ratio=8)) == ["threads"]


def test_two_sweeps_of_different_models_are_never_one_series():
    runs = runs_of(model=["tiny", "30m"], chunk=[64, 128]).assign(
        swept="[chunk]", batch=[4, 4, 8, 8]
    )
    runs = runs.assign(sweep=runs.model, device=["cpu (AMD)", "cpu (AMD)"] + ["simulated a100"] * 2)
    assert sweep_analysis.varied(runs) == ["model", "device", "chunk"]
    axes = sweeps.choose_axes(runs)
    assert (axes.kind, axes.x, axes.hue, axes.others) == ("line", "chunk", "model", ())
    figure = sweeps.draw_sweep(runs, y="throughput")
    assert len(figure.axes[0].containers) == 2
    assert legend_of(figure) == ["tiny, cpu", "30m, simulated a100"]
    names = Results(runs, ["model", "device", "chunk"]).names
    assert names[::2] == ["sarathi, tiny, cpu, chunk 64", "sarathi, 30m, simulated a100, chunk 64"]
    assert list(sweep_table(runs, "").rows[0])[1:4] == ["model", "device", "chunk"]


def test_rows_of_a_run_are_long(tmp_path):
    labels = {**LABELS, "name": "new", "git_commit": "abc"}
    rows = rows_of_run({"throughput": 30.0, "mfu": 0.1}, labels)
    assert list(rows) == COLUMNS
    shown = rows[["case", "quantity", "value", "unit", "level", "commit"]].to_numpy().tolist()
    assert shown[0] == ["new", "throughput", 30.0, "tokens/s", "measured", "abc"]
    write_run(tmp_path / "new", {})
    rows.to_parquet(tmp_path / "new" / RESULTS)
    assert load_summary(tmp_path / "new") == {"throughput": 30.0, "mfu": 0.1}


def runs_of(**values: list[object]) -> pd.DataFrame:
    """A run for every combination of settings, each with a throughput of its own."""
    rows = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    runs = pd.DataFrame([LABELS | row for row in rows]).assign(executor="simulated")
    return runs.assign(throughput=[100.0 + i for i in range(len(runs))])


def points_of(ax: Axes) -> list[tuple[float, float]]:
    """Where points are, series after series."""
    lines = [container[0] for container in ax.containers]
    return [(float(x), float(y)) for line in lines for x, y in line.get_xydata()]


def test_rates_are_at_their_values_with_a_series_a_policy():
    runs = runs_of(policy=["orca", "sarathi"], **{"workload.rate": [1, 2, 4]})
    axes = sweeps.choose_axes(runs)
    assert (axes.x, axes.hue, axes.col, axes.others) == ("workload.rate", "policy", None, ())
    figure = sweeps.draw_sweep(runs, y="throughput")
    ax = figure.axes[0]
    assert points_of(ax) == [(1, 100), (2, 101), (4, 102), (1, 103), (2, 104), (4, 105)]
    assert legend_of(figure) == ["orca", "sarathi"]
    assert "request rate [1/s], log scale" in " ".join(ax.get_xlabel().split())
    assert ax.get_xscale() == "log"
    assert sweeps.choose_axes(runs, x="rate").x == "workload.rate"
    assert sweeps.choose_axes(runs, x="policy").hue == "workload.rate"


def test_two_settings_are_an_axis_and_panels_and_baselines_lines_across(sweep):
    figure = sweeps.draw_sweep(load_runs(sweep), y="throughput", col="pd_ratio")
    left, right = figure.axes
    assert "= 8" in left.get_title()
    assert "= 32" in right.get_title()
    assert points_of(left) == [(128, 100), (512, 101)]
    assert [75.0, 75.0] in lines_of(left)
    assert [100.0, 100.0] in lines_of(right)
    assert legend_of(figure) == ["sarathi", "orca (baseline)", "request_level (baseline)"]
    assert left.get_ylim() == right.get_ylim()


def test_more_settings_than_axes_are_distinct_and_never_averaged():
    runs = runs_of(chunk=[128, 256, 512], pd_ratio=[8, 32], batch=[4, 8], dtype=["a", "b"])
    figure = sweeps.draw_sweep(runs, y="throughput")
    shades = [float(shade) for ax in figure.axes for shade in shades_of(ax)]
    assert sorted(shades) == runs.throughput.tolist()
    figure = sweeps.draw_sweep(runs, y="throughput", kind="line")
    assert sum(len(points_of(ax)) for ax in figure.axes) == len(runs)
    with pytest.raises(UserError, match="kind=pie is unknown; use one of line, heat"):
        sweeps.draw_sweep(runs, kind="pie")
    with pytest.raises(UserError, match="y=mfu has no value in these runs"):
        sweeps.draw_sweep(runs.assign(mfu=float("nan")), y="mfu")
    with pytest.raises(UserError, match="kind=heat needs two settings that vary; use kind=line"):
        sweeps.draw_sweep(runs_of(chunk=[128, 256]), kind="heat")


def shades_of(ax: Axes) -> list[float]:
    return list(ax.collections[0].get_array().compressed())


def test_seeds_are_intervals_and_explained():
    figure = sweeps.draw_sweep(runs_of(chunk=[128, 256], seed=[0, 1, 2]), y="throughput")
    assert points_of(figure.axes[0]) == [(128, 101), (256, 104)]
    assert legend_of(figure) == ["bars and bands: 75% intervals of medians of 3 seeds"]


def test_equal_policies_are_one_line_under_their_names_and_a_single_simulated_run_has_no_noise():
    runs = runs_of(policy=["sarathi", "vllm_v1", "orca"], chunk=[128, 256])
    speed = [1.0, 2.0, 1.0, 2.0, 1.0, 3.0]
    runs = runs.assign(throughput=speed, tbt_p99=[1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    figure = sweeps.draw_sweep(runs, y=["throughput", "tbt_p99", "throughput_vs_orca"])
    assert legend_of(figure) == ["sarathi = vllm_v1", "orca"]
    assert [len(ax.containers) for ax in figure.axes] == [2, 2, 2]
    # In rows each policy has its own.
    rows = sweeps.draw_sweep(runs[runs.chunk == 128].assign(chunk=None), y="throughput")
    assert [label.get_text() for label in rows.axes[0].get_yticklabels()] == [
        "orca",
        "vllm_v1",
        "sarathi",
    ]
    table = sweep_table(runs, "All")
    assert "~" not in str(table.rows) + table.title


def test_27_policies_have_a_row_each_on_axes_that_fit_them():
    names = [f"policy_{i:02}" for i in range(26)]
    runs = runs_of(policy=["orca", *names]).assign(ttft_p50=1.0, tbt_p99=0.1)
    left, ax = sweeps.draw_sweep(runs, y=["throughput", "throughput_vs_orca"]).axes
    assert len(points_of(ax)) == len(ax.get_yticks()) == 27
    assert left.get_xlim()[0] == 0
    assert all(1 <= x <= 1.26 and ax.get_xlim()[0] < x < ax.get_xlim()[1] for x, _ in points_of(ax))
    assert ax.get_xlim()[0] > 0.9


def test_a_time_below_the_noise_does_not_stretch_the_axis():
    runs = runs_of(chunk=[128, 256]).assign(decode_time_marginal=[-0.0107, 0.001])
    ax = sweeps.draw_sweep(runs, y="decode_time_marginal").axes[0]
    assert points_of(ax) == [(256, 1.0)]
    assert ax.get_ylim()[0] >= 0


def test_what_equal_work_differs_by_is_undecided():
    runs = runs_of(policy=["orca", "sarathi"], repetition=[1, 2, 3])
    runs = runs.assign(executor="torch", throughput=[100, 130, 100, 120, 140, 115])
    runs["schedule"] = ["x"] * 3 + ["y"] * 3
    assert sweep_analysis.noise(runs) == 1.3
    sentence, remark = conclusion(runs)
    assert "undecided in throughput 120 against 100 tokens/s (in pairs 1.15 times, " in sentence
    assert "75% intervals of 3 samples, each by itself; repeat=6 has 95%;" in remark
    assert remark.endswith("equal work differed by up to 1.30 times.")
    far = runs.assign(throughput=[100, 101, 102, 200, 202, 204])
    assert "beside orca: better in throughput" in conclusion(far)[0]
    slow = runs.assign(throughput=[200, 201, 202, 100, 101, 102])
    assert "beside orca: worse in throughput" in conclusion(slow)[0]


def test_requests_that_arrive_over_time_are_judged_by_their_waits():
    """Each rate by itself: the same tokens/s, later first tokens, shorter gaps, more good ones."""
    runs = runs_of(policy=["orca", "sarathi"], **{"workload.rate": [1, 2]})
    runs = runs.assign(**{"workload.arrivals": "poisson", "throughput": 100.0})
    runs = runs.assign(ttft_p50=[1, 2, 1.5, 2], tbt_p99=[0.3, 0.3, 0.06, 0.03])
    runs = runs.assign(slo_attainment=[0.055, 0.5, 1.0, 1.0], goodput=[0.1, 1.0, 1.0, 2.0])
    first, second, remark = conclusion(runs)
    assert "seed=range(6)" in remark
    assert first == (
        "\nsarathi workload.rate=1 beside orca: better in TBT P99 60 against 300 ms (0.20 times), "
        "requests within the SLO 100.0% against 5.5%, goodput 1 against 0.1 requests/s "
        "(10.00 times); worse in TTFT P50 1,500 against 1,000 ms (1.50 times)."
    )
    assert "equal in TTFT P50." in second
    replayed = runs.assign(**{"workload.arrivals": None, "arrives_over_time": True})
    assert len(conclusion(replayed)) == 2  # no seed decides when its requests arrive
    headings = " ".join(" ".join(sweep_table(runs, "All").rows[0]).split())
    assert "within SLO ^ good [req/s] ^ TTFT P50 [ms] v TBT P99 [ms] v" in headings


def test_the_shortest_gaps_of_all_do_not_hide_a_pause_of_each_request():
    """SGLang without mixed chunks: most gaps are short, and each request waits 17 s once."""
    policies = ["orca", "vllm_v1", "sglang"]
    runs = runs_of(policy=policies).assign(**{"workload.arrivals": "poisson", "throughput": 100.0})
    runs = runs.assign(tbt_p99=[0.3, 0.2, 0.042], request_gap_p99=[0.6, 0.21, 17.4])
    sentence, remark = conclusion(runs)
    assert remark.startswith("These are single draws")
    beside_other = conclusion(runs.assign(swept="[policy]"))[1]
    assert "beside sglang: better in longest gap of a request P99 0.21 against 17" in beside_other
    assert sentence.startswith("\nvllm_v1 beside orca: better in TBT P99 200 against 300 ms")
    assert "longest gap of a request P99 210 against 600 ms" in sentence
    headings = " ".join(" ".join(sweep_table(runs, "All").rows[0]).split())
    assert "TBT P99 [ms] v worst gap P99" in headings


def test_of_chunks_whose_requests_all_wait_the_one_with_short_gaps_is_not_the_best():
    runs = runs_of(policy=["orca", "sarathi"], chunk=[128, 2048])
    runs = runs.assign(**{"workload.arrivals": "poisson", "throughput": 100.0})
    runs = runs.assign(ttft_p99=[6, 6, 47, 7], request_gap_p99=[0.6, 0.6, 0.034, 0.18])
    assert conclusion(runs)[0].startswith("\nsarathi chunk=2048 beside orca")


def test_a_ratio_to_nothing_is_left_out():
    runs = runs_of(policy=["orca", "sarathi"]).assign(**{"workload.arrivals": "poisson"})
    runs = runs.assign(slo_attainment=[0.5, 0.0], goodput=[0.0, 1.0], throughput=100.0)
    sentence = conclusion(runs)[0]
    assert "goodput 1 against 0 requests/s;" in sentence
    assert "requests within the SLO 0.0% against 50.0%" in sentence
    assert not re.search("nan|inf", sentence)


def test_a_difference_that_no_digit_shows_is_none():
    runs = runs_of(policy=["orca", "vllm_v1"]).assign(**{"workload.arrivals": "poisson"})
    runs = runs.assign(throughput=100.0, ttft_p50=[53.6, 53.5], goodput=[0.4621, 0.4622])
    sentence, _ = conclusion(runs)
    assert sentence.endswith("beside orca: equal in TTFT P50, goodput.")


def test_the_best_of_several_needs_an_interval_for_all_of_them():
    runs = runs_of(policy=["orca", "sarathi"], chunk=[1, 2, 3], repetition=range(6))
    speed = runs.policy.map({"orca": 100.0, "sarathi": 120.0}) + runs.repetition / 10
    runs = runs.assign(throughput=speed, executor="torch", schedule=runs.policy)
    sentence, remark = conclusion(runs)
    assert "better in throughput" in sentence
    of_each = "These are 95% intervals of 6 samples, each by itself; "
    assert remark == f"{of_each}repeat=7 has 95% for the best of 3."
    seeded = runs.assign(seed=runs.repetition).drop(columns="repetition")
    assert conclusion(seeded)[1] == f"{of_each}seed=range(7) has 95% for the best of 3."


@pytest.mark.parametrize("measured", [100.0, 103.0])
def test_a_baseline_that_equals_a_swept_run_is_listed_once(measured):
    runs = runs_of(policy=["orca", "sarathi"])
    swept_too = runs[runs.policy == "orca"].assign(is_baseline=True, throughput=measured)
    runs = pd.concat([swept_too, runs.assign(is_baseline=False, throughput=[100.0, 120.0])])
    shown = sweep_table(runs, "All")
    own = ["orca", "sarathi"]
    assert [row["policy"] for row in shown.rows] == (own if measured == 100 else ["orca *", *own])
    assert ("equal runs once" in shown.title) == (measured == 100)


def test_a_quantity_along_x_has_its_unit():
    runs = runs_of(chunk=[128, 256]).assign(tbt_p99=[0.1, 0.2], ttft_p50=1.0)
    for name, label in {"tbt_p99": "TBT P99 [s]", "throughput": "throughput [tokens/s]"}.items():
        assert sweeps.draw_sweep(runs, x=name, y="ttft_p50").axes[0].get_xlabel() == label


def test_a_baseline_swept_over_chunks_is_divided_by_itself():
    runs = runs_of(policy=["sarathi", "vllm_v1"], chunk=[128, 256])
    runs = runs.assign(is_baseline=runs.policy == "sarathi", throughput=[100.0, 200, 110, 220])
    table = sweep_table(runs, "All")
    (ratio,) = [name for name in table.rows[0] if name.startswith("x sarathi")]
    assert [row[ratio] for row in table.rows] == ["1.00", "1.00", "1.10", "1.10"]


def test_further_blocks_of_a_table_keep_the_first_names_of_a_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = {"metric": "time_between_tokens", "quantile": "p99", "unit": "seconds of a run"}
    row |= {f"number {i}": "123456789" for i in range(6)}
    show([DisplayTable([row], left=["metric", "quantile", "unit"])])
    assert capsys.readouterr().out.count("p99") == 2


def test_a_finished_sweep_is_drawn_again_by_other_axes(sweep, capsys):
    for name in ("plot.png", "plot-2.png"):  # overwrites nothing
        assert plot.main([str(sweep / "s"), "x=pd_ratio", "y=tbt_p99,throughput"]) == 0
        assert (sweep / "s" / name).stat().st_size > 10_000
        assert str(sweep / "s" / name) in capsys.readouterr().out
    out = sweep / "out.pdf"
    assert plot.main([str(sweep / "s"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"%PDF")
    assert plot.main([str(sweep / "s"), "--out", str(out)]) == 2
    assert "out.pdf exists; name another file" in capsys.readouterr().err
    assert plot.main([str(sweep / "s"), "x=chnk"]) == 2
    said = "chnk is no setting or quantity of these runs (did you mean chunk?); use such as chunk"
    assert said in capsys.readouterr().err


def test_a_sweeps_table_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")  # no styles
    rates = {"workload.rate": [1, 2]}
    policies = ["transformers_prefill_first", "orca", "request_level"]
    runs = runs_of(policy=policies, chunk=[256, 512], **rates)
    runs = runs.assign(is_baseline=runs.policy != policies[0], tbt_p99=0.269)
    show([sweep_table(runs.assign(kv_reread_factor=2.5, decode_time_marginal=0.0014), "All runs")])
    table = capsys.readouterr().out.splitlines()[2:]
    assert max(map(len, table)) <= 80
    assert not any("…" in line for line in table)
    row = next(line for line in table if "prefill_first" in line and "512" in line)
    assert {"269", "2.5"} <= set(row.split())
    assert "x orca" in "".join(table)
    assert "level" in "".join(table)


@pytest.mark.parametrize(
    ("columns", "width", "is_split"),
    [("120", 120, False), ("", 80, False), ("wide", 80, False), ("36", 36, True)],
)
def test_a_table_in_a_file_is_as_wide_as_columns_says_and_cuts_no_number(
    columns, width, is_split, monkeypatch, capsys
):
    """Columns without room follow below, beside the settings that name their row."""
    monkeypatch.setenv("COLUMNS", columns)
    runs = runs_of(policy=["vllm_v1", "orca"], chunk=[256, 512], repetition=[0, 1, 2])
    runs = runs.assign(executor="torch", schedule=runs.policy, ttft_p50=15.092, tbt_p99=0.269)
    runs = runs.assign(decode_time_alone=0.0213, kv_reread_factor=2.5)
    table = sweep_table(runs, "All")
    show([table])
    title, text = table.title.split()[-1], capsys.readouterr().out
    lines = text.partition(title)[2].splitlines()
    assert max(map(len, lines)) <= width
    words = [line.split() for line in lines]
    num_tables = sum(line[:2] == ["policy", "chunk"] for line in words)
    assert (num_tables > 1) == is_split
    cells = {cell for row in table.cells()[1:] for cell in row}
    assert cells <= {word for line in words for word in line}


def test_a_ratio_in_pairs_says_that_it_is_no_ratio_of_the_medians_beside_it():
    """Medians of 1,728 and 1,178 tokens/s stand beside 1.11 where a phase of a machine was slow."""
    runs = runs_of(policy=["orca", "sarathi"], repetition=[0, 1, 2])
    runs = runs.assign(executor="torch", schedule=runs.policy)
    runs = runs.assign(throughput=[1178.0, 1060.0, 1600.0, 1178.0 * 1.11, 1728.0, 1750.0])
    shown = sweep_table(runs, "All")
    assert [row["x orca\nin pairs\n^"] for row in shown.rows] == ["1.00", "~1.11"]
    assert [row["tokens/s\n^"] for row in shown.rows] == ["1,178", "1,728"]
    assert "in pairs: the median of each round's or seed's ratio, not the ratio of" in shown.title
    assert "1,728 against 1,178 tokens/s (in pairs 1.11 times, " in conclusion(runs)[0]
    once = sweep_table(runs[runs.repetition == 0], "All")
    assert "in pairs" not in once.title + str(once.rows[0])


def test_headings_carry_units_and_factors():
    assert heading("ttft_p50") == "TTFT P50 [ms]"
    assert heading("throughput_vs_orca") == "throughput / orca"
    assert heading("something_new") == "something_new"
    names = ("ttft_p50", "ttft_p50_vs_orca", "kv_read_bytes")
    assert [factor(name) for name in names] == [1e3, 1, 1e-9]


def recorded_points(y: float) -> pd.DataFrame:
    row = {"figure": "fig08", "panel": "", "series": "1K", "x": 4.0, "y": y, "low": y - 1}
    row |= {"high": y + 1, "num_pairs": 5, "unit": "ratio", "reason": None, "model": "30m"}
    return pd.DataFrame([row])


def test_what_is_saved_is_loaded_with_its_device(tmp_path):
    load.save(recorded_points(2.0), "fig08", "cpu", tmp_path)
    load.save(recorded_points(7.0), "fig08", "simulated-a6000", tmp_path)
    table = load.load("fig08", tmp_path)
    assert list(table.columns[:2]) == ["device", "is_simulated"]
    rows = table[["device", "is_simulated", "y"]].to_numpy().tolist()
    assert rows == [["cpu", False, 2.0], ["simulated-a6000", True, 7.0]]
    assert set(load.POINT_COLUMNS) <= set(table.columns)
    assert load.recorded(tmp_path) == ["fig08"]
    with pytest.raises(UserError, match="fig99 has no recorded results; use one of fig08"):
        load.load("fig99", tmp_path)
