"""Reads folders of operation tables (`executor.tables`); refuses what can't be interpolated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import REPOSITORY, readable
from sarathi_lab.executor.tables import FILES, LAYERS, META, TIME, File, OperationTables

# Medians of a file outside these bounds are no microseconds: no kernel is done in 0.2 µs, and no
# operation takes a minute.
PLAUSIBLE_MEDIAN = (0.2, 6e7)
OTHER_UNITS = re.compile(r"(?:time|latency|duration|seconds)?_?(?:s|ms|ns|seconds|millis\w*)?$")


def read_tables(folder: str, *, model: str = "", tensor: int = 1) -> OperationTables:
    """The tables in `folder`, a path from the current folder or the repository or an absolute one.

    Of its subfolders those named after the `model` and `tpN` come first. Raises UserError for a
    folder without tables, and for a file that can't be interpolated.
    """
    root = _found(folder)
    candidates = [root / model, root] if model else [root]
    tried = [place for top in candidates for place in (top / f"tp{tensor}", top)]
    chosen = next((place for place in tried if _files(place)), None)
    if chosen is None:
        raise UserError(f"hardware.tables={folder} has no tables of {_missing(root, model)}")
    frames = {path.stem: _read(path) for path in _files(chosen)}
    degree = re.fullmatch(r"tp(\d+)", chosen.name)
    return OperationTables(str(chosen), frames, _meta(chosen), int(degree[1]) if degree else 1)


def _missing(root: Path, model: str) -> str:
    """What a folder lacks, and what to do about it."""
    others = sorted(place.name for place in root.iterdir() if place.is_dir() and _files(place))
    if model and others:
        return (
            f"model {model} (it has: {', '.join(others)}); measure one on the device with "
            "task=calibrate, or use executor.cost_model=analytic"
        )
    files = ", ".join(f"{name}.csv" for name in FILES)
    return f"operations: none of {files}; name a folder with some, or one of folders by model"


def _found(folder: str) -> Path:
    given = Path(folder).expanduser()
    for place in (given, REPOSITORY / given):
        if place.is_dir():
            return place
    raise UserError(
        f"hardware.tables={folder} is no folder; use the path of one with operation tables, from "
        "here, from the repository, or absolute"
    )


def _files(folder: Path) -> list[Path]:
    return [path for name in FILES if (path := folder / f"{name}.csv").is_file()]


def _meta(folder: Path) -> Mapping[str, Any]:
    """What `meta.yaml` in the folder, or above it, says; nothing without one."""
    for place in (folder, folder.parent):
        if (path := place / META).is_file():
            with readable(path, "correct it", yaml.YAMLError):
                meta = yaml.safe_load(path.read_text())
            if not isinstance(meta, Mapping):
                raise UserError(f"{path} holds no names with values; write such as model: 13b")
            return meta
    return {}


def _read(path: Path) -> pd.DataFrame:
    """The checked rows of one file."""
    with readable(path, "write comma-separated columns"):
        try:
            table = pd.read_csv(path, float_precision="round_trip")
        except pd.errors.EmptyDataError:
            raise UserError(f"{path} is empty; measure it again, or delete it") from None
    return checked(table, path.stem, str(path))


def checked(table: pd.DataFrame, name: str, source: str) -> pd.DataFrame:
    """`table` of the file `name` with numbers as such. Raises UserError that names `source`, the
    line, what is wrong there and the fix.
    """
    for problem in _problems(table, FILES[name]):
        raise UserError(f"{source}{problem}")
    counts = _counts(table, FILES[name])
    table = table.assign(**{column: pd.to_numeric(table[column]) for column in (*counts, TIME)})
    known = [*FILES[name].names, *counts, TIME]
    return table[known].reset_index(drop=True)


def _counts(table: pd.DataFrame, file: File) -> dict[str, int]:
    least = {name: int(name != "num_prefills") for name in file.optional if name in table}
    return {**file.counts, **least}


def _problems(table: pd.DataFrame, file: File) -> Iterator[str]:
    needed = (*file.names, *file.counts, TIME)
    if missing := [name for name in needed if name not in table]:
        others = [name for name in table if name not in needed and OTHER_UNITS.match(str(name))]
        if missing == [TIME] and others:
            yield f" has no column {TIME} but {others[0]}; convert it to microseconds, as {TIME}"
        yield f" has no column {missing[0]} of {', '.join(needed)}; add it"
    if table.empty:
        yield " has no rows; measure some, or delete it"
    counts = _counts(table, file)
    for column, least in (*counts.items(), (TIME, None)):
        numbers = pd.to_numeric(table[column], errors="coerce")
        if least is None:
            bad, what = ~((numbers > 0) & (numbers < float("inf"))), "no time above 0"
            fix = "measure it again, or drop the line"
        else:
            bad = ~(numbers >= least) | (numbers % 1 != 0)
            what, fix = f"no whole number from {least}", "correct it, or drop the line"
        if bad.any():
            line = int(bad.to_numpy().argmax())
            yield f" line {line + 2}: {column}={table[column].iloc[line]} is {what}; {fix}"
    if "layer" in table and not (unknown := table[~table.layer.isin(list(LAYERS))]).empty:
        where = f"line {unknown.index[0] + 2}: layer={unknown.layer.iloc[0]}"
        yield f" {where} is unknown; use one of {', '.join(LAYERS)}"
    keys = [*file.names, *counts]
    if (again := table.duplicated(keys)).any():
        line = int(again.to_numpy().argmax())
        same = ", ".join(f"{key}={table[key].iloc[line]}" for key in keys)
        yield f" line {line + 2} is a second one of {same}; keep one"
    median, (least_us, most_us) = float(table[TIME].astype(float).median()), PLAUSIBLE_MEDIAN
    if not least_us <= median <= most_us:
        yield f": half of {TIME} is {'below' if median < least_us else 'above'} {median:g}, which \
is not plausible in microseconds; convert it from its unit"
