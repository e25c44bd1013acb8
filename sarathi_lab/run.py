"""`python -m sarathi_lab.run chunk=256,512,1024 -m`: run, compare with the baselines, and
report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from sarathi_lab.config import console
from sarathi_lab.config.command_line import (
    CommandLine,
    explain,
    flags_first,
    is_run,
    read_command_line,
    run_job,
)
from sarathi_lab.config.errors import EXIT_INTERRUPTED, UserError, exit_code
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import CONF, make_folder
from sarathi_lab.config.sweep_driver import Sweep
from sarathi_lab.config.sweep_resume import find_sweep, split_resume
from sarathi_lab.results import report
from sarathi_lab.tasks.base import track_sweep


def main(args: Sequence[str]) -> int:
    """Run a command line; returns the exit code.

    0; 2 for a mistake of the user's, or runs that stopped; 1 for runs that failed otherwise; 130
    for Ctrl-C.
    """
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # errors reach us as exceptions, to be reported in one line
    )
    return exit_code(lambda: _main(flags_first(args)), "finished runs are kept")


def _main(args: Sequence[str]) -> int:
    if not is_run(args):
        return _show(args)
    args, resume = split_resume(args)
    command_line = read_command_line(args)
    if resume is not None:
        command_line = replace(command_line, results_dir=find_sweep(resume, command_line).folder)
    _check(command_line)
    if command_line.is_sweep:
        return _run_sweep(command_line, is_resumed=resume is not None)
    return _run(args, command_line)


def _show(args: Sequence[str]) -> int:
    """Help, or the configuration: Hydra's own business, but for its tracebacks."""
    try:
        _hydra_main(args, lambda cfg: None)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain(error, args) from None
    return 0


def _check(command_line: CommandLine) -> None:
    """Check every job, so that a mistake in the last one shows before the first one runs."""
    for cfg in command_line.jobs:
        build(cfg.task).check(cfg)
    # Only now may anything be written.
    make_folder(Path(str(command_line.jobs[0].output)), "output")
    make_folder(command_line.results_dir, command_line.results_setting)
    for cfg in command_line.jobs:
        build(cfg.tracking).check()


def _run(args: Sequence[str], command_line: CommandLine) -> int:
    folder = command_line.results_dir
    mistakes: list[UserError] = []

    def job(cfg: DictConfig) -> None:
        try:
            run_job(cfg, ())
        except UserError as error:
            # Carried past Hydra, which would add lines of its own; anew, as a traceback would hold
            # the run's memory.
            mistakes.append(type(error)(str(error)))

    # Said once more, so that folder and report agree however long planning took.
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    try:
        _hydra_main([*args, f"{command_line.results_setting}='{quoted}'"], job)
    finally:
        if (folder / "run.json").is_file():
            console.print_place("results", folder)
        _print_hint(command_line)
    if mistakes:
        raise mistakes[0]
    return 0


def _hydra_main(args: Sequence[str], job: Callable[[DictConfig], None]) -> None:
    argv = sys.argv
    sys.argv = [argv[0], *args]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    finally:
        sys.argv = argv


def _run_sweep(command_line: CommandLine, *, is_resumed: bool) -> int:
    sweep = Sweep(command_line, is_resumed=is_resumed)
    folder = sweep.record.folder
    is_interrupted = False
    try:
        sweep.run()
    except KeyboardInterrupt:
        is_interrupted = True
        print(
            f"interrupted: finished runs are kept; {sweep.record.resume_command} continues",
            file=sys.stderr,
        )
    finally:
        if build(command_line.jobs[0].task).has_runs:
            report.print_sweep(folder, sweep.num_jobs)
            if not is_interrupted:  # else nobody wants to wait for W&B
                track_sweep(command_line.jobs[0], folder, command_line.swept)
        else:
            console.print_place("results", folder)
        _print_hint(command_line)
    if is_interrupted:
        return EXIT_INTERRUPTED
    if (failure := sweep.failure()) is None:
        return 0
    console.print_place("resume", sweep.record.resume_command)
    print(f"error: {failure[0]}", file=sys.stderr)
    return failure[1]


def _print_hint(command_line: CommandLine) -> None:
    if hint := build(command_line.jobs[0].tracking).hint():
        console.print_place("W&B", hint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
