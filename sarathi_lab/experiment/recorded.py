"""Recorded points of experiments beside the paper's, and the errors of simulated ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import pandas as pd
import yaml

from sarathi_lab.config.csv_files import csv_files
from sarathi_lab.config.errors import require_one_of
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.experiment.registry import CATALOG, COUNTED, KEYS, PAPERS
from sarathi_lab.results import load
from sarathi_lab.results.table import PAPER, SIMULATED

ERROR_ROWS = EXPERIMENTS / "sarathi" / "paper" / "errors.yaml"
COLUMNS = ["figure", *KEYS, "y", "low", "high", "unit", "source", "device"]
# What was simulated, in separate columns; empty for the paper's points and a device's.
LABELS = ["hardware", "level", "model", "method"]
OF_ROW = ["device", "hardware", "level", "method"]  # of an error row, beside its name
ERRORS = [
    "row",
    *OF_ROW,
    "points",
    "mean",
    "largest",
    "stated",
    "aim_mean",
    "aim_largest",
    "verdict",
]


@dataclass(frozen=True)
class ErrorRow:
    """A row of the error table: the points that `where` (a pandas query) chooses, and the aims.

    Attributes:
        aims: By level the mean and, unless None, the largest relative error to stay within.
        given: The level whose profile was made from some of these points.
        fitted: A level or a hardware file with constants that were fitted to some of them.
        is_formula: Whether the row is arithmetic on the paper's numbers, not a prediction.
    """

    name: str
    where: str = "x == x"
    aims: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    given: str = ""
    fitted: str = ""
    is_formula: bool = False


@cache
def error_rows(figure: str) -> list[ErrorRow]:
    """Return the rows of a figure of the paper."""
    rows = yaml.load(ERROR_ROWS.read_text(), load.YAML_LOADER)[figure]
    return [ErrorRow(**row) for row in rows]


def paper(name: str) -> pd.DataFrame:
    """Return the paper's points of an experiment, if it has any."""
    experiment = CATALOG[name]
    if experiment.has_paper:
        points = _of_paper(experiment.paper_points())
        no_labels = dict.fromkeys(LABELS, "")
        points = points.assign(figure=name, **no_labels)
        return points[[*COLUMNS, *LABELS]]
    folder = EXPERIMENTS / load.group_of(name) / name
    path = folder / "paper.csv"
    if not path.is_file():
        return pd.DataFrame()
    points = _of_paper(pd.read_csv(path))
    return points.assign(hardware=experiment.papers[0].hardware)


def _of_paper(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(source=PAPER, device=PAPER, low=math.nan, high=math.nan)


def points_of(*names: str) -> pd.DataFrame:
    """Return all points of experiments (none named: the paper's figures): the paper's, simulated
    and measured ones. Raises UserError for an unknown name.
    """
    for name in names:
        require_one_of("figure", name, CATALOG)
    recorded = load.recorded()
    tables = []
    for name in names or PAPERS:
        papers_points = paper(name)
        if not papers_points.empty:
            tables.append(papers_points)
        if name in recorded:
            tables.append(_recorded(name))
    return pd.concat(tables, ignore_index=True)


def _recorded(name: str) -> pd.DataFrame:
    """Return the points of an experiment that were recorded by device, counted ones, too."""
    tables = [load.load(name)]
    for path in csv_files(EXPERIMENTS, f"*/{name}/results/*/{name}-{COUNTED}.csv"):
        counted = pd.read_csv(path)
        counted["is_simulated"] = True
        counted["device"] = path.parent.name
        counted["method"] = COUNTED
        tables.append(counted)
    points = pd.concat(tables, ignore_index=True)
    table = load.with_texts(points)
    device = _device_and_model(table)
    if CATALOG[name].has_paper:  # the name of what was simulated has level, model and method
        device = device.where(~table.is_simulated, table.device_name)
    source = table.device.map(load.source_of)
    return table.assign(device=device, source=source)


def _device_and_model(table: pd.DataFrame) -> pd.Series:
    """Return the device of each point, with the model unless the series has its name."""
    is_named_by_series = table.model == table.series
    has_no_name = table.model == ""
    with_model = table.device + ", " + table.model
    return with_model.mask(has_no_name | is_named_by_series, table.device)


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Return predicted points beside the paper's y (`paper`), and their relative, signed `error`.

    Points that the paper does not show are left out, as are GPUs that it did not use.
    """
    key_columns = ["figure", *KEYS]
    simulated = points[points.source == SIMULATED]
    papers_points = points[points.source == PAPER]
    papers_y = papers_points[[*key_columns, "y"]].rename(columns={"y": "paper"})
    # Inner joins: what the paper does not show has no error.
    on_papers_gpus = simulated.merge(_gpus_of_paper(), on=["figure", "hardware"])
    compared = on_papers_gpus.merge(papers_y, on=key_columns)
    ratio = compared.y / compared.paper
    return compared.assign(error=ratio - 1)


def _gpus_of_paper() -> pd.DataFrame:
    """Return the GPUs that the paper used, a row for each figure and GPU."""
    pairs = []
    for name in PAPERS:
        for platform in CATALOG[name].papers:
            pairs.append((name, platform.hardware))
    table = pd.DataFrame(pairs, columns=["figure", "hardware"])
    return table.drop_duplicates()


def error_table(points: pd.DataFrame) -> pd.DataFrame:
    """Return a row per declared error row and device: mean and largest absolute error.

    `stated` is the mean error that the cost model itself expects. `verdict` is "met", "missed", or
    "-" without an aim; "given" where the profile was made from some of the points, "formula" where
    nothing is predicted; "partly fitted" where constants are fitted to, or chosen by, some of them.
    """
    rows = []
    for name, of_figure in compare(points).groupby("figure"):
        for error_row in error_rows(str(name)):
            chosen = of_figure.query(error_row.where)
            for labels, group in chosen.groupby(OF_ROW, sort=False):
                row: dict[str, object] = {"row": error_row.name}
                labels_of_row = zip(OF_ROW, labels, strict=True)
                row.update(labels_of_row)
                row |= _errors(error_row, group)
                rows.append(row)
    return pd.DataFrame(rows, columns=ERRORS)


def _errors(error_row: ErrorRow, group: pd.DataFrame) -> dict[str, object]:
    errors = group.error.abs()
    level = str(group.level.iloc[0])
    aim_mean, aim_largest = error_row.aims.get(level, (None, None))
    half_widths = (group.high - group.low) / 2
    relative_widths = half_widths / group.y.abs()
    verdict = "-"
    if error_row.given == level:
        verdict = "given"
    elif error_row.is_formula:
        verdict = "formula"
    elif aim_mean is not None:
        is_within_largest = aim_largest is None or errors.max() <= aim_largest
        verdict = "missed"
        if errors.mean() <= aim_mean and is_within_largest:
            verdict = "met"
    is_partly_fitted = error_row.fitted in (level, group.hardware.iloc[0])
    if is_partly_fitted and not error_row.is_formula:
        verdict = f"{verdict}, partly fitted".removeprefix("-, ")
    return {
        "points": len(group),
        "mean": errors.mean(),
        "largest": errors.max(),
        "stated": relative_widths.mean(),
        "aim_mean": aim_mean,
        "aim_largest": aim_largest,
        "verdict": verdict,
    }
