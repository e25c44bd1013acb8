"""What a part is given: where it runs, how long it may take, where its tables go. Tables are in
long format.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd


@dataclass
class Context:
    """One part at work. `device` is as torch names it, `slug` as folders of results do.

    `tables` has a folder per part, and in it one per question (those of `experiments/`).
    """

    part: str
    device: str
    is_dry: bool
    seconds: float
    work: Path
    tables: Path
    slug: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the part began, in its own process."""
        return time.monotonic() - self.started

    @property
    def remaining(self) -> float:
        """Seconds left of its share; negative once it is over."""
        return self.seconds - self.elapsed

    @property
    def is_over(self) -> bool:
        return self.remaining <= 0

    def until(self, fraction: float) -> float:
        """The time of `elapsed` at which this fraction of what is left now is gone."""
        return self.elapsed + fraction * max(0.0, self.remaining)

    def cuts_short(self, until: float | None = None) -> bool:
        """Whether a grid must be left unfinished, at `elapsed` = `until`. Those of a dry run are
        tiny and are not.
        """
        return not self.is_dry and self.elapsed >= (self.seconds if until is None else until)

    def say(self, text: str) -> None:
        """A line of progress; the command shows it and keeps it in the part's log."""
        print(text, flush=True)

    def path(self, question: str, name: str) -> Path:
        """Where a file of results belongs."""
        folder = self.tables / self.part / question
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def write(
        self, question: str, name: str, rows: pd.DataFrame | Sequence[Mapping[str, object]]
    ) -> None:
        """Write a table; one without rows is not written."""
        table = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
        if len(table):
            table.to_csv(self.path(question, f"{name}.csv"), index=False, float_format="%.6g")

    def read(self, question: str, name: str) -> pd.DataFrame | None:
        """A table that some part wrote, None if it is not there."""
        path = next(self.tables.glob(f"*/{question}/{name}.csv"), None)
        return None if path is None else pd.read_csv(path)
