"""What goes to the terminal: lines, places and progress."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 132
BAR_SECONDS = 0.2  # between two pictures of a bar
LINE_SECONDS = 8.0  # between two lines, at least; with what LOOK_SECONDS adds, at most 10
LOOK_SECONDS = 1.0  # between two looks of the thread that shows a phase whose steps are long
_phases: list[Progress] = []  # that run now, the innermost last
_printed = 0.0  # when the last line of theirs was


def console() -> Console:
    """Standard output, wide enough for the tables where it is a file; in a notebook, too, so that
    who catches standard output has all of it.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(width=width, highlight=False, markup=False, force_jupyter=False)


def print_place(what: str, where: Path | str) -> None:
    """A path or a command on a line of its own, unbroken, so that it can be copied."""
    console().print(f"{what:<7} {where}", soft_wrap=True)


@dataclass
class Progress:
    """Progress of a phase of the work, of `total` steps (None: unknown)."""

    what: str
    total: float | None = None
    unit: str = ""
    done: float = 0.0
    start: float = field(default_factory=lambda: time.monotonic())

    def line(self) -> str:
        """What is done, the time that it took, and the time left at this pace."""
        elapsed, parts = time.monotonic() - self.start, [self.what]
        if self.total is not None:
            parts = [f"{self.what}: {min(self.done, self.total):,.0f} of {self.total:,.0f}"]
            parts[0] += f" {self.unit}".rstrip()
        parts.append(duration(elapsed))
        if self.total is not None and 0 < self.done < self.total:
            parts.append(f"about {duration(elapsed * (self.total / self.done - 1))} left")
        return f"  {', '.join(parts)}"


@contextmanager
def progress_of(what: str, total: float, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Show how much of `total` steps is done, and the time left: on a terminal by a bar, elsewhere
    by lines. Yields the function to call with the steps just done.
    """
    state = Progress(what, total, unit)
    with _bar(state) if sys.stdout.isatty() else lines_of(state) as show:

        def advance(steps: float) -> None:
            state.done += steps
            show()

        yield advance


@contextmanager
def lines_of(state: Progress) -> Iterator[Callable[[], None]]:
    """Print `state` at least every 10 s, for Slurm, CI and `| tee`, unless a phase within this one
    prints more; nothing on a terminal. A short phase prints nothing.
    """
    global _printed
    _phases.append(state)
    is_outermost = len(_phases) == 1
    if is_outermost:
        _printed = time.monotonic()
    try:
        with repeated(print_if_due) if is_outermost else nullcontext():
            yield lambda: None
    finally:
        _phases.pop()


def print_if_due() -> None:
    """Print the innermost phase if no line came for `LINE_SECONDS`, unless on a terminal."""
    global _printed
    if _phases and time.monotonic() - _printed > LINE_SECONDS and not sys.stdout.isatty():
        _printed = time.monotonic()
        print(_phases[-1].line(), flush=True)


@contextmanager
def _bar(state: Progress) -> Iterator[Callable[[], None]]:
    from rich import progress

    columns = (
        progress.TextColumn(f"  {state.what}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(state.unit),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console(), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=state.total)

        def draw() -> None:  # some milliseconds, where a step may take less: not at every step
            bar.update(task, completed=min(state.done, state.total or 0.0), refresh=True)

        with repeated(draw, BAR_SECONDS):
            yield lambda: None


@contextmanager
def repeated(function: Callable[[], None], seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """Call `function` every so many seconds from a thread meanwhile: a single step may take
    minutes.
    """
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(seconds):
            function()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def amount(value: float) -> str:
    """A number in three digits, or whole, as people read it: 0.123, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format seconds: 40 s, 4 min, 2 h 10 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
