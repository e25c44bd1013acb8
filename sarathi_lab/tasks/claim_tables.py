"""Tables of the documents, from what is recorded: claims by verdict, errors beside the paper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.experiment.claims import (
    NOT_MEASURED,
    VERDICTS,
    in_words,
    kind_of,
    load_claims,
)
from sarathi_lab.experiment.recorded import error_table, points_of
from sarathi_lab.results import load
from sarathi_lab.results.load import COMPOSED, COMPOSED_SOURCE, SIMULATED
from sarathi_lab.results.result import markdown

README, FRONT = EXPERIMENTS / "README.md", REPOSITORY / "README.md"
PAPER = EXPERIMENTS / "sarathi" / "paper" / "README.md"
BEGIN, END = "<!-- {}: python -m sarathi_lab claims --readme -->", "<!-- end of {} -->"
AFTER = "after_sarathi"  # the folder of experiments on what came after SARATHI
PROFILED = "-profiled"
# The claims of the front page.
FIRST = ["decode_tenfold", "sarathi_over_orca", "bubbles"]


def readme_table(table: pd.DataFrame) -> str:
    """Format the verdicts in Markdown: a row per claim, a column for measured kernels, one per
    device, one for simulated.
    """
    devices = _measured_devices(table)
    rows = [["claim", "source", "expected", COMPOSED_SOURCE, *devices, "simulated"]]
    for _, judged in table[~_is_after(table)].groupby("id", sort=False):
        first = judged.iloc[0]
        rows.append([first.claim, first.source, first.expected, *_cells(judged, devices)])
    return markdown(rows)


def front_lines(table: pd.DataFrame) -> str:
    """Format the claims of the front page in Markdown: a line each, values without intervals."""
    lines = []
    for name in FIRST:
        judged = table[(table.id == name) & (table.verdict != NOT_MEASURED)]
        values = []
        for row in judged.sort_values("device").to_dict("records"):
            value = in_words(row).partition(" (")[0]
            values.append(f"{row['device']} {value} ({row['verdict']})")
        claim, expected = table.loc[table.id == name, ["claim", "expected"]].iloc[0]
        lines.append(f"- {claim} (**{expected}**): {', '.join(values)}")
    return "\n".join(lines)


def count_table(table: pd.DataFrame) -> str:
    """Format the number of claims with each verdict in Markdown, by kind of device."""
    rows = [[f"{table.id.nunique()} claims", *VERDICTS]]
    for device, found in _ids_by_verdict(table).items():
        rows.append([device, *(str(len(ids)) for ids in found.values())])
    return markdown(rows)


def names_table(table: pd.DataFrame) -> str:
    """Format SARATHI's claims in Markdown, by verdict and `id`."""
    found = _ids_by_verdict(table[table.source.str.startswith("SARATHI")])
    rows = [["verdict", *found]]
    rows += [[one, *(", ".join(part[one]) for part in found.values())] for one in VERDICTS]
    return markdown(rows)


def _ids_by_verdict(table: pd.DataFrame) -> dict[str, dict[str, list[str]]]:
    """Return the claims with each verdict, by where they were judged: by kernels measured on GPUs,
    on a CPU, and at each level of the cost model. A claim stands under every verdict that it
    has on one of several GPUs.
    """
    is_simulated = table.device.str.startswith(SIMULATED)
    is_profiled = table.device.str.endswith(PROFILED)
    parts = {
        COMPOSED_SOURCE: table[table.device.str.startswith(COMPOSED)],
        "two CPU cores": table[table.device.map(_without_engine) == "cpu"],
        "simulated": table[is_simulated & ~is_profiled],
        "simulated, profiled": table[is_profiled],
    }
    known = {name: part[part.verdict != NOT_MEASURED] for name, part in parts.items()}
    found = {}
    for name, part in known.items():
        kinds = part.verdict.map(kind_of)
        found[name] = {verdict: list(part.id[kinds == verdict].unique()) for verdict in VERDICTS}
    for name, part in known.items():
        found[name][NOT_MEASURED] = list(table.id[~table.id.isin(part.id)].unique())
    return found


def map_table(table: pd.DataFrame, root: str = "") -> str:
    """Format the claims on what came after SARATHI in Markdown; `root` leads to `experiments/`."""
    rows = [["experiment", "claim", "source", "claimed", "found", "conditions"]]
    conditions = {claim.id: claim.caveat for claim in load_claims()}
    for name, judged in table[_is_after(table)].groupby("id", sort=False):
        first, devices = judged.iloc[0], _measured_devices(judged[judged.verdict != NOT_MEASURED])
        composed, *cells, simulated = _cells(judged, devices)
        found = [f"{device} {cell}" for device, cell in zip(devices, cells, strict=True)]
        if composed != NOT_MEASURED:
            found.insert(0, f"{COMPOSED_SOURCE} {composed}")
        where = f"[{first.experiment}]({root}{AFTER}/{first.experiment}/README.md)"
        what = [where, first.claim, first.source, first.expected]
        rows.append([*what, "; ".join([*found, simulated]), conditions[str(name)]])
    return markdown(rows)


def errors_of_paper(errors: pd.DataFrame) -> str:
    """Format mean and largest errors in Markdown by level, bold where the aim is missed."""
    levels, lines = ("profiled", "analytic"), []
    rows = [["", "points", *(cell for level in levels for cell in (level, "aim"))]]
    of_row = errors[errors.verdict != "formula"].groupby(["row", "hardware", "method"], sort=False)
    for labels, group in of_row:
        name, hardware, method = map(str, labels)
        is_one = errors[errors.row == name].hardware.nunique() == 1
        words = [name, method, "" if is_one else f"`{hardware}`"]
        by_level = {row["level"]: row for row in group.to_dict("records")}
        cells = [cell for level in levels for cell in _errors_of(by_level.get(level))]
        lines.append([", ".join(filter(None, words)), str(group.points.iloc[0]), *cells])
    return markdown([*rows, *lines])


def _errors_of(row: Mapping[Any, Any] | None) -> tuple[str, str]:
    """Format mean and largest error, and the aim."""
    if row is None:
        return "-", ""
    words = f"{row['mean']:.2%} ({row['largest']:.1%})"
    words += " †" if row["verdict"].endswith("partly fitted") else ""
    words = f"given: {words}" if row["verdict"] == "given" else words
    words = f"**{words}**" if row["verdict"].startswith("missed") else words
    mean, largest = row["aim_mean"], row["aim_largest"]
    aim = "" if pd.isna(mean) else f"{mean:.0%}"
    return words, aim if pd.isna(largest) else f"{aim} ({largest:.0%})"


def _is_after(table: pd.DataFrame) -> pd.Series:
    return table.experiment.map(load.group_of) == AFTER


def _measured_devices(table: pd.DataFrame) -> list[str]:
    """Return the columns of measured devices. What vLLM's engine measured on a device stands in the
    column of the lab's engine there, if that has one.
    """
    names = dict.fromkeys(map(str, table.device))
    others = ("none", SIMULATED, COMPOSED)
    measured = [name for name in names if not name.startswith(others)]
    columns = []
    for name in measured:
        device = _without_engine(name)
        if device == name or device not in measured:
            columns.append(name)
    return columns


def _without_engine(name: str) -> str:
    """Return the device of a folder such as "vllm-cpu-pp2": "cpu"."""
    return re.sub(r"(-[tp]p\d+)+$", "", name.removeprefix("vllm-"))


def _cells(rows: pd.DataFrame, devices: Sequence[str]) -> list[str]:
    """Format the verdicts on one claim: by verdict those of measured kernels, on each of `devices`,
    and by verdict the simulated ones.
    """
    known = rows[rows.verdict != NOT_MEASURED].to_dict("records")
    words = {str(row["device"]): (row["verdict"], in_words(row)) for row in known}
    first, last = _by_verdict(words, COMPOSED), _by_verdict(words, SIMULATED)
    cells = []
    for column in devices:
        measured = []
        for device, (verdict, value) in words.items():
            if device == column:
                measured.append(f"**{verdict}**: {value}")
            elif _without_engine(device) == column:
                measured.append(f"**{verdict}**: {value}, {device}")
        cells.append("; ".join(measured))
    return [cell or NOT_MEASURED for cell in (first, *cells, last)]


def _by_verdict(words: Mapping[str, tuple[str, str]], prefix: str) -> str:
    """Format the values of the devices that begin with `prefix`, each verdict's together."""
    values: dict[str, list[str]] = {}
    for device, (verdict, value) in sorted(words.items()):
        if device.startswith(prefix):
            name = device.removeprefix(prefix).replace(PROFILED, " profiled")
            values.setdefault(verdict, []).append(f"{name} {value}")
    return "; ".join(f"**{verdict}**: {', '.join(each)}" for verdict, each in values.items())


def blocks(table: pd.DataFrame) -> Iterator[tuple[Path, str, str]]:
    """Yield the tables of the documents: the page, the name between its marks, and the table."""
    yield README, "claims", readme_table(table)
    yield README, "map", map_table(table)
    yield README, "names", names_table(table)
    yield FRONT, "claims", front_lines(table)
    yield README, "counts", count_table(table)
    yield PAPER, "errors", errors_of_paper(error_table(points_of()))


def between(text: str, name: str) -> tuple[str, str, str]:
    """Split a page at the marks of the table `name`. Raises ValueError if they are gone."""
    before, begin, rest = text.partition(BEGIN.format(name))
    block, end, after = rest.partition(END.format(name))
    if not end:
        raise ValueError(f"no {BEGIN.format(name)} and {END.format(name)}")
    return before + begin, block, end + after


def write_page(path: Path, name: str, block: str) -> None:
    """Put a table between its marks. Raises UserError if the marks are gone."""
    try:
        before, _, after = between(path.read_text(), name)
    except ValueError as error:
        raise UserError(f"{path} has {error}; put both on separate lines") from None
    path.write_text(f"{before}\n{block}\n{after}")
