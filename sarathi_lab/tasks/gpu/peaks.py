"""What the device can do at best: matrix products and copies of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from omegaconf import DictConfig

from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.torch.device import resolve_dtype
from sarathi_lab.executor.torch.watching import durations, timeline_of
from sarathi_lab.results.intervals import coarse_to_fine, summary
from sarathi_lab.tasks.gpu.part import Part, Work

MIB = 1 << 20
SQUARES = (2048, 4096, 6144, 8192, 12288, 16384)
LAYERS = ((5120, 15360), (5120, 5120), (5120, 20480), (20480, 5120))  # products of 13B's layers
LAYER_TOKENS = (256, 512, 1024, 2048, 4096)
COPIES = (64, 256, 1024, 4096)  # MiB
DRY_SQUARES, DRY_COPIES = (64, 128), (1, 4)
SECONDS_A_CASE = 0.25
WARM_UPS, FEWEST, MOST = 2, 3, 200  # repetitions of a case


@dataclass(frozen=True)
class Case:
    """What is timed: `amount` is its FLOPs or bytes, `make` its function, made when it is timed."""

    quantity: str
    name: str
    amount: float
    unit: str
    per: float
    make: Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class DevicePeaks(Part):
    """Leaves peaks.csv: TFLOP/s and GB/s by case."""

    home: ClassVar[str] = "gpu/peaks"

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        """Time copies, then products, as many as the time allows."""
        device = torch.device(work.device)
        dtype_name, dtype = resolve_dtype("auto", device)
        copies = list(_copies(device, is_dry=work.is_dry))
        cases = [*copies, *coarse_to_fine(list(_products(device, dtype, is_dry=work.is_dry)))]
        rows: list[dict[str, object]] = []
        for case in cases:
            if work.cuts_short() and len(rows) > len(copies):
                work.log(f"{len(rows)} of {len(cases)} cases: the time is over")
                break
            rows.append(_row(case, device, dtype_name, 0.01 if work.is_dry else SECONDS_A_CASE))
            work.log(f"{case.quantity} {case.name}: {rows[-1]['value']:.4g} {case.unit}")
            work.keep("peaks", rows)


@torch.inference_mode()
def _row(case: Case, device: torch.device, dtype: str, seconds: float) -> dict[str, object]:
    work, timeline = case.make(), timeline_of(device)
    first = durations(work, timeline, WARM_UPS + 1)[-1]
    fitting = int(seconds / max(first, 1e-7))
    times = durations(work, timeline, max(FEWEST, min(MOST, fitting)))
    rates = [case.amount / time / case.per for time in times]
    labels = {"quantity": case.quantity, "case": case.name, "dtype": dtype}
    return {**labels, **summary(rates, case.unit)}


def _products(device: torch.device, dtype: torch.dtype, *, is_dry: bool) -> Iterator[Case]:
    sizes = [(n, n, n) for n in (DRY_SQUARES if is_dry else SQUARES)]
    sizes += [] if is_dry else [(m, k, n) for m in LAYER_TOKENS for k, n in LAYERS]
    for m, k, n in sizes:
        product = _product(m, k, n, device, dtype)
        yield Case("matmul", f"{m}x{k}x{n}", 2.0 * m * k * n, "TFLOP/s", 1e12, product)


def _product(
    m: int, k: int, n: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Callable[[], object]]:
    """As the engine's linear layers have it, [m, k] x [n, k] transposed; normal values, as zeros
    run faster.
    """

    def make() -> Callable[[], object]:
        rows = torch.randn(m, k, device=device, dtype=dtype)
        weight = torch.randn(n, k, device=device, dtype=dtype)
        return lambda: torch.nn.functional.linear(rows, weight)

    return make


def _copies(device: torch.device, *, is_dry: bool) -> Iterator[Case]:
    for mib in DRY_COPIES if is_dry else COPIES:
        yield Case("copy", f"{mib} MiB", 2.0 * mib * MIB, "GB/s", 1e9, _copy(mib, device))
        yield Case("read", f"{mib} MiB", 1.0 * mib * MIB, "GB/s", 1e9, _read(mib, device))


def _copy(mib: int, device: torch.device) -> Callable[[], Callable[[], object]]:
    """Bytes read and written both count."""

    def make() -> Callable[[], object]:
        source = torch.randn(mib * MIB // 4, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return make


def _read(mib: int, device: torch.device) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        source = torch.randn(mib * MIB // 4, device=device)
        return source.sum

    return make
