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
TEXTS = ["panel", "series", "dataset", "slo", *LABELS]
OF_ROW = ["device", "hardware", "level", "method"]  # of an error row, beside its name
ERRORS = ["row", *OF_ROW, "points", "mean", "largest", "stated"]
ERRORS += ["aim_mean", "aim_largest", "verdict"]


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
        of_paper = paper(name)
        if len(of_paper):
            tables.append(of_paper)
        if name in recorded:
            tables.append(_recorded(name))
    return pd.concat(tables, ignore_index=True)


def _recorded(name: str) -> pd.DataFrame:
    """Return the points of an experiment that were recorded by device, counted ones, too."""
    tables = [load.load(name)]
    for path in EXPERIMENTS.glob(f"*/{name}/results/*/{name}-{COUNTED}.csv"):
        counted = pd.read_csv(path)
        tables.append(counted.assign(is_simulated=True, device="", method=COUNTED))
    table = pd.concat(tables, ignore_index=True)
    # Without missing values, by which pandas would leave points out of groups and merges.
    texts = table.reindex(columns=TEXTS).fillna("").astype(str)
    for column in TEXTS:
        table[column] = texts[column]
    device = _device_and_model(table)
    if CATALOG[name].has_paper:  # the name of what was simulated has level, model and method
        device = device.where(~table.is_simulated, table.device_name)
    return points_of_table(table.assign(device=device), _source_of(table))


def _device_and_model(table: pd.DataFrame) -> pd.Series:
    """Return the device of each point, with the model unless the series has its name."""
    with_model = table.device + ", " + table.model
    is_named = (table.model == "") | (table.model == table.series)
    return with_model.mask(is_named, table.device)


def _source_of(table: pd.DataFrame) -> pd.Series:
    """Return whether each point was measured, simulated, or composed of measured kernels."""
    source = table.is_simulated.map({True: "simulated", False: "measured"})
    is_composed = table.device.str.startswith(load.COMPOSED)
    return source.mask(is_composed, load.COMPOSED_SOURCE)


def points_of_table(table: pd.DataFrame, source: str | pd.Series) -> pd.DataFrame:
    """Return a table of an experiment as points, with half the interval as their uncertainty."""
    half = (table.high - table.low) / 2
    if "device" not in table:
        table = table.assign(device=table.device_name + ", " + table.model)
    return table.assign(source=source, uncertainty=half / table.y.abs())


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Return predicted points beside the paper's y (`paper`), and their relative, signed `error`.

    Points that the paper does not show are left out, as are GPUs that it did not use.
    """
    # Inner joins: what the paper does not show has no error.
    predicted = points[points.source == "simulated"]
    on_used = predicted.merge(_gpus_of_paper(), on=["figure", "hardware"])
    key_columns = ["figure", *KEYS]
    of_paper = points[points.source == "paper"]
    stated = of_paper.rename(columns={"y": "paper"})[[*key_columns, "paper"]]
    both = on_used.merge(stated, on=key_columns)
    return both.assign(error=both.y / both.paper - 1)


def _gpus_of_paper() -> pd.DataFrame:
    """Return the GPUs that the paper used, a row for each figure and GPU."""
    pairs: dict[tuple[str, str], None] = {}
    for name in PAPERS:
        for platform in CATALOG[name].papers:
            pairs[name, platform.hardware] = None
    return pd.DataFrame(list(pairs), columns=["figure", "hardware"])


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
                row: dict[str, object] = {"row": declared.name}
                row.update(zip(OF_ROW, labels, strict=True))
                row.update(_errors(declared, group))
                rows.append(row)
    return pd.DataFrame(rows, columns=ERRORS)


def _errors(declared: ErrorRow, group: pd.DataFrame) -> dict[str, object]:
    errors = group.error.abs()
    level = str(group.level.iloc[0])
    hardware = str(group.hardware.iloc[0])
    aim_mean, aim_largest = declared.aims.get(level, (None, None))
    return {
        "points": len(group),
        "mean": errors.mean(),
        "largest": errors.max(),
        "stated": group.uncertainty.mean(),
        "aim_mean": aim_mean,
        "aim_largest": aim_largest,
        "verdict": _verdict(declared, level, hardware, errors),
    }


def _verdict(declared: ErrorRow, level: str, hardware: str, errors: pd.Series) -> str:
    if declared.is_formula:
        return "given" if declared.given == level else "formula"
    verdict = "given"
    if declared.given != level:
        verdict = _held_against_aim(declared, level, errors)
    if declared.fitted not in (level, hardware):
        return verdict
    return "partly fitted" if verdict == "-" else f"{verdict}, partly fitted"


def _held_against_aim(declared: ErrorRow, level: str, errors: pd.Series) -> str:
    """Return "met", "missed", or "-" without an aim."""
    aim_mean, aim_largest = declared.aims.get(level, (None, None))
    if aim_mean is None:
        return "-"
    if errors.mean() > aim_mean:
        return "missed"
    if aim_largest is not None and errors.max() > aim_largest:
        return "missed"
    return "met"
