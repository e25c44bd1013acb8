"""Recorded points of experiments beside the paper's, and the errors of simulated ones."""

from __future__ import annotations

import pandas as pd

from sarathi_lab.config.errors import require_one_of
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.experiment.registry import CATALOG, COUNTED, KEYS, PAPERS, ErrorRow
from sarathi_lab.results import load

COLUMNS = ["figure", *KEYS, "y", "unit", "source", "device", "uncertainty"]
# What was simulated, in separate columns; empty for the paper's points and a device's.
LABELS = ["hardware", "level", "model", "method"]
OF_ROW = ["device", "hardware", "level", "method"]  # of an error row, beside its name
ERRORS = ["row", *OF_ROW, "points", "mean", "largest", "stated"]
ERRORS += ["aim_mean", "aim_largest", "verdict"]


def paper(name: str) -> pd.DataFrame:
    """Return the paper's points of an experiment, if it has any."""
    experiment = CATALOG[name]
    if experiment.has_paper:
        table = experiment.paper_points().assign(figure=name, **dict.fromkeys(LABELS, ""))
        return _of_paper(table)[[*COLUMNS, *LABELS]]
    path = EXPERIMENTS / load.group_of(name) / name / "paper.csv"
    if not path.is_file():
        return pd.DataFrame()
    return _of_paper(pd.read_csv(path)).assign(hardware=experiment.papers[0].hardware)


def _of_paper(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(source="paper", device="paper", uncertainty=0.0)


def points_of(*names: str) -> pd.DataFrame:
    """Return all points of experiments (none named: the paper's figures): the paper's, simulated
    and measured ones. Raises UserError for an unknown name.
    """
    for name in names:
        require_one_of("figure", name, CATALOG)
    recorded = load.recorded()
    tables = []
    for name in names or PAPERS:
        tables.append(paper(name))
        if name in recorded:
            tables.append(_recorded(name))
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def _recorded(name: str) -> pd.DataFrame:
    """Return the points of an experiment that were recorded by device, counted ones, too."""
    tables = [load.load(name)]
    for path in EXPERIMENTS.glob(f"*/{name}/results/*/{name}-{COUNTED}.csv"):
        counted = pd.read_csv(path)
        tables.append(counted.assign(is_simulated=True, device="", method=COUNTED))
    table = pd.concat(tables, ignore_index=True)
    texts = table.reindex(columns=["panel", "series", "dataset", "slo", *LABELS])
    table = table.assign(**texts.fillna("").astype(str))
    device = (table.device + ", " + table.model).str.removesuffix(", ")
    device = device.where(table.model != table.series, table.device)
    if CATALOG[name].has_paper:  # the name of what was simulated has level, model and method
        device = device.where(~table.is_simulated, table.device_name)
    source = table.is_simulated.map({True: "simulated", False: "measured"})
    is_composed = table.device.str.startswith(load.COMPOSED)
    source = source.mask(is_composed, load.COMPOSED_SOURCE)
    return as_points(table.assign(device=device), source)


def as_points(table: pd.DataFrame, source: str | pd.Series) -> pd.DataFrame:
    """Return a table of an experiment as points, with half the interval as their uncertainty."""
    if "device" not in table:
        table = table.assign(device=table.device_name + ", " + table.model)
    uncertainty = (table.high - table.low) / 2 / table.y.abs()
    return table.assign(source=source, uncertainty=uncertainty)


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Return predicted points beside the paper's y (`paper`), and their relative, signed `error`.

    Points that the paper does not show are left out, as are GPUs that it did not use.
    """
    stated = points[points.source == "paper"].rename(columns={"y": "paper"})
    predicted = points[points.source == "simulated"]
    pairs = []
    for name in PAPERS:
        for platform in CATALOG[name].papers:
            pairs.append((name, platform.hardware))
    used = pd.DataFrame(pairs, columns=["figure", "hardware"]).drop_duplicates()
    both = predicted.merge(used, on=["figure", "hardware"])
    both = both.merge(stated[["figure", *KEYS, "paper"]], on=["figure", *KEYS])
    return both.assign(error=both.y / both.paper - 1)


def error_table(points: pd.DataFrame) -> pd.DataFrame:
    """Return a row per declared error row and device: mean and largest absolute error.

    `stated` is the mean error that the cost model itself expects. `verdict` is "met", "missed", or
    "-" without an aim; "given" where the profile was made from some of the points, "formula" where
    nothing is predicted; "partly fitted" where constants are fitted to, or chosen by, some of them.
    """
    rows = []
    for name, of_figure in compare(points).groupby("figure"):
        for declared in CATALOG[str(name)].errors:
            chosen = of_figure.query(declared.where)
            for labels, group in chosen.groupby(OF_ROW, sort=False):
                about = dict(zip(OF_ROW, labels, strict=True))
                rows.append({"row": declared.name, **about, **_errors(declared, group)})
    return pd.DataFrame(rows, columns=ERRORS)


def _errors(declared: ErrorRow, group: pd.DataFrame) -> dict[str, object]:
    errors = group.error.abs()
    level = str(group.level.iloc[0])
    aim_mean, aim_largest = declared.aims.get(level, (None, None))
    return {
        "points": len(group),
        "mean": errors.mean(),
        "largest": errors.max(),
        "stated": group.uncertainty.mean(),
        "aim_mean": aim_mean,
        "aim_largest": aim_largest,
        "verdict": _verdict(declared, level, str(group.hardware.iloc[0]), errors),
    }


def _verdict(declared: ErrorRow, level: str, hardware: str, errors: pd.Series) -> str:
    if declared.is_formula:
        return "given" if declared.given == level else "formula"
    verdict = "-"
    aim_mean, aim_largest = declared.aims.get(level, (None, None))
    if declared.given == level:
        verdict = "given"
    elif aim_mean is not None:
        is_met = errors.mean() <= aim_mean
        if aim_largest is not None:
            is_met = is_met and errors.max() <= aim_largest
        verdict = "met" if is_met else "missed"
    if declared.fitted not in (level, hardware):
        return verdict
    return "partly fitted" if verdict == "-" else f"{verdict}, partly fitted"
