"""Functions that tests of `config.processes` call in other processes, imported there by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sarathi_lab.config.errors import UserError


def write(path: Path) -> None:
    path.write_text(str(os.getpid()))


def refuse() -> None:
    raise UserError("value=7 is too large; use 6")


def divide() -> None:
    raise ZeroDivisionError("a mistake")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(folder: Path) -> None:
    """Start a process, write its number, and wait."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "child").write_text(str(child.pid))
    time.sleep(60)
