"""The paper's figures, drawn from recorded results, or recomputed on simulated GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Picture
from omegaconf import DictConfig

from sarathi_lab.config.checked import listed, whole
from sarathi_lab.config.console import print_place, progress_of, typed
from sarathi_lab.config.errors import exit_code, require_one_of
from sarathi_lab.config.paths import CONF, EXPERIMENTS, OUTPUTS, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment.recorded import (
    COLUMNS,
    LABELS,
    as_points,
    error_table,
    paper,
    points_of,
)
from sarathi_lab.experiment.registry import FIGURES, PAPERS, Job, paper_jobs
from sarathi_lab.experiment.simulate import simulate
from sarathi_lab.results import load
from sarathi_lab.results.intervals import LEVEL
from sarathi_lab.results.load import POINTS
from sarathi_lab.results.plots import figures as plots
from sarathi_lab.results.plots.files import save_figure
from sarathi_lab.results.plots.sweeps import draw_sweep, policies
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.results.table import rows_of_points
from sarathi_lab.tasks.base import Task

GPUS = sorted(path.stem for path in CONF.glob("hardware/*.yaml") if path.stem != "auto")
FORMATS = ("png", "pdf")
PROCESSES = "use a number such as 2, or null for one a core"
NEUTRAL = 0.02  # share up to which a gain or a loss is none
POLICIES = "policies"  # an experiment: a figure for each device that it was recorded on


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=typed("figures"),
        description="Draw the paper's figures as PNG and PDF: its points, simulated, and "
        "measured where recorded.",
    )
    text = f"one of {', '.join([*FIGURES, POLICIES])}"
    parser.add_argument("--only", action="append", metavar="FIGURE", help=text)
    parser.add_argument("--out", type=Path, default=OUTPUTS / "figures", help="where they go")
    text = "all that is simulated and measured, not one line a GPU and panels with enough points"
    parser.add_argument("--all", action="store_true", help=text)
    text = "instead draw again, in its folder, each picture in experiments/ with recorded results"
    parser.add_argument("--recorded", action="store_true", help=text)
    options = parser.parse_args(args)
    if options.recorded and options != parser.parse_args(["--recorded"]):
        parser.error("--recorded draws all into their folders: leave out --only, --out and --all")
    work = redraw if options.recorded else partial(_main, options)
    return exit_code(work, "the figures that were written are kept")


def redraw(root: Path = EXPERIMENTS) -> int:
    """Draw figures by their names, and sweeps by the table beside them."""
    names = FIGURES.keys() & load.recorded(root)
    for path in sorted(root.rglob("*.png")):
        table = path.with_suffix(".csv")
        if path.stem in names:
            picture = draw(path.stem)
        elif table.is_file() and {"policy", "is_baseline"} <= {*(runs := pd.read_csv(table))}:
            picture = draw_sweep(runs)
        else:
            continue
        save_figure(picture, path)
        print_place("figure", path)
    return 0


def _main(options: argparse.Namespace) -> int:
    recorded = load.recorded()
    others = sorted(FIGURES.keys() - set(PAPERS), key=list(FIGURES).index)
    known = (*PAPERS, *(name for name in (*others, POLICIES) if name in recorded))
    chosen = options.only or known
    for name in chosen:
        require_one_of("--only", name, known)
    make_folder(options.out, "--out")
    with progress_of("drawing", len(chosen)) as advance:
        for name in chosen:
            if name == POLICIES:
                runs = load.load(POLICIES).copy().groupby("device")
                pictures = {f"{POLICIES}-{device}": policies(rows) for device, rows in runs}
            else:
                pictures = {name: draw(name, is_all=options.all)}
            for stem, picture in pictures.items():
                for ending in FORMATS:
                    save_figure(picture, options.out / f"{stem}.{ending}")
            advance(1)
    print_place("figures", options.out)
    return 0


def draw(name: str, *, is_all: bool = False) -> Picture:
    """Draw what is recorded of an experiment; `is_all` draws every simulated line."""
    return plots.draw(FIGURES[name].look, rows_of_points(points_of(name)), is_all=is_all)


def _some(name: str, known: Sequence[str]) -> Any:
    """A field that holds a list of `known` names, or None."""
    complaint = f"is not a list; write task.{name}=[{known[0]}], or null for all"
    return listed(None, each=partial(require_one_of, valid=known), complaint=complaint)


@dataclass(frozen=True)
class Figures(Task):
    """Recompute `figures` on `gpus`, each n-th point of the long curves (`every`)."""

    reads = ()
    figures: Sequence[str] | None = _some("figures", PAPERS)
    gpus: Sequence[str] | None = _some("gpus", GPUS)
    every: int = whole(1, minimum=1, fix="use 1 for all points")
    processes: int | None = whole(None, minimum=1, fix=PROCESSES)

    def check(self, cfg: DictConfig) -> None:
        for job in self._jobs():
            job.figure.check(job.backend, job.spec, job.sizes)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        return recompute(simulate(self._jobs(), self.processes))

    def _jobs(self) -> list[Job]:
        names = [name for name in PAPERS if self.figures is None or name in self.figures]
        return [job for name in names for job in paper_jobs(FIGURES[name], self.gpus, self.every)]


def recompute(tables: Sequence[pd.DataFrame]) -> Result:
    """Return simulated `tables` of the paper's figures beside its points, with their errors."""
    names = list(dict.fromkeys(table.figure.iloc[0] for table in tables))
    simulated = [as_points(table, "simulated") for table in tables]
    points = pd.concat([*map(paper, names), *simulated], ignore_index=True)
    points = points[[*COLUMNS, *LABELS]]
    errors = error_table(points)
    shown = [_shown_errors(errors)] if len(errors) else []
    devices = [(str(table.device.iloc[0]), table) for table in tables]
    shown += [lines(name, table) for name, table in devices if name not in set(errors.device)]
    means = zip(errors.row, errors.device, errors["mean"], strict=True)
    pictures = {
        name: plots.draw(FIGURES[name].look, rows_of_points(points[points.figure == name]))
        for name in names
    }
    return Result(
        tables={POINTS: points, "errors": errors},
        figures=pictures,
        summary={f"error/{row}, {device}": mean for row, device, mean in means},
        shown=shown,
        tags=names,
    )


def lines(device: str, table: pd.DataFrame) -> DisplayTable:
    """Each line's least and most with their intervals, and what is missing."""
    rows = []
    for (panel, series), line in table.groupby(["panel", "series"], sort=False):
        known = line.dropna(subset="y").sort_values("y")
        ends = known.iloc[[0, -1]].itertuples() if len(known) else ()
        words = [f"{row.y:.3g} ({row.low:.3g} to {row.high:.3g}) at {row.x:g}" for row in ends]
        missing = line[line.y.isna()]
        row = {"panel": str(panel), "line": str(series), "points": str(len(line))}
        row |= dict(zip(("least", "most"), words or ["", ""], strict=True))
        why = f"{len(missing)}: {missing.reason.iloc[0]}" if len(missing) else ""
        rows.append({**row, "unit": str(line.unit.iloc[0]), "missing": why})
    what = "in brackets the cost model's error"
    if table.num_pairs.max() > 1:
        reached = table.confidence[table.num_pairs > 1]
        what = "medians (of an iteration's timings the lower quartile counts)"
        what += f", in brackets intervals of {100 * LEVEL:.0f} %"
        if below := int((reached < LEVEL).sum()):
            what += f", of {below} of {len(reached)} points of less, as their rounds are alike"
    left = ("panel", "line", "unit", "missing")
    return DisplayTable(rows, left=left, title=f"{table.figure.iloc[0]} on {device}: {what}")


def counts(device: str, table: pd.DataFrame) -> DisplayTable:
    """Count where each map of a table gains, is neutral or loses, with its best and worst cell, and
    how many loads do with the chunk that is best for them.
    """
    rows = []
    for (model, panel), cells in table.groupby(["model", "panel"], sort=False):
        best_chunks = cells.groupby("series").y.max()
        rows.append(
            {
                "model": str(model),
                "map": str(panel),
                "gain / neutral / lose": _counted(cells.y),
                "best": f"{cells.y.max() - 1:+.0%}",
                "worst": f"{cells.y.min() - 1:+.0%}",
                "with the best chunk": _counted(best_chunks),
            }
        )
    title = f"{table.figure.iloc[0]} on {device}: more than {NEUTRAL:.0%} is a gain or a loss"
    return DisplayTable(rows, left=("model", "map"), title=title)


def _counted(ratios: pd.Series) -> str:
    """Count ratios that are gains, neutral and losses."""
    num_gains = int((ratios > 1 + NEUTRAL).sum())
    num_losses = int((ratios <= 1 - NEUTRAL).sum())
    return f"{num_gains} / {len(ratios) - num_gains - num_losses} / {num_losses}"


def _shown_errors(errors: pd.DataFrame) -> DisplayTable:
    """The mean and largest absolute relative errors, with those to stay within."""
    formats = dict.fromkeys(("mean", "largest", "stated", "aim_mean", "aim_largest"), ".1%")
    left, title = ("row", "device", "verdict"), "Error against the paper's points"
    shown = errors.drop(columns=["hardware", "level", "method"]).to_dict("records")
    return DisplayTable(shown, left=left, formats=formats, title=title)
