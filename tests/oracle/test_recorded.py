"""Recorded simulated tables, computed again: thinned here, whole by `-m oracle`.

`python -m pytest -m oracle tests/oracle` computes all of them, about five hours of one core;
`ORACLE_SECONDS=60` leaves out what takes longer (about 15 minutes are left), `-k fig09` chooses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from sarathi_lab.config.csv_files import csv_file, csv_files
from sarathi_lab.run import main

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
COMMANDS: list[dict[str, Any]] = yaml.load(
    (Path(__file__).parent / "recorded.yaml").read_text(), yaml.CSafeLoader
)
RELATIVE = 1e-9
# Columns that describe the recording: its machine, time, commit, and the folder of the run, whose
# name holds a hash of the settings.
PROVENANCE = ("git_commit", "started_at", "threads", "device_name", "path")
# Columns of which one row is told from another.
KEYS = ("figure", "panel", "series", "x", "model", "name", "metric", "quantile", "row", "device")
KEYS = (*KEYS, "pd_ratio", "seq_len", "batch", "chunk", "baseline")


def recompute(entry: Mapping[str, Any], folder: Path, more: Sequence[str] = ()) -> None:
    """Run the command of `entry` with results in `folder`."""
    record = [] if "from" in entry else [f"task.record={folder}/record"]
    kind = "sweep" if entry.get("from") == "sweep.csv" else "run"
    places = [f"output={folder}/out", f"hydra.{kind}.dir={folder}/run"]
    assert main([*entry["command"], *record, *more, "tracking=none", *places]) == 0


def differences(entry: Mapping[str, Any], folder: Path, *, is_thin: bool = False) -> list[str]:
    """The values that differ from the recorded ones; all rows must be there unless `is_thin`."""
    found = []
    for name in entry["tables"]:
        recorded = pd.read_csv(csv_file(EXPERIMENTS / name))
        path = folder / "run" / entry["from"] if "from" in entry else _recorded_in(folder, name)
        computed = pd.read_csv(path)
        computed = computed.round(entry.get("decimals", 15))
        found += [f"{name}: {text}" for text in _compare(recorded, computed, is_thin)]
    return found


def _recorded_in(folder: Path, name: str) -> Path:
    """The table of the same experiment and device, in whatever group of experiments it stands."""
    experiment, device = Path(name).parts[1], Path(name).parts[-2]
    table = f"**/{experiment}/results/{device}/{Path(name).name}"
    (path,) = csv_files(folder / "record", table)
    return path


def _compare(recorded: pd.DataFrame, computed: pd.DataFrame, is_thin: bool) -> Iterator[str]:
    keys = [key for key in KEYS if key in recorded and key in computed]
    rows = dict(_by_key(recorded, keys))
    again = dict(_by_key(computed, keys))
    if not again:
        yield "no rows"
    if unknown := again.keys() - rows.keys():
        yield f"rows that are not recorded: {sorted(map(str, unknown))[:3]}"
    if not is_thin and (missing := rows.keys() - again.keys()):
        yield f"rows that are missing: {sorted(map(str, missing))[:3]}"
    columns = [name for name in recorded if name in computed and name not in (*keys, *PROVENANCE)]
    for key in rows.keys() & again.keys():
        for name in columns:
            if not _is_equal(rows[key][name], again[key][name]):
                yield f"{key}: {name} is {again[key][name]}, recorded {rows[key][name]}"


def _by_key(table: pd.DataFrame, keys: Sequence[str]) -> Iterator[tuple[tuple, dict]]:
    for (_, row), number in zip(
        table.iterrows(), table.groupby(keys, dropna=False).cumcount(), strict=True
    ):
        yield (*(_text(row[key]) for key in keys), number), row.to_dict()


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _is_equal(first: Any, second: Any) -> bool:
    """Equal text, or numbers (also several, separated by blanks) within the tolerance."""
    if pd.isna(first) or pd.isna(second):
        return bool(pd.isna(first) and pd.isna(second))
    try:
        pairs = zip(str(first).split(), str(second).split(), strict=True)
        return all(_is_close(float(value), float(other)) for value, other in pairs)
    except ValueError:
        return str(first) == str(second)


def _is_close(value: float, other: float) -> bool:
    """Equal within the tolerance; the draws of a value that does not exist are all NaN."""
    if math.isnan(value) or math.isnan(other):
        return math.isnan(value) and math.isnan(other)
    return math.isclose(value, other, rel_tol=RELATIVE)


LONGEST = float(os.environ.get("ORACLE_SECONDS", "inf"))
WHOLE = [entry for entry in COMMANDS if entry["seconds"] <= LONGEST]
THIN = [entry for entry in COMMANDS if "thin" in entry]


def name(entry) -> str:
    return entry["tables"][0].replace("/results", "").removesuffix(".csv")


@pytest.mark.parametrize("entry", THIN, ids=name)
def test_some_points_are_the_recorded_ones(entry, tmp_path):
    in_process = ["task.processes=1"] if entry["command"][0].startswith("experiment=") else []
    recompute(entry, tmp_path, [*entry["thin"], *in_process])
    assert differences(entry, tmp_path, is_thin=bool(entry["thin"])) == []


@pytest.mark.oracle
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("entry", WHOLE, ids=name)
def test_all_points_are_the_recorded_ones(entry, tmp_path, request):
    if "oracle" not in request.config.option.markexpr:
        pytest.skip("takes hours: python -m pytest -m oracle tests/oracle")
    recompute(entry, tmp_path)
    assert differences(entry, tmp_path) == []
