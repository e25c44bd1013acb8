"""What goes to the terminal: lines, places and progress."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 132
BAR_SECONDS = 0.2  # between two pictures of a bar
LINE_SECONDS = 9.0  # between two lines


def console() -> Console:
    """Standard output, wide enough for the tables where it is a file; in a notebook, too, so that
    who catches standard output has all of it.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(width=width, highlight=False, markup=False, force_jupyter=False)


def print_place(what: str, where: Path | str) -> None:
    """A path or a command on a separate line, unbroken, so that it can be copied."""
    console().print(f"{what:<7} {where}", soft_wrap=True)


@dataclass
class _Phase:
    """A phase of the work, of `total` steps (None: unknown)."""

    what: str
    total: float | None
    unit: str
    done: float = 0.0
    start: float = field(default_factory=lambda: time.monotonic())

    def advance(self, steps: float) -> None:
        self.done += steps

    def line(self) -> str:
        """What is done, the time that it took, and the time left at this pace."""
        elapsed = time.monotonic() - self.start
        if self.total is None:
            return f"  {self.what}, {duration(elapsed)}"
        steps = f"{min(self.done, self.total):,.0f} of {self.total:,.0f} {self.unit}".rstrip()
        text = f"  {self.what}: {steps}, {duration(elapsed)}"
        if 0 < self.done < self.total:
            text += f", about {duration(elapsed * (self.total / self.done - 1))} left"
        return text


@contextmanager
def progress_of(
    what: str, total: float | None = None, unit: str = ""
) -> Iterator[Callable[[float], None]]:
    """Show how much of `total` steps is done, and the time left: on a terminal by a bar; elsewhere,
    for Slurm, CI and `| tee`, by a line every `LINE_SECONDS`. Yields the function to call with the
    steps just done.
    """
    phase = _Phase(what, total, unit)
    shown: AbstractContextManager[None]
    if not sys.stdout.isatty():
        shown = repeated(lambda: print(phase.line(), flush=True), LINE_SECONDS)
    else:
        shown = nullcontext() if total is None else _bar(phase)
    with shown:
        yield phase.advance


@contextmanager
def _bar(phase: _Phase) -> Iterator[None]:
    from rich.progress import Progress

    with Progress(console=console(), auto_refresh=False, transient=True) as bar:
        task = bar.add_task(f"  {phase.what}", total=phase.total)

        def draw() -> None:  # some milliseconds, where a step may take less: not at every step
            bar.update(task, completed=phase.done, refresh=True)

        with repeated(draw, BAR_SECONDS):
            yield


@contextmanager
def repeated(function: Callable[[], None], seconds: float) -> Iterator[None]:
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
