"""The command that draws the paper's figures: what it writes, what it says, and that it shows what
is recorded.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import sarathi_lab as lab
from sarathi_lab.config.csv_files import csv_file
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.claims import COLUMNS as CLAIM_COLUMNS
from sarathi_lab.experiment.claims import verdict
from sarathi_lab.experiment.recorded import paper, points_of
from sarathi_lab.experiment.registry import CATALOG, load_experiment
from sarathi_lab.results import load
from sarathi_lab.results.plots.panels import draw
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.run import main as run
from sarathi_lab.tasks import figures
from sarathi_lab.tasks.figures import lines, main


def is_drawn(path: Path) -> bool:
    """Whether a picture has the size of a figure, and lines of several colours on it."""
    picture = Image.open(path)
    colours = picture.convert("RGB").getcolors(maxcolors=2**24)
    return min(picture.size) > 300 and colours is not None and len(colours) > 20


def test_it_writes_png_and_pdf(tmp_path):
    names = ("fig08", "batch_size")
    chosen = [word for name in names for word in ("--only", name)]
    assert main([*chosen, "--out", str(tmp_path / "new")]) == 0
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "new").iterdir()}
    assert set(sizes) == {f"{name}.{ending}" for name in names for ending in ("png", "pdf")}
    assert min(sizes.values()) > 10_000


def test_recorded_pictures_are_drawn_anew_where_they_lie(tmp_path):
    results = EXPERIMENTS / "sarathi" / "chunk_size" / "results"
    kept = csv_file(results / "cpu" / "chunk_size.csv")
    place = tmp_path / "sarathi" / "chunk_size" / "results" / "simulated-a6000"
    place.mkdir(parents=True)
    shutil.copy(kept, place)
    for name in ("chunk_size.png", "other.png"):
        (place / name).write_bytes(b"old")
    table = tmp_path / "after_sarathi" / "p_pas_gain" / "results" / "simulated" / "p_pas_gain.csv"
    table.parent.mkdir(parents=True)
    table.write_text("y\n1\n")
    page_of_another = tmp_path / "lab" / "leaderboard" / "results" / "p_pas_gain.png"
    page_of_another.parent.mkdir(parents=True)
    page_of_another.write_bytes(b"old")
    with pytest.raises(UserError, match="--only=fig99"):
        figures.redraw(tmp_path, only=["fig99"])
    with pytest.raises(UserError, match="--only=other has no recorded table"):
        figures.redraw(tmp_path, only=["other"])
    assert (place / "chunk_size.png").read_bytes() == b"old"
    assert figures.redraw(tmp_path) == 0
    assert is_drawn(place / "chunk_size.png")
    assert (place / "other.png").read_bytes() == b"old"
    assert page_of_another.read_bytes() == b"old"


@pytest.mark.parametrize("option", [["--all"], ["--out", "pictures"]])
def test_recorded_pictures_have_their_folders_and_their_lines(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        figures.main(["--recorded", "--only", "fig09", *option])
    assert "leave out --out and --all" in capsys.readouterr().err


def test_the_figure_of_the_tour_is_simulated_recorded_and_drawn(tmp_path, monkeypatch):
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (overlay,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "tour.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "experiment" / "chunk_gain.yaml"
    path.parent.mkdir()
    overlay = overlay.replace("paper:", "real:").replace("dry:", "paper:")
    path.write_text(overlay.replace("sarathi_lab.experiment.chunk_gain.", "tour."))
    places = [f"--config-dir={tmp_path}", f"task.record={tmp_path}", f"hydra.run.dir={tmp_path}"]
    chosen = ["experiment=chunk_gain", "executor=simulated", "model=tiny", "tracking=none"]
    chosen += ["task.processes=1"]  # a worker started for an earlier test has an older sys.path
    assert run([*chosen, *places]) == 0
    assert is_drawn(tmp_path / "chunk_gain.png")
    points = load.load("chunk_gain", tmp_path).assign(source="simulated")
    (ax,) = draw(load_experiment("tour.chunk_gain").look, points.assign(device="a")).axes
    assert ax.get_xlabel() == "chunk"
    assert " ".join(ax.get_ylabel().split()).startswith("gain, axis from 0.")
    assert list(ax.lines[0].get_xdata()) == [8, 16]


def test_an_axis_shows_more_than_the_last_digits_and_says_where_it_begins():
    columns = {"figure": "f", "panel": "p", "series": "s", "unit": "ratio", "device": "cpu"}
    points = pd.DataFrame({"x": [1.0, 2.0], "y": [0.56, 0.560006], "low": None, "high": None})
    points = points.assign(**columns, source="measured")
    (ax,) = draw(PlotSpec(x="P:D", y="gain", log_x=True), points).axes
    low, high = ax.get_ylim()
    assert high - low > 0.02
    assert ax.get_ylabel().split() == ["gain,", *f"axis from {low:.3g}".split()]
    assert ax.get_xlabel().split() == ["P:D,", "log", "scale"]


def test_bars_of_the_paper_are_drawn_where_too_little_was_measured():
    picture = draw(CATALOG["table2"].look, paper("table2"))
    assert [ax.get_ylabel() for ax in picture.axes if ax.has_data()] == ["ms"] * 3


@pytest.mark.parametrize("name", ["sarathi_serve_budget", "sarathi_serve_capacity"])
def test_what_is_recorded_of_serving_is_drawn_for_every_device(name):
    titles = [ax.get_title() for ax in figures.draw(name).axes if ax.has_data()]
    devices = {title.split()[0].removesuffix(",") for title in titles}
    points = load.load(name).dropna(subset="y")
    assert devices == set(points.device)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "fig99"], "--only=fig99 is unknown (did you mean fig09?); use one of fig03"),
        (["--only", "fig08", "--out", "/dev/null/x"], "--out=/dev/null/x can't be written"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


MEASURED = {"figure": "fig08", "panel": "", "series": "256", "x": 2.0, "unit": "ratio"}


def test_the_verdict_is_that_of_the_claims_on_every_device_that_has_a_number():
    row = dict.fromkeys(CLAIM_COLUMNS, "")
    row |= {"claim": "it gains", "expected": "at least 2", "experiment": "fig08", "device": "cpu"}
    row |= {"measured": 2.5, "low": 2.0, "high": 3.0, "confidence": 0.96, "verdict": "holds"}
    none = {**row, "device": "none", "measured": np.nan, "verdict": "not measured"}
    said = verdict("fig08", pd.DataFrame([row, none]))
    assert said == "- it gains (at least 2): cpu **2.5 (2 to 3, 96 %)** (holds)."
    said = verdict("fig08", pd.DataFrame([none]))
    assert said.endswith("No device has recorded results of it.")


def test_a_figures_claims_may_be_judged_by_another_experiment():
    row = dict.fromkeys(CLAIM_COLUMNS, "")
    row |= {"experiment": "chunk_optimum", "verdict": "fails", "confidence": 0.95}
    row |= {"claim": "it peaks", "measured": 1.0, "low": 1.0, "high": 1.0, "device": "cpu"}
    sources = ["SARATHI, section 5.1.2 and Fig 9", "Sarathi-Serve, Fig 9"]
    table = pd.DataFrame([{**row, "source": source} for source in sources])
    assert verdict("fig09", table).startswith("- it peaks")
    assert verdict("fig09", table.iloc[1:]) == "- No claim is read from it."
    with pytest.raises(UserError, match="verdict=fig9 is unknown"):
        lab.verdict("fig9")


def test_recorded_results_of_devices_are_among_the_points(monkeypatch):
    row = {**MEASURED, "series": 256, "panel": None, "y": 3.0, "low": 2.5, "high": 3.5}
    row |= {"device": "cpu", "is_simulated": False, "model": "30m", "device_name": "cpu (a chip)"}
    table = pd.DataFrame([row])
    both = pd.concat([table, table.assign(device="simulated-a6000", is_simulated=True)])
    monkeypatch.setattr(load, "recorded", lambda: ["fig08"])
    monkeypatch.setattr(load, "load", lambda name: both)
    (found,) = points_of("fig08").query("source == 'measured'").to_dict("records")
    expected = {**MEASURED, "device": "cpu, 30m", "y": 3.0, "low": 2.5, "high": 3.5}
    assert {name: found[name] for name in expected} == expected


def test_the_peaks_of_a_figure_of_gains_are_told():
    (table,) = figures.peak_tables(points_of("fig09", "fig08"))
    (papers,) = [row for row in table.rows if (row["panel"], row["device"]) == ("1K", "paper")]
    assert papers["highest"] == "1.26"
    assert papers["at"] == "P:D 14, C=256"


def test_a_map_of_batches_needs_room_for_its_smallest_one():
    """Of a GPU with little memory the larger ones are left out, and a simulated one has all."""
    figure = CATALOG["piggyback_boundary"]
    spec = load_option("model", "llama3.1-8b")
    sizes = figure.sizes("paper")
    backend = SimulatedBackend(load_option("hardware", "a6000"))
    assert figure.least_tokens(backend, spec, sizes) < 1024
    assert figure.room(backend, spec, sizes).kv_tokens > 8_000_000


def test_a_table_of_simulated_seeds_says_whether_it_has_the_cost_models_errors():
    point = {"figure": "a", "panel": "", "series": "b", "x": 1.0, "y": 2.0, "low": 1.0, "high": 3.0}
    points = pd.DataFrame([{**point, "unit": "s", "confidence": 0.97, "num_pairs": 6}])
    assert lines("cpu", points).title.endswith("intervals of 95 %")
    of_seeds = lines("simulated", points.assign(level="analytic")).title
    assert of_seeds.endswith("of the seeds alone, without the cost model's errors")
    of_both = lines("simulated", points.assign(level="analytic", draws="2.1 1.9")).title
    assert of_both.endswith("intervals of 95 %, with the cost model's errors")
