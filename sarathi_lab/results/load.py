"""Loading of run folders, of recorded results and of the paper's points."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from sarathi_lab.config.csv_files import csv_files, csv_name, write_csv
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS, OUTPUTS, make_folder, read_object, readable
from sarathi_lab.config.run_context import SweepRecord
from sarathi_lab.results.table import MEASURED, RESULTS, Iterations, Quantities, Requests, Runs
from sarathi_lab.results.table import SIMULATED as SIMULATED_SOURCE

POINTS = "figure.parquet"  # recomputed figures of the paper
LABELS = "run.json"  # written last, so its presence marks a complete run
SIMULATED = "simulated-"
COMPOSED = "kernels-"  # of measured kernels: folders of their hardware and model
COMPOSED_SOURCE = "measured kernels"
REPLAYED = "replayed share"  # of iterations, as CUDA graphs: a quantity of the tables of serving
SHARED = {"hardware", "host"}  # groups that the simulated executor has inside
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is not everywhere
LONGEST = 80  # characters of a command in a sweep's name
AGAIN = "leave it out or run it again"
# A point: its place in its figure, the median, its interval (see `intervals`) and number of pairs;
# the `reason` where y is missing. A simulated point records its `draws`, and what it is where each
# of its shapes is slower (`moved`; see `Estimate`).
POINT = [
    "figure",
    "panel",
    "series",
    "x",
    "y",
    "low",
    "high",
    "num_pairs",
    "unit",
    "reason",
]
# What a point is of, in words; a recording lacks those that its experiment does not vary.
TEXTS = [
    "panel",
    "series",
    "dataset",
    "slo",
    "hardware",
    "level",
    "model",
    "method",
]
POINT_COLUMNS = [
    *POINT,
    # Measured points have the level of the interval and the samples in their order, too.
    "confidence",
    "samples",
    "draws",
    "moved",
    "model",
    "dtype",
    "device_name",
]


Tree = Mapping[str, object]  # of a configuration, with trees as values
Settings = dict[str, object]  # of a run, by the names that they are typed by
FoldersByName = dict[str, list[Path]]


def find_runs(*roots: Path) -> list[Path]:
    """Return the folders of finished runs below `roots`, baselines included, in natural order."""
    folders = set()
    for root in roots:
        for path in Path(root).rglob(LABELS):
            folder = path.parent
            is_hidden = _is_hidden(folder) or _is_hidden(folder.parent)
            if not is_hidden:
                folders.add(folder)
    return sorted(folders, key=_natural_order)


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def find_sweeps(root: Path | str = OUTPUTS) -> FoldersByName:
    """Return folders of sweeps by start time and what was swept, newest first; then single runs."""
    num_runs: Counter[Path] = Counter()
    for run in find_runs(Path(root)):
        if run.parent.name != "baselines":
            num_runs[_sweep_of(run)] += 1
    sweeps: FoldersByName = {}
    single = []
    for folder, number in num_runs.items():
        record = SweepRecord.find(folder)
        if record is None:
            single.append(folder)
            continue
        to_the_second = record.started_at[:19]
        started = to_the_second.replace("T", " ")
        arguments = " ".join(record.arguments)
        command = textwrap.shorten(arguments, LONGEST, placeholder="...")
        name = f"{started}, {number} runs: {command}"
        sweeps[name] = [folder]
    newest_first = dict(sorted(sweeps.items(), reverse=True))
    if single:
        newest_first[f"{len(single)} single runs"] = single
    return newest_first


def load_runs(*roots: Path | str) -> Runs:
    """Return a row per finished run below `roots`: settings and labels (`load_settings`), summary,
    folder (`path`) and its sweep's (`sweep`); NaN where a run lacks a name.

    Unreadable folders are left out and listed in `attrs["skipped"]`; `attrs["settings"]` are the
    columns before the summary's.
    """
    rows = []
    skipped = []
    settings: dict[str, None] = {}
    columns: dict[str, None] = {}
    for path in find_runs(*map(Path, roots)):
        try:
            labels = load_settings(path)
            summary = load_summary(path)
        except UserError:
            skipped.append(str(path))
            continue
        row = {
            **labels,
            **summary,
            "path": str(path),
            "sweep": str(_sweep_of(path)),
        }
        rows.append(row)
        settings |= dict.fromkeys(labels)
        columns |= dict.fromkeys(row)
    # Settings of all runs come first, also those that only a later run has.
    columns = settings | columns
    runs = pd.DataFrame(rows, columns=list(columns))
    runs.attrs["skipped"] = tuple(skipped)
    runs.attrs["settings"] = tuple(settings)
    return runs


def load_settings(path: Path) -> Settings:
    """Return the settings of the run in `path`, by the names that a user types (`workload.rate`).

    The run's labels override them: "auto" is resolved there, and what the policy does not read is
    None. No value is a list or a mapping. A leaf of a mapping has a dotted name (`versions.torch`),
    a list is text ("[512,2048]"), and an option is its `name` or else its class. Groups that the
    simulator reads by `${...}` (`hardware`, `host`) are listed once, and only for executors that
    read them.

    Raises:
        UserError: For a run without readable files.
    """
    labels = read_object(path / LABELS, AGAIN)
    file = path / "config.yaml"
    config = {}
    with readable(path, AGAIN, AttributeError, yaml.YAMLError):
        if file.is_file():
            config = yaml.load(file.read_text(), YAML_LOADER)
        return merge_settings(labels, config)


def merge_settings(labels: Tree, config: Tree) -> Settings:
    """Return the settings of a run with these labels and configuration, as `load_settings` does."""
    named = _flat(labels)
    read = without_unread(config)
    inside = [f"executor.{name}" for name in SHARED]
    stated = _flat(read, leaving=inside)
    # Labels come first, and a setting that is stated, too, has the label's value: what "auto" was
    # resolved to.
    return named | stated | named


def without_unread(config: Tree) -> Settings:
    """Return a run's configuration without the groups that its executor does not read."""
    executor = config.get("executor")
    unread = SHARED
    if isinstance(executor, Mapping):
        unread = SHARED - executor.keys()
    read = {}
    for name, value in config.items():
        if name not in unread:
            read[name] = value
    return read


def _flat(
    node: Mapping[Any, object],
    prefix: str = "",
    leaving: Collection[str] = (),
) -> Settings:
    """Return the leaves of a tree by their dotted names, without those that are named."""
    flat: Settings = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if name in leaving:
            continue
        if isinstance(value, list):
            flat[name] = _as_typed(value)
        elif not isinstance(value, Mapping):
            flat[name] = value
        else:
            leaves = _flat(value, f"{name}.", leaving)
            target = leaves.pop(f"{name}._target_", None)
            if target is not None:  # an option
                class_name = str(target).rpartition(".")[2]
                flat[name] = leaves.pop(f"{name}.name", class_name)
            flat |= leaves
    return flat


def _as_typed(value: object) -> str:
    """Write a list as it is typed on a command line."""
    if isinstance(value, list):
        items = ",".join(map(_as_typed, value))
        return f"[{items}]"
    if value is None:
        return "null"
    return str(value)


def load_summary(path: Path | str) -> Quantities:
    """Return the quantities of the run in `path` by name."""
    rows = _parquet(Path(path) / RESULTS)
    return dict(zip(rows["quantity"], rows["value"], strict=True))


def load_iterations(path: Path | str) -> Iterations:
    """Load the iterations of the run in `path`, a row each; columns as in metrics.md."""
    return _parquet(Path(path) / "iterations.parquet")


def load_requests(path: Path | str) -> Requests:
    """Load the requests of the run in `path`, a row each."""
    return _parquet(Path(path) / "requests.parquet")


def _parquet(path: Path) -> pd.DataFrame:
    with readable(path, AGAIN):
        return pd.read_parquet(path)


def load_paper(figure: str) -> pd.DataFrame:
    """Load the paper's points (panel, series, x, y, unit) of a figure or table, such as "fig09"."""
    path = EXPERIMENTS / "sarathi" / "paper" / f"{figure}.csv"
    if not path.is_file():
        files = path.parent.glob("*.csv")
        figures = sorted(file.stem for file in files)
        require_one_of("figure", figure, figures)
    texts = {"panel": str, "series": str}
    points = pd.read_csv(path, dtype=texts, keep_default_na=False)
    return points.astype({"x": float})


def _sweep_of(run: Path) -> Path:
    """Return the folder that a run shares with its baselines."""
    if run.parent.name == "baselines":
        return run.parent.parent
    if run.name.isdecimal():  # Hydra numbers the jobs of a sweep
        return run.parent
    return run


def _natural_order(path: Path) -> list[str]:
    """Return the parts of a path, numbers so that 2 comes before 10."""
    padded = []
    for part in path.parts:
        if part.isdecimal():
            part = part.zfill(9)
        padded.append(part)
    return padded


def load(experiment: str, root: Path = EXPERIMENTS) -> pd.DataFrame:
    """Load all recorded rows of `experiment`, such as "fig09" or "orca", with `device` and
    `is_simulated` first. Raises UserError if nothing is recorded.
    """
    tables = []
    for path in csv_files(root, f"*/{experiment}/results/*/{experiment}.csv"):
        table = pd.read_csv(path)
        table = table.rename(columns={"device": "device_name"})
        device = path.parent.name
        is_simulated = device.startswith((SIMULATED, COMPOSED))
        labels_of_rows = pd.DataFrame(
            {"device": device, "is_simulated": is_simulated},
            index=table.index,
        )
        with_labels = pd.concat([labels_of_rows, table], axis="columns")
        # pandas warns of columns that are empty in one table: they would decide the types of all.
        filled = with_labels.dropna(axis="columns", how="all")
        tables.append(filled)
    if not tables:
        experiments = ", ".join(recorded(root)) or "none"
        raise UserError(
            f"experiment {experiment} has no recorded results; use one of {experiments}"
        )
    rows = pd.concat(tables, ignore_index=True)
    if "figure" in rows:  # points have all columns, also those that are empty everywhere
        columns = dict.fromkeys([*rows, *POINT_COLUMNS])
        rows = rows.reindex(columns=list(columns))
    if "confidence" in rows:
        rows = rows.astype({"confidence": float})
    return rows


def with_texts(points: pd.DataFrame) -> pd.DataFrame:
    """Return points with all of `TEXTS`, empty ones without missing values: by these pandas would
    leave points out of groups and merges.
    """
    stated = points.reindex(columns=TEXTS)
    texts = stated.fillna("").astype(str)
    others = points.drop(columns=TEXTS, errors="ignore")
    return pd.concat([others, texts], axis="columns")


def source_of(device: str) -> str:
    """Return how the points in a device's folder came about."""
    if device.startswith(COMPOSED):
        # Their constants are a GPU's kernels that were timed: neither a run nor a data sheet's GPU.
        return COMPOSED_SOURCE
    if device.startswith(SIMULATED):
        return SIMULATED_SOURCE
    return MEASURED


def recorded(root: Path = EXPERIMENTS) -> list[str]:
    """Return the experiments that have recorded results, sorted."""
    experiments = set()
    for path in csv_files(root, "*/*/results/*/*.csv"):
        name = csv_name(path)
        if name == path.parents[2].name:
            experiments.add(name)
    return sorted(experiments)


def group_of(experiment: str) -> str:
    """Return the folder of `experiments/` that has the experiment; `lab` for an unknown one."""
    for path in EXPERIMENTS.glob(f"*/{experiment}"):
        return path.parent.name
    return "lab"


def save(
    table: pd.DataFrame,
    experiment: str,
    device: str,
    root: Path,
    ending: str = "",
) -> Path:
    """Record a table, replacing the previous one; returns its path. Further tables of an experiment
    have an `ending`, such as "-serving".
    """
    folder_of_experiment = root / group_of(experiment) / experiment
    folder = folder_of_experiment / "results" / device
    make_folder(folder, "task.record")
    # Six digits: more are noise, and would differ between machines in every record.
    text = table.to_csv(index=False, float_format="%.6g")
    name = f"{experiment}{ending}.csv"
    return write_csv(folder / name, text)
