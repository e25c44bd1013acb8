"""The notebooks run top to bottom on a fresh clone, and show what they promise; so do they as they
are committed.
"""

from __future__ import annotations

import json
import re
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.run import main
from sarathi_lab.tasks.figures import FIGURES, SERVING

NOTEBOOKS = REPOSITORY / "notebooks"
LARGEST = 3_000_000  # bytes
PICTURES = {
    "figures": len(FIGURES) + len(SERVING) + 2,
    "walkthrough": 10,
    "compare_runs": 4,
}  # fewest; policies on two devices


def execute(name: str) -> tuple[str, int]:
    """Printed and rendered text, and number of pictures, of an execution."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    return _shown(notebook)


def _shown(notebook: nbformat.NotebookNode) -> tuple[str, int]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = [
        output.get("text", "") + output.get("data", {}).get("text/markdown", "")
        for output in outputs
    ]
    return "\n".join(texts), sum("image/png" in output.get("data", {}) for output in outputs)


def test_figures_show_every_figure_with_a_verdict():
    text, pictures = execute("figures")
    assert pictures == PICTURES["figures"]
    assert (
        "- decode speed-up, highest: paper **9.9**; simulated a6000, profiled, 13b **9.26** (holds)"
        in text
    )
    assert "median bubble time, Orca over SARATHI: paper **6.29**" in text


def test_the_walkthrough_serves_the_tiny_model_under_every_policy():
    text, pictures = execute("walkthrough")
    assert pictures >= PICTURES["walkthrough"]
    assert len(re.findall(r"chunk \d+: a decode alone takes -?[\d.]+ times", text)) == 4
    assert re.search(
        r"A6000, simulated: chunk 256 serves most, 1\.\d+ times request-level batching", text
    )


@pytest.fixture
def runs(tmp_path):
    args = [
        "executor=simulated",
        "model=tiny",
        "batch=3",
        "seq_len=64",
        "pd_ratio=7",
        "workload.num_requests=4",
    ]
    assert main(["chunk=8,16", "-m", *args, "tracking=wandb", f"output={tmp_path}"]) == 0
    return tmp_path


def test_runs_of_a_folder_and_of_wandb_are_compared(runs, monkeypatch):
    sweep = next(path.parent.parent for path in runs.glob("*/*/0/run.json"))
    monkeypatch.setenv("SARATHI_LAB_RUNS", f"{sweep},{runs / 'wandb'}")
    text, pictures = execute("compare_runs")
    assert "8 runs:" in text
    assert "simulating" not in text
    assert pictures == PICTURES["compare_runs"]


@pytest.mark.parametrize("name", PICTURES)
def test_it_is_committed_with_its_pictures_and_nothing_of_the_machine(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
    assert _shown(notebook)[1] >= PICTURES[name]
    assert not re.search(r"/(tmp|home|root|work|Users)/", json.dumps(notebook))
    assert not any(
        output.output_type == "error"
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )


# -- in a browser ----------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = "needs chromium on the path (apt-get install chromium)"


@pytest.mark.browser
@pytest.mark.timeout(420)
@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason=NO_BROWSER)
def test_figures_are_on_the_page_of_a_jupyterlab_in_a_browser(tmp_path):
    pytest.importorskip("playwright", reason="needs playwright (in the extra `test`)")
    from lab_in_browser import run_in_lab

    browser = next(path for path in map(shutil.which, BROWSERS) if path)
    page = run_in_lab(NOTEBOOKS / "figures.ipynb", browser, tmp_path)
    assert page.errors == []
    assert page.num_executed == page.num_code_cells
    assert len(page.pictures) == PICTURES["figures"]
    for width, height in page.pictures:  # as drawn by the browser, in its pixels
        assert width > 300
        assert height > 150
    assert "decode speed-up, highest: paper 9.9" in page.text
