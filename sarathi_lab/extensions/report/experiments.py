"""Sections of recorded experiments: the claims, then each experiment that has results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.paths import CONF, EXPERIMENTS
from sarathi_lab.experiment.claims import HOLDS, HOLDS_WITHIN, in_words, kind_of, verdicts
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.extensions.report.page import Section
from sarathi_lab.results.plots.files import as_png
from sarathi_lab.results.result import DisplayTable
from sarathi_lab.tasks.figures import draw

KINDS = [HOLDS, HOLDS_WITHIN, "fails"]
CLAIMS_TITLE = "Which claims hold"
CLAIMS = ["claim", "device", "verdict", "measured", "expected", "source", "note"]


def sections_of_experiments(root: Path) -> list[Section]:
    """Return the claims, then every experiment that has results."""
    judged = verdicts(root)
    folders = {path.parent for path in root.glob("*/*/results")}
    by_name = sorted(folders, key=lambda folder: folder.name)
    sections = [_of_claims(judged)]
    with progress_of("drawing", len(by_name)) as advance:
        for folder in by_name:
            sections.append(_of_experiment(folder, root, judged))
            advance(1)
    return sections


def _of_claims(judged: pd.DataFrame) -> Section:
    kinds = judged.verdict.map(kind_of)
    num_claims = judged.groupby(kinds).id.nunique()
    num_holding, num_within, num_failing = num_claims.reindex(KINDS, fill_value=0)
    summary = (
        f"Of {judged.id.nunique()} claims {num_holding} hold on at least one device, {num_within} "
        f"within a tolerance, simulated ones included, and {num_failing} fail on at least one."
    )
    counts = pd.crosstab(judged.device, judged.verdict).reset_index()
    rows = counts.to_dict("records")
    by_device = DisplayTable(rows, left=["device"], title="Verdicts by device")
    return Section(CLAIMS_TITLE, [summary], tables=[by_device, _claims_table(judged)])


def _claims_table(judged: pd.DataFrame) -> DisplayTable:
    measured = list(map(in_words, judged.to_dict("records")))
    table = judged.assign(measured=measured)
    rows = table[CLAIMS].to_dict("records")
    return DisplayTable(rows, left=CLAIMS, title="In brackets the interval")


def _of_experiment(folder: Path, root: Path, judged: pd.DataFrame) -> Section:
    """Return the claims and pictures of an experiment, drawn if there are none."""
    name = folder.name
    facts = {}
    if name in CATALOG:
        facts["question"] = CATALOG[name].question
    if (CONF / "experiment" / f"{name}.yaml").is_file():
        facts["command"] = f"python -m sarathi_lab.run experiment={name}"
    tables = []
    claimed = judged[judged.experiment == name]
    if len(claimed):
        tables.append(_claims_table(claimed))
    is_lab = root.resolve() == EXPERIMENTS
    pictures = _pictures(folder, is_lab=is_lab)
    return Section(name, facts=facts, pictures=pictures, tables=tables)


def _pictures(folder: Path, *, is_lab: bool) -> dict[str, bytes]:
    """PNGs in `folder` by their names; of the lab's figures one is drawn if there are none."""
    pictures = {}
    for path in sorted(folder.rglob("*.png")):
        name = str(path.relative_to(folder))
        pictures[name] = path.read_bytes()
    if is_lab and not pictures and folder.name in CATALOG:
        pictures[folder.name] = as_png(draw(folder.name))
    return pictures
