"""How the trackers of a command's jobs take part in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sarathi_lab.config.console import print_place
from sarathi_lab.config.instantiate import build, is_measured
from sarathi_lab.config.jobs import Job


@contextmanager
def tracked(jobs: Sequence[Job], folder: Path, *, names_hint: bool) -> Iterator[None]:
    """Run `jobs` in the block; all that they leave in `folder` is tracked when it ends.

    Prints the command that shows them, if it `names_hint`. Raises UserError, before the block, for
    what can't be tracked.
    """
    for job in jobs:
        build(job.cfg.tracking).check()
    tracker = build(jobs[0].cfg.tracking)
    if not any(is_measured(job.cfg) for job in jobs):
        tracker.start()
    try:
        yield
    finally:
        tracker.finish(folder)
        hint = tracker.hint() if names_hint else None
        if hint:
            print_place("W&B", hint)


def track_ended(job: Job, folder: Path) -> None:
    """Track the run that `job` has left in `folder`; no measurement begins meanwhile."""
    build(job.cfg.tracking).keep(folder, waits=is_measured(job.cfg))
