"""When things happened on a device: by the host's clock on a CPU, by CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A moment on the device, which may not have come yet."""

    def wait(self) -> float:
        """Wait until it has; returns it in seconds since the timeline's zero."""
        ...

    def seconds_until(self, other: Any) -> float:
        """Seconds to a later mark of the same timeline; both must have come."""
        ...


class Timeline(Protocol):
    """A clock of the host and the moments of one device, in seconds since `reset`."""

    @property
    def now(self) -> float: ...

    def reset(self) -> None:
        """Set zero to this moment, the device being idle."""
        ...

    def mark(self) -> Mark:
        """The moment at which the device has done all work submitted so far. Wait for marks in their order."""
        ...


class _Past(float):
    """A moment that has come."""

    def wait(self) -> float:
        """See `Mark`."""
        return float(self)

    def seconds_until(self, other: _Past) -> float:
        """See `Mark`."""
        return float(other) - float(self)


class HostTimeline:
    """Of a device that works while the host waits. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._zero = clock()

    @property
    def now(self) -> float:
        """See `Timeline`."""
        return self._clock() - self._zero

    def reset(self) -> None:
        """See `Timeline`."""
        self._zero = self._clock()

    def mark(self) -> _Past:
        """Now: nothing is ever pending."""
        return _Past(self.now)


class CudaTimeline:
    """Of a GPU's current stream. Durations are the device's own, without the host's launches and waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    @property
    def now(self) -> float:
        """See `Timeline`."""
        return time.perf_counter() - self._zero

    def reset(self) -> None:
        """See `Timeline`."""
        torch.cuda.synchronize(self._device)
        self._last = _Event(self)
        torch.cuda.synchronize(self._device)
        self._zero = time.perf_counter()
        self._last_time = 0.0

    def mark(self) -> _Event:
        """See `Timeline`."""
        return _Event(self)

    def time_of(self, event: _Event) -> float:
        """When `event` happened, counted from the one before it: an event's own clock has only 24 bits."""
        self._last_time += self._last.seconds_until(event)
        self._last = event
        return self._last_time


class _Event:
    def __init__(self, timeline: CudaTimeline) -> None:
        self._timeline = timeline
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def wait(self) -> float:
        """See `Mark`."""
        self._event.synchronize()
        return self._timeline.time_of(self)

    def seconds_until(self, other: _Event) -> float:
        """See `Mark`."""
        return self._event.elapsed_time(other._event) / 1e3
