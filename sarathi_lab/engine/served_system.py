"""What a serving system chooses where its operator states nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ServingDevice:
    """One device as a server sees it when it chooses its defaults.

    `name` is that of the driver or of the hardware file; `memory_bytes` is all of its memory, not
    what is free; `maker` is None where nothing states it.
    """

    name: str
    memory_bytes: int
    maker: str | None = None


@dataclass(frozen=True)
class CacheRoom:
    """Tokens of KV cache of one engine, and of the longest context that its model takes."""

    cache_tokens: int
    context_len: int


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device of a server, and what lies there beside the cache, in bytes.

    `libraries` is of the driver's context and of communication, `iteration` the peak of a profiled
    iteration of `token_budget` tokens, `graphs` that of CUDA graphs. The server has `num_devices`.
    """

    total: float
    weights: float
    libraries: float
    iteration: float
    graphs: float
    token_budget: int
    num_devices: int


@dataclass(frozen=True)
class MemoryRule:
    """What a server leaves to the cache of a device's memory.

    Attributes:
        setting: The share of memory by its name there.
        share: The share where its operator states none, by device.
        is_of_free: Whether it is a share of what is free beside all else; else all that is
            subtracted must fit into that share of the whole.
        has_iteration: Whether the peak of an iteration is subtracted.
        has_graphs: Whether the memory of CUDA graphs is subtracted.
        window_pool: Tokens of a pool for layers with a window, for each token of the others; None:
            all layers have blocks of one pool.
        source: Where it was read.
    """

    setting: str
    share: Callable[[DeviceMemory], float]
    source: str
    is_of_free: bool = False
    has_iteration: bool = True
    has_graphs: bool = False
    window_pool: float | None = None

    def cache_bytes(self, device: DeviceMemory, share: float | None = None) -> float:
        """Compute the bytes that are left for the cache on `device`, below 0 where none are, of a
        `share` of its memory (None: the default).
        """
        if share is None:
            share = self.share(device)
        used = sum(size for _, size in self._subtracted(device))
        if self.is_of_free:
            return share * (device.total - used)
        return share * device.total - used

    def describe(self, device: DeviceMemory, share: float | None = None) -> str:
        """Describe the calculation, such as "0.92 of 85.1 GB, less 65.5 of weights"."""
        if share is None:
            share = self.share(device)
        used = [f"{size / 1e9:.1f} of {name}" for name, size in self._subtracted(device)]
        subtracted = f"less {', '.join(used)}"
        share_of_total = f"{self.setting}={share:.3g} of {device.total / 1e9:.1f} GB"
        # Without the comma the share is of what is left when all else is subtracted.
        separator = " " if self.is_of_free else ", "
        return f"{share_of_total}{separator}{subtracted}"

    def _subtracted(self, device: DeviceMemory) -> list[tuple[str, float]]:
        used = [("weights", device.weights), ("libraries", device.libraries)]
        if self.has_iteration:
            used.append(("an iteration's peak", device.iteration))
        if self.has_graphs:
            used.append(("CUDA graphs", device.graphs))
        return used


@dataclass(frozen=True)
class ServerSetup:
    """How a server is started, as far as the size of its cache depends on it.

    Attributes:
        rule: What the server leaves to the cache.
        token_budget: The most tokens of one iteration, by which the server profiles its memory.
        num_sequences: The most sequences that are served at a time.
        share: The share of each device's memory, from 0 to 1, that the operator states; None: the
            rule's.
    """

    rule: MemoryRule
    token_budget: int
    num_sequences: int
    share: float | None = None

    def cache_bytes(self, device: DeviceMemory) -> float:
        """Compute the bytes of cache on `device`; below 0 if they lack."""
        return self.rule.cache_bytes(device, self.share)

    def describe(self, device: DeviceMemory) -> str:
        """Describe how the cache of `device` is calculated."""
        return self.rule.describe(device, self.share)


@dataclass(frozen=True)
class ServedSystem:
    """A serving system with its defaults.

    Attributes:
        name: The system with the version whose defaults these are, such as "vLLM 0.32".
        token_budget: Tokens of one iteration, by device: the policy's `budget_field`. Policies that
            never cut prompts do not read it.
        num_sequences: The most sequences that are served at a time, by device and cache.
        source: Where both were read.
        memory: What it leaves to the cache.
        makers: Whose devices it runs on; None: not stated.
    """

    name: str
    token_budget: Callable[[ServingDevice], int]
    num_sequences: Callable[[ServingDevice, CacheRoom], int]
    source: str
    memory: MemoryRule
    makers: tuple[str, ...] | None = None

    def refuses(self, device: ServingDevice) -> str | None:
        """Return why the system does not run on `device`; None where it may."""
        if self.makers is None or device.maker is None or device.maker in self.makers:
            return None
        makers = " and ".join(self.makers)
        return f"{self.name} runs on cards of {makers}, and {device.name} is of {device.maker}"
