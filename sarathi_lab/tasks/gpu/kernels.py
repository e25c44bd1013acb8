"""Every kernel against what it replaces and against others' kernels: the benchmarks of
`sarathi_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig

from sarathi_lab.config.run_context import RunContext
from sarathi_lab.tasks.gpu.part import Part, Work

EVERY = 20  # rows between two lines of progress
LABELS = ("operation", "case", "implementation", "dtype", "timing")
RATES = ("flops", "num_bytes", "flops_per_second", "bytes_per_second")


class _TimeIsOver(Exception):
    """Ends the benchmarks, which know of no time."""


@dataclass(frozen=True)
class KernelBenchmarks(Part):
    """Leaves kernels.csv: microseconds by operation, case and implementation, with FLOP/s and
    bytes/s.

    What fails leaves a row with its error, as does what is not installed.
    """

    home: ClassVar[str] = "gpu/kernels"

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        """Time all benchmarks, as far as the time allows."""
        from sarathi_kernels.benchmarks.measure import (
            run,  # reads the interpreter's setting when imported
        )

        rows: list[dict[str, Any]] = []

        def keep(row: dict[str, Any]) -> None:
            rows.append(as_long(row))
            if len(rows) % EVERY == 1:
                work.log(f"{len(rows)} benchmarks: {row['operation']}, {row['case']}")
                work.keep("kernels", rows)
            if work.cuts_short():
                raise _TimeIsOver

        device = torch.device(work.device)
        # bfloat16 is garbage in the interpreter
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        try:
            run(device, dtype, work.is_dry, on_row=keep)
        except _TimeIsOver:
            work.log(f"the time is over after {len(rows)} benchmarks")
        finally:
            work.keep("kernels", rows)
        failed = sum(bool(row["error"]) for row in rows)
        work.log(f"{len(rows)} benchmarks, {failed} without a time (see the column error)")


def as_long(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `sarathi_kernels.benchmarks` with the columns that every table of a campaign has."""

    def micro(name: str) -> float | None:
        return None if row.get(name) is None else 1e6 * float(row[name])

    return {
        **{name: row.get(name) for name in LABELS},
        "value": micro("median_seconds"),
        "unit": "us",
        "q20": micro("q20"),
        "q80": micro("q80"),
        "repetitions": row.get("repetitions"),
        **{name: row.get(name) for name in RATES},
        "error": row.get("error") or "",
    }
