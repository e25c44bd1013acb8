"""`python -m sarathi_lab.run chunk=256,512,1024 -m`: run, compare with the baselines, and
report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sarathi_lab import __version__
from sarathi_lab.config.errors import exit_code, report

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    from sarathi_lab.config.command_line import Arguments, explained, read_arguments
    from sarathi_lab.config.instantiate import build
    from sarathi_lab.config.paths import CONF
    from sarathi_lab.config.run_context import current_run
    from sarathi_lab.config.stated import complete
    from sarathi_lab.config.sweeper import sweeper_of
except ModuleNotFoundError as missing:  # on a bare image
    if __name__ != "__main__":
        raise
    sys.exit(report(missing))


def run(cfg: DictConfig, prepared: object = None) -> None:
    """Run one job of a sweep or a command line in the folder that Hydra made for it. `prepared` is
    from the check of its task, where that was made in this process.
    """
    from sarathi_lab.tasks.base import run_task

    complete(cfg, HydraConfig.get().overrides.task)
    run_task(cfg, current_run(prepared or build(cfg.task).check(cfg)))


def main(args: Sequence[str]) -> int:
    """Run a command line; returns the exit code.

    0; 2 for a mistake of the user's, or runs that stopped; 1 for runs that failed otherwise; 130
    for Ctrl-C.
    """
    return exit_code(lambda: _main(args), "finished runs are kept")


def _main(args: Sequence[str]) -> int:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `policy._target_=my_module.MyPolicy`, as python -m does
    arguments = read_arguments(args)
    if arguments.is_version:
        print(f"sarathi-lab {__version__}")
    elif arguments.is_help:
        from sarathi_lab.config.help import help_text

        print(help_text(arguments.settings, arguments.topics))
    elif arguments.flags_of_hydra:
        _show_by_hydra(arguments)
    else:
        sweeper_of(arguments, run).sweep()
    return 0


def _show_by_hydra(arguments: Arguments) -> None:
    """Let Hydra show the configuration, or what else its flags ask for."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # it raises its errors instead of printing them
    before = sys.argv
    sys.argv = [before[0], *arguments.flags_of_hydra, *arguments.settings]
    try:
        with explained(arguments.settings):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
