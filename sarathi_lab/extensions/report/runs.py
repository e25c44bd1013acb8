"""Sections of what was run: sweeps, and runs with their baselines."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import yaml

from sarathi_lab.config.run_context import SweepRecord, as_command
from sarathi_lab.extensions.report.page import Section
from sarathi_lab.results import load, sweep_analysis
from sarathi_lab.results.conclusion import conclusion
from sarathi_lab.results.plots.files import as_png
from sarathi_lab.results.report import notes_of, sweep_table

LABELS = ("device", "model", "dtype", "executor")  # of runs, that are facts of the sweep


def sections_of_runs(folder: Path) -> list[Section]:
    """Return the sweeps in `folder`, the newest first; none if it has no runs."""
    runs = load.load_runs(folder)
    if runs.empty:
        return []
    started = runs.groupby("sweep").started_at.max()
    sections = []
    for sweep in started.sort_values(ascending=False, kind="stable").index:
        of_sweep = runs[runs.sweep == sweep]
        sections.append(_of_sweep(Path(str(sweep)), of_sweep, folder))
    return sections


def _of_sweep(sweep: Path, runs: pd.DataFrame, folder: Path) -> Section:
    """A sweep, or a single run with its baselines; `folder` is what was asked for."""
    # Columns of other sweeps in the same folder would be empty in this table.
    runs = runs.dropna(axis="columns", how="all")
    varying = sweep_analysis.varied(runs)
    swept = sweep_analysis.without_baselines(runs)
    title = str(swept.name.iloc[0])
    if varying:
        title = f"Sweep of {', '.join(varying)}"
    sentences = [*notes_of(runs), *conclusion(runs)]
    facts = _facts(sweep, swept)
    facts["folder"] = str(sweep)
    return Section(
        title,
        sentences=[sentence.strip() for sentence in sentences],
        facts=facts,
        pictures={title: _picture(sweep, runs, folder)},
        tables=[sweep_table(runs, "Runs")],
    )


def _picture(sweep: Path, runs: pd.DataFrame, folder: Path) -> bytes:
    """The sweep's picture, maybe by axes that the user chose; drawn if there is none."""
    drawn = sweep / "sweep.png"
    # A run elsewhere may name a sweep whose picture has more runs than were asked for.
    if drawn.is_file() and sweep.resolve().is_relative_to(folder.resolve()):
        return drawn.read_bytes()
    from sarathi_lab.results.plots.sweeps import draw_sweep  # matplotlib takes a second

    return as_png(draw_sweep(runs))


def _overrides(folder: Path) -> list[str]:
    """Read the settings that were typed for the run in a folder; none of a sweep's folder."""
    path = folder / ".hydra" / "overrides.yaml"
    if not path.is_file():
        return []
    overrides: list[str] = yaml.safe_load(path.read_text())
    return overrides


def _versions(runs: pd.DataFrame) -> list[str]:
    """List the packages that computed runs, each with its versions."""
    versions = []
    for column in map(str, runs):
        if column.startswith("versions."):
            package = column.removeprefix("versions.")
            versions.append(f"{package} {_values(runs, column)}")
    return versions


def _facts(sweep: Path, runs: pd.DataFrame) -> dict[str, str]:
    """The command, devices and versions, by the runs' labels and the sweep's record."""
    facts = {}
    record = SweepRecord.find(sweep)
    if record is not None:
        facts["command"] = record.command
        facts["runs"] = f"{len(runs)} of {record.num_jobs} finished"
    else:
        facts["runs"] = str(len(runs))
        overrides = _overrides(sweep)  # of a single run
        if overrides:
            facts["command"] = as_command(overrides)
    for label in LABELS:
        facts[label] = _values(runs, label)
    facts["commit"] = _values(runs, "git_commit")
    facts["versions"] = ", ".join(_versions(runs))
    return {name: fact for name, fact in facts.items() if fact}


def _values(runs: pd.DataFrame, column: str) -> str:
    """All values of a column; empty without it."""
    if column not in runs:
        return ""
    return " or ".join(map(str, runs[column].dropna().unique()))
