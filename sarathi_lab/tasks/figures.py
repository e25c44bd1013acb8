"""The paper's figures, drawn from recorded results, or recomputed on simulated GPUs."""

from __future__ import annotations

import argparse
import math
from collections import Counter
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
from sarathi_lab.config.csv_files import csv_file
from sarathi_lab.config.errors import UserError, exit_code, require_one_of
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF, EXPERIMENTS, OUTPUTS, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment.recorded import (
    COLUMNS,
    LABELS,
    error_table,
    paper,
    points_of,
)
from sarathi_lab.experiment.registry import CATALOG, PAPERS, SimulatedJob, paper_jobs
from sarathi_lab.experiment.simulate import simulate
from sarathi_lab.results import load
from sarathi_lab.results.intervals import BAND, EFFECTS, LEVEL, effect
from sarathi_lab.results.load import POINTS
from sarathi_lab.results.plots import panels
from sarathi_lab.results.plots.files import save_figure
from sarathi_lab.results.plots.sweeps import draw_sweep, policies
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.results.table import SIMULATED
from sarathi_lab.tasks.base import Task

GPUS = sorted(path.stem for path in CONF.glob("hardware/*.yaml") if path.stem != "auto")
FORMATS = ("png", "pdf")
PROCESSES = "use a number such as 2, or null for one a core"
PAPERS_GAIN = "throughput / baseline"  # of figures whose peaks are the paper's claims
POLICIES = "policies"  # an experiment: a figure for each device that it was recorded on


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=typed("figures"),
        description="Draw the paper's figures as PNG and PDF: its points, simulated, and "
        "measured where recorded.",
    )
    figures = f"one of {', '.join([*CATALOG, POLICIES])}"
    parser.add_argument("--only", action="append", metavar="FIGURE", help=figures)
    parser.add_argument("--out", type=Path, default=OUTPUTS / "figures", help="where they go")
    everything = (
        "all that is simulated and measured, not one line a GPU and panels with enough points"
    )
    parser.add_argument("--all", action="store_true", help=everything)
    again = (
        "draw recorded pictures again, in their folders in experiments/: all, or those of --only"
    )
    parser.add_argument("--recorded", action="store_true", help=again)
    options = parser.parse_args(args)
    draw = partial(_main, options)
    if options.recorded:
        # Recorded pictures have their folders and their lines.
        if options.all or options.out != parser.get_default("out"):
            parser.error("--recorded draws into the folders of results: leave out --out and --all")
        draw = partial(redraw, only=options.only)
    return exit_code(draw, "the figures that were written are kept")


def redraw(root: Path = EXPERIMENTS, only: Sequence[str] | None = None) -> int:
    """Draw figures by their names, and sweeps by the table beside them; all, or `only` some."""
    names = CATALOG.keys() & load.recorded(root)
    pictures = sorted(root.rglob("*.png"))
    recorded_names = dict.fromkeys(path.stem for path in pictures)
    for name in only or ():
        require_one_of("--only", name, recorded_names)
    drawn = set()
    for path in pictures:
        if only and path.stem not in only:
            continue
        group = path.relative_to(root).parts[0]
        # A page of another group, such as the leaderboard's, may have a picture of that name.
        is_experiment = path.stem in names and load.group_of(path.stem) == group
        picture: Picture | None
        if is_experiment:
            picture = draw(path.stem)
        else:
            picture = _redrawn_sweep(path)
        if picture is not None:
            save_figure(picture, path)
            print_place("figure", path)
            drawn.add(path.stem)
    for name in only or ():
        if name not in drawn:
            raise UserError(f"--only={name} has no recorded table to draw from; leave it out")
    return 0


def _redrawn_sweep(path: Path) -> Picture | None:
    """Draw the sweep whose table is beside a picture; None if it is no sweep."""
    table = csv_file(path.with_suffix(".csv"))
    if not table.is_file():
        return None
    runs = pd.read_csv(table)
    # Other tables beside pictures have no runs.
    is_sweep = {"policy", "is_baseline"} <= set(runs)
    if not is_sweep:
        return None
    return draw_sweep(runs)


def _main(options: argparse.Namespace) -> int:
    recorded = load.recorded()
    names = list(PAPERS)
    for name in (*CATALOG, POLICIES):
        if name in recorded and name not in PAPERS:
            names.append(name)
    chosen = options.only or names
    for name in chosen:
        require_one_of("--only", name, names)
    make_folder(options.out, "--out")
    with progress_of("drawing", len(chosen)) as advance:
        for name in chosen:
            for stem, picture in _pictures(name, is_all=options.all).items():
                for ending in FORMATS:
                    save_figure(picture, options.out / f"{stem}.{ending}")
            advance(1)
    print_place("figures", options.out)
    return 0


def _pictures(name: str, *, is_all: bool) -> dict[str, Picture]:
    """Draw what is recorded under a name; return the pictures by the names of their files."""
    if name != POLICIES:
        return {name: draw(name, is_all=is_all)}
    pictures = {}
    all_rows = load.load(POLICIES)
    for device, rows in all_rows.groupby("device"):
        pictures[f"{POLICIES}-{device}"] = policies(rows)
    return pictures


def draw(name: str, *, is_all: bool = False) -> Picture:
    """Draw what is recorded of an experiment; `is_all` draws every simulated line."""
    return panels.draw(CATALOG[name].look, points_of(name), is_all=is_all)


def _some(name: str, valid: Sequence[str]) -> Any:
    """A field that holds a list of `valid` names, or None."""
    complaint = f"is not a list; write task.{name}=[{valid[0]}], or null for all"
    return listed(None, each=partial(require_one_of, valid=valid), complaint=complaint)


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
            job.experiment.check_simulated(job.backend, job.spec, job.sizes)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        return recompute(simulate(self._jobs(), self.processes))

    def _jobs(self) -> list[SimulatedJob]:
        cards = [load_option("hardware", gpu) for gpu in self.gpus or ()]
        jobs = []
        for name in PAPERS:
            if self.figures is None or name in self.figures:
                jobs += paper_jobs(CATALOG[name], cards, self.every)
        return jobs


def recompute(tables: Sequence[pd.DataFrame]) -> Result:
    """Return simulated `tables` of the paper's figures beside its points, with their errors."""
    names = list(dict.fromkeys(table.figure.iloc[0] for table in tables))
    papers = [paper(name) for name in names]
    simulated = [table.assign(source=SIMULATED) for table in tables]
    rows = pd.concat([*papers, *simulated], ignore_index=True)
    points = rows[[*COLUMNS, *LABELS]]
    errors = error_table(points)
    shown: list[DisplayTable | str] = []
    if len(errors):
        shown += _shown_errors(errors)
    shown += peak_tables(points)
    # Of what has no error row, as the paper shows no points of it, the lines are shown.
    has_errors = set(errors.device)
    for table in tables:
        device = str(table.device.iloc[0])
        if device not in has_errors:
            shown.append(lines(device, table))
    summary = {}
    for row, device, mean in zip(errors.row, errors.device, errors["mean"], strict=True):
        summary[f"error/{row}, {device}"] = mean
    pictures = {}
    for name in names:
        is_of_figure = points.figure == name
        of_figure = points[is_of_figure]
        pictures[name] = panels.draw(CATALOG[name].look, of_figure)
    return Result(
        tables={POINTS: points, "errors": errors},
        figures=pictures,
        summary=summary,
        shown=shown,
        tags=names,
    )


def peak_tables(points: pd.DataFrame) -> list[DisplayTable]:
    """Show the highest gain of each panel of a figure of gains, the paper's and the simulated ones,
    with its line and where it is.
    """
    tables = []
    for name, of_figure in points.groupby("figure", sort=False):
        look = CATALOG[str(name)].look
        if look.y != PAPERS_GAIN:
            continue
        rows = []
        by_panel = of_figure.sort_values("panel", kind="stable")
        for (panel, device), group in by_panel.groupby(["panel", "device"], sort=False):
            highest = group.sort_values("y").iloc[-1]
            row = {
                "panel": str(panel),
                "device": str(device),
                "highest": f"{highest['y']:.2f}",
                "at": f"{look.x} {highest['x']:.3g}, {highest['series']}",
            }
            rows.append(row)
        title = f"{name}: the highest {PAPERS_GAIN}"
        tables.append(DisplayTable(rows, left=("panel", "device", "at"), title=title))
    return tables


def lines(device: str, table: pd.DataFrame) -> DisplayTable:
    """Each line's least and most with their intervals, and what is missing."""
    rows = []
    for (panel, series), line in table.groupby(["panel", "series"], sort=False):
        with_value = line.dropna(subset="y")
        by_value = with_value.sort_values("y")
        row = {
            "panel": str(panel),
            "line": str(series),
            "points": str(len(line)),
            "least": _described(by_value[:1]),
            "most": _described(by_value[-1:]),
            "unit": str(line.unit.iloc[0]),
        }
        missing = line[line.y.isna()]
        if len(missing):
            row["points"] += f", {len(missing)} missing: {missing.reason.iloc[0]}"
        rows.append(row)
    figure = table.figure.iloc[0]
    title = f"{figure} on {device}: {_brackets(table)}"
    texts = ("panel", "line", "points", "unit")
    return DisplayTable(rows, left=texts, title=title, keys=("panel", "line"))


def _described(points: pd.DataFrame) -> str:
    """Describe the only one of `points`; empty if there is none."""
    if points.empty:
        return ""
    point = points.iloc[0]
    interval = ""
    if not math.isnan(point.low):
        interval = f" ({point.low:.3g} to {point.high:.3g})"
    return f"{point.y:.3g}{interval} at {point.x:g}"


def _brackets(table: pd.DataFrame) -> str:
    """State what the brackets around values are."""
    if table.num_pairs.max() <= 1:
        return "in brackets intervals of the cost model's errors"
    text = "medians (of an iteration's timings the lower quartile counts), in brackets intervals "
    levels = table.confidence[table.num_pairs > 1]
    text += f"of {100 * min(LEVEL, levels.min()):.0f} %"
    is_simulated = "level" in table and table.level.notna().all()
    if not is_simulated:
        return text
    if "draws" in table:
        return f"{text}, with the cost model's errors"
    return f"{text} of the seeds alone, without the cost model's errors"


def counts(device: str, table: pd.DataFrame) -> DisplayTable:
    """Count where the whole interval shows that a map of a table gains, is neutral or loses, with
    its best and worst cell, and for how many loads the chunk that is best for them does.
    """
    rows = []
    for (model, panel), cells in table.groupby(["model", "panel"], sort=False):
        best_rows = cells.groupby("series").y.idxmax()
        rows.append(
            {
                "model": str(model),
                "map": str(panel),
                " / ".join(EFFECTS): _counted(cells),
                "best": f"{cells.y.max() - 1:+.0%}",
                "worst": f"{cells.y.min() - 1:+.0%}",
                "with the best chunk": _counted(cells.loc[best_rows]),
            }
        )
    title = (
        f"{table.figure.iloc[0]} on {device}: an interval that is all more than {BAND:.0%} off is "
        "a gain or a loss"
    )
    return DisplayTable(rows, left=("model", "map"), title=title)


def _counted(ratios: pd.DataFrame) -> str:
    """Count what the intervals of ratios show, in the order of `EFFECTS`."""
    effects = map(effect, ratios.low, ratios.high)
    counted = Counter(effects)
    numbers = [str(counted[name]) for name in EFFECTS]
    return " / ".join(numbers)


NOTES_ON_ERRORS = (
    "  own: the mean error that the cost model expects of itself; counted: batches are counted, "
    "not served; missed: the mean or the largest error is above its aim, by whatever little"
)


def _shown_errors(errors: pd.DataFrame) -> list[DisplayTable | str]:
    """The mean and largest absolute relative errors, each with the aim to stay within."""
    rows = []
    for error in errors.to_dict("records"):
        rows.append(
            {
                "row": error["row"],
                "device": error["device"],
                "points": error["points"],
                # Two digits: 1.01 % misses an aim of 1 %.
                "mean\n(aim)": _beside_aim(error["mean"], error["aim_mean"]),
                "largest\n(aim)": _beside_aim(error["largest"], error["aim_largest"]),
                "own": error["stated"],
                "verdict": error["verdict"],
            }
        )
    title = "Error against the paper's points"
    left = ("row", "device", "verdict")
    return [DisplayTable(rows, left=left, formats={"own": ".1%"}, title=title), NOTES_ON_ERRORS]


def _beside_aim(error: float, aim: float | None) -> str:
    return f"{error:.2%}" if pd.isna(aim) else f"{error:.2%}\n({aim:.0%})"
