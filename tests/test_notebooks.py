"""The notebooks run from top to bottom in a kernel, on a fresh clone and beside earlier runs, and
show what they promise; as committed, too.
"""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.experiment.claims import load_claims
from sarathi_lab.experiment.registry import CATALOG, PAPERS
from sarathi_lab.results.load import group_of
from sarathi_lab.tasks.claim_tables import AFTER

NOTEBOOKS = REPOSITORY / "notebooks"
LARGEST = 4_000_000  # bytes
SERVING = [name for name, figure in CATALOG.items() if figure.is_in_rounds]
LATER = [name for name in SERVING if group_of(name) == AFTER]
SERVED = {
    "compare_runs": 2,
    "your_policy": 2,
    "your_server": 2,
    "playground": 1,
    "walkthrough": 10,
}
RECORDED = {
    AFTER: len(LATER),
    "figures": len(PAPERS) + len(SERVING) - len(LATER) + 5,  # policies on five devices
}
PICTURES = SERVED | RECORDED  # fewest
SMALL = {  # times are not looked at
    "lab.tiny_on_this_cpu()": "lab.tiny_on_this_cpu(repetitions=1)",
    '"workload.num_requests": 60': '"workload.num_requests": 8',
    '"workload.num_requests": 8}': '"workload.num_requests": 2}',
    '"orca", "sarathi", "sarathi_serve", "vllm_v1"]': '"orca"]',
    '"executor.kernels": "torch", ': "",
    '    device="cpu",\n': '    executor="simulated",\n',
    'policy=["vllm_v1", "sarathi_serve"], chunk=[512, 4096]': 'policy="sarathi_serve", chunk=512',
    '"host.graphs.largest": [8, 256]': '"host.graphs.largest": [8]',
    "range(8, 521, 8)": "range(8, 521, 64)",
    "workload.num_requests=32": "workload.num_requests=4",
    "(8, 16, 32, 64, 128), requests": "(8, 32), requests",
}
# The kernel is quickened as the tests are. Its pictures are made, but not drawn: tests of
# plots draw them.
SETTINGS = f"""
c.InlineBackend.print_figure_kwargs = {{"bbox_inches": None}}
c.InteractiveShellApp.exec_lines = [
    "import sys; sys.path.append({str(Path(__file__).parent / "support")!r})",
    "import quickened; quickened.quicken(); quickened.collect_seldom()",
    "from matplotlib.figure import Figure; Figure.draw = lambda self, renderer: None",
]
"""
LONGEST = 240  # seconds of a cell, which takes a tenth of that
# Only against a hang: what a cell takes depends on what else the machine does.
pytestmark = pytest.mark.timeout(1800)


def in_kernel(folder: Path, environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Printed and rendered text, and number of pictures, of each notebook of `SERVED`, run one
    after another in one kernel that forgets its names in between.
    """
    import nbformat  # here, as it takes seconds
    from nbclient import NotebookClient

    notebooks = {name: nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for name in SERVED}
    for notebook in notebooks.values():
        nbformat.validate(notebook)
    forget = (nbformat.v4.new_code_cell("%reset -sf") for _ in notebooks)
    cells = [cell for notebook in notebooks.values() for cell in (*notebook.cells, next(forget))]
    for i, cell in enumerate(cells):
        cell.id = f"cell-{i}"  # each notebook has numbered its own
        for given, small in SMALL.items():
            cell.source = cell.source.replace(given, small)
    resources = {"metadata": {"path": str(NOTEBOOKS)}}  # their own folder, as Jupyter has it
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=cells), timeout=LONGEST, resources=resources
    )
    settings = folder / "ipython" / "profile_default" / "ipython_kernel_config.py"
    settings.parent.mkdir(parents=True)
    settings.write_text(SETTINGS)
    client.execute(env={**os.environ, "IPYTHONDIR": str(folder / "ipython"), **environment})
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
    """Text and pictures by notebook; there are no runs when the first begins."""

    def make():
        folder = tmp_path_factory.mktemp("notebooks")
        environment = {"SARATHI_LAB_OUTPUT": str(folder / "outputs"), "SARATHI_LAB_RUNS": ""}
        return in_kernel(folder, environment)

    return made_once("notebooks", make)


@pytest.mark.parametrize("name", SERVED)
def test_all_pictures_are_there_and_nothing_failed(executed, name):
    assert "Traceback" not in executed[name]["text"]
    assert executed[name]["pictures"] >= PICTURES[name]


def test_notebooks_print_what_they_promise(executed):
    text = {name: found["text"] for name, found in executed.items()}
    assert (
        len(re.findall(r"chunk \d+: a decode alone takes -?[\d.]+ times", text["walkthrough"])) == 4
    )
    best = r"A6000, simulated: chunk 256 serves most, 1\.\d+ times request-level batching"
    assert re.search(best, text["walkthrough"])
    assert "outputs/ has no runs yet: simulating 13B on an A6000." in text["compare_runs"]
    assert "5 runs (" in text["compare_runs"]
    assert re.search(r"sarathi chunk=\d+ beside orca: better in throughput", text["compare_runs"])
    gain = r"sarathi serves [\d,]+ tokens/s, (\d\.\d+) times orca's"
    assert float(re.search(gain, text["playground"])[1]) > 1.02
    policy = text["your_policy"]
    assert "progress: policy first_try stalled" in policy
    assert "gentle_chunks: no rule is broken in" in policy
    assert "a made-up workload: Results(4 runs and 0 baselines" in policy
    assert "policy._target_=my_policy.GentleChunks" in policy
    for name in ("real", "as_run", "sarathi_serve"):
        assert f">{name}</td>" in text["your_server"]
    assert re.search(r"^results +\S*\d{4}-", policy, re.MULTILINE)


def test_notebooks_of_records_show_pictures_and_verdicts(monkeypatch):
    """Without a kernel; pictures are drawn in tests/experiment."""
    for drawing in ("draw", "policies"):
        monkeypatch.setattr(f"sarathi_lab.tasks.figures.{drawing}", lambda *args, **_: "picture")
    text = {}
    for name, number in RECORDED.items():
        shown: list[Any] = []
        names = {"display": lambda *parts, shown=shown: shown.extend(parts)}
        for cell in json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
        assert shown.count("picture") >= number
        text[name] = "".join(one.data for one in shown if one != "picture").replace("**", "")
    assert "decodes that ride on a chunk are up to 10 times cheaper than alone" in text["figures"]
    assert "simulated-a6000-profiled 9.26 (6.78 to 12.6) (direction holds)" in text["figures"]
    assert "shrink 6.29 times (near 6.29): simulated-a100_2023 7.9" in text["figures"]
    assert "(at least 4.48): simulated-h100-profiled 1.25" in text[AFTER]


def test_the_committed_map_has_every_claim():
    text = _shown(json.loads((NOTEBOOKS / f"{AFTER}.ipynb").read_text())["cells"])[0]
    with_claims = {claim.experiment for claim in load_claims()} & set(LATER)
    assert len(with_claims) > 5
    for name in with_claims:
        assert f"[{name}](../experiments/{AFTER}/{name}/README.md)" in text


@pytest.mark.parametrize("name", PICTURES)
def test_it_is_committed_with_its_pictures_and_nothing_of_the_machine(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert path.stat().st_size < LARGEST
    assert _shown(notebook["cells"])[1] >= PICTURES[name]
    assert not re.search(r"/(tmp|home|root|work|Users)/", json.dumps(notebook))
    outputs = (output for cell in notebook["cells"] for output in cell.get("outputs", ()))
    assert not any(output["output_type"] == "error" for output in outputs)


def test_an_executed_notebook_has_paths_from_its_folder():
    """What it prints is read in clones that are elsewhere."""
    pytest.importorskip("nbclient")
    execute = runpy.run_path(str(NOTEBOOKS / "execute.py"))
    printed = f"results {REPOSITORY}/outputs/1\ntable {REPOSITORY}/outputs/1/sweep.csv"
    outputs = [
        {"output_type": "stream", "text": printed, "name": "stdout"},
        {"output_type": "display_data", "data": {"text/markdown": printed}, "metadata": {}},
    ]
    stream, display = execute["from_notebooks"](outputs)
    assert stream.text == "results ../outputs/1\ntable ../outputs/1/sweep.csv"
    assert display.data["text/markdown"] == stream.text
