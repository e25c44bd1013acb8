"""`python -m sarathi_lab leaderboard`: a sweep, or the pages of one that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sarathi_lab.config.errors import exit_code
from sarathi_lab.extensions.leaderboard.task import publish


def main(args: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the sweep by the command `run`, or write the pages of the folder that `args` name.

    Returns:
        The exit code.
    """
    if len(args) == 1 and "=" not in args[0]:
        folder = Path(args[0])
        if folder.is_dir():
            return exit_code(lambda: publish(folder), "no page was written")
    if _names_sweep_alone(args):
        return run(args)  # its record has the experiment and all settings
    return run(["experiment=leaderboard", *args])


def _names_sweep_alone(args: Sequence[str]) -> bool:
    """Return whether `args` are `resume=FOLDER`, which may have another launcher beside it."""
    folders: list[str] = []
    for arg in args:
        name, _, value = arg.partition("=")
        if name == "resume" and value.lower() not in ("true", "false"):
            folders.append(value)
        elif not name.startswith(("hydra/launcher", "hydra.launcher.")):
            return False
    return bool(folders)
