"""The notebook runs top to bottom: on measured-looking results, on partial ones, and on none at all."""

from __future__ import annotations

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
        "Best here: chunk 256",
        "Paper, 1K_b18, P:D near 14: chunk 256, 1.26",
        "piggybacked: cheaper",
        "factor 2.",
    ):
        assert words in text
    assert "SARATHI is ahead of Orca" in text


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


def test_it_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
