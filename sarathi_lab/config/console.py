"""What goes to the terminal: lines, places and progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import progress
from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 132


def console() -> Console:
    """Standard output, wide enough for the tables where it is a file; in a notebook, too, so that
    who catches standard output has all of it.
    """
    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(width=width, highlight=False, markup=False, force_jupyter=False)


def print_place(what: str, where: Path | str) -> None:
    """A path or a command on a line of its own, unbroken, so that it can be copied."""
    console().print(f"{what:<7} {where}", soft_wrap=True)


@contextmanager
def progress_of(what: str, total: float, unit: str = "") -> Iterator[Callable[[float], None]]:
    """A progress bar over `total` steps; yields the function to call with those just done."""
    columns = (
        progress.TextColumn(f"  {what}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console(), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total)
        done, shown = 0.0, 0.0

        def advance(steps: float) -> None:
            nonlocal done, shown
            done += steps
            # Drawing costs milliseconds, a step may take less: redraw a few times a second only.
            if (now := time.monotonic()) - shown > 0.2:
                shown = now
                bar.update(task, completed=min(done, total), refresh=True)

        yield advance
