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
    name = name_of(kernel, chip, head_size, dtype, work)
    values = _table().get(name)
    if values is None:
        return None
    return tuple(values)


def name_of(kernel: str, chip: Chip, head_size: int, dtype: torch.dtype, work: int) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"sm_{chip.capability} {chip.num_sms} {kernel} {head_size} {name} {work}"


def write(measured: dict[str, list[int]]) -> None:
    """Add entries to the file; those of other GPUs stay. Raises OSError."""
    entries = _table() | measured
    lines = []
    for name in sorted(entries):
        values = json.dumps(entries[name])
        lines.append(f"  {json.dumps(name)}: {values}")
    text = ",\n".join(lines)
    FILE.write_text(f"{{\n{text}\n}}\n")
    forget()


def forget() -> None:
    """Read the file again at the next launch."""
    tuned.cache_clear()
    _table.cache_clear()


@cache
def _table() -> dict[str, list[int]]:
    if not FILE.is_file():
        return {}
    return dict(json.loads(FILE.read_text()))
