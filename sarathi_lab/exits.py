"""How commands end: the exit codes, and one line for what the user can mend."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sarathi_lab.errors import UserError

EXIT_FAILED = 1  # by what no user can mend
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def exit_code(command: Callable[[], int], kept: str) -> int:
    """The code that `command` returns; 2 for a mistake of the user's, 130 for Ctrl-C, which says what is `kept`."""
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"interrupted: {kept}", file=sys.stderr)
        return EXIT_INTERRUPTED
