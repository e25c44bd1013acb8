"""Ranks that follow rank 0, started by torchrun or as `python -m` with torchrun's environment.
torch is imported late, as every command imports this module.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from sarathi_lab.config.errors import EXIT_FAILED, UserError
from sarathi_lab.extensions.ranks import by_torchrun

if TYPE_CHECKING:
    from sarathi_lab.extensions.ranks.group import Group


def run_or_follow(run: Callable[[], int]) -> int:
    """Run a command on rank 0 or without torchrun; follow on other ranks. Return the exit code."""
    if not by_torchrun():
        return run()
    from sarathi_lab.extensions.ranks import group

    if os.environ["RANK"] != "0":
        return follow(group.join())
    code = run()
    if code == 0:  # otherwise torchrun ends the others
        group.close()
    return code


def follow(group: Group) -> int:
    """Make the calls that rank 0 sends until "stop"; return the exit code, 0 for a lost rank."""
    from sarathi_lab.extensions.ranks.executor import build_part
    from sarathi_lab.extensions.ranks.group import Lost

    try:
        executor = None
        while (message := group.receive())[0] != "stop":
            method, arguments = message
            if method == "build":
                executor = None  # its memory is the next one's
                executor = build_part(group, *arguments)
            else:
                getattr(executor, method)(*arguments)
        return 0
    except Lost:
        return 0
    except BaseException as error:
        group.report_failure(error)
        if not isinstance(error, UserError):
            traceback.print_exc()
        return EXIT_FAILED


if __name__ == "__main__":
    from sarathi_lab.extensions.ranks.group import join

    code = follow(join())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once, without waiting for torch.distributed
