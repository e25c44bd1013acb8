"""The notebook runs top to bottom: on measured-looking results, on partial ones, and on none at all."""

from __future__ import annotations

import json

import nbformat
import pytest
from nbclient import NotebookClient

from sarathi_lab.paths import REPOSITORY
from sarathi_lab.run import main

NOTEBOOK = REPOSITORY / "notebooks" / "figures.ipynb"


def execute(results, monkeypatch) -> tuple[str, int]:
    """Printed text and number of pictures of an execution over `results`."""
    monkeypatch.setenv("SARATHI_LAB_RESULTS", str(results))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    return text, sum("image/png" in output.get("data", {}) for output in outputs)


def test_without_results_it_simulates_and_says_so(tmp_path, monkeypatch):
    text, pictures = execute(tmp_path / "none", monkeypatch)
    assert "simulating the paper's 13B on an A6000 instead (nothing is measured)" in text
    assert pictures == 4
    for words in (
        "Best here: chunk 256, sarathi",
        "Paper, 1K_b18, P:D near 14: chunk 256, 1.26",
        "piggybacked: cheaper",
        "factor 2.",
    ):
        assert words in text
    assert "sarathi, chunk=256: ahead of Orca at" in text


@pytest.fixture
def tiny_sweep(tmp_path):
    args = ["model=tiny", "device=cpu", "tracking=none", "workload.num_requests=4", "batch=3", "seq_len=64"]
    assert main(["chunk=8,16", "-m", *args, "pd_ratio=7", f"output={tmp_path}"]) == 0
    return tmp_path


def test_on_results_of_this_machine_it_simulates_nothing(tiny_sweep, monkeypatch, capsys):
    text, pictures = execute(tiny_sweep, monkeypatch)
    assert "simulating" not in text
    assert "4 runs below" in text
    assert pictures == 3
    assert "No sweep varies pd_ratio. Make one" in text
    assert "No figure was recomputed here. Do it: python -m sarathi_lab.run experiment=paper" in text


@pytest.fixture
def grid(tmp_path):
    """Chunks 128 and 256 over two P:D: best at 256 and P:D 20, where Orca is behind; Orca ahead of their mean."""
    throughputs = {("sarathi", 128): (90, 60), ("sarathi", 256): (80, 120), ("orca", None): (105, 95)}
    throughputs["request_level", None] = (100, 100)
    labels = {"batch": 8, "seq_len": 1024, "workload": "paper_grid", "model": "30m", "device": "cpu", "seed": 0}
    labels |= {"dtype": "float32", "executor": "torch", "started_at": "2026-01-01T00:00:00"}
    job = 0
    for (policy, chunk), row in throughputs.items():
        for pd_ratio, throughput in zip((5, 20), row, strict=True):
            folder = tmp_path / (str(job) if chunk else f"baselines/{policy}-{pd_ratio}")
            folder.mkdir(parents=True)
            own = {"policy": policy, "chunk": chunk, "pd_ratio": pd_ratio, "is_baseline": chunk is None}
            (folder / "run.json").write_text(json.dumps(labels | own))
            summary = {"throughput": throughput, "kv_reread_factor": 2.0, "kv_read_bytes": 1e9}
            summary |= {"num_prompt_tokens": 1000, "num_requests": 1}
            (folder / "summary.json").write_text(json.dumps(summary))
            job += 1
    return tmp_path


def test_verdicts_on_a_grid_compare_like_with_like(grid, monkeypatch):
    text, _ = execute(grid, monkeypatch)
    assert "shown where throughput_vs_request_level is highest: pd_ratio=20." in text
    assert "Best here: chunk 256, sarathi, 1.20" in text
    assert "Paper, 1K_b18, P:D near 20" in text
    assert "sarathi, chunk=128: ahead of Orca at 0 of 2 P:D ratios;" in text
    assert "sarathi, chunk=256: ahead of Orca at 1 of 2 P:D ratios (20)" in text
    assert "its best is 1.20 at P:D=20; C/(B-1) = 36.6." in text


def test_recomputed_figures_are_drawn_with_their_errors(tiny_sweep, monkeypatch):
    assert main(["task=figures", "task.figures=[table2]", "tracking=none", f"output={tiny_sweep}"]) == 0
    assert main(["task=figures", "task.figures=[table2,table4]", "tracking=none", f"output={tiny_sweep}"]) == 0
    text, pictures = execute(tiny_sweep, monkeypatch)
    assert "figure.parquet" in text
    assert pictures == 5  # three of the sweep, and both tables of the larger experiment


def test_it_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
