"""Loading of run folders, of recorded results and of the paper's points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import EXPERIMENTS, OUTPUTS, make_folder, read_object, readable
from sarathi_lab.config.run_context import SweepRecord
from sarathi_lab.results.table import COLUMNS, RESULTS, rows_of_run

POINTS = "figure.parquet"  # recomputed figures of the paper
LABELS = "run.json"  # written last, so its presence marks a complete run
RENAMED = {"floor": "roofline", "ceiling": "peak"}  # words in the names of older files
SIMULATED = "simulated-"
COMPOSED = "kernels-"  # of measured kernels: folders of their hardware and model
COMPOSED_SOURCE = "measured kernels"
REPLAYED = "replayed share"  # of iterations, as CUDA graphs: a quantity of `load_serving`
SHARED = {"hardware", "host"}  # groups that the simulated executor has inside
LONGEST = 80  # characters of a sweep's name
AGAIN = "leave it out or run it again"
# A point: its place in its figure, the median, its interval (see `intervals`) and number of pairs;
# the `reason` where y is missing. `low` and `high` of a simulated point are the cost model's error.
POINT = ["figure", "panel", "series", "x", "y", "low", "high", "num_pairs", "unit", "reason"]
# Measured points have the level of the interval and the samples in their order, too.
POINT_COLUMNS = [*POINT, "confidence", "samples", "model", "dtype", "device_name"]


def find_runs(*roots: Path) -> list[Path]:
    """Return the folders of finished runs below `roots`, baselines included, in natural order."""
    found = {path.parent for root in roots for path in Path(root).rglob(LABELS)}
    visible = (path for path in found if not any(part.startswith(".") for part in path.parts[-2:]))
    return sorted(visible, key=_natural_order)


def find_sweeps(root: Path | str = OUTPUTS) -> dict[str, list[Path]]:
    """Return folders of sweeps by start time and what was swept, newest first; then single runs."""
    runs = [run for run in find_runs(Path(root)) if run.parent.name != "baselines"]
    sweeps, single = dict[str, list[Path]](), []
    for folder, number in Counter(map(_sweep_of, runs)).items():
        if (record := SweepRecord.find(folder)) is None:
            single.append(folder)
            continue
        named = {*record.swept, "experiment", "executor", "hardware", "model"}
        varied = [one for one in record.arguments if one.partition("=")[0] in named]
        what = " ".join(varied or record.arguments)
        what = f"{what[:LONGEST]}..." if len(what) > LONGEST else what
        started = record.started_at[:19].replace("T", " ")
        sweeps[f"{started}, {number} runs: {what}"] = [folder]
    newest_first = dict(sorted(sweeps.items(), reverse=True))
    return newest_first | ({f"{len(single)} single runs": single} if single else {})


def load_runs(*roots: Path | str) -> pd.DataFrame:
    """Return a row per finished run below `roots`: settings and labels (`load_settings`), summary,
    folder (`path`) and its sweep's (`sweep`); NaN where a run lacks a name.

    Unreadable folders are left out and listed in `attrs["skipped"]`; `attrs["settings"]` are the
    columns before the summary's.
    """
    rows, skipped, settings = [], [], dict[str, None]()
    for path in find_runs(*map(Path, roots)):
        try:
            labels, summary = load_settings(path), load_summary(path)
        except UserError:
            skipped.append(str(path))
            continue
        settings |= dict.fromkeys(labels)
        rows.append({**labels, **summary, "path": str(path), "sweep": str(_sweep_of(path))})
    names = settings | dict.fromkeys(name for row in rows for name in row)
    runs = pd.DataFrame(rows, columns=list(names))
    runs.attrs |= {"skipped": tuple(skipped), "settings": tuple(settings)}
    return runs


def load_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the run in `path` by the names that they are typed by (`chunk`,
    `workload.rate`), overridden by its labels, which have resolved "auto" and are None for what the
    policy does not read. Raises UserError.

    No value is a list or a mapping: `versions.torch` is a name, "[512,2048]" a value, an option its
    `name`, else its class. Groups that the simulator reads by `${...}` (`hardware`, `host`) are
    listed once, and not for executors that do not read them.
    """
    labels, config = read_object(path / LABELS, AGAIN), {}
    with readable(path, AGAIN, AttributeError, yaml.YAMLError):
        if (kept := path / "config.yaml").is_file():
            config = yaml.load(kept.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return merge_settings(labels, config)


def merge_settings(labels: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with these labels and configuration, as `load_settings` does."""
    inside = [f"executor.{name}" for name in SHARED]
    named, flat = _flat(labels), _flat(without_unread(config), leaving=inside)
    return named | flat | named  # labels first, and their values


def without_unread(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's configuration without the groups that its executor does not read."""
    unread = SHARED - (config.get("executor") or {}).keys()
    return {name: value for name, value in config.items() if name not in unread}


def _flat(
    node: Mapping[Any, Any], prefix: str = "", leaving: Collection[str] = ()
) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if (name := f"{prefix}{key}") in leaving:
            continue
        if isinstance(value, Mapping):
            inner = _flat(value, f"{name}.", leaving)
            target = inner.pop(f"{name}._target_", None)
            if target is not None:
                flat[name] = inner.pop(f"{name}.name", str(target).rpartition(".")[2])
            flat |= inner
        else:
            flat[name] = _as_typed(value) if isinstance(value, list) else value
    return flat


def _as_typed(value: object) -> str:
    """Write a list as it is typed on a command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_as_typed, value))}]"
    return "null" if value is None else str(value)


def load_rows(*roots: Path | str) -> pd.DataFrame:
    """Return the long table (`table.COLUMNS`) of all readable runs, with their `path`."""
    tables = [pd.DataFrame(columns=[*COLUMNS, "path"])]
    for path in find_runs(*map(Path, roots)):
        with suppress(UserError):
            tables.append(_rows_of(path).assign(path=str(path)))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def _rows_of(path: Path) -> pd.DataFrame:
    """Return the rows of the run in `path`, of an older one from summary.json and run.json."""
    if (file := path / RESULTS).is_file():
        return _parquet(file)
    summary = read_object(path / "summary.json", AGAIN)
    named = {new_name(name): value for name, value in summary.items()}
    return rows_of_run(named, read_object(path / LABELS, AGAIN))


def load_summary(path: Path | str) -> dict[str, float]:
    """Return the quantities of the run in `path` by name."""
    rows = _rows_of(Path(path))
    return dict(zip(rows["quantity"], rows["value"], strict=True))


def load_iterations(path: Path | str) -> pd.DataFrame:
    """Load the iterations of the run in `path`, a row each; columns as in metrics.md."""
    return _parquet(Path(path) / "iterations.parquet").rename(columns=new_name)


def load_requests(path: Path | str) -> pd.DataFrame:
    """Load the requests of the run in `path`, a row each."""
    return _parquet(Path(path) / "requests.parquet")


def _parquet(path: Path) -> pd.DataFrame:
    with readable(path, AGAIN):
        return pd.read_parquet(path)


def new_name(name: str) -> str:
    """Return today's name of a quantity of an older file."""
    return "_".join(RENAMED.get(word, word) for word in str(name).split("_"))


def load_paper(figure: str) -> pd.DataFrame:
    """Load the paper's points (panel, series, x, y, unit) of a figure or table, such as "fig09"."""
    path = EXPERIMENTS / "sarathi" / "paper" / f"{figure}.csv"
    if not path.is_file():
        known = ", ".join(sorted(option.stem for option in path.parent.glob("*.csv")))
        raise UserError(f"figure {figure} is not there; use one of {known}")
    points = pd.read_csv(path, dtype={"panel": str, "series": str}, keep_default_na=False)
    return points.astype({"x": float})


def _sweep_of(run: Path) -> Path:
    """Return the folder that a run shares with its baselines."""
    if run.parent.name == "baselines":
        return run.parent.parent
    return run.parent if run.name.isdecimal() else run  # Hydra numbers the jobs of a sweep


def _natural_order(path: Path) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in path.parts)


def load(experiment: str, root: Path = EXPERIMENTS) -> pd.DataFrame:
    """Load all recorded rows of `experiment`, such as "fig09" or "orca", with `device` and
    `is_simulated` first. Raises UserError if nothing is recorded.
    """
    tables = []
    for path in sorted(root.glob(f"*/{experiment}/results/*/{experiment}.csv")):
        table = pd.read_csv(path).rename(columns={"device": "device_name"})
        device = path.parent.name
        labels = {"device": device, "is_simulated": device.startswith((SIMULATED, COMPOSED))}
        whole = pd.concat([pd.DataFrame(labels, index=table.index), table], axis="columns")
        tables.append(whole.dropna(axis="columns", how="all"))
    if not tables:
        known = ", ".join(recorded(root)) or "none"
        raise UserError(f"experiment {experiment} has no recorded results; use one of {known}")
    table = pd.concat(tables, ignore_index=True)
    if "figure" in table:  # points have all columns, also those that are empty everywhere
        table = table.reindex(columns=list(dict.fromkeys([*table, *POINT_COLUMNS])))
    return table.astype({"confidence": float}) if "confidence" in table else table


def load_serving(experiment: str, device: str, root: Path = EXPERIMENTS) -> pd.DataFrame:
    """Load the recorded quantities of serving `experiment` on a device by policy; may be empty."""
    found = root.glob(f"*/{experiment}/results/{device}/{experiment}-serving.csv")
    return next(map(pd.read_csv, found), pd.DataFrame({"quantity": []}))


def recorded(root: Path = EXPERIMENTS) -> list[str]:
    """Return the experiments that have recorded results, sorted."""
    paths = root.glob("*/*/results/*/*.csv")
    return sorted({path.stem for path in paths if path.stem == path.parents[2].name})


def group_of(experiment: str) -> str:
    """Return the folder of `experiments/` that has the experiment; `lab` for an unknown one."""
    return next((path.parent.name for path in EXPERIMENTS.glob(f"*/{experiment}")), "lab")


def save(
    table: pd.DataFrame, experiment: str, device: str, root: Path, stem: str | None = None
) -> Path:
    """Record a table, replacing the previous one; returns its path. `stem` names another."""
    folder = root / group_of(experiment) / experiment / "results" / device
    make_folder(folder, "task.record")
    table.to_csv(path := folder / f"{stem or experiment}.csv", index=False, float_format="%.6g")
    return path
