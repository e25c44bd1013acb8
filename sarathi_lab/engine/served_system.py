"""What a serving system chooses where its operator states nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ServingDevice:
    """One device as a server sees it when it chooses its defaults.

    `name` is that of the driver or of the hardware file; `memory_bytes` is all of its memory, not
    what is free.
    """

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class CacheRoom:
    """Tokens of KV cache of one engine, and of the longest context that its model takes."""

    cache_tokens: int
    context_len: int


@dataclass(frozen=True)
class ServedSystem:
    """A serving system with its defaults.

    Attributes:
        name: The system with the version whose defaults these are, such as "vLLM 0.32".
        token_budget: Tokens of one iteration, by device: the policy's `budget_field`. Policies that
            never cut prompts do not read it.
        num_sequences: The most sequences that are served at a time, by device and cache.
        source: Where both were read.
    """

    name: str
    token_budget: Callable[[ServingDevice], int]
    num_sequences: Callable[[ServingDevice, CacheRoom], int]
    source: str
