"""What other processes are asked to do in tests of `config.apart`; imported there by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sarathi_lab.config.errors import UserError


class Odd(Exception):
    """Can't be made again from what pickle keeps of it."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def write(path: Path) -> None:
    path.write_text(str(os.getpid()))


def refuse() -> None:
    raise UserError("value=7 is too large; use 6")


def divide() -> None:
    raise ZeroDivisionError("a mistake")


def fail_oddly() -> None:
    raise Odd("this", "that")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(folder: Path) -> None:
    """Start a process, say so, and wait; leave a word on the way out."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "child").write_text(str(child.pid))
    try:
        time.sleep(60)
    finally:
        (folder / "found").write_text("half")
