"""The verdicts as people read them: in the terminal, and as the README's table."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from sarathi_lab.errors import UserError
from sarathi_lab.paths import REPOSITORY
from sarathi_lab.recorded import SIMULATED
from sarathi_lab.report import console

README = REPOSITORY / "README.md"
BEGIN, END = "<!-- claims: python -m sarathi_lab.claims --readme -->", "<!-- end of claims -->"
PROFILED = "-profiled"
STYLES = {"holds": "green", "partly": "yellow", "fails": "red", "not measured": "dim"}


def print_verdicts(table: pd.DataFrame) -> None:
    """One block a device: each claim with what was expected, what was measured, and the verdict."""
    for device, rows in table.groupby("device", sort=False):
        shown = Table(box=None, padding=(0, 1))
        for heading in ("claim", "expected", "measured", "verdict", "note"):
            shown.add_column(heading, no_wrap=heading in ("expected", "measured", "verdict"))
        for row in rows.to_dict("records"):
            verdict = f"[{STYLES[row['verdict']]}]{row['verdict']}[/]"
            shown.add_row(row["claim"], row["expected"], measured_in_words(row), verdict, row["note"], style=None)
        out = console()
        out.print(f"\nOn {device}, in brackets the 95 % interval{_of(str(device))}", style="bold")
        out.print(shown, markup=True)
        out.print(", ".join(f"{count} {verdict}" for verdict, count in rows.verdict.value_counts().items()))


def _of(device: str) -> str:
    return " by the cost model's own error" if device.startswith(SIMULATED) else ""


def measured_in_words(row: Mapping[Hashable, Any]) -> str:
    """Such as "1.31 (1.25 to 1.36)"; empty if nothing was measured."""
    value, low, high = (float(row[name]) for name in ("measured", "low", "high"))
    if math.isnan(value):
        return ""
    return f"{value:.3g}" if low == high else f"{value:.3g} ({low:.3g} to {high:.3g})"


def readme_table(table: pd.DataFrame) -> str:
    """The verdicts in Markdown: a row per claim, a column per measured device, and one for what is simulated.

    Of a simulated GPU the usual, analytic level is shown.
    """
    measured = [str(d) for d in dict.fromkeys(table.device) if d != "none" and not str(d).startswith(SIMULATED)]
    lines = [f"| claim | source | expected | {' | '.join([*measured, 'simulated'])} |"]
    lines.append("|" + " --- |" * (len(measured) + 4))
    for _, rows in table.groupby("id", sort=False):
        first = rows.iloc[0]
        by_device = {str(row["device"]): row for row in rows.to_dict("records")}
        cells = [_cell(by_device.get(device)) for device in measured]
        simulated = sorted(d for d in by_device if d.startswith(SIMULATED) and not d.endswith(PROFILED))
        cells.append("; ".join(_cell(by_device[device], device) for device in simulated) or _cell(None))
        lines.append(f"| {first.claim} | {first.source} | {first.expected} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Mapping[Hashable, Any] | None, device: str | None = None) -> str:
    if row is None or row["verdict"] == "not measured":
        return "not measured"
    where = f", {device.removeprefix(SIMULATED)}" if device is not None else ""
    return f"**{row['verdict']}**: {measured_in_words(row)}{where}"


def write_readme(table: pd.DataFrame, path: Path = README) -> None:
    """Put the table between its marks. Raises UserError if the marks are gone."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise UserError(f"{path} has no place for the claims; put {BEGIN} and {END} on lines of their own")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{readme_table(table)}\n{END}{after}")
