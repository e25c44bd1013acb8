"""Parts of the campaign that measure by themselves: peaks of the device, and kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from omegaconf import DictConfig

from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.torch.device import resolve_dtype
from sarathi_lab.executor.torch.timeline import durations, timeline_of
from sarathi_lab.results.intervals import coarse_to_fine, summary
from sarathi_lab.tasks.gpu.part import Part, Work

# -- what the device can do at best ----------------------------------------------------------------

MIB = 1 << 20
SQUARES = (2048, 4096, 6144, 8192, 12288, 16384)
LAYERS = ((5120, 15360), (5120, 5120), (5120, 20480), (20480, 5120))  # products of 13B's layers
LAYER_TOKENS = (256, 512, 1024, 2048, 4096)
COPIES = (64, 256, 1024, 4096)  # MiB
DRY_SQUARES, DRY_COPIES = (64, 128), (1, 4)
SECONDS_A_CASE = 0.25
WARM_UPS, FEWEST, MOST = 2, 3, 200  # repetitions of a case
PER = {"TFLOP/s": 1e12, "GB/s": 1e9}
Job = Callable[[], object]


class Case(NamedTuple):
    """What is timed: `amount` is its FLOPs or bytes, `make` its function, made when it is timed."""

    quantity: str
    name: str
    amount: float
    unit: str
    make: Callable[[], Job]


@dataclass(frozen=True)
class DevicePeaks(Part):
    """Leaves peaks.csv: TFLOP/s and GB/s of matrix products and copies of several sizes."""

    home = "gpu/peaks"

    @torch.inference_mode()
    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        device = work.device
        dtype_name, dtype = resolve_dtype("auto", device)
        copies = [
            Case(name, f"{mib} MiB", num_bytes * mib * MIB, "GB/s", partial(make, device, mib))
            for mib in (DRY_COPIES if work.is_dry else COPIES)
            for name, num_bytes, make in (("copy", 2.0, _copy), ("read", 1.0, _read))
        ]
        sizes = [(n, n, n) for n in (DRY_SQUARES if work.is_dry else SQUARES)]
        sizes += [] if work.is_dry else [(m, k, n) for m in LAYER_TOKENS for k, n in LAYERS]
        products = []
        for m, k, n in coarse_to_fine(sizes):
            make = partial(_product, device, dtype, m, k, n)
            products.append(Case("matmul", f"{m}x{k}x{n}", 2.0 * m * k * n, "TFLOP/s", make))
        rows: list[dict[str, object]] = []
        for case in [*copies, *products]:
            if work.cuts_short() and len(rows) > len(copies):
                total = len(copies) + len(products)
                work.log(f"{len(rows)} of {total} cases: the time is over")
                break
            repeat = partial(durations, case.make(), timeline_of(device))
            first = repeat(WARM_UPS + 1)[-1]
            seconds = 0.01 if work.is_dry else SECONDS_A_CASE
            times = repeat(max(FEWEST, min(MOST, int(seconds / max(first, 1e-7)))))
            rates = summary([case.amount / time / PER[case.unit] for time in times], case.unit)
            labels = {"quantity": case.quantity, "case": case.name, "dtype": dtype_name}
            rows.append({**labels, **rates})
            work.log(f"{case.quantity} {case.name}: {rates['value']:.4g} {case.unit}")
            work.keep("peaks", rows)


def _product(device: torch.device, dtype: torch.dtype, m: int, k: int, n: int) -> Job:
    """[m, k] x [n, k] transposed, as linear layers have it; normal values, as zeros run faster."""
    rows = torch.randn(m, k, device=device, dtype=dtype)
    weight = torch.randn(n, k, device=device, dtype=dtype)
    return lambda: torch.nn.functional.linear(rows, weight)


def _copy(device: torch.device, mib: int) -> Job:
    source = torch.randn(mib * MIB // 4, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _read(device: torch.device, mib: int) -> Job:
    return torch.randn(mib * MIB // 4, device=device).sum


# -- kernels against what they replace and against others': the benchmarks of `sarathi_kernels` ----

EVERY = 20  # rows between two lines of progress
TIMES = ["value", "q20", "q80"]
AS_LONG = [  # the columns, those that every table of a campaign has among them
    *("operation", "case", "implementation", "dtype", "timing", "value", "unit", "q20", "q80"),
    *("repetitions", "flops", "num_bytes", "flops_per_second", "bytes_per_second", "error"),
]


class _TimeIsOver(Exception):
    """Ends the benchmarks, which know of no time."""


@dataclass(frozen=True)
class KernelBenchmarks(Part):
    """Leaves kernels.csv, a row a benchmark, with its error where it failed or is not installed."""

    home = "gpu/kernels"

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        # Reads the interpreter's setting when imported.
        from sarathi_kernels.benchmarks.measure import COLUMNS, run

        rows: list[dict[str, Any]] = []

        def record() -> None:
            table = pd.DataFrame(rows, columns=COLUMNS).rename(columns={"median_seconds": "value"})
            table[TIMES] = 1e6 * table[TIMES].astype(float)
            work.keep("kernels", table.assign(unit="us")[AS_LONG])

        def keep(row: dict[str, Any]) -> None:
            rows.append(row)
            if len(rows) % EVERY == 1:
                work.log(f"{len(rows)} benchmarks: {row['operation']}, {row['case']}")
                record()
            if work.cuts_short():
                raise _TimeIsOver

        # bfloat16 is garbage in the interpreter
        dtype = torch.bfloat16 if work.device.type == "cuda" else torch.float16
        try:
            run(work.device, dtype, work.is_dry, on_row=keep)
        except _TimeIsOver:
            work.log(f"the time is over after {len(rows)} benchmarks")
        finally:
            record()
        failed = sum(bool(row["error"]) for row in rows)
        work.log(f"{len(rows)} benchmarks, {failed} without a time (see the column error)")
