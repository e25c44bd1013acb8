"""What goes to the terminal: lines, places and progress."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 80
NARROWEST = 20  # columns: below, no table can be read
BAR_SECONDS = 0.2  # between two pictures of a bar
LINE_SECONDS = 9.0  # between two lines

_shown: list[str] = []  # what is in progress


def console() -> Console:
    """Standard output, in a notebook, too: as wide as the environment's COLUMNS, else as the
    terminal, else `WIDTH_WITHOUT_TERMINAL`.
    """
    from rich.console import Console

    width = _stated_width()
    if width is None and not sys.stdout.isatty():
        width = WIDTH_WITHOUT_TERMINAL
    return Console(width=width, highlight=False, markup=False, force_jupyter=False)


def _stated_width() -> int | None:
    """Return the width that the user exports as COLUMNS, as for `ls` and `git`; None without."""
    stated = os.environ.get("COLUMNS", "")
    if not stated.isdecimal() or int(stated) == 0:
        return None
    return max(NARROWEST, int(stated))


def typed(command: str) -> str:
    """Return what was typed to call a command of the lab, such as `sarathi-lab plot`."""
    start = Path(sys.argv[0]).name
    if start == "run.py":
        return f"python -m sarathi_lab.{command}"
    if start == "sarathi-lab":
        return f"sarathi-lab {command}"
    return f"python -m sarathi_lab {command}"


def print_words(text: str, style: str | None = None) -> None:
    """Print lines wrapped at words on a terminal and where COLUMNS is stated, indented below their
    start; whole in a file, and where they are flags of a command, which are copied.
    """
    out = console()
    has_width = sys.stdout.isatty() or _stated_width() is not None
    for line in text.split("\n"):
        start = line[: len(line) - len(line.lstrip())]
        if has_width and not line.lstrip().startswith("--"):
            line = textwrap.fill(
                line,
                out.width,
                subsequent_indent=f"{start}  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        out.print(line, style=style, soft_wrap=True)


def print_place(what: str, path: Path | str) -> None:
    """A path or a command on a separate line, unbroken, so that it can be copied; a path from the
    root on, as it may be copied to a shell in another folder.
    """
    if isinstance(path, Path):
        path = path.absolute()
    console().print(f"{what:<7} {path}", soft_wrap=True)


@contextmanager
def progress_of(
    what: str, total: float | None = None, unit: str = ""
) -> Iterator[Callable[..., None]]:
    """Show how much of `total` steps (None: unknown) is done, and the time left: on a terminal by a
    bar; elsewhere, for Slurm, CI and `| tee`, by a line every `LINE_SECONDS`, without a `total`
    only while nothing else is in progress. Yields the function to call with the steps just done,
    and with how many there will be, where that is known better by now.
    """
    work = _Work(what, total, unit)
    if not sys.stdout.isatty():
        with _in_lines(work):
            yield work.advance
    elif total is None:
        yield work.advance
    else:
        with _in_a_bar(work):
            yield work.advance


@dataclass
class _Work:
    """What is in progress, and how much of it is done."""

    what: str
    total: float | None
    unit: str
    done: float = 0.0
    start: float = field(default_factory=time.monotonic)

    def advance(self, steps: float, expected: float | None = None) -> None:
        self.done += steps
        self.total = expected or self.total

    def seconds_left(self) -> float | None:
        """Return about how long the rest takes; None while that is unknown."""
        if not self.total or not 0 < self.done < self.total:
            return None
        elapsed = time.monotonic() - self.start
        seconds_a_step = elapsed / self.done
        steps_left = self.total - self.done
        return seconds_a_step * steps_left

    def print_line(self) -> None:
        # Where several things are in progress, one without a total is not worth a line.
        if self.total is None and len(_shown) > 1:
            return
        elapsed = time.monotonic() - self.start
        text = f"  {self.what}"
        if self.total:
            done = min(self.done, self.total)
            text += f": {done:,.0f} of {self.total:,.0f} {self.unit}".rstrip()
        text += f", {duration(elapsed)}"
        seconds_left = self.seconds_left()
        if seconds_left is not None:
            text += f", about {duration(seconds_left)} left"
        print(text, flush=True)


@contextmanager
def _in_lines(work: _Work) -> Iterator[None]:
    _shown.append(work.what)
    try:
        with repeated(work.print_line, LINE_SECONDS):
            yield
    finally:
        _shown.remove(work.what)


@contextmanager
def _in_a_bar(work: _Work) -> Iterator[None]:
    from rich.progress import Progress

    # Drawing takes milliseconds, where a step may take less: it is not done at every step.
    with Progress(console=console(), auto_refresh=False, transient=True) as bar:
        task = bar.add_task(f"  {work.what}", total=work.total)

        def draw() -> None:
            bar.update(task, completed=work.done, total=work.total, refresh=True)

        with repeated(draw, BAR_SECONDS):
            yield


@contextmanager
def repeated(function: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `function` every so many seconds from a thread: a single step may take minutes."""
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
    if abs(value) >= 99.95:  # three digits without a decimal point, rounded
        return f"{value:,.0f}"
    return f"{value:.3g}"


def counted(number: float, noun: str) -> str:
    """Format a number of things: 1 run, 2 runs, 1,440 requests."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,.0f} {noun}s"


def duration(seconds: float) -> str:
    """Format seconds: 40 s, 4 min, 2 h 10 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
