"""`python -m sarathi_lab.run chunk=256,512,1024 -m`: run, compare with the baselines, and
report.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from sarathi_lab.config import console
from sarathi_lab.config.arguments import Arguments, read_arguments
from sarathi_lab.config.command_line import CommandLine, read_command_line
from sarathi_lab.config.errors import EXIT_INTERRUPTED, UserError, exit_code
from sarathi_lab.config.explain import explained, help_text
from sarathi_lab.config.instantiate import build, make_loader, resolved
from sarathi_lab.config.jobs import group_of, run_here
from sarathi_lab.config.paths import CONF, make_folder
from sarathi_lab.config.sweep import Sweep
from sarathi_lab.config.sweep_record import as_command
from sarathi_lab.config.sweep_resume import check_unused, find_sweep, split_resume
from sarathi_lab.extensions.ranks.follow import run_or_follow


def main(args: Sequence[str]) -> int:
    """Run a command line; returns the exit code.

    0; 2 for a mistake of the user's, or runs that stopped; 1 for runs that failed otherwise; 130
    for Ctrl-C. Of torchrun's ranks the first does it, the others follow and do not return.
    """
    return run_or_follow(lambda: exit_code(lambda: _main(args), "finished runs are kept"))


def _main(args: Sequence[str]) -> int:
    arguments = read_arguments(args)
    if arguments.shows:
        return _show(arguments)
    if arguments.is_dry_run:
        from sarathi_lab.tasks.dry_run import print_jobs

        print_jobs(_read(arguments.of_run)[0])
        return 0
    command_line, is_resumed = prepare(arguments.of_run)
    if command_line.is_sweep:
        return _run_sweep(command_line, is_resumed=is_resumed)
    return _run(command_line)


def _set_up() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as exceptions, to be told in one line
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `policy._target_=my_module.MyPolicy`, as python -m does


def prepare(args: Sequence[str]) -> tuple[CommandLine, bool]:
    """Compose and check all jobs of `args`, flags and settings, and make the folder of the results;
    also whether it continues a sweep. Raises UserError, with nothing written.
    """
    command_line, is_resumed = _read(args)
    command_line.check()
    # Only now may anything be written.
    make_folder(Path(str(command_line.jobs[0].cfg.output)), "output")
    setting = "hydra.sweep.dir" if command_line.is_sweep else "hydra.run.dir"
    make_folder(command_line.results_dir, setting)
    for job in command_line.jobs:
        build(job.cfg.tracking).check()
    return command_line, is_resumed


def _read(args: Sequence[str]) -> tuple[CommandLine, bool]:
    """The jobs of `args`, composed, and whether they continue a sweep. Raises UserError."""
    _set_up()
    own, resume = split_resume(args)
    command_line = read_command_line(own)
    if resume is not None:
        command_line.results_dir = find_sweep(resume, command_line).folder
    if command_line.search is not None:
        from sarathi_lab.results.table import HEADINGS

        command_line.search.check_objective(HEADINGS)
    if resume is None and command_line.is_sweep:
        check_unused(command_line.results_dir)
    return command_line, resume is not None


def _show(arguments: Arguments) -> int:
    """Help, or the configuration: Hydra's own business, but for its tracebacks."""
    _set_up()
    loader = make_loader()
    with explained(arguments.settings, loader):
        if arguments.is_help:
            print(help_text(arguments.settings, loader))
            return 0
        show = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
        argv, sys.argv = sys.argv, [sys.argv[0], *arguments.ordered]
        try:
            show(lambda cfg: None)()
        finally:
            sys.argv = argv
    return 0


def _run(command_line: CommandLine) -> int:
    folder = command_line.results_dir
    try:
        run_single(command_line)
    finally:
        if (folder / "run.json").is_file():
            console.print_place("results", folder)
        _print_hint(command_line)
    return 0


def run_single(command_line: CommandLine) -> None:
    """Run the one job of a prepared command line in its folder. Raises what its task raises."""
    from sarathi_lab.tasks.base import run_task

    (job,) = command_line.jobs
    job.place(command_line.results_dir)

    def work(cfg: DictConfig) -> None:
        command = as_command(command_line.arguments)
        run_here(run_task, cfg, (), job, command=command, host=platform.node())

    try:
        job.run(work, command_line.composer.loader)
    except UserError as error:
        raise UserError(str(error)) from None  # anew, as its traceback holds the run's memory


def _run_sweep(command_line: CommandLine, *, is_resumed: bool) -> int:
    from sarathi_lab.results import report
    from sarathi_lab.tasks.base import run_task, track_sweep

    cfg = command_line.jobs[0].cfg
    sweep = Sweep(command_line, run_task, is_resumed=is_resumed)
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
        if build(cfg.task).has_runs:
            report.print_sweep(folder, sweep.num_jobs, resolved(cfg)["plot"])
            if not is_interrupted:  # else nobody wants to wait for W&B
                choices = command_line.jobs[0].composed.hydra.runtime.choices
                swept, host = command_line.swept, sweep.record.host
                track_sweep(cfg, sweep.record, swept, group_of(folder, choices, swept, host))
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
    if hint := build(command_line.jobs[0].cfg.tracking).hint():
        console.print_place("W&B", hint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
