"""Every kernel against what it replaces and against others' kernels: the benchmarks of
`sarathi_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch

from sarathi_lab.tasks.gpu.context import Context

SAY_EVERY = 20  # rows


class _TimeIsOver(Exception):
    """Ends the benchmarks, which know of no time."""


def measure(context: Context) -> None:
    """Write kernels.csv: microseconds by operation, case and implementation, with FLOP/s and
    bytes/s.

    What fails leaves a row with its error, as does what is not installed. In a dry run the sizes
    are tiny.
    """
    from sarathi_kernels.benchmarks.measure import (
        run,  # reads the interpreter's setting when it is imported
    )

    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(as_long(row))
        if len(rows) % SAY_EVERY == 1:
            context.say(f"{len(rows)} benchmarks: {row['operation']}, {row['case']}")
            context.write("kernels", "kernels", rows)
        if context.cuts_short():
            raise _TimeIsOver

    device = torch.device(context.device)
    dtype = (
        torch.bfloat16 if device.type == "cuda" else torch.float16
    )  # bfloat16 is garbage in the interpreter
    try:
        run(device, dtype, context.is_dry, on_row=keep)
    except _TimeIsOver:
        context.say(f"the time is over after {len(rows)} benchmarks")
    finally:
        context.write("kernels", "kernels", rows)
    failed = [row for row in rows if row["error"]]
    context.say(
        f"{len(rows)} benchmarks, {len(failed)} without a time (see the table's column error)"
    )


def as_long(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `sarathi_kernels.benchmarks` with the columns that every table of a campaign has."""

    def micro(name: str) -> float | None:
        return None if row.get(name) is None else 1e6 * float(row[name])

    return {
        **{
            name: row.get(name)
            for name in ("operation", "case", "implementation", "dtype", "timing")
        },
        "value": micro("median_seconds"),
        "unit": "us",
        "q20": micro("q20"),
        "q80": micro("q80"),
        "repetitions": row.get("repetitions"),
        **{
            name: row.get(name)
            for name in ("flops", "num_bytes", "flops_per_second", "bytes_per_second")
        },
        "error": row.get("error") or "",
    }
