"""The script that compares engines: tokens and times of an engine, and of one that fails."""

from __future__ import annotations

import pandas as pd
import pytest
from scripts import load_script

from sarathi_lab.config.paths import EXPERIMENTS

FOLDER = EXPERIMENTS / "lab" / "peers"


@pytest.fixture(scope="module")
def compare():
    return load_script(FOLDER / "compare.py")


def test_engines_are_compared_and_failures_listed(compare, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "SETTLE", 0)
    sizes = ["models=[tiny]", "workloads=[dry]", "repetitions=1", "batch=2", "chunk=16"]
    compare.main([*sizes, "engines=[vllm]", "python.vllm=/bin/false", f"folder={tmp_path}"])
    table = pd.read_csv(tmp_path / "peers.csv").set_index("peer")
    assert list(table.index) == ["sarathi_lab", "vllm"]
    assert table.agreement["sarathi_lab"] == 1
    assert table.ratio["sarathi_lab"] == 1
    assert "no answer to load" in table.error["vllm"]
    assert "ratio" in capsys.readouterr().out


def test_a_row_has_ratios_and_agreement_to_ours(compare):
    def answers(*seconds, token=1):
        tokens = [[token] * 4] * 2
        return [{"version": "v"}, *({"seconds": s, "tokens": tokens} for s in (9.0, *seconds))]

    row = compare.summarize("dry", answers(2.0, 4.0, token=2), answers(1.0, 1.0))
    assert (row["seconds"], row["ratio"], row["agreement"]) == (3.0, 3.0, 0.0)
    short = [{}, {"tokens": [[1]], "seconds": 1.0}]
    assert "did not return 4 tokens" in compare.summarize("dry", short, short)["error"]


def test_the_readme_shows_the_recorded_ratios():
    table = pd.read_csv(FOLDER / "results" / "cpu" / "peers.csv").dropna(subset="ratio")
    readme = (FOLDER / "README.md").read_text()
    engines = table.peer + " " + table.variant.fillna("")
    for (engine, dtype), rows in table[table.peer != "sarathi_lab"].groupby([engines, "dtype"]):
        shown = " | ".join(f"{ratio:.2f}" for ratio in rows.ratio)
        assert shown in readme, (engine, dtype)
    assert (table.agreement[table.dtype == "float32"] == 1).all()
