"""Plain words for everyday settings: lengths of prompts and outputs, and bounds that are stated."""

from __future__ import annotations

import pytest
from composed import config_of

from sarathi_lab.api.session import read, serve, sweep
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.help import help_text
from sarathi_lab.config.instantiate import build
from sarathi_lab.run import main
from sarathi_lab.tasks.plan import make_plan

SMALL = {
    "executor": "simulated",
    "hardware": "h100",
    "model": "llama3-8b",
    "baselines": [],
    "workload.num_requests": 4,
}


def plan_of(*settings: str):
    small = (f"{name}={value}" for name, value in SMALL.items())
    return make_plan(config_of(*small, "tracking=none", *settings))


# -- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_len", "output_len"), [(6000, 300), (1000, 33), (1, 1), (1, 700), (999, 1)]
)
def test_stated_lengths_are_served_and_all_else_follows(prompt_len, output_len):
    plan = plan_of(f"workload.prompt_len={prompt_len}", f"workload.output_len={output_len}")
    lengths = {(request.prompt_len, request.output_len) for request in plan.load.requests}
    assert lengths == {(prompt_len, output_len)}
    assert plan.max_model_len == prompt_len + output_len
    assert plan.config["seq_len"] == plan.config["workload"]["seq_len"] == prompt_len + output_len
    assert plan.config["pd_ratio"] == pytest.approx(prompt_len / output_len)


def test_a_sweep_over_prompts_shows_them_and_the_totals(tmp_path):
    lengths = {"workload.prompt_len": [100, 250], "workload.output_len": 10}
    runs = sweep(**{**SMALL, **lengths, "baselines": [[]]}, output=str(tmp_path)).runs
    assert list(runs["workload.prompt_len"]) == [100, 250]
    assert list(runs["seq_len"]) == [110, 260]
    assert list(runs["pd_ratio"]) == [10, 25]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"seq_len": 1024},
            "seq_len=1024 contradicts workload.prompt_len=6000 workload.output_len=300, which",
        ),
        ({"pd_ratio": 3}, "which are 6300 tokens at a P:D of 20; drop it"),
        ({"seq_len": 1024, "pd_ratio": 3}, "seq_len=1024 contradicts workload"),
        ({"workload.output_len": None}, "prompt_len=6000 needs workload.output_len"),
        ({"workload.prompt_len": None}, "output_len=300 needs workload.prompt_len"),
        ({"workload.prompt_len": 0}, "workload.prompt_len=0 is below 1"),
        ({"workload": "uniform"}, "workload.prompt_len is not a parameter of Uniform"),
    ],
    ids=str,
)
def test_lengths_that_contradict_or_lack_each_other_are_refused_in_a_line(settings, said):
    lengths = {"workload.prompt_len": 6000, "workload.output_len": 300}
    with pytest.raises(UserError, match="workload") as raised:
        build(read({**SMALL, **lengths, **settings}).workload)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("output_len", "typed", "not_typed"),
    [
        (301, {"seq_len": 1024}, "pd_ratio"),
        (1, {"seq_len": 1024}, "pd_ratio"),
        (301, {"pd_ratio": 3}, "seq_len"),
    ],
)
def test_only_what_was_typed_is_named_as_contradicting(output_len, typed, not_typed):
    lengths = {"workload.prompt_len": 6000, "workload.output_len": output_len}
    with pytest.raises(UserError) as raised:
        build(read({**SMALL, **lengths, **typed}).workload)
    ((name, value),) = typed.items()
    assert str(raised.value).startswith(f"{name}={value} contradicts workload.prompt_len=6000 ")
    assert str(raised.value).endswith("; drop it")
    assert not_typed not in str(raised.value)


def test_the_papers_words_may_stand_beside_lengths_that_they_mean():
    plan = plan_of(
        "workload.prompt_len=6000", "workload.output_len=300", "seq_len=6300", "pd_ratio=20"
    )
    assert plan.load.requests[0].output_len == 300


# -- objectives ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name", "bounds"),
    [
        (["slo.ttft=2", "slo.tbt=0.05"], "ttft=2,tbt=0.05", {"ttft": 2, "tbt": 0.05}),
        (["slo=strict", "slo.tbt=0.05"], "strict,tbt=0.05", {"tbt": 0.05, "scheduling_delay": 2}),
        (["slo=yi-34b-strict", "slo.tbt_factor=3"], "yi-34b-strict,tbt_factor=3", None),
        (["slo.tpot=0.1", "slo.name=mine"], "mine", {"tpot": 0.1}),
        (["+slo.ttft=2"], "ttft=2", {"ttft": 2}),
        (["slo=strict"], "strict", None),
    ],
    ids=str,
)
def test_bounds_need_no_plus_and_name_the_objective(settings, name, bounds):
    slo = plan_of(*settings).targets.slo
    assert slo.name == name
    if bounds is not None:
        assert slo.bounds == bounds
        assert not slo.is_relative


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slo.quantile": 0.9}, "slo.quantile=0.9 has no effect without a bound of a quantile"),
        (
            {"slo.scheduling_delay": 1, "slo.quantile": 0.9},
            "slo.quantile=0.9 has no effect without a bound of a quantile",
        ),
        ({"slo.decode_batch": 9}, "slo.decode_batch=9 has no effect without slo.tbt_factor"),
        ({"slo": "strict", "slo.tbt": 1, "slo.tbt_factor": 5}, "drop one"),
        ({"slo.tbt": -1}, "slo.tbt=-1"),
    ],
    ids=str,
)
def test_bounds_without_effect_are_refused_in_a_line(settings, said):
    with pytest.raises(UserError) as raised:
        build(read({**SMALL, **settings}).slo)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_plus_where_none_is_needed_says_so(capsys):
    assert main(["+slo.quantile=0.9", "slo.tbt=1", "executor=simulated", "tracking=none"]) == 2
    assert "Either remove + prefix: 'slo.quantile=0.9'" in capsys.readouterr().err


def test_python_serves_an_own_objective_under_its_name(tmp_path):
    own = {"slo.tbt": 0.05, "workload.prompt_len": 64, "workload.output_len": 4}
    (run,) = serve(**SMALL, **own, output=str(tmp_path)).runs.to_dict("records")
    assert run["slo"] == "tbt=0.05"
    assert run["slo_attainment"] == 1.0
    assert run["workload.prompt_len"] == 64


def test_help_lists_the_plain_words():
    text = help_text(["workload=paper_grid", "slo=none"])
    for name in ("prompt_len", "output_len", "ttft", "scheduling_delay", "quantile"):
        assert f"\n  {name}: " in text


# -- tables ----------------------------------------------------------------------------------------


def test_tables_that_the_cost_model_does_not_read_are_refused():
    tables = "hardware.tables=experiments/lab/cost_model/tables/h100"
    with pytest.raises(UserError, match=r"add executor\.cost_model=profiled, or drop it"):
        plan_of(tables)
    assert plan_of(tables, "executor.cost_model=profiled").backend.cost_model == "profiled"
