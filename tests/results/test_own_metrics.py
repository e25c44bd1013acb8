"""A user's metrics: a module in the folder at hand, named on the command line."""

from __future__ import annotations

import re
import sys
from importlib import import_module

import pytest

import sarathi_lab as lab
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.results.load import load_summary
from sarathi_lab.results.table import RESULTS
from sarathi_lab.run import main

PAGE = REPOSITORY / "docs" / "reference" / "metrics.md"
RUN = [
    *("executor=simulated", "tracking=none", "batch=2", "seq_len=64", "pd_ratio=7", "chunk=16"),
    *("workload.num_requests=4", "baselines=[orca]", "output=runs"),
]
MORE = """

def half(run):
    return 0.5


def throughput(run):
    return 1.0


def latency_p99(run):
    return 1.0


def num_requests(run):
    return 1.0


def policy(run):
    return 1.0


def in_words(run):
    return "many"


def a_column(run):
    return run.requests.prompt_len


def broken(run):
    return run.requests.absent


def many_in_words(run):
    return 1.0 if len(run.requests) < 3 else "many"


def nine_requests(run):
    return run.requests.prompt_len.iloc[8]


def of_all_columns(run):
    return float(run.iterations.graph_use.eq("none").sum() + run.iterations.instance.sum())
"""


@pytest.fixture(autouse=True)
def _module_of_the_user(tmp_path, monkeypatch):
    """The module of the page, with further functions, in the folder at hand."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "my_metrics.py").write_text(code + MORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_metrics", raising=False)


def test_a_metric_of_the_users_is_a_quantity_of_each_run(tmp_path, capsys):
    assert main([*RUN, "metrics=[my_metrics.longest_prompt,my_metrics.half]"]) == 0
    summaries = [load_summary(path.parent) for path in tmp_path.rglob(RESULTS)]
    assert len(summaries) == 2
    assert all(one["longest_prompt"] == 56 and one["half"] == 0.5 for one in summaries)
    assert max(one.get("half_vs_orca", 0.0) for one in summaries) == 1.0
    assert re.search(r"longest_prompt +56 +1.00x", capsys.readouterr().out)
    assert main([*RUN[:-1], "output=swept", "metrics=[my_metrics.half]", "chunk=16,24", "-m"]) == 0
    table = capsys.readouterr().out.partition("All 3 runs")[2]
    assert re.search(r"half *\n.*\n(.* 0.5 *\n){3}", table)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[absent.name]", "absent.name can't be imported (No module named 'absent'); name a func"),
        ("[my_metrics.absent]", "my_metrics.absent can't be imported"),
        ("[my_metrics.throughput]", "throughput has the name of another quantity; rename it"),
        ("[my_metrics.latency_p99]", "latency_p99 has the name of another quantity; rename it"),
        ("[my_metrics.policy]", "policy has the name of a setting or a label; rename it"),
        ("[my_metrics.half,my_metrics.half]", "half has the name of another quantity"),
        ("my_metrics.half", "my_metrics.half is not a list; write 'metrics=["),
        ("null", "metrics=None is not a list"),
        ("[my_metrics.in_words]", "metrics: in_words returned 'many'; return a number"),
        ("[my_metrics.half,my_metrics.a_column]", "metrics: a_column returned 0 56 1 56"),
        ("[my_metrics.broken]", "metrics: broken failed (AttributeError"),
    ],
)
def test_what_is_no_metric_is_refused_before_the_run(value, reason, capsys, tmp_path):
    assert main([*RUN, f"metrics={value}"]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.rglob("requests.parquet"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        # A trial of two requests does not show what fails with more of them, or with fewer.
        ("many_in_words", "metrics: many_in_words returned 'many'; return a number"),
        ("nine_requests", "metrics: nine_requests failed (IndexError"),
        ("of_all_columns", "metrics: of_all_columns failed (AttributeError"),
        ("num_requests", "metrics: num_requests has the name of another quantity; rename it"),
    ],
)
def test_a_metric_that_fails_leaves_the_run_with_all_others(name, reason, capsys, tmp_path):
    assert main([*RUN, "baselines=[]", f"metrics=[my_metrics.{name},my_metrics.half]"]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    (summary,) = [load_summary(path.parent) for path in tmp_path.rglob(RESULTS)]
    assert summary["half"] == 0.5
    assert summary["throughput"] > 1


def test_a_sweep_says_once_why_its_runs_failed(capsys):
    assert main([*RUN, "metrics=[my_metrics.many_in_words]", "seed=0,1", "baselines=[]", "-m"]) == 2
    printed, error = capsys.readouterr()
    assert printed.count("returned 'many'") == 1
    assert "[2/2] seed=1 failed as [1/2]" in printed
    assert error.startswith("error: 2 runs stopped: metrics: many_in_words returned")


def test_a_metric_that_fails_for_a_baseline_leaves_its_other_ratios(capsys, tmp_path):
    assert main([*RUN, "metrics=[my_metrics.many_in_words]"]) == 2
    assert len(list(tmp_path.rglob("run.json"))) == 2
    assert re.search(r"tokens/s.* [\d.]+x", capsys.readouterr().out)


def test_a_function_is_a_metric_from_python(tmp_path):
    function = import_module("my_metrics").half
    settings = {"executor": "simulated", "batch": 2, "seq_len": 64, "pd_ratio": 7, "chunk": 16}
    served = {**settings, "baselines": [], "output": tmp_path, "workload.num_requests": 4}
    assert lab.serve(metrics=[function], **served).runs.half.tolist() == [0.5]
    runs = lab.sweep(metrics=[function], seed=[0, 1], **{**served, "baselines": [[]]}).runs
    assert runs.half.tolist() == [0.5, 0.5]
    with pytest.raises(UserError, match="define it at the top of a module"):
        lab.serve(metrics=[lambda run: 1.0], **served)
