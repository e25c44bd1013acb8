"""The paper's figures: drawn from recorded results as PNG and PDF (`python -m sarathi_lab figures`,
`make figures`), or recomputed on simulated GPUs (`task=figures`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure as Picture
from omegaconf import DictConfig

from sarathi_lab.config.console import console, print_place, progress_of
from sarathi_lab.config.errors import UserError, exit_code, require_int, require_one_of
from sarathi_lab.config.paths import CONF, OUTPUTS, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment.claims import in_words, verdicts
from sarathi_lab.experiment.figures import (
    FIGURES,
    PAPERS,
    SERVING,
    SIMULATED,
    error_table,
    paper,
    points_of,
    serving_points,
)
from sarathi_lab.experiment.registry import Sizes
from sarathi_lab.experiment.simulate import Job, check_fits, jobs_of, predict_all
from sarathi_lab.results import load
from sarathi_lab.results.load import POINTS
from sarathi_lab.results.plots import figures as plots
from sarathi_lab.results.plots import serving as serving_plots
from sarathi_lab.results.plots.tasks import policies
from sarathi_lab.results.result import Result, Shown

FORMATS = ("png", "pdf")
POLICIES = "policies"  # an experiment: a figure for each device that it was recorded on
# each n-th of the thousand points of a pipeline's curves is recorded; more than can be seen apart
DRAWN_CURVES = 10


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    options = _parser().parse_args(args)
    return exit_code(lambda: _run(options), "the figures that were written are kept")


def simulate(names: Sequence[str] = PAPERS) -> pd.DataFrame:
    """All simulated points anew, about a minute; with progress."""
    jobs = [job for name in names for job in jobs_of(name)]
    points = pd.concat(predict_all(jobs), ignore_index=True)
    rank = points.groupby(["figure", "device", "panel", "series"]).cumcount()
    is_curve = points.figure.map(lambda name: FIGURES[name].kind == "pipeline")
    return points[~is_curve | (rank % DRAWN_CURVES == 0)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab figures",
        description="Draw the paper's figures as PNG and PDF: its points, simulated, and "
        "measured where recorded.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="FIGURE",
        help=f"one of {', '.join([*PAPERS, *SERVING, POLICIES])}",
    )
    parser.add_argument("--out", type=Path, default=OUTPUTS / "figures", help="where they go")
    parser.add_argument(
        "--recompute", action="store_true", help="simulate anew, and record it, before drawing"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    recorded = load.recorded()
    known = (*PAPERS, *(name for name in (*SERVING, POLICIES) if name in recorded))
    chosen = options.only or known
    for name in chosen:
        require_one_of("--only", name, known)
    make_folder(options.out, "--out")
    if options.recompute:
        simulate().to_csv(SIMULATED, index=False, float_format="%.5g")
        print_place("simulated", SIMULATED)
    with progress_of("drawing", len(chosen)) as advance:
        for name in chosen:
            for stem, picture in _pictures(name):
                for ending in FORMATS:
                    picture.savefig(options.out / f"{stem}.{ending}", dpi=150)
            advance(1)
    found = verdicts()
    for row in found[found.experiment.isin(chosen)].to_dict("records"):
        if row["verdict"] != "not measured":
            said = f"{row['experiment']:7} {row['claim']} ({row['expected']}): {row['device']} "
            text = f"{said}{in_words(row)} ({row['verdict']})"
            console().print(text, highlight=False, soft_wrap=True)
    print_place("figures", options.out)
    return 0


def _pictures(name: str) -> Iterator[tuple[str, Picture]]:
    """The pictures of a figure or experiment, each with its file's name."""
    if name == POLICIES:
        for device, runs in load.load(POLICIES).copy().groupby("device"):
            yield f"{POLICIES}-{device}", policies(runs)
    else:
        yield name, draw(name)


def draw(name: str) -> Picture:
    """A figure of the paper, or an experiment of serving, from what is recorded of it."""
    figure = FIGURES[name]
    if figure.look is None:
        return serving_plots.draw(name, figure.question, serving_points(name))
    return plots.draw(figure.look, points_of(name))


@dataclass(frozen=True)
class Figures:
    """Recompute `figures` on `gpus`, each n-th point of the long curves (`every`)."""

    reads: ClassVar[tuple[str, ...]] = ()
    has_runs: ClassVar[bool] = False
    figures: Sequence[str] | None = None
    gpus: Sequence[str] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        _require_list("task.figures", self.figures, PAPERS)
        gpus = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml"))
        _require_list("task.gpus", self.gpus, gpus)
        require_int("task.every", self.every, 1, "use 1 for all points")

    def check(self, cfg: DictConfig) -> None:
        """Refuse a model that a GPU can't hold."""
        for job in _jobs(self._names(), self.gpus):
            check_fits(job)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """figure.parquet, errors.csv and a picture of each figure, with the error table."""
        return recompute(self._names(), self.gpus, self.every)

    def _names(self) -> list[str]:
        return [name for name in PAPERS if self.figures is None or name in self.figures]


def _jobs(names: Sequence[str], gpus: Sequence[str] | None) -> list[Job]:
    return [job for name in names for job in jobs_of(name, gpus)]


def recompute(
    names: Sequence[str], gpus: Sequence[str] | None, every: int, sizes: Sizes | None = None
) -> Result:
    """The points of the paper's figures beside the paper's own, their errors and pictures; `sizes`
    (of one figure) in place of those in conf/experiment.
    """
    predicted = predict_all(_jobs(names, gpus), every, sizes)
    points = pd.concat([*map(paper, names), *predicted], ignore_index=True)
    errors = error_table(points)
    others = points[(points.source != "paper") & ~points.device.isin(errors.device)]
    shown: list[Shown | str] = []
    if len(errors):
        shown.append(_shown_errors(errors))
    if len(others):
        shown.append(_shown_ranges(others))
    means = zip(errors.row, errors.device, errors["mean"], strict=True)
    pictures: dict[str, Any] = {}
    for name in names:
        if (look := FIGURES[name].look) is not None:
            pictures[name] = plots.draw(look, points[points.figure == name])
    return Result(
        tables={POINTS: points, "errors": errors},
        figures=pictures,
        summary={f"error/{row}, {device}": mean for row, device, mean in means},
        shown=shown,
        tags=names,
    )


def _require_list(name: str, values: object, valid: Collection[str]) -> None:
    if values is None:
        return
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(
            f"{name}={values} is not a list; write {name}=[{next(iter(valid))}], or null for all"
        )
    for value in values:
        require_one_of(name, value, valid)


def _shown_ranges(points: pd.DataFrame) -> Shown:
    """What is predicted for GPUs that the paper does not have: the least and the most of each line,
    and where.
    """
    rows: list[Mapping[Any, object]] = []
    keys = ["figure", "panel", "series", "hardware", "level", "model", "method"]
    for names, line in points.groupby(keys, sort=False):
        figure, panel, series, *device = map(str, names)
        ordered = line.sort_values("y")
        least, most = (f"{row.y:.4g} at {row.x:.4g}" for _, row in ordered.iloc[[0, -1]].iterrows())
        words = ", ".join(filter(None, device))
        row = {"figure": figure, "panel": panel, "line": series, "device": words}
        rows.append({**row, "least": least, "most": most, "unit": str(line.unit.iloc[0])})
    left = ("figure", "panel", "line", "device", "unit")
    title = "On other GPUs than the paper's: least and most of each line"
    return Shown(rows, left=left, title=title)


def _shown_errors(errors: pd.DataFrame) -> Shown:
    """The error table as people read it: mean and, in brackets, largest absolute relative error."""
    rows = [
        {
            "": row["row"],
            "device": row["device"].removeprefix("simulated "),
            "points": str(row["points"]),
            "error": _errors(row["mean"], row["largest"], ".2%", ".1%"),
            "aim": _errors(row["aim_mean"], row["aim_largest"], ".0%", ".0%"),
            "stated": f"{row['stated']:.0%}",
            " ": row["verdict"],
        }
        for row in errors.to_dict("records")
    ]
    title = "Error against the paper's points: mean (largest)"
    return Shown(rows, left=("", "device", " "), title=title)


def _errors(mean: float, largest: float, form: str, form_largest: str) -> str:
    """Mean and largest error in words; NaN stands for none."""
    if pd.isna(mean):
        return ""
    return format(mean, form) if pd.isna(largest) else f"{mean:{form}} ({largest:{form_largest}})"


if __name__ == "__main__":
    sys.exit(main())
