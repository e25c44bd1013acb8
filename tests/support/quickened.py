"""A process of tests without work that proves nothing more, as conftest and a kernel begin."""

from __future__ import annotations

import gc

import composing

from sarathi_lab.executor import device
from sarathi_lab.executor.torch import backend


def quicken() -> None:
    """Read configurations once, measure peaks of a CPU in milliseconds, and give model=auto and
    dtype=auto the same meaning on every CPU: matrix tiles have a larger model.
    """
    composing.quicken()
    flags_of_machine = backend.cpu_flags
    backend.cpu_flags = lambda: flags_of_machine() - {device.TILES}
    device.PRODUCT_SIZE["cpu"], device.STREAM_BYTES["cpu"] = 256, 8 << 20
    device.NATIVE_ROWS, device.NATIVE_SIZE = 64, (512, 256)


def collect_seldom() -> None:
    """Keep the garbage collector from what has been imported: it makes composing half as fast."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
