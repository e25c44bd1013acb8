"""The paper's figures in a reduced form: every point predicted, the errors that were reached, the
task end to end.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from scripts import load_script

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.engine.request import Batch
from sarathi_lab.experiment.claims import HELD_BY_FORMULA, HELD_BY_FORMULA_IN, load_claims
from sarathi_lab.experiment.recorded import (
    COLUMNS,
    LABELS,
    compare,
    error_rows,
    error_table,
    points_of,
)
from sarathi_lab.experiment.registry import CATALOG, KEYS, PAPERS, paper_jobs
from sarathi_lab.experiment.scenario import Scenario, lengths, request_times
from sarathi_lab.experiment.simulate import simulate
from sarathi_lab.policy import Orca, RequestLevel, Sarathi
from sarathi_lab.run import main

# Every n-th point of these is computed again here, all of fig07, 08, 13 and table4 in tests/oracle.
COMPUTED = {"fig03": 1, "fig04": 15, "fig09": 400, "fig11": 40, "table2": 1}


@pytest.fixture(scope="module")
def points() -> pd.DataFrame:
    """The paper's points and the recorded simulation of all."""
    found = points_of()
    return found[found.source != "measured"]


def test_every_point_of_the_paper_has_a_prediction(points):
    for name in PAPERS:
        wanted = CATALOG[name].paper_points()
        for job in paper_jobs(CATALOG[name]):
            own = points[(points.device == job.device) & (points.figure == name)]
            asked = wanted[wanted.panel == job.spec.name] if name == "table4" else wanted
            assert len(asked.merge(own, on=KEYS)) == len(asked), job
    assert points[["y", "unit"]].notna().all(axis=None)
    assert (points.y > 0).all()
    is_time = (points.unit != "FLOP/B") & (points.series != "others")
    predicted = points[(points.source == "simulated") & is_time]
    uncertainty = (predicted.high - predicted.low) / 2 / predicted.y
    assert uncertainty.between(0, 1, inclusive="neither").all()


@pytest.mark.parametrize("figure", COMPUTED)
def test_the_recorded_simulation_is_what_the_simulator_computes(figure, points):
    jobs = paper_jobs(CATALOG[figure], every=COMPUTED[figure])[::2]  # by tables, and counted
    anew = pd.concat(simulate(jobs, processes=1)).assign(source="simulated")
    own = points[(points.source == "simulated") & (points.figure == figure)]
    both = own.merge(anew, on=["figure", "device", *KEYS], suffixes=("", "_anew"))
    assert len(both) == len(anew) > 3
    assert set(anew.columns) >= {*COLUMNS, *LABELS}
    np.testing.assert_allclose(both.y, both.y_anew, rtol=1e-4)
    np.testing.assert_allclose(both.low, both.low_anew, rtol=1e-4)
    np.testing.assert_allclose(both.high, both.high_anew, rtol=1e-4)


def test_errors_stay_what_is_recorded(points):
    recorded = pd.read_csv(EXPERIMENTS / "sarathi" / "paper" / "results" / "errors.csv")
    recorded = recorded.fillna({"method": ""})
    computed, recorded = (
        table.sort_values(["row", "device"], ignore_index=True)
        for table in (error_table(points), recorded)
    )
    pd.testing.assert_frame_equal(computed, recorded, rtol=1e-3, atol=1e-6, check_dtype=False)


# -- verdicts --------------------------------------------------------------------------------------


def test_errors_are_relative_and_compared_with_the_aim():
    rows = [
        (2.0, 10.0, np.nan, np.nan, "paper"),
        (4.0, 5.0, np.nan, np.nan, "paper"),
        (2.0, 10.8, 7.56, 14.04, "simulated"),  # within 30 %
        (4.0, 4.5, 4.05, 4.95, "simulated"),  # within 10 %
        (6.0, 99.0, 90.0, 108.0, "simulated"),
    ]
    points = pd.DataFrame(rows, columns=["x", "y", "low", "high", "source"])
    points = points.assign(figure="fig08", panel="", series="1K", unit="ratio", device="a device")
    points = points.assign(hardware="a6000", level="analytic", model="13b", method="")
    assert compare(points).error.tolist() == pytest.approx([0.08, -0.1])
    (row,) = error_table(points).itertuples()
    assert (row.points, row.mean, row.largest, row.stated) == pytest.approx((2, 0.09, 0.1, 0.2))
    assert row.verdict == "met"
    points.loc[3, "y"] = 3.9
    assert error_table(points).verdict.tolist() == ["missed"]


# -- the steady state ------------------------------------------------------------------------------


def operation_times(batch: Batch) -> dict[str, float]:
    """Each operation takes a second an iteration."""
    decodes = float(batch.num_decode_tokens > 0)
    return {"qkv_proj": 1.0, "decode_attention": decodes, "overhead": 2.0}


def test_coverage_counts_no_point_that_something_was_fitted_to():
    script = load_script(REPOSITORY / "tools" / "before_and_after.py")
    tested = script.tested_points(EXPERIMENTS)
    assert set(tested.figure) == {*PAPERS} - {"fig03", "fig07"}
    assert set(tested[tested.figure == "fig12"].device) == {"a100_2023"}
    coverage = script.coverage(tested)
    shares = coverage["mean"].round(2)
    assert shares["all but fig12", "analytic"] == HELD_BY_FORMULA
    assert {"fig12": shares["fig12", "a100_2023"]} == HELD_BY_FORMULA_IN
    pooled = coverage.loc["all but fig12"]
    page = (REPOSITORY / "docs/explanation/intervals.md").read_text()
    for number, share in zip(pooled["size"], pooled["mean"], strict=True):
        assert f"{share:.0%} of {number:.0f}".replace("%", " %") in page


def test_a_commit_that_git_does_not_know_is_named(tmp_path):
    script = load_script(REPOSITORY / "tools" / "before_and_after.py")
    for commit in ("no-commit", "--output=x"):
        with pytest.raises(UserError, match=f"^{commit}: git has no records of it"):
            script.recorded_at(commit, tmp_path)


def test_lengths_are_whole_chunks_with_the_ratio_kept():
    assert lengths(1024, 15.0) == (960, 64)
    assert lengths(1024, 15.0, 239) == (956, 64)
    assert lengths(100, 1.0, 400) == (400, 400)  # one chunk at least


def test_together_counts_iterations():
    cost = operation_times
    # One prefill and five decode iterations for four requests.
    spent = request_times(cost, Scenario(RequestLevel(), 8, 5, 4))
    assert spent["qkv_proj"] == pytest.approx(6 / 4)
    assert spent["decode_attention"] == pytest.approx(5 / 4)


def test_steady_state_below_the_optimum_is_bound_by_decodes():
    # 2 chunks of 4 prompt tokens carry 3 decodes each, which leaves 12 - 2 * 3 of 12 for
    # decode-only batches of four.
    scenario = Scenario(Sarathi(chunk=7, min_decodes=3), 8, 12, 4)
    spent = request_times(operation_times, scenario)
    assert spent["qkv_proj"] == pytest.approx(2 + (12 - 2 * 3) / 4, rel=0.1)


def test_steady_orca_takes_one_iteration_a_prompt():
    spent = request_times(operation_times, Scenario(Orca(), 8, 12, 4))
    assert spent["qkv_proj"] == pytest.approx(1 + (12 - 3) / 4, rel=0.1)


def test_counting_and_serving_agree_where_nothing_is_left_over(points):
    fig09 = points[(points.figure == "fig09") & (points.level == "profiled") & (points.x <= 3)]
    served = fig09[fig09.method == ""].set_index(KEYS).y
    counted = fig09[fig09.method == "counted"].set_index(KEYS).y
    assert len(served) == len(counted) > 3
    assert (served / counted - 1).abs().max() < 0.02


# -- the task --------------------------------------------------------------------------------------


def test_a_figure_leaves_points_errors_and_a_picture_also_of_other_gpus(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "120")  # in 80 the name of a device takes two lines
    settings = ["task.figures=[table2]", "task.gpus=[a6000,h100]", "task.processes=1"]
    places = ["tracking=none", f"output={tmp_path}", f"hydra.run.dir={tmp_path}/run"]
    assert main(["task=figures", *settings, *places]) == 0
    points = pd.read_parquet(tmp_path / "run" / "figure.parquet")
    of_h100 = "simulated h100, analytic, 13b"
    assert {"paper", of_h100} < set(points.device)
    errors = pd.read_csv(tmp_path / "run" / "errors.csv")
    assert set(errors.verdict) == {"met"}
    assert of_h100 not in set(errors.device), "the paper has no points of it"
    assert (tmp_path / "run" / "table2.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "a6000, profiled, 13b" in out
    assert f"table2 on {of_h100}" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["task.figures=[fig99]"], r"task\.figures=fig99 is unknown \(did you mean fig09\?\)"),
        (["task.gpus=[]"], r"task\.gpus=\[\] is not a list"),
        (["chunk=256"], "chunk=256 has no effect: Figures does not read chunk"),
        (
            ["task.figures=[table4]", "task.gpus=[a40]"],
            r"needs 64.* GB for the weights of 33b alone",
        ),
    ],
)
def test_bad_input_is_one_line(args, words, refused):
    assert re.search(words, refused("task=figures", *args, "tracking=none"))


def test_every_figure_has_a_question_a_row_of_errors_and_a_claim():
    assert all(figure.question.endswith("?") for figure in CATALOG.values())
    assert all(error_rows(name) for name in PAPERS)
    # The gain of Fig 9 is read where its best P:D is: from chunk_optimum.
    assert set(PAPERS) - {claim.experiment for claim in load_claims()} == {"fig09"}


def test_levels_follow_the_profiles_of_the_hardware_file():
    def devices(name: str, *gpus: str) -> list[str]:
        cards = [load_option("hardware", gpu) for gpu in gpus]
        return [job.device.removeprefix("simulated ") for job in paper_jobs(CATALOG[name], cards)]

    of_13b = ["a6000, profiled, 13b", "a6000, analytic, 13b"]
    assert devices("table4") == [*of_13b, "a100_2023, analytic, 33b"]
    twice = devices("table2", "h100", "h200", "h100")
    assert twice == ["h100, analytic, 13b", "h200, analytic, 13b"]


# -- measured servers ------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["a100", "l40s", "a card without a file"])
def test_fusions_and_graphs_are_of_a_servers_version_on_a_gpu_without_an_entry(gpu):
    script = load_script(EXPERIMENTS / "lab" / "silicon_points" / "simulate.py")
    lengths = {"tp": 1, "isl": 8, "osl": 8, "concurrency": 1, "real_ttft": 1.0, "real_tpot": 1.0}
    named = {"id": script.INFERENCE_MAX, "model": "llama3.1-70b", "version": "", "weights": "fp8"}
    hosts = {
        backend: script.Point(gpu=gpu, backend=backend, **named, **lengths).host
        for backend in ("vllm", "trtllm")
    }
    assert hosts["trtllm"].fused == script.TRTLLM_FUSED
    assert hosts["vllm"].fused == script.VLLM_FUSED
    assert hosts["vllm"].graphs.mode == script.VLLM_GRAPHS


def test_errors_and_orders_of_servers_are_compared_before_and_now():
    script = load_script(REPOSITORY / "tools" / "before_and_after.py")
    numbers = script.measured_servers(EXPERIMENTS)
    page = (EXPERIMENTS / script.SERVERS.parent / "README.md").read_text()
    order = numbers["h200", "llama3.1-70b, trtllm over vllm", "analytic"]
    assert f"the time per token at **{order}**" in page


def test_the_page_on_one_call_states_the_errors_of_its_long_decodes():
    tools = REPOSITORY / "tools"
    calls = load_script(tools / "before_and_after.py").measured_calls(None)
    long = calls[calls.group != "chunk and decodes in one call"]
    predicted = load_script(tools / "attention_times.py").predict(long)
    errors = (predicted.predicted / predicted.seconds - 1).abs().groupby(predicted.hardware).mean()
    page = (EXPERIMENTS / "lab/hybrid_attention/README.md").read_text()
    for error in errors:
        assert f", {100 * error:.1f} % |" in page
    assert errors.max() < 0.15  # what is aimed at
