"""`python -m sarathi_lab plot FOLDER [x=SETTING] [hue=SETTING] [facet=SETTING] [y=QUANTITY,...]`:
draws a finished sweep again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sarathi_lab.config.console import print_place
from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.results.load import load_runs
from sarathi_lab.results.report import save_picture

AXES = ("x", "hue", "facet", "y")
PURPOSE = "draws a finished sweep's sweep.png and sweep.pdf again; y may name several"
USAGE = f"usage: python -m sarathi_lab plot FOLDER {' '.join(f'[{name}=NAME]' for name in AXES)}"


def main(args: Sequence[str]) -> int:
    """Draw the sweep in the folder that the first argument names; returns the exit code."""
    if not args or args[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{PURPOSE}")
        return 0 if args else 2
    return exit_code(lambda: _plot(Path(args[0]), args[1:]), "the picture is as it was")


def _plot(folder: Path, settings: Sequence[str]) -> int:
    axes = dict(setting.split("=", 1) for setting in settings if "=" in setting)
    for setting in settings:
        if setting.partition("=")[0] not in AXES or not setting.partition("=")[2]:
            raise UserError(
                f"{setting} is no axis; write {', '.join(f'{one}=NAME' for one in AXES)}"
            )
    runs = load_runs(folder)
    if runs.empty:
        raise UserError(f"{folder} has no finished run; name the folder of a sweep")
    chosen = {name: value for name, value in axes.items() if name != "y"}
    quantities = axes["y"].split(",") if "y" in axes else None
    print_place("figure", save_picture(folder, runs, y=quantities, **chosen))
    return 0
