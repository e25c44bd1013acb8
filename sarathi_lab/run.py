"""`python -m sarathi_lab.run chunk=256,512,1024 -m`: run, compare with the baselines, and report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from sarathi_lab import report
from sarathi_lab.command_line import CommandLine, explain, flags_first, is_run, read_command_line
from sarathi_lab.errors import RunError, UserError
from sarathi_lab.paths import CONF, make_folder
from sarathi_lab.plan import build
from sarathi_lab.sweep_tracking import track_sweep
from sarathi_lab.task import Place

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# What does not make a run another one.
UNNAMED = ("policy", "executor", "tracking", "baselines", "output", "trace", "hydra")


def main(args: Sequence[str]) -> int:
    """Run a command line; returns the exit code: 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as exceptions, to be reported in one line
    try:
        args = flags_first(args)
        if not is_run(args):
            return _show(args)
        command_line = read_command_line(args)
        _check(command_line)
        return _run(args, command_line)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept", file=sys.stderr)
        return EXIT_INTERRUPTED


def _show(args: Sequence[str]) -> int:
    """Help, or the configuration: Hydra's own business, but for its tracebacks."""
    try:
        _hydra_main(args)
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
    # Said once more, so that folder and report agree whatever launcher runs the jobs and however long planning took.
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    try:
        _hydra_main([*args, f"{command_line.results_setting}='{quoted}'"], command_line.swept)
    finally:
        if command_line.is_sweep and build(command_line.jobs[0].task).has_runs:
            report.print_sweep(folder, len(command_line.jobs))
            if not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # then nobody wants to wait for W&B
                track_sweep(command_line.jobs[0], folder, command_line.swept)
        elif (folder / "run.json").is_file():
            report.print_place("results", folder)
        if hint := build(command_line.jobs[0].tracking).hint():
            report.print_place("W&B", hint)
    return 0


def _hydra_main(args: Sequence[str], swept: Sequence[str] = ()) -> None:
    process = os.getpid()
    mistakes: list[UserError] = []

    def job(cfg: DictConfig) -> None:
        if any(not isinstance(mistake, RunError) for mistake in mistakes):
            return
        try:
            _job(cfg, swept)
        except UserError as error:
            if os.getpid() != process:  # a launcher's worker, whose list nobody reads
                raise
            # Carried past Hydra, which would add lines of its own; anew, as a traceback would hold the run's memory.
            mistakes.append(type(error)(str(error)))
            if isinstance(error, RunError):
                report.print_stopped(error)

    argv = sys.argv
    sys.argv = [argv[0], *args]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    finally:
        sys.argv = argv
    if mistakes:
        raise _summed_up(mistakes)


def _summed_up(mistakes: Sequence[UserError]) -> UserError:
    """What stopped the sweep, or the runs that stopped in it."""
    stopping = [mistake for mistake in mistakes if not isinstance(mistake, RunError)]
    if stopping or len(mistakes) == 1:
        return [*stopping, *mistakes][0]
    return UserError(f"{len(mistakes)} runs stopped, the first as: {mistakes[0]}")


def _job(cfg: DictConfig, swept: Sequence[str]) -> None:
    """One job of a sweep, or the only one; Hydra has made its folder."""
    settings = HydraConfig.get()
    run_dir = Path(settings.runtime.output_dir)
    is_sweep = settings.mode == hydra.types.RunMode.MULTIRUN
    root = Path(settings.sweep.dir) if is_sweep else run_dir
    name = _name(str(settings.runtime.choices["policy"]), settings.overrides.task, swept if is_sweep else None)
    group = "/".join(root.absolute().parts[-2:])
    experiment = settings.runtime.choices.get("experiment")
    build(cfg.task).run(cfg, Place(run_dir, root / "baselines", name, group, swept, experiment))


def _name(policy: str, overrides: Sequence[str], swept: Sequence[str] | None) -> str:
    """The policy and what sets the run apart: what its sweep varies, or what a single run was told of its work."""
    told = [(override.partition("=")[0].lstrip("+"), override) for override in overrides]
    if swept is None:
        parts = [override for key, override in told if key.partition(".")[0] not in UNNAMED]
    else:
        parts = [override for key, override in told if key in swept and key != "policy"]
    return " ".join([policy, *parts])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
