"""Tables of the documents, from what is recorded: claims by verdict, errors beside the paper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.experiment.claims import (
    FITTED,
    NO_DEVICE,
    NOT_MEASURED,
    VERDICTS,
    Verdicts,
    in_words,
    kind_of,
    load_claims,
)
from sarathi_lab.experiment.recorded import error_table, points_of
from sarathi_lab.results import load
from sarathi_lab.results.load import COMPOSED, COMPOSED_SOURCE, SIMULATED
from sarathi_lab.results.result import markdown
from sarathi_lab.results.table import SIMULATED as SIMULATED_SOURCE
from sarathi_lab.results.table import Row

README = EXPERIMENTS / "README.md"
FRONT = REPOSITORY / "README.md"
PAPER = EXPERIMENTS / "sarathi" / "paper" / "README.md"
BEGIN = "<!-- {}: python -m sarathi_lab claims --readme -->"
END = "<!-- end of {} -->"
AFTER = "after_sarathi"  # the folder of experiments on what came after SARATHI
PROFILED = "-profiled"  # the end of the names of devices at that level
LEVELS = ("profiled", "analytic")
# Where claims are judged: by kernels measured on GPUs, on a CPU, at each level of the cost model.
TWO_CORES = "two CPU cores"
SIMULATED_PROFILED = "simulated, profiled"
AreFitted = dict[str, bool]  # by the `id` of a claim
IdsByVerdict = dict[str, AreFitted]
Block = tuple[Path, str, str]  # a page, the name between its marks, and the table
EVIDENCE = (COMPOSED_SOURCE, TWO_CORES, SIMULATED_SOURCE, SIMULATED_PROFILED)
# The claims of the front page, by their names in claims.yaml.
FIRST = ["decode_tenfold", "sarathi_over_orca", "bubbles"]


def readme_table(table: Verdicts) -> str:
    """Format the verdicts in Markdown: a row per claim, a column for measured kernels, one per
    device, one for simulated.
    """
    devices = _measured_devices(table)
    headings = [
        "claim",
        "source",
        "expected",
        COMPOSED_SOURCE,
        *devices,
        "simulated",
    ]
    rows = [headings]
    is_after = _is_after(table)
    of_sarathi = table[~is_after]
    for _, judged in of_sarathi.groupby("id", sort=False):
        first = judged.iloc[0]
        row = [
            first.claim,
            first.source,
            first.expected,
            *_cells(judged, devices),
        ]
        rows.append(row)
    return markdown(rows)


def front_lines(table: Verdicts) -> str:
    """Format the claims of the front page in Markdown: a line each, values by verdict."""
    lines = []
    for name in FIRST:
        judged = table[table.id == name]
        first = judged.iloc[0]
        records = _measured(judged).to_dict("records")
        values = _by_verdict(records)
        lines.append(f"- {first.claim}. {values}")
    return "\n".join(lines)


def count_table(table: Verdicts) -> str:
    """Format the number of claims with each verdict in Markdown, by kind of device, without those
    on what came after SARATHI.
    """
    counted = table[~_is_after(table)]
    num_claims = counted.id.nunique()
    rows = [[f"{num_claims} claims", *VERDICTS]]
    for evidence, by_verdict in ids_by_verdict(counted).items():
        row = [evidence]
        for verdict in VERDICTS:
            ids = by_verdict[verdict]
            number = str(len(ids))
            num_fitted = sum(ids.values())
            if num_fitted:
                number += f" ({num_fitted} {FITTED})"
            row.append(number)
        rows.append(row)
    return markdown(rows)


def names_table(table: Verdicts) -> str:
    """Format SARATHI's claims in Markdown, by verdict and `id`."""
    is_of_sarathi = table.source.str.startswith("SARATHI")
    by_evidence = ids_by_verdict(table[is_of_sarathi])
    rows = [["verdict", *by_evidence]]
    for verdict in VERDICTS:
        row = [verdict]
        for by_verdict in by_evidence.values():
            names = []
            for name, is_fitted in by_verdict[verdict].items():
                mark = f" {FITTED}" if is_fitted else ""
                names.append(f"{name}{mark}")
            row.append(", ".join(names))
        rows.append(row)
    return markdown(rows)


def _measured(table: Verdicts) -> Verdicts:
    """Select the rows of claims that were measured, or simulated."""
    return table[table.verdict != NOT_MEASURED]


def ids_by_verdict(table: Verdicts) -> dict[str, IdsByVerdict]:
    """Return the claims by `EVIDENCE` and verdict, and whether a claim has the verdict by values
    alone that are no predictions. A claim stands under every verdict that it has on one of several
    GPUs, and as not measured where it has none.
    """
    evidence = table.device.map(_evidence_of)
    ids = {}
    for name in EVIDENCE:
        measured = _measured(table[evidence == name])
        kinds = measured.verdict.map(kind_of)
        is_fitted = measured.mark == FITTED
        by_kind_and_claim = is_fitted.groupby([kinds, measured.id], sort=False)
        by_verdict: IdsByVerdict = {}
        for verdict in VERDICTS:
            by_verdict[verdict] = {}
        for (kind, claim), are_fitted in by_kind_and_claim:
            ids_of_kind = by_verdict[str(kind)]
            ids_of_kind[str(claim)] = bool(are_fitted.all())
        is_measured = table.id.isin(measured.id)
        missing = table.id[~is_measured]
        by_verdict[NOT_MEASURED] = dict.fromkeys(missing, False)
        ids[name] = by_verdict
    return ids


def _evidence_of(device: str) -> str | None:
    """Return which of `EVIDENCE` a device gives; None for others, such as a real GPU."""
    if device.startswith(COMPOSED):
        return COMPOSED_SOURCE
    # Before the other simulated ones, whose beginning these have, too.
    if device.endswith(PROFILED):
        return SIMULATED_PROFILED
    if device.startswith(SIMULATED):
        return SIMULATED_SOURCE
    if _without_engine(device) == "cpu":
        return TWO_CORES
    return None


def map_table(table: Verdicts, root: str = "") -> str:
    """Format the claims on what came after SARATHI in Markdown; `root` leads to `experiments/`."""
    headings = [
        "experiment",
        "claim",
        "source",
        "claimed",
        "found",
        "conditions",
    ]
    rows = [headings]
    conditions = {claim.id: claim.caveat for claim in load_claims()}
    after = table[_is_after(table)]
    for name, judged in after.groupby("id", sort=False):
        first = judged.iloc[0]
        devices = _measured_devices(_measured(judged))
        # `_cells` has kernels first and simulations last.
        composed, *cells, simulated = _cells(judged, devices)
        values = []
        if composed != NOT_MEASURED:
            values.append(f"{COMPOSED_SOURCE} {composed}")
        for device, cell in zip(devices, cells, strict=True):
            values.append(f"{device} {cell}")
        values.append(simulated)
        page = f"{root}{AFTER}/{first.experiment}/README.md"
        row = [
            f"[{first.experiment}]({page})",
            first.claim,
            first.source,
            first.expected,
            "; ".join(values),
            conditions[str(name)],
        ]
        rows.append(row)
    return markdown(rows)


def errors_of_paper(errors: pd.DataFrame) -> str:
    """Format mean and largest errors in Markdown by level, bold where the aim is missed."""
    headings = ["", "points"]
    for level in LEVELS:
        headings += [level, "aim"]
    rows = [headings]
    predicted = errors[errors.verdict != "formula"]  # arithmetic on the paper's numbers is exact
    num_hardware = errors.groupby("row").hardware.nunique()
    keys = ["row", "hardware", "method"]
    for labels, group in predicted.groupby(keys, sort=False):
        name, hardware, method = map(str, labels)
        title = [name]
        if method:
            title.append(method)
        if num_hardware[name] > 1:
            title.append(f"`{hardware}`")
        num_points = group.points.iloc[0]
        cells = [", ".join(title), str(num_points)]
        by_level: dict[str, Row] = {}
        for row in group.to_dict("records"):
            by_level[row["level"]] = row
        for level in LEVELS:
            of_level = by_level.get(level)
            cells += _errors_of(of_level)
        rows.append(cells)
    return markdown(rows)


def _errors_of(row: Row | None) -> list[str]:
    """Format mean and largest error, and the aim, of a level that has been compared."""
    if row is None:
        return ["-", ""]
    mean = row["mean"]
    largest = row["largest"]
    verdict = row["verdict"]
    error = f"{mean:.2%} ({largest:.1%})"
    # One verdict may be both missed and partly fitted.
    if verdict.endswith("partly fitted"):
        error += f" {FITTED}"
    if verdict == "given":
        error = f"given: {error}"
    if verdict.startswith("missed"):
        error = f"**{error}**"
    aim = ""  # of the mean, in brackets that of the largest
    if not pd.isna(row["aim_mean"]):
        aim = f"{row['aim_mean']:.0%}"
    if not pd.isna(row["aim_largest"]):
        aim += f" ({row['aim_largest']:.0%})"
    return [error, aim]


def _is_after(table: Verdicts) -> pd.Series:
    return table.experiment.map(load.group_of) == AFTER


def _measured_devices(table: Verdicts) -> list[str]:
    """Return the columns of measured devices. What vLLM's engine measured on a device stands in the
    column of the lab's engine there, if that has one.
    """
    # In the order of the verdicts: that of the names of the recorded folders.
    devices = []
    for device in dict.fromkeys(map(str, table.device)):
        if not device.startswith((NO_DEVICE, SIMULATED, COMPOSED)):
            devices.append(device)
    columns = []
    for device in devices:
        of_lab = _without_engine(device)
        if of_lab == device or of_lab not in devices:
            columns.append(device)
    return columns


def _without_engine(name: str) -> str:
    """Return the device of a folder such as "vllm-cpu-pp2": "cpu"."""
    return re.sub(r"(-[tp]p\d+)+$", "", name.removeprefix("vllm-"))


def _cells(rows: Verdicts, devices: Sequence[str]) -> list[str]:
    """Format the verdicts on one claim: by verdict those of measured kernels, on each of `devices`,
    and by verdict the simulated ones.
    """
    records = _measured(rows).to_dict("records")
    composed = _by_verdict(records, COMPOSED)
    simulated = _by_verdict(records, SIMULATED)
    measured = []
    for device in devices:
        measured.append(_on_device(records, device))
    cells = [composed, *measured, simulated]
    return [cell or NOT_MEASURED for cell in cells]


def _on_device(records: Sequence[Row], device: str) -> str:
    """Format the verdicts of a device's column: of the lab's engine and, named, of vLLM's."""
    values = []
    for row in records:
        engine_and_device = str(row["device"])
        measured = in_words(row)
        value = f"**{row['verdict']}**: {measured}"
        if engine_and_device == device:
            values.append(value)
        elif _without_engine(engine_and_device) == device:
            values.append(f"{value}, {engine_and_device}")
    return "; ".join(values)


def _by_verdict(records: Sequence[Row], prefix: str = "") -> str:
    """Format the values of the devices that begin with `prefix`, each verdict's together."""
    values: dict[str, list[str]] = {}
    for row in sorted(records, key=itemgetter("device")):
        device = str(row["device"])
        if not device.startswith(prefix):
            continue
        name = device.removeprefix(prefix).replace(PROFILED, " profiled")
        value = in_words(row)
        of_verdict = values.setdefault(row["verdict"], [])
        of_verdict.append(f"{name} {value}")
    cells = []
    for verdict, texts in values.items():
        joined = ", ".join(texts)
        cells.append(f"**{verdict}**: {joined}")
    return "; ".join(cells)


def blocks(table: Verdicts) -> Iterator[Block]:
    """Yield the tables of the documents: the page, the name between its marks, and the table."""
    yield README, "claims", readme_table(table)
    yield README, "map", map_table(table)
    yield README, "names", names_table(table)
    yield FRONT, "claims", front_lines(table)
    yield README, "counts", count_table(table)
    errors = error_table(points_of())
    yield PAPER, "errors", errors_of_paper(errors)


def between(text: str, name: str) -> tuple[str, str, str]:
    """Split a page at the marks of the table `name`. Raises ValueError if they are gone."""
    begin = BEGIN.format(name)
    end = END.format(name)
    before, _, rest = text.partition(begin)
    block, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"no {begin} and {end}")
    head = before + begin
    tail = end + after
    return head, block, tail


def write_page(path: Path, name: str, block: str) -> None:
    """Put a table between its marks. Raises UserError if the marks are gone."""
    text = path.read_text()
    try:
        before, _, after = between(text, name)
    except ValueError as error:
        raise UserError(f"{path} has {error}; put both on separate lines") from None
    path.write_text(f"{before}\n{block}\n{after}")
