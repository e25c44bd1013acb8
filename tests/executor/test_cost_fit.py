"""The constants of the A6000's hardware file are what `cost_model/fit.py` finds in the figures."""

from __future__ import annotations

import importlib.util

import pytest

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.results.load import load_paper

NAMES = (
    "matmul_efficiency",
    "memory_efficiency",
    "kernel_launch",
    "causal_efficiency",
    "kv_efficiency",
    "attention_efficiency",
    "attention_launch",
    "iteration_overhead",
)


@pytest.fixture(scope="module")
def script():
    (path,) = EXPERIMENTS.rglob("cost_model/fit.py")
    spec = importlib.util.spec_from_file_location("cost_model_fit", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recorded_constants_are_the_fitted_ones(script):
    fig3, fig7 = load_paper("fig03"), load_paper("fig07")
    fitted = script.fit_a6000(script.unfitted("a6000"), fig3, fig7)
    recorded = load_option("hardware", "a6000")
    assert {name: getattr(fitted, name) for name in NAMES} == pytest.approx(
        {name: getattr(recorded, name) for name in NAMES}, rel=0.02
    )


def test_the_paper_s_tables_are_told_how_far_off_the_fit_is(script, capsys):
    tables = [load_paper(name) for name in script.PAPER_TABLES]
    script.report_a6000(load_option("hardware", "a6000"), *tables)
    assert "Table 2, never fitted" in capsys.readouterr().out


def test_a_table_that_is_not_there_is_named(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fit.py", "--gemm", "nowhere.csv"])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    assert "nowhere.csv" in capsys.readouterr().err
