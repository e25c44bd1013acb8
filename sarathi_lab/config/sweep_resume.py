"""Finds the sweep that `resume=true` or `resume=FOLDER` continues, and refuses to mix it with
another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from sarathi_lab.config.command_line import CommandLine
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import resolved
from sarathi_lab.config.sweep_record import RECORD, SweepRecord

LATEST = "true"


def split_resume(args: Sequence[str]) -> tuple[list[str], str | None]:
    """The command line without `resume=...`, and its value: "true", a folder, None. UserError."""
    asked = [arg for arg in args if re.match(r"\+*resume=", arg)]
    rest = [arg for arg in args if arg not in asked]
    if len(asked) > 1:
        raise UserError(f"resume is given {len(asked)} times; name one sweep")
    value = asked[0].partition("=")[2].strip("'\"") if asked else "false"
    if value.lower() == LATEST:
        return rest, LATEST
    if value in ("", "null"):
        raise UserError(
            "resume= names nothing; use resume=true, or resume=FOLDER with the folder of a sweep"
        )
    if value.lower() == "false":
        return rest, None
    return _with_recorded(rest, Path(value)), value


def _with_recorded(args: Sequence[str], folder: Path) -> list[str]:
    """The sweep's own command line if `args` ask for no other; launchers may differ."""
    record = _read(folder)
    overrides = [arg for arg in args if not arg.startswith("-")]
    if not all(map(_is_hydras, overrides)):
        return list(args)
    own = [arg for arg in record.arguments if not overrides or not _is_hydras(arg)]
    return [*own, *overrides]


def _is_hydras(override: str) -> bool:
    return override.lstrip("+~").startswith(("hydra.launcher", "hydra/launcher"))


def _read(folder: Path) -> SweepRecord:
    if record := SweepRecord.find(folder.absolute()):
        return record
    raise UserError(
        f"resume={folder} is not the folder of a sweep: it has no readable {RECORD}; "
        "name one such as outputs/DATE/TIME, or use resume=true"
    )


def fingerprint(command_line: CommandLine) -> str:
    """Equal for command lines whose jobs do the same work, wherever they leave the results."""
    aside = ("output", "tracking", "resume", "limit", "repeat", "plot")
    settings = [resolved(job.cfg) for job in command_line.jobs]
    jobs = [{name: job[name] for name in job if name not in aside} for job in settings]
    search = None if command_line.search is None else command_line.search.identity()
    text = json.dumps([jobs, search], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_sweep(resume: str, command_line: CommandLine) -> SweepRecord:
    """The sweep to continue: the one that `resume` names, or the latest unfinished one of the same
    jobs.

    Raises UserError if there is none, it is complete, or its configuration differs.
    """
    if not command_line.is_sweep:
        raise UserError(
            f"resume={resume} has no effect: this is one run, not a sweep; drop it, or add -m"
        )
    if resume != LATEST:
        return _named(resume, command_line)
    output = Path(str(command_line.jobs[0].cfg.output))
    mark = fingerprint(command_line)
    paths = {path.absolute() for path in [*output.rglob(RECORD), command_line.results_dir / RECORD]}
    records = [record for path in paths if (record := SweepRecord.find(path.parent))]
    same = [record for record in records if record.fingerprint == mark]
    same.sort(key=lambda record: record.started_at)
    unfinished = [record for record in same if not record.is_complete()]
    if unfinished:
        return unfinished[-1]
    found = f": {same[-1].folder} is complete" if same else ""
    raise UserError(
        f"resume=true finds no unfinished sweep of this command below {output}{found}; drop it "
        "to start one"
    )


def check_unused(folder: Path) -> None:
    """Refuse a folder for a new sweep in which its results would be mixed with others'."""
    if next(folder.rglob("run.json"), None) or (folder / RECORD).exists():
        raise UserError(
            f"hydra.sweep.dir={folder} has results of other runs; name another folder, or "
            f"resume={folder} if it is their sweep that shall go on"
        )


def _named(resume: str, command_line: CommandLine) -> SweepRecord:
    record = _read(Path(resume))
    if record.fingerprint != fingerprint(command_line):
        here = command_line.arguments
        only_there = " ".join(arg for arg in record.arguments if arg not in here)
        only_here = " ".join(arg for arg in here if arg not in record.arguments)
        differ = f"{only_there or 'nothing more'} there, {only_here or 'nothing more'} here"
        if not only_there and not only_here:
            differ = "the files in conf/ have changed since"
        raise UserError(
            f"resume={resume} has another configuration ({differ}); repeat its command, or "
            "start anew"
        )
    if record.is_complete():
        raise UserError(
            f"resume={resume} has nothing left to run: the sweep is complete; drop it to start "
            "another"
        )
    return record
