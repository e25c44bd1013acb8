"""A process of tests without work that proves nothing more, as conftest and a kernel begin."""

from __future__ import annotations

import gc

import composing

from sarathi_lab.executor import device


def quicken() -> None:
    """Read configurations once, and measure peaks of a CPU in milliseconds."""
    composing.quicken()
    device.PRODUCT_SIZE["cpu"], device.STREAM_BYTES["cpu"] = 256, 8 << 20
    device.NATIVE_ROWS, device.NATIVE_SIZE = 64, (512, 256)


def collect_seldom() -> None:
    """Keep the garbage collector from what has been imported: it makes composing half as fast."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
