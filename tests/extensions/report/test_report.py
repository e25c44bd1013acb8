"""The page of a sweep and of experiments: its contents."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from sarathi_lab.__main__ import main
from sarathi_lab.experiment.claims import load_claims
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.extensions.report.page import Section, write_page
from sarathi_lab.results import load
from sarathi_lab.results.conclusion import conclusion
from sarathi_lab.results.result import DisplayTable

SMALL = ["executor=simulated", "model=tiny", "batch=3", "seq_len=64", "pd_ratio=7"]
SMALL += ["workload.num_requests=4", "tracking=none", "baselines=[orca]"]
LABEL = "<script>document.title = 'obeyed'</script><img src=x>"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """A sweep over chunks."""
    folder = tmp_path_factory.mktemp("sweep")
    fixed = [f"hydra.sweep.dir={folder}", f"output={folder / 'o'}", *SMALL]
    assert main(["run", "chunk=8,16", "-m", *fixed]) == 0
    return folder


@pytest.fixture(scope="module")
def page(sweep) -> Path:
    assert main(["report", str(sweep)]) == 0
    return sweep / "report.html"


def test_it_says_what_was_run_and_what_follows(page, sweep):
    text, runs = page.read_text(), load.load_runs(sweep)
    for words in (
        "-m chunk=8,16",
        "2 of 2 finished",
        "simulated a6000",
        str(runs.git_commit[0]),
        f"torch {runs['versions.torch'][0]}",
        conclusion(runs)[0].strip(),
    ):
        assert words.replace("'", "&#39;") in text
    assert f"{runs.throughput.max():,.0f}" in text
    assert len(re.findall(r"<img src=.data:image/png", text)) == 1


def test_tables_are_printed_as_markdown_baselines_first(sweep, capsys):
    assert main(["report", str(sweep), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| policy | chunk |"))
    first = [line.split(" | ")[:2] for line in lines[head + 2 : head + 5]]
    assert first == [["| orca *", "-"], ["| sarathi", "8"], ["| sarathi", "16"]]


def test_what_looks_like_html_is_shown_as_text(tmp_path):
    table = DisplayTable([{"run": LABEL}], left=["run"])
    write_page(LABEL, [Section("runs", sentences=[LABEL], tables=[table])], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("&lt;script&gt;document.title") == 4  # the title twice
    assert "&lt;img src=x&gt;" in text
    assert text.count("<script") == 1  # the sorter


def test_recorded_experiments_come_with_their_claims_and_pictures(tmp_path):
    claim = load_claims()[0]
    points = pd.DataFrame(
        [{"figure": claim.experiment, "panel": "", "series": "1K", "x": 2.0, "y": 1234.5}]
    )
    points = points.assign(low=points.y, high=points.y, num_pairs=0, unit="ratio", reason=None)
    path = load.save(points, claim.experiment, "simulated-x", tmp_path)
    path.with_suffix(".png").write_bytes(b"a picture")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "deep" / "page.html")]) == 0
    text = (tmp_path / "deep" / "page.html").read_text()
    assert 'class="holds left">holds</td>' in text
    assert "1 hold on at least one device" in text
    assert CATALOG[claim.experiment].question in text
    assert f"experiment={claim.experiment}" in text
    assert "YSBwaWN0dXJl" in text


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_results_is_one_line_and_code_2(folder, tmp_path, capsys):
    assert main(["report", str(tmp_path / folder)]) == 2
    err = capsys.readouterr().err
    assert "has no finished run and no recorded result" in err
    assert err.count("\n") == 1
