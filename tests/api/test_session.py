"""`lab.serve`, `lab.sweep` and `lab.load`: the command line's configuration, checks and results."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from own_policies import DecodesThenOneChunk

import sarathi_lab as lab
from sarathi_lab.api.session import PolicyOptions, text_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.policy import Orca
from sarathi_lab.run import main

SMALL = {
    "executor": "simulated",
    "model": "tiny",
    "batch": 3,
    "seq_len": 64,
    "pd_ratio": 7,
    "workload.num_requests": 4,
}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    rates = {"workload.arrivals": "poisson", "workload.rate": np.array([50, 500])}
    policies = [DecodesThenOneChunk, Orca(max_prefills=2)]
    sizes = {**SMALL, **rates, "chunk": 8, "baselines": [["orca"]]}
    return lab.sweep(policy=policies, **sizes, output=tmp_path_factory.mktemp("swept"))


def test_a_run_is_that_of_the_command_line(tmp_path, capsys):
    result = lab.serve(policy="sarathi", chunk=8, **SMALL, output=tmp_path / "a")
    assert capsys.readouterr().out == ""
    args = [f"{name}={value}" for name, value in SMALL.items()]
    assert main(["chunk=8", *args, "tracking=none", f"output={tmp_path / 'b'}"]) == 0
    other = lab.load(tmp_path / "b")
    differing = ["started_at", "path", "sweep", "output", "name"]
    pd.testing.assert_frame_equal(
        result.runs.drop(columns=differing), other.runs.drop(columns=differing)
    )
    assert result.runs["is_baseline"].sum() == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"polcy": "orca"}, "polcy is not a setting (did you mean policy?)"),
        ({"policy": "orca", "chunk": 8}, "chunk=8 has no effect: Orca does not read chunk"),
        (
            {"executor": "torch", "hardware": "h100"},
            "drop it, or simulate it by executor=simulated",
        ),
        ({"chunk": 2}, "chunk=2 is smaller than the 2 decodes"),
        ({"chunk": "256"}, "chunk=256 is not a whole number"),
        ({"chunk": object}, "is not a value of a setting"),
        ({"policy": type("Local", (Orca,), {})}, "define it at the top of a module"),
    ],
)
def test_mistakes_raise_the_line_that_the_command_line_prints(settings, words, tmp_path):
    with pytest.raises(UserError) as error:
        lab.serve(**{**SMALL, **settings}, output=tmp_path / "o")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "o").exists()


def test_a_sweep_has_a_row_for_every_combination(swept):
    rows = swept.runs[~swept.runs.is_baseline]
    assert sorted(zip(rows["policy"], rows["workload.rate"], strict=True)) == [
        ("decodes_then_one_chunk", 50),
        ("decodes_then_one_chunk", 500),
        ("orca_2", 50),  # an object, not conf/policy/orca.yaml
        ("orca_2", 500),
    ]
    assert {"policy", "workload.rate"} <= set(swept.varying)
    # A class reads `chunk` as its budget, an object's fields stay as they are.
    assert set(rows["policy.tokens"].dropna()) == {8}
    assert set(rows["policy.max_prefills"].dropna()) == {2}


def test_requests_and_iterations_have_their_runs_settings(swept):
    settings = ["policy", "workload.rate", "is_baseline"]
    assert set(swept.requests.groupby(settings, observed=True).size()) == {4}
    decodes = swept.iterations.groupby(settings, observed=True)["num_decode_tokens"].sum()
    assert set(decodes) == {4 * 7}
    assert len(decodes) == len(swept.runs) == 6
    assert {"policy.tokens", "chunk", "hardware"} <= set(swept.iterations)


def test_runs_are_compared_on_the_same_work(swept):
    table = swept.compare(to="orca_2", metrics=["throughput", "tbt_p99"]).set_index("workload.rate")
    base, other = (
        table[table.policy == name] for name in ("orca_2", "decodes_then_one_chunk")
    )  # of the sweep, not the baselines
    assert list(base.throughput_vs_orca_2) == [1, 1]
    assert list(other.throughput_vs_orca_2) == pytest.approx(
        list(other.throughput / base.throughput)
    )
    with pytest.raises(UserError, match=r"the runs have policy: .*orca_2"):
        swept.compare(to="sglang")


def test_a_reference_that_is_several_runs_is_refused(tmp_path):
    result = lab.sweep(chunk=[8, 16], **SMALL, baselines=[["orca"]], output=tmp_path)
    with pytest.raises(UserError, match="is 2 runs that differ in chunk"):
        result.compare(to="sarathi")
    by_one = result.compare(to={"policy": "sarathi", "chunk": 8}, metrics=["throughput"])
    assert by_one["throughput_vs_sarathi_8"][0] == 1
    assert result.compare(to="orca")["throughput_vs_orca"].notna().all()
    assert result.plot(x="chunk").get_axes()


def test_runs_that_stop_are_left_out_with_a_warning(tmp_path):
    limits = {"workload.arrivals": "poisson", "workload.rate": [1, 1e5]}
    limits |= {"window.cooldown": 1, "baselines": [[]]}
    with pytest.warns(UserWarning, match="leave nothing"):
        result = lab.sweep(**SMALL, **limits, chunk=8, output=tmp_path)
    assert list(result.runs["workload.rate"]) == [1]


def test_places_are_loaded_together(swept):
    paths = swept.runs["path"]
    both = lab.load(paths[0], paths[1])
    assert len(both.runs) == 2
    assert len(both.requests) == 8
    assert lab.load("fig09").runs["is_simulated"].any()
    with pytest.raises(UserError, match="nowhere holds no finished run"):
        lab.load("nowhere")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (np.int64(3), "3"),
        (0.5, "0.5"),
        ("true", "'true'"),
        ("10%", "'10%'"),
        ("a,b='c'", "'a,b=\\'c\\''"),
        ([1, None, "x"], "[1,null,x]"),
        ({"a": 1}, "{a:1}"),
    ],
)
def test_values_are_typed_as_what_they_are(value, text, tmp_path):
    assert text_of(value, PolicyOptions(tmp_path)) == text
