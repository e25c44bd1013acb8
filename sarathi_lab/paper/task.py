"""The task that recomputes the paper: predicts its figures, writes the points, prints the errors, draws."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd
from omegaconf import DictConfig
from rich.table import Table

from sarathi_lab.errors import UserError, require_int, require_one_of
from sarathi_lab.paper import plots
from sarathi_lab.paper.errors import error_table
from sarathi_lab.paper.figures import FIGURES, PARTS, Device, Part, check_fits, devices_of, paper, predict
from sarathi_lab.paths import CONF
from sarathi_lab.plan import build, resolved
from sarathi_lab.report import console, print_place, progress_of
from sarathi_lab.results import POINTS
from sarathi_lab.task import Place
from sarathi_lab.tracking import Tracker

Job = tuple[Part, Device]


@dataclass(frozen=True)
class Figures:
    """Recompute `figures` on `gpus`, each n-th point of the long curves (`every`)."""

    reads: ClassVar[tuple[str, ...]] = ()
    has_runs: ClassVar[bool] = False
    figures: Sequence[str] | None = None
    gpus: Sequence[str] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        _require_list("task.figures", self.figures, FIGURES)
        _require_list("task.gpus", self.gpus, sorted(path.stem for path in (CONF / "hardware").glob("*.yaml")))
        require_int("task.every", self.every, 1, "use 1 for all points")

    def check(self, cfg: DictConfig) -> None:
        """Refuse a model that a GPU can't hold."""
        for part, device in self._jobs():
            check_fits(part, device)

    def run(self, cfg: DictConfig, place: Place) -> None:
        """Write figure.parquet, errors.csv and a picture of each figure, print the error table, and log all of it."""
        tracker: Tracker = build(cfg.tracking)
        names = self._names()
        config = {"task": "figures", "figures": names, "settings": resolved(cfg)}
        job_type = place.experiment or "figures"
        with tracker.run(name=place.name, group=place.group, job_type=job_type, tags=names, config=config) as tracked:
            points = pd.concat([*map(paper, names), *self._predicted()], ignore_index=True)
            errors = error_table(points)
            _write(place.run_dir, names, points, errors)
            found = zip(errors.row, errors.device, errors["mean"], strict=True)
            tracked.log_summary({f"error/{row}, {device}": mean for row, device, mean in found})
            tracked.log_tables(place.run_dir)
        others = points[(points.source != "paper") & ~points.device.isin(errors.device)]
        if len(errors):
            _print_errors(errors)
        if len(others):
            _print_ranges(others)
        print_place("points", place.run_dir / POINTS)
        for name in names:
            print_place("figure", place.run_dir / f"{name}.png")

    def _names(self) -> list[str]:
        return [name for name in FIGURES if self.figures is None or name in self.figures]

    def _jobs(self) -> list[Job]:
        parts = [part for part in PARTS if part.figure in self._names()]
        jobs = [(part, device) for part in parts for device in devices_of(part, self.gpus)]
        # On other GPUs than the paper's, parts that differ in theirs alone are one.
        return list({(part.figure, device.name(part)): (part, device) for part, device in jobs}.values())

    def _predicted(self) -> Iterator[pd.DataFrame]:
        """The predicted points of each job, several at a time, in the order of the jobs."""
        jobs = self._jobs()
        with ProcessPoolExecutor() as pool, progress_of("predicting", len(jobs)) as advance:
            futures = [pool.submit(_predict, PARTS.index(part), device, self.every) for part, device in jobs]
            for future in as_completed(futures):
                future.result()
                advance(1)
        return (future.result() for future in futures)


def _predict(number: int, device: Device, every: int) -> pd.DataFrame:
    """`predict` of a part by its number: functions do not travel between processes."""
    return predict(PARTS[number], device, every)


def _require_list(name: str, values: object, valid: Collection[str]) -> None:
    if values is None:
        return
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"{name}={values} is not a list; write {name}=[{next(iter(valid))}], or null for all")
    for value in values:
        require_one_of(name, value, valid)


def _write(folder: Path, names: Sequence[str], points: pd.DataFrame, errors: pd.DataFrame) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    points.to_parquet(folder / POINTS, index=False)
    errors.to_csv(folder / "errors.csv", index=False)
    for name in names:
        plots.draw(name, points).savefig(folder / f"{name}.png", dpi=150)


def _print_ranges(points: pd.DataFrame) -> None:
    """What is predicted for GPUs that the paper does not have: the least and the most of each line, and where."""
    console().print("\nOn other GPUs than the paper's: least and most of each line", style="bold")
    table = Table(box=None, padding=(0, 1))
    for heading in ("figure", "panel", "line", "device", "least", "at", "most", "at", "unit"):
        table.add_column(heading, justify="right" if heading in ("least", "most", "at") else "left", no_wrap=True)
    for names, line in points.groupby(["figure", "panel", "series", "device"], sort=False):
        figure, panel, series, device = map(str, names)
        ordered = line.sort_values("y")
        ends = [f"{ordered[column].iloc[i]:.4g}" for i in (0, -1) for column in ("y", "x")]
        table.add_row(figure, panel, series, device.removeprefix("simulated "), *ends, str(line.unit.iloc[0]))
    console().print(table)


def _print_errors(errors: pd.DataFrame) -> None:
    """The error table as people read it: mean and, in brackets, largest absolute relative error."""
    console().print("\nError against the paper's points: mean (largest)", style="bold")
    table = Table(box=None, padding=(0, 1))
    for heading in ("", "device", "points", "error", "aim", "stated", ""):
        is_number = heading in ("points", "error", "aim", "stated")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in errors.to_dict("records"):
        found = _errors(row["mean"], row["largest"], ".2%", ".1%")
        aim = _errors(row["aim_mean"], row["aim_largest"], ".0%", ".0%")
        device = row["device"].removeprefix("simulated ")
        table.add_row(row["row"], device, str(row["points"]), found, aim, f"{row['stated']:.0%}", row["verdict"])
    console().print(table)


def _errors(mean: float, largest: float, form: str, form_largest: str) -> str:
    """Mean and largest error in words; NaN stands for none."""
    if pd.isna(mean):
        return ""
    return format(mean, form) if pd.isna(largest) else f"{mean:{form}} ({largest:{form_largest}})"
