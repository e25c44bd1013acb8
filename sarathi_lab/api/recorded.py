"""What is recorded in `experiments/`, as the notebooks show it: pictures, verdicts, errors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pandas as pd

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import require_one_of
from sarathi_lab.experiment import claims as judged
from sarathi_lab.experiment import recorded
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results import load
from sarathi_lab.results.result import markdown
from sarathi_lab.tasks import claim_tables, figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = ["mean", "largest", "stated", "aim_mean", "aim_largest"]  # columns of errors


@cache
def _verdicts() -> pd.DataFrame:
    """Judge all claims, which takes half a minute."""
    claims = judged.load_claims()
    with progress_of("judging", len(claims), "claims") as advance:
        return judged.verdicts(claims=claims, advance=advance)


def figure(name: str, *, is_all: bool = False) -> Figure:
    """Draw what is recorded of an experiment beside the paper.

    Args:
        name: Such as "fig09".
        is_all: Whether every simulated line is drawn, not one a GPU.

    Raises:
        UserError: For no experiment that is drawn.
    """
    require_one_of("figure", name, CATALOG)
    return figures.draw(name, is_all=is_all)


def verdict(name: str) -> str:
    """Return what an experiment's claims come to on each device, in Markdown.

    Raises:
        UserError: For no experiment.
    """
    # First, as judging takes its time.
    require_one_of("verdict", name, CATALOG)
    return judged.verdict(name, _verdicts())


def verdicts() -> str:
    """Return a row for each claim, with the devices on which it holds, in Markdown."""
    judgements = _verdicts()
    measured = judgements[judgements.verdict != judged.NOT_MEASURED]
    reached = set(measured.verdict)
    columns = [verdict for verdict in judged.VERDICTS if verdict in reached]
    rows = [["experiment", "claim", *columns]]
    for (experiment, claim), group in measured.groupby(["experiment", "claim"]):
        cells = [str(experiment), str(claim)]
        devices = group.device.str.removeprefix("simulated-")
        for verdict in columns:
            has_verdict = group.verdict == verdict
            devices_of_verdict = ", ".join(devices[has_verdict])
            cells.append(devices_of_verdict)
        rows.append(cells)
    return markdown(rows)


def errors() -> str:
    """Return the simulator's errors against the paper's points, in Markdown."""
    points = recorded.points_of()
    table = recorded.error_table(points)
    as_percent = "{:.1%}".format
    for name in table.columns.intersection(SHARES):
        table[name] = table[name].map(as_percent, na_action="ignore")
    with_gaps = table.astype(object)
    texts = with_gaps.fillna("").astype(str)
    heading = list(map(str, texts))
    rows = texts.to_numpy().tolist()
    return markdown([heading, *rows])


def later_claims(root: str = "") -> str:
    """Return the claims on what came after SARATHI in Markdown; `root` leads to `experiments/`."""
    return claim_tables.map_table(_verdicts(), root)


def policy_figures() -> dict[str, Figure]:
    """Draw all policies on the same arrivals, by the device that they were recorded on."""
    pictures = {}
    all_runs = load.load(figures.POLICIES)
    for device, runs in all_runs.groupby("device"):
        pictures[str(device)] = figures.policies(runs.copy())
    return pictures
