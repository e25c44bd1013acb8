"""The notebooks run top to bottom on a fresh clone, and show what they promise; so do they as they
are committed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec

import pytest
from helpers import drawing_once

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.experiment.figures import PAPERS, SERVING
from sarathi_lab.run import main

NOTEBOOKS = REPOSITORY / "notebooks"
LARGEST = 4_000_000  # bytes
PICTURES = {
    "figures": len(PAPERS) + len(SERVING) + 5,
    "walkthrough": 10,
    "compare_runs": 4,
    "your_policy": 2,
}  # fewest; policies on five devices
ONCE = {"lab.tiny_on_this_cpu()": "lab.tiny_on_this_cpu(repetitions=1)"}  # times are not looked at
SMALL = [
    "executor=simulated",
    "model=tiny",
    "batch=3",
    "seq_len=64",
    "pd_ratio=7",
    "workload.num_requests=4",
]
BROWSERS = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
BROWSER = next(BROWSERS, None) if find_spec("playwright") else None
# The notebooks that a plain kernel runs; the figures take half a minute, once is enough.
IN_KERNEL = [name for name in PICTURES if name != "figures" or BROWSER is None]
LONGEST = 240  # seconds of a cell, which takes a tenth of that
# Only against a hang: what a cell takes depends on what else the machine does.
pytestmark = pytest.mark.timeout(1800)


def execute_all(environment: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Printed and rendered text, and number of pictures, of each notebook, run one after another in
    one kernel that forgets its names in between.
    """
    import nbformat  # here, as it takes seconds
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError

    paths = {name: NOTEBOOKS / f"{name}.ipynb" for name in IN_KERNEL}
    notebooks = {name: nbformat.read(path, as_version=4) for name, path in paths.items()}
    for notebook in notebooks.values():
        nbformat.validate(notebook)
    forget = (nbformat.v4.new_code_cell("%reset -f") for _ in notebooks)
    cells = [cell for notebook in notebooks.values() for cell in (*notebook.cells, next(forget))]
    for cell in cells:
        for given, once in ONCE.items():
            cell.source = cell.source.replace(given, once)
    client = NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=LONGEST)
    try:
        client.execute(env=dict(environment))
    except CellTimeoutError:  # seen once: the kernel rests, and its reply never came
        client.execute(env=dict(environment))
    return {name: _shown(notebook["cells"]) for name, notebook in notebooks.items()}


def _shown(cells) -> tuple[str, int]:
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    texts = [
        "".join(output.get("text", "")) + "".join(output.get("data", {}).get("text/markdown", ""))
        for output in outputs
    ]
    return "\n".join(texts), sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture(scope="module")
def executed(tmp_path_factory, made_once):
    """`(text, pictures)` by notebook; the one that compares has a sweep in a folder, and in W&B."""

    def make():
        folder = tmp_path_factory.mktemp("runs")
        command = ["chunk=8,16", "-m", *SMALL, "tracking=wandb", f"output={folder}"]
        assert main(command) == 0
        sweep = next(path.parent.parent for path in folder.glob("*/*/0/run.json"))
        runs = {"SARATHI_LAB_RUNS": f"{sweep},{folder / 'wandb'}"}
        runs |= {"SARATHI_LAB_OUTPUT": str(folder / "own")}
        return execute_all({**os.environ, **drawing_once(folder / "ipython"), **runs})

    return made_once("notebooks", make)


@pytest.mark.skipif(BROWSER is not None, reason="run in the browser")
def test_figures_show_every_figure_with_a_verdict(executed):
    text, pictures = executed["figures"]
    assert pictures == PICTURES["figures"]
    check_verdicts(text.replace("**", ""))


def check_verdicts(text: str) -> None:
    decodes = (
        "decodes that ride on a chunk are up to 10 times cheaper than alone (at least 10): cpu"
    )
    assert decodes in text
    assert "simulated-a6000-profiled 9.26 (8.04 to 10.5) (undecided)" in text
    bubbles = "the bubbles of a pipeline shrink 6.29 times (near 6.29)"
    assert f"{bubbles}: simulated-a100_2023 32.4" in text


def test_the_walkthrough_serves_the_tiny_model_under_every_policy(executed):
    text, pictures = executed["walkthrough"]
    assert pictures >= PICTURES["walkthrough"]
    assert len(re.findall(r"chunk \d+: a decode alone takes -?[\d.]+ times", text)) == 4
    assert re.search(
        r"A6000, simulated: chunk 256 serves most, 1\.\d+ times request-level batching", text
    )


def test_runs_of_a_folder_and_of_wandb_are_compared(executed):
    text, pictures = executed["compare_runs"]
    assert "8 runs:" in text
    assert "simulating" not in text
    assert pictures == PICTURES["compare_runs"]


def test_a_policy_of_ones_own_is_checked_served_and_kept(executed):
    text, pictures = executed["your_policy"]
    assert "progress: policy first_try stalled" in text
    assert "gentle_chunks: no rule is broken in" in text
    assert "a made-up workload: Results(10 runs and 0 baselines" in text
    assert "policy._target_=my_policy.GentleChunks" in text
    assert "Traceback" not in text
    assert re.search(r"^results +\d{4}-", text, re.MULTILINE)
    assert pictures == PICTURES["your_policy"]


@pytest.mark.parametrize("name", PICTURES)
def test_it_is_committed_with_its_pictures_and_nothing_of_the_machine(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert path.stat().st_size < LARGEST
    assert _shown(notebook["cells"])[1] >= PICTURES[name]
    assert not re.search(r"/(tmp|home|root|work|Users)/", json.dumps(notebook))
    assert not any(
        output["output_type"] == "error"
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
    )


# -- in a browser ----------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="needs chromium on the path, and playwright")
def test_figures_are_on_the_page_of_a_jupyterlab_in_a_browser(tmp_path):
    from lab_in_browser import run_in_lab

    page = run_in_lab(NOTEBOOKS / "figures.ipynb", str(BROWSER), tmp_path)
    assert page.errors == []
    assert page.num_executed == page.num_code_cells
    assert len(page.pictures) == PICTURES["figures"]
    for width, height in page.pictures:  # as drawn by the browser, in its pixels
        assert width > 300
        assert height > 150
    check_verdicts(page.text)
