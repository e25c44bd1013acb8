"""Parts of a campaign that do next to nothing, for tests of how campaigns run them. Imported by
name in processes.
"""

from __future__ import annotations

import os
import signal
import time

from sarathi_lab.config.errors import UserError
from sarathi_lab.tasks.gpu.context import Context
from sarathi_lab.tasks.gpu.parts import Part


def part(name: str, seconds: float = 1.0, *, is_always_run: bool = False) -> Part:
    """A part whose function is `name` below."""
    return Part(name, f"campaign_parts:{name}", seconds, seconds, "a test", is_always_run)


def good(context: Context) -> None:
    context.write("question", "good", [{"value": 1.0, "unit": "s", "seconds": context.seconds}])


def last(context: Context) -> None:
    table = context.read("question", "good")
    assert table is not None
    context.write("question", "last", [{"value": len(table)}])


def raises(context: Context) -> None:
    context.write("question", "half", [{"value": 1.0}])
    raise ZeroDivisionError("a mistake\nin two lines")


def refuses(context: Context) -> None:
    raise UserError("value=7 is too large; use 6")


def dies(context: Context) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(context: Context) -> None:
    try:
        context.say("about to hang")
        time.sleep(60)
    finally:
        context.write("question", "before", [{"value": 1.0}])
