"""`python -m sarathi_lab plot FOLDER [x=SETTING] [hue=SETTING] [col=SETTING] [y=QUANTITY,...]
[kind=line|heat] [--out FILE]`: draws a finished run, or a sweep by other axes.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from itertools import count
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
        "axes", nargs="*", metavar=names, help="settings; quantities for y; kind=line or heat"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"ends in {', '.join(KINDS)}")
    options = parser.parse_args(args)
    work = partial(_plot, options.folder, options.axes, options.out)
    return exit_code(work, "no picture was written")


def _plot(folder: Path, settings: Sequence[str], out: Path | None) -> int:
    for setting in settings:
        if setting.partition("=")[0] not in AXES or not setting.partition("=")[2]:
            fix = ", ".join(f"{one}=NAME" for one in AXES)
            raise UserError(f"{setting} is no axis; write {fix}")
    if out is not None and (out.suffix not in KINDS or out.exists()):
        why = "exists" if out.suffix in KINDS else f"does not end in {', '.join(KINDS)}"
        raise UserError(f"--out {out} {why}; name another file")
    figure = _draw(folder, dict(setting.split("=", 1) for setting in settings))
    names = (folder / f"plot{f'-{number}' if number > 1 else ''}.png" for number in count(1))
    out = out or next(path for path in names if not path.exists())
    from sarathi_lab.results.plots.files import save_figure  # matplotlib takes a second

    save_figure(figure, out)
    print_place("figure", out)
    return 0


def _draw(folder: Path, axes: dict[str, str]) -> Figure:
    """Draw the run that the folder is, or else the runs in it. Raises UserError without any."""
    if (folder / "run.json").is_file() and not axes:
        from sarathi_lab.results.plots.runs import draw_run  # matplotlib takes a second

        iterations, requests = (pd.read_parquet(folder / one) for one in (ITERATIONS, REQUESTS))
        return draw_run(iterations, requests, str(load_runs(folder)["name"].iloc[0]))
    runs = load_runs(folder)
    if runs.empty:
        raise UserError(f"{folder} has no finished run; name the folder of a sweep or of a run")
    from sarathi_lab.results.plots.sweeps import draw_sweep

    quantities = axes.pop("y").split(",") if "y" in axes else None
    return draw_sweep(runs, y=quantities, **axes)
