"""All figures of the paper as PNG and PDF, from recorded results: the paper's points, simulations,
measurements.

`python -m sarathi_lab.tasks.figures`, or `make figures`; `notebooks/figures.ipynb` shows the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.table import Table

from sarathi_lab.config.console import console, print_place, progress_of
from sarathi_lab.config.errors import UserError, exit_code, require_int, require_one_of
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.paths import CONF, EXPERIMENTS, REPOSITORY, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment.errors import error_table
from sarathi_lab.experiment.figures import (
    COLUMNS,
    FIGURES,
    PARTS,
    Device,
    Part,
    check_fits,
    devices_of,
    paper,
    predict,
)
from sarathi_lab.experiment.headlines import QUESTIONS, headlines, verdict
from sarathi_lab.results import load
from sarathi_lab.results.load import POINTS
from sarathi_lab.results.plots import figures
from sarathi_lab.results.plots.serving import TITLES
from sarathi_lab.results.plots.serving import draw as draw_serving
from sarathi_lab.results.plots.tasks import policies
from sarathi_lab.results.tracking import Tracker

__all__ = [
    "FIGURES",
    "QUESTIONS",
    "SERVING",
    "headlines",
    "main",
    "points_of",
    "serving_points",
    "simulate",
    "verdict",
]

SIMULATED = EXPERIMENTS / "sarathi" / "paper" / "results" / "simulated.csv"
FORMATS = ("png", "pdf")
POLICIES = (
    "policies"  # the experiment of that name: a figure for each device that it was recorded on
)
SERVING = tuple(TITLES)  # experiments of serving, which are drawn as soon as something is recorded
# each n-th of the thousand points of Fig 12's curves is recorded; more than can be seen apart
DRAWN_CURVES = 10


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    options = _parser().parse_args(args)
    return exit_code(lambda: _run(options), "the figures that were written are kept")


def points_of(*names: str) -> pd.DataFrame:
    """The points of figures (of all without names): the paper's, simulated and measured, as in
    `figure.parquet`.

    Measured ones have `low` and `high`, their interval. Raises UserError for an unknown name.
    """
    for name in names:
        require_one_of("figure", name, FIGURES)
    chosen = names or FIGURES
    simulated = pd.read_csv(SIMULATED, keep_default_na=False, dtype={"series": str})
    tables = [*map(paper, chosen), simulated[simulated.figure.isin(chosen)]]
    known = load.recorded()
    tables += [_measured(name) for name in chosen if name in known]
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def serving_points(name: str) -> pd.DataFrame:
    """The recorded points of an experiment of serving, and the paper's where its folder has them
    (`plots_serving`).
    """
    table = load.load(name)
    points = table.assign(device=table.device_name + ", " + table.model.astype(str))
    papers = EXPERIMENTS / load.group_of(name) / name / "paper.csv"
    return (
        pd.concat([points, pd.read_csv(papers)], ignore_index=True) if papers.is_file() else points
    )


def simulate() -> pd.DataFrame:
    """All simulated points anew, about a minute; with progress."""
    jobs = [(part, device) for part in PARTS for device in devices_of(part)]
    tables = []
    with progress_of("predicting", len(jobs)) as advance:
        for part, device in jobs:
            tables.append(predict(part, device))
            advance(1)
    points = pd.concat(tables, ignore_index=True)
    rank = points.groupby(["figure", "device", "panel", "series"]).cumcount()
    return points[(points.figure != "fig12") | (rank % DRAWN_CURVES == 0)]


def _measured(figure: str) -> pd.DataFrame:
    """The recorded points of a figure by devices; what a device's own simulation gave is left to
    the paper's scale.
    """
    table = load.load(figure)
    table = table[~table.is_simulated]
    device = table.device + ", " + table.model.fillna("").astype(str)
    names = {"panel": table.panel.fillna("").astype(str), "series": table.series.astype(str)}
    found = table.assign(
        **names, device=device.str.removesuffix(", "), source="measured", uncertainty=float("nan")
    )
    return found[[*COLUMNS, "low", "high"]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab.tasks.figures",
        description="Draw the paper's figures as PNG and PDF: its points, simulated, and "
        "measured where recorded.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="FIGURE",
        help=f"one of {', '.join([*FIGURES, *SERVING, POLICIES])}",
    )
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "outputs" / "figures", help="where they go"
    )
    parser.add_argument(
        "--recompute", action="store_true", help="simulate anew, and record it, before drawing"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    known = (*FIGURES, *(name for name in (*SERVING, POLICIES) if name in load.recorded()))
    chosen = options.only or known
    for name in chosen:
        require_one_of("--only", name, known)
    names = [name for name in chosen if name in FIGURES]
    make_folder(options.out, "--out")
    if options.recompute:
        simulate().to_csv(SIMULATED, index=False, float_format="%.5g")
        print_place("simulated", SIMULATED)
    points = points_of(*names) if names else points_of()[:0]
    with progress_of("drawing", len(chosen)) as advance:
        for name in chosen:
            for stem, figure in _draw(name, points):
                _write(stem, figure, options.out)
            advance(1)
    for row in headlines(points).to_dict("records"):
        said = f" ({row['verdict']})" if row["verdict"] else ""
        text = f"{row['figure']:7} {row['headline']}: {row['device']} {row['value']:.3g}{said}"
        console().print(text, highlight=False, soft_wrap=True)
    print_place("figures", options.out)
    return 0


def _draw(name: str, points: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """The pictures of a figure or experiment, each with its file's name; `points` are those of the
    paper's figures.
    """
    if name == POLICIES:
        for device, runs in load.load(POLICIES).groupby("device"):
            yield f"{POLICIES}-{device}", policies(runs)
    else:
        yield (
            name,
            draw_serving(name, serving_points(name))
            if name in SERVING
            else figures.draw(name, points),
        )


def _write(name: str, figure: Figure, folder: Path) -> None:
    for ending in FORMATS:
        figure.savefig(folder / f"{name}.{ending}", dpi=150)


if __name__ == "__main__":
    sys.exit(main())


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
        _require_list(
            "task.gpus", self.gpus, sorted(path.stem for path in (CONF / "hardware").glob("*.yaml"))
        )
        require_int("task.every", self.every, 1, "use 1 for all points")

    def check(self, cfg: DictConfig) -> None:
        """Refuse a model that a GPU can't hold."""
        for part, device in self._jobs():
            check_fits(part, device)

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Write figure.parquet, errors.csv and a picture of each figure, print the error table, and
        log all of it.
        """
        tracker: Tracker = build(cfg.tracking)
        names = self._names()
        config = {"task": "figures", "figures": names, "settings": resolved(cfg)}
        job_type = place.experiment or "figures"
        with tracker.run(
            name=place.name, group=place.group, job_type=job_type, tags=names, config=config
        ) as tracked:
            points = pd.concat([*map(paper, names), *self._predicted()], ignore_index=True)
            errors = error_table(points)
            _write_tables(place.run_dir, names, points, errors)
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
        return list(
            {(part.figure, device.name(part)): (part, device) for part, device in jobs}.values()
        )

    def _predicted(self) -> Iterator[pd.DataFrame]:
        """The predicted points of each job, several at a time, in the order of the jobs."""
        jobs = self._jobs()
        with ProcessPoolExecutor() as pool, progress_of("predicting", len(jobs)) as advance:
            futures = [
                pool.submit(_predict, PARTS.index(part), device, self.every)
                for part, device in jobs
            ]
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
        raise UserError(
            f"{name}={values} is not a list; write {name}=[{next(iter(valid))}], or null for all"
        )
    for value in values:
        require_one_of(name, value, valid)


def _write_tables(
    folder: Path, names: Sequence[str], points: pd.DataFrame, errors: pd.DataFrame
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    points.to_parquet(folder / POINTS, index=False)
    errors.to_csv(folder / "errors.csv", index=False)
    for name in names:
        figures.draw(name, points).savefig(folder / f"{name}.png", dpi=150)


def _print_ranges(points: pd.DataFrame) -> None:
    """What is predicted for GPUs that the paper does not have: the least and the most of each line,
    and where.
    """
    console().print("\nOn other GPUs than the paper's: least and most of each line", style="bold")
    table = Table(box=None, padding=(0, 1))
    for heading in ("figure", "panel", "line", "device", "least", "at", "most", "at", "unit"):
        table.add_column(
            heading, justify="right" if heading in ("least", "most", "at") else "left", no_wrap=True
        )
    for names, line in points.groupby(["figure", "panel", "series", "device"], sort=False):
        figure, panel, series, device = map(str, names)
        ordered = line.sort_values("y")
        ends = [f"{ordered[column].iloc[i]:.4g}" for i in (0, -1) for column in ("y", "x")]
        table.add_row(
            figure, panel, series, device.removeprefix("simulated "), *ends, str(line.unit.iloc[0])
        )
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
        table.add_row(
            row["row"],
            device,
            str(row["points"]),
            found,
            aim,
            f"{row['stated']:.0%}",
            row["verdict"],
        )
    console().print(table)


def _errors(mean: float, largest: float, form: str, form_largest: str) -> str:
    """Mean and largest error in words; NaN stands for none."""
    if pd.isna(mean):
        return ""
    return format(mean, form) if pd.isna(largest) else f"{mean:{form}} ({largest:{form_largest}})"
