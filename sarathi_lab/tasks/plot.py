"""`python -m sarathi_lab plot FOLDER [x=SETTING] [hue=SETTING] [col=SETTING] [y=QUANTITY,...]
[kind=line|heat] [--out FILE]`: draws a finished run, or a sweep by other axes.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from sarathi_lab.config.console import print_place, typed
from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.results.load import load_runs
from sarathi_lab.results.result import ITERATIONS, REQUESTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = ("x", "hue", "col", "y", "kind")
KINDS = (".png", ".pdf", ".svg")


def main(args: Sequence[str]) -> int:
    """Draw what the folder of the arguments holds; returns the exit code."""
    text = "Draws a finished sweep by other axes (y may name several quantities), or one run: its "
    text += "batches over time, its times to first token and between tokens."
    parser = ArgumentParser(typed("plot"), description=text)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a sweep or of one run")
    names = " ".join(f"[{name}=NAME]" for name in AXES)
    parser.add_argument(
        "axes",
        nargs="*",
        default=[],  # else argparse lists them among what is missing
        metavar=names,
        help="settings; quantities for y; kind=line or heat",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"ends in {', '.join(KINDS)}")
    options = parser.parse_args(args)
    work = partial(_plot, options.folder, options.axes, options.out)
    return exit_code(work, "no picture was written")


def _plot(folder: Path, settings: Sequence[str], out: Path | None) -> int:
    axes = {}
    for setting in settings:
        axis, _, name = setting.partition("=")
        if axis not in AXES or not name:
            advice = ", ".join(f"{valid}=NAME" for valid in AXES)
            raise UserError(f"{setting} is no axis; write {advice}")
        axes[axis] = name
    if out is not None:
        _check_out(out)
    figure = _draw(folder, axes)
    path = out or _unused(folder)
    from sarathi_lab.results.plots.files import save_figure  # matplotlib takes a second

    save_figure(figure, path)
    print_place("figure", path)
    return 0


def _check_out(path: Path) -> None:
    """Raise UserError for a file of another kind, or one that is there."""
    reason = ""
    if path.suffix not in KINDS:
        reason = f"does not end in {', '.join(KINDS)}"
    elif path.exists():
        reason = "exists"
    if reason:
        raise UserError(f"--out {path} {reason}; name another file")


def _unused(folder: Path) -> Path:
    """Return the first of plot.png, plot-2.png, ... that is not there."""
    path = folder / "plot.png"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"plot-{number}.png"
    return path


def _draw(folder: Path, axes: dict[str, str]) -> Figure:
    """Draw the run that the folder is, or else the runs in it. Raises UserError without any."""
    if (folder / "run.json").is_file() and not axes:
        from sarathi_lab.results.plots.runs import draw_run  # matplotlib takes a second

        iterations = pd.read_parquet(folder / ITERATIONS)
        requests = pd.read_parquet(folder / REQUESTS)
        name = str(load_runs(folder)["name"].iloc[0])
        return draw_run(iterations, requests, name)
    runs = load_runs(folder)
    if runs.empty:
        raise UserError(f"{folder} has no finished run; name the folder of a sweep or of a run")
    from sarathi_lab.results.plots.sweeps import draw_sweep

    # `y` alone may name several.
    quantities = None
    if "y" in axes:
        quantities = axes.pop("y").split(",")
    return draw_sweep(runs, y=quantities, **axes)
