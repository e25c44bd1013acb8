"""Launch configurations that were measured on a GPU: `tiles.json`, which `python -m
sarathi_kernels.benchmarks --tune` writes and launches read. Without an entry the rules beside a
kernel choose.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from sarathi_kernels.runtime.chip import Chip

FILE = Path(__file__).parents[1] / "tiles.json"


@cache
def tuned(
    kernel: str, chip: Chip, head_size: int, dtype: torch.dtype, work: int
) -> tuple[int, ...] | None:
    """Return the configuration of `kernel` on `chip`, as the fields of its class; None if it was
    not measured. `work` is what else it depends on: rows of a tile, heads that share a cache.
    """
    values = _table().get(name_of(kernel, chip, head_size, dtype, work))
    return None if values is None else tuple(values)


def name_of(kernel: str, chip: Chip, head_size: int, dtype: torch.dtype, work: int) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"sm_{chip.capability} {chip.num_sms} {kernel} {head_size} {name} {work}"


def write(found: dict[str, list[int]]) -> None:
    """Add entries to the file; those of other GPUs stay. Raises OSError."""
    entries = sorted((_table() | found).items())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in entries)
    FILE.write_text(f"{{\n{lines}\n}}\n")
    forget()


def forget() -> None:
    """Read the file again at the next launch."""
    tuned.cache_clear()
    _table.cache_clear()


@cache
def _table() -> dict[str, list[int]]:
    return dict(json.loads(FILE.read_text())) if FILE.is_file() else {}
