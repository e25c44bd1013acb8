"""Times work on a device, repetition by repetition."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

WARM_UPS = 2


def sample(work: Callable[[], object], device: torch.device, seconds: float, most: int = 200) -> list[float]:
    """Seconds of each repetition of `work`, for about `seconds` (at least 3, at most `most` repetitions).

    On a GPU they are launched without waits in between and timed by events on the device.
    """
    for _ in range(WARM_UPS):
        work()
    start = time.perf_counter()
    _once(work, device)
    first = time.perf_counter() - start
    repetitions = max(3, min(most, int(seconds / max(first, 1e-7))))
    if device.type != "cuda":
        return [_once(work, device) for _ in range(repetitions)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _once(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
