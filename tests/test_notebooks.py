"""The notebooks run from top to bottom in a kernel, on a fresh clone and beside earlier runs, and
show what they promise; as committed, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import drawing_once

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.experiment.registry import FIGURES, PAPERS
from sarathi_lab.results.load import group_of
from sarathi_lab.tasks.claims import AFTER

NOTEBOOKS = REPOSITORY / "notebooks"
LARGEST = 4_000_000  # bytes
SERVING = [name for name, figure in FIGURES.items() if figure.is_in_rounds]
LATER = [name for name in SERVING if group_of(name) == AFTER]
PICTURES = {
    "compare_runs": 2,
    "your_policy": 2,
    "playground": 1,
    AFTER: len(LATER),
    "walkthrough": 10,
    "figures": len(PAPERS) + len(SERVING) - len(LATER) + 5,  # policies on five devices
}  # fewest
ONCE = {  # times are not looked at
    "lab.tiny_on_this_cpu()": "lab.tiny_on_this_cpu(repetitions=1)",
    '"workload.num_requests": 60': '"workload.num_requests": 20',
    '"sarathi", "sarathi_serve", "vllm_v1"]': '"sarathi"]',
}
QUICKENED = [  # the kernel, as the tests' own processes are
    f"import sys; sys.path.append({str(Path(__file__).parent / 'support')!r})",
    "import quickened; quickened.quicken(); quickened.collect_seldom()",
]
LONGEST = 240  # seconds of a cell, which takes a tenth of that
AGAIN = "compare_runs, again"  # once there are runs
# Only against a hang: what a cell takes depends on what else the machine does.
pytestmark = pytest.mark.timeout(1800)


def in_kernel(
    folder: Path, environment: Mapping[str, str], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Printed and rendered text, and number of pictures, of each notebook, run one after another in
    one kernel that forgets its names in between.
    """
    import nbformat  # here, as it takes seconds
    from nbclient import NotebookClient

    paths = {name: NOTEBOOKS / f"{name.partition(',')[0]}.ipynb" for name in names}
    notebooks = {name: nbformat.read(path, as_version=4) for name, path in paths.items()}
    for notebook in notebooks.values():
        nbformat.validate(notebook)
    forget = (nbformat.v4.new_code_cell("%reset -sf") for _ in notebooks)
    cells = [cell for notebook in notebooks.values() for cell in (*notebook.cells, next(forget))]
    for i, cell in enumerate(cells):
        cell.id = f"cell-{i}"  # each notebook has numbered its own
        for given, once in ONCE.items():
            cell.source = cell.source.replace(given, once)
    resources = {"metadata": {"path": str(NOTEBOOKS)}}  # their own folder, as Jupyter has it
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=cells), timeout=LONGEST, resources=resources
    )
    whole = {**os.environ, **drawing_once(folder / "ipython", QUICKENED), **environment}
    client.execute(env=whole)
    shown = {name: _shown(notebook["cells"]) for name, notebook in notebooks.items()}
    return {name: {"text": text, "pictures": number} for name, (text, number) in shown.items()}


def _shown(cells) -> tuple[str, int]:
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    kinds = ("text/markdown", "text/html")
    texts = [
        "".join(output.get("text", ""))
        + "".join("".join(output.get("data", {}).get(kind, "")) for kind in kinds)
        for output in outputs
    ]
    return "\n".join(texts), sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture(scope="module")
def executed(tmp_path_factory, made_once):
    """Text and pictures by notebook. `outputs` is empty when the first begins, and has the two
    sweeps and the run of `your_policy` when `AGAIN` does.
    """

    def make():
        folder = tmp_path_factory.mktemp("notebooks")
        environment = {"SARATHI_LAB_OUTPUT": str(folder / "outputs"), "SARATHI_LAB_RUNS": ""}
        return in_kernel(folder, environment, [*PICTURES, AGAIN])

    return made_once("notebooks", make)


@pytest.mark.parametrize("name", [*PICTURES, AGAIN])
def test_all_pictures_are_there_and_nothing_failed(executed, name):
    found = executed[name]
    assert "Traceback" not in found["text"]
    assert found["pictures"] >= PICTURES[name.partition(",")[0]]


def test_figures_have_their_verdicts(executed):
    text = executed["figures"]["text"].replace("**", "")
    decodes = (
        "decodes that ride on a chunk are up to 10 times cheaper than alone (at least 10): cpu"
    )
    assert decodes in text
    assert "simulated-a6000-profiled 9.26 (8.04 to 10.5) (undecided)" in text
    bubbles = "the bubbles of a pipeline shrink 6.29 times (near 6.29)"
    assert f"{bubbles}: simulated-a100_2023 32.4" in text


def test_the_walkthrough_serves_the_tiny_model_under_every_policy(executed):
    text = executed["walkthrough"]["text"]
    assert len(re.findall(r"chunk \d+: a decode alone takes -?[\d.]+ times", text)) == 4
    assert re.search(
        r"A6000, simulated: chunk 256 serves most, 1\.\d+ times request-level batching", text
    )


def test_the_map_has_every_claim_with_its_verdict(executed):
    text = executed[AFTER]["text"]
    assert all(f"[{name}](../experiments/{AFTER}/{name}/README.md)" in text for name in LATER)
    assert "(at least 4.48): simulated-h100-profiled **1.32" in text


def test_runs_are_compared_with_and_without_ones_own(executed):
    first, again = executed["compare_runs"], executed[AGAIN]
    assert "outputs/ has no runs yet: simulating 13B on an A6000." in first["text"]
    assert "5 runs (" in first["text"]
    assert re.search(r"sarathi chunk=\d+ serves 1\.\d+ times orca's tokens", first["text"])
    assert "no runs yet" not in again["text"]
    assert "6 runs (" in again["text"], "the newest sweep is open"


def test_the_playground_opens_where_chunks_gain(executed):
    gain = r"sarathi serves [\d,]+ tokens/s, (\d\.\d+) times orca's"
    assert float(re.search(gain, executed["playground"]["text"])[1]) > 1.02


def test_a_policy_of_ones_own_is_checked_served_and_kept(executed):
    text = executed["your_policy"]["text"]
    assert "progress: policy first_try stalled" in text
    assert "gentle_chunks: no rule is broken in" in text
    assert "a made-up workload: Results(6 runs and 0 baselines" in text
    assert "policy._target_=my_policy.GentleChunks" in text
    assert re.search(r"^results +\d{4}-", text, re.MULTILINE)


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
