"""Checks of all jobs of a command line before the first one runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from omegaconf import DictConfig

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.jobs import Job


def check_jobs(
    jobs: Sequence[Job],
    swept: Collection[str],
    *,
    skips: bool,
    keeps: bool,
) -> tuple[list[Job], list[str]]:
    """Let the tasks check jobs.

    Args:
        jobs: The jobs.
        swept: Settings by which an error names its job, unless all jobs fail for the same reason.
        skips: Whether jobs that fail are left out.
        keeps: Whether jobs keep what their task has prepared.

    Returns:
        The jobs that pass, and notes on the others.

    Raises:
        UserError: A job fails; with `skips` only if all do.
    """
    passed = []
    notes: dict[str, None] = {}
    with progress_of("checking", len(jobs), "runs") as advance:
        for job in jobs:
            prepared = _checked(job.cfg)
            advance(1)
            if not isinstance(prepared, UserError):
                if keeps:  # of thousands of jobs it would be too much memory
                    job.prepared = prepared
                passed.append(job)
                continue
            name = job.named(swept)
            if not name:
                raise prepared
            if not skips:
                # Most mistakes are of all jobs: then what the sweep varies has no part in them.
                is_of_all = job is jobs[0] and str(_checked(jobs[-1].cfg)) == str(prepared)
                if is_of_all:
                    raise prepared
                raise _of_one_job(name, prepared)
            notes[f"left out: {name}: {prepared}"] = None
    if not passed:
        raise UserError(f"no run of this sweep passes its check; {next(iter(notes))}")
    return passed, list(notes)


def _of_one_job(name: str, error: UserError) -> UserError:
    """Return the error of the job `name` of a sweep, which names it once."""
    message = str(error)
    if not message.startswith(name):
        message = f"{name}: {message}"
    return UserError(f"{message}; skip_invalid=true leaves such runs out")


def _checked(cfg: DictConfig) -> object:
    """Return what the task prepares, or the error of its check."""
    try:
        return build(cfg.task).check(cfg)
    except UserError as error:
        return error
