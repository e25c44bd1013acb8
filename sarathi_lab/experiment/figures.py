"""Points of experiments: the paper's, recorded and simulated ones, and errors beside the paper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import pandas as pd
from joblib import Parallel as Workers
from joblib import cpu_count, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.simulated.cost_model import MEASURED_KERNELS
from sarathi_lab.experiment.cases import Part, Point
from sarathi_lab.experiment.registry import COUNTED, FIGURES, KEYS, PAPERS, ErrorRow, Job
from sarathi_lab.results import load

COLUMNS = ["figure", *KEYS, "y", "unit", "source", "device", "uncertainty"]
# What was simulated, in separate columns; empty for the paper's points and a device's.
LABELS = ["hardware", "level", "model", "method"]
OF_ROW = ["device", "hardware", "level", "method"]  # of an error row, beside its name
ERRORS = ["row", *OF_ROW, "points", "mean", "largest", "stated"]
ERRORS += ["aim_mean", "aim_largest", "verdict"]


def paper(name: str) -> pd.DataFrame:
    """Return the paper's points of an experiment, if it has any."""
    figure = FIGURES[name]
    about: dict[str, Any] = {"source": "paper", "device": "paper", "uncertainty": 0.0}
    if figure.has_paper:
        table = figure.paper_points().assign(figure=name, **about, **dict.fromkeys(LABELS, ""))
        return table[[*COLUMNS, *LABELS]]
    path = EXPERIMENTS / load.group_of(name) / name / "paper.csv"
    if not path.is_file():
        return pd.DataFrame()
    return pd.read_csv(path).assign(**about, hardware=figure.papers[0].hardware)


def points_of(*names: str) -> pd.DataFrame:
    """Return all points of experiments (none named: the paper's figures): the paper's, simulated
    and measured ones. Raises UserError for an unknown name.
    """
    for name in names:
        require_one_of("figure", name, FIGURES)
    known = load.recorded()
    tables = []
    for name in names or PAPERS:
        tables += [paper(name), *([_recorded(name)] if name in known else [])]
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def _recorded(name: str) -> pd.DataFrame:
    """Return the points of an experiment that were recorded by device, counted ones, too."""
    files = EXPERIMENTS.glob(f"*/{name}/results/*/{name}-{COUNTED}.csv")
    about: dict[str, Any] = {"is_simulated": True, "device": "", "method": COUNTED}
    counted = [pd.read_csv(path).assign(**about) for path in files]
    table = pd.concat([load.load(name), *counted], ignore_index=True)
    texts = table.reindex(columns=["panel", "series", "dataset", "slo", *LABELS])
    table = table.assign(**texts.fillna("").astype(str))
    device = (table.device + ", " + table.model).str.removesuffix(", ")
    device = device.where(table.model != table.series, table.device)
    if FIGURES[name].has_paper:  # the name of what was simulated has level, model and method
        device = device.where(~table.is_simulated, table.device_name)
    source = table.is_simulated.map({True: "simulated", False: "measured"})
    source = source.where(~table.device.str.startswith(load.COMPOSED), load.COMPOSED_SOURCE)
    return as_points(table.assign(device=device), source)


def as_points(table: pd.DataFrame, source: str | pd.Series) -> pd.DataFrame:
    """Return a table of an experiment as points, with half the interval as their uncertainty."""
    device = table.device if "device" in table else table.device_name + ", " + table.model
    uncertainty = (table.high - table.low) / 2 / table.y.abs()
    return table.assign(source=source, device=device, uncertainty=uncertainty)


def simulate(jobs: Sequence[Job], processes: int | None = None) -> list[pd.DataFrame]:
    """Return a table of points for each job, with its labels; parts of jobs are shared among
    `processes`, None for one a core.
    """
    call = uuid4().hex
    parts = [job.figure.cases(job.spec, job.sizes) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda i: len(parts[i]))  # few parts are large ones
    work = [(i, part) for i in order for part in parts[i]]
    names = list(dict.fromkeys(job.figure.name for job in jobs))
    models = " and ".join(dict.fromkeys(job.spec.name for job in jobs))
    title = f"computing {names[0] if len(names) == 1 else f'{len(names)} figures'} with {models}"
    size = 1 if any(job.figure.is_chained for job in jobs) else processes or cpu_count()
    calls = (delayed(_points)(call, jobs[i], part) for i, part in work)
    points = defaultdict[int, list[list[Point]]](list)
    with progress_of(title, len(work), "parts") as advance:
        try:
            results = Workers(n_jobs=min(size, len(work)), return_as="generator")(calls)
            for (i, _), one in zip(work, results, strict=True):
                points[i].append(one)
                advance(1)
        except TerminatedWorkerError:
            raise RunError(
                "a process of the simulation was killed; the system may have been out of memory: "
                "use task.processes=1"
            ) from None
    tables = [job.figure.table(points[i]).assign(**job.labels) for i, job in enumerate(jobs)]
    return [
        table.assign(device=job.device, device_name=job.backend.device_name)
        for job, table in zip(jobs, tables, strict=True)
    ]


_BENCHES: dict[tuple[str, ...], Any] = {}  # of the last call in this process


def _points(call: str, job: Job, part: Part) -> list[Point]:
    """Evaluate a part on the job's bench, which is made once in each process."""
    key = (call, job.device, job.figure.name if job.figure.has_own_bench else "")
    if key not in _BENCHES:
        if any(other[0] != call for other in _BENCHES):
            _BENCHES.clear()
        _BENCHES[key] = job.figure.bench(job)
    return part.points(_BENCHES[key], 0)


def by_folder(tables: Iterable[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the rows of simulated `tables` by the folder of their hardware and level, of which the
    analytic one is the usual; of measured kernels by that of their hardware and model.
    """
    rows = pd.concat(tables, ignore_index=True).drop(columns=["method", "device"])
    level = ("-" + rows.level).where(rows.level != "analytic", "")
    folders = load.SIMULATED + rows.hardware + level
    composed = load.COMPOSED + rows.hardware + "-" + rows.model
    folders = folders.where(rows.level != MEASURED_KERNELS, composed)
    return {
        str(name): table.reset_index(drop=True) for name, table in rows.groupby(folders, sort=False)
    }


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Return predicted points beside the paper's y (`paper`), and their relative, signed `error`.

    Points that the paper does not show are left out, as are GPUs that it did not use.
    """
    stated = points[points.source == "paper"].rename(columns={"y": "paper"})
    predicted = points[points.source == "simulated"]
    papers = {(name, on.hardware) for name in PAPERS for on in FIGURES[name].papers}
    is_papers = [pair in papers for pair in zip(predicted.figure, predicted.hardware, strict=True)]
    both = predicted[is_papers].merge(stated[["figure", *KEYS, "paper"]], on=["figure", *KEYS])
    return both.assign(error=both.y / both.paper - 1)


def error_table(points: pd.DataFrame) -> pd.DataFrame:
    """Return a row per declared error row and device: mean and largest absolute error.

    `stated` is the mean error that the cost model itself expects. `verdict` is "met", "missed", or
    "-" without an aim; "given" where the profile was made from some of the points, "formula" where
    nothing is predicted; "partly fitted" where constants are fitted to, or chosen by, some of them.
    """
    compared = compare(points)
    rows = []
    for name, of_figure in compared.groupby("figure"):
        for row in FIGURES[str(name)].errors:
            for labels, group in of_figure.query(row.where).groupby(OF_ROW, sort=False):
                rows.append((row.name, *labels, *_judged(row, group)))
    return pd.DataFrame(rows, columns=ERRORS)


def _judged(row: ErrorRow, group: pd.DataFrame) -> tuple[object, ...]:
    errors, level = group.error.abs(), str(group.level.iloc[0])
    mean, largest = errors.mean(), errors.max()
    aim_mean, aim_largest = row.aims.get(level, (None, None))
    verdict = "-"
    if row.given == level:
        verdict = "given"
    elif row.is_formula:
        verdict = "formula"
    elif aim_mean is not None:
        is_met = mean <= aim_mean and (aim_largest is None or largest <= aim_largest)
        verdict = "met" if is_met else "missed"
    if row.fitted in (level, group.hardware.iloc[0]) and not row.is_formula:
        verdict = f"{verdict}, partly fitted".removeprefix("-, ")
    return len(group), mean, largest, group.uncertainty.mean(), aim_mean, aim_largest, verdict
