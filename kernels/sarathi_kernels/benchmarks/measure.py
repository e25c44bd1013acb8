"""Times of the kernels and of what they replace.

Modules of this package whose names end in `_benchmarks` say what to time, in a generator
`benchmarks(device, dtype, quick)`. On a GPU each work is captured in a CUDA graph, as the engine
replays it, so that the host's part is not in its time, and the L2 cache is flushed before each
repetition.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sarathi_kernels import benchmarks

# Milliseconds of a GPU's time for each benchmark.
WARMUP_MS = 10
REPETITION_MS = 50
QUICK_REPETITION_MS = 5
HOST_REPETITIONS = 3
COLUMNS = (
    "operation",
    "case",
    "implementation",
    "dtype",
    "timing",
    "repetitions",
    "median_seconds",
    "q20",
    "q80",
    "flops",
    "num_bytes",
    "flops_per_second",
    "bytes_per_second",
    "error",
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """One implementation of `operation` on one case; `work` runs it once on inputs that are made
    already.

    `flops` are the useful ones, 0 where arithmetic does not count; `num_bytes` is the least that
    must be moved.
    """

    operation: str
    case: str
    implementation: str
    work: Callable[[], object]
    flops: float
    num_bytes: float


def measure(
    benchmark: Benchmark, device: torch.device, dtype: torch.dtype, *, quick: bool = False
) -> Row:
    """A row of COLUMNS: seconds, FLOP/s and bytes/s, `timing` "graph", "calls" or "host"; `error`
    if it raised.

    "graph" is the time of a replayed CUDA graph, "calls" includes what launching costs (the work
    could not be captured), "host" is wall time on a CPU.
    """
    row: Row = dict.fromkeys(COLUMNS)
    row |= {
        "operation": benchmark.operation,
        "case": benchmark.case,
        "implementation": benchmark.implementation,
        "dtype": str(dtype).removeprefix("torch."),
        "flops": benchmark.flops,
        "num_bytes": benchmark.num_bytes,
        "error": "",
    }
    try:
        timing, seconds = _seconds(benchmark.work, device, quick)
    except Exception as error:
        return row | {"error": _first_line(error)}
    median, low, high = (float(np.quantile(seconds, q)) for q in (0.5, 0.2, 0.8))
    return row | {
        "timing": timing,
        "repetitions": len(seconds),
        "median_seconds": median,
        "q20": low,
        "q80": high,
        "flops_per_second": benchmark.flops / median,
        "bytes_per_second": benchmark.num_bytes / median,
    }


def run(
    device: torch.device,
    dtype: torch.dtype,
    quick: bool,
    operations: Collection[str] | None = None,
    on_row: Callable[[Row], object] | None = None,
) -> list[Row]:
    """Measure every benchmark of every module, or of `operations` alone; `on_row` is called with
    each row at once.

    What fails leaves a row with its error. A CPU runs the kernels in Triton's interpreter, so only
    `quick` sizes. Raises ValueError for an operation that no module has, and on a CPU without
    `quick` or without the interpreter.
    """
    if device.type != "cuda":
        _require_interpreter(quick)
    rows: list[Row] = []
    names: set[str] = set()
    for benchmark in _benchmarks(device, dtype, quick):
        names.add(benchmark.operation)
        # A module that fails is no operation to choose: its row says why others are missing.
        if operations and benchmark.operation not in operations and benchmark.implementation:
            continue
        rows.append(measure(benchmark, device, dtype, quick=quick))
        if on_row is not None:
            on_row(rows[-1])
    unknown = sorted(set(operations or ()) - names)
    if unknown:
        raise ValueError(
            f"no benchmark of {', '.join(unknown)}; there are {', '.join(sorted(names))}"
        )
    return rows


def _benchmarks(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Benchmark]:
    """Those of all modules; a module that raises gives one benchmark, of its name, that raises the
    same.
    """
    modules = pkgutil.iter_modules(benchmarks.__path__)
    for name in sorted(m.name for m in modules if m.name.endswith("_benchmarks")):
        try:
            module = importlib.import_module(f"{benchmarks.__name__}.{name}")
            yield from module.benchmarks(device, dtype, quick)
        except Exception as error:
            text = f"making its inputs: {_first_line(error)}"
            yield Benchmark(name, "", "", _raising(text), 0, 0)


def _raising(text: str) -> Callable[[], object]:
    def work() -> None:
        raise RuntimeError(text)

    return work


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _seconds(
    work: Callable[[], object], device: torch.device, quick: bool
) -> tuple[str, list[float]]:
    """How the repetitions were timed, and the seconds of each."""
    if device.type != "cuda":
        return "host", _host_seconds(work)
    from triton.testing import do_bench

    timing, repeated = _replayable(work)
    repetition_ms = QUICK_REPETITION_MS if quick else REPETITION_MS
    times_ms = do_bench(repeated, warmup=WARMUP_MS, rep=repetition_ms, return_mode="all")
    return timing, [ms * 1e-3 for ms in times_ms]


def _host_seconds(work: Callable[[], object]) -> list[float]:
    work()
    seconds = []
    for _ in range(HOST_REPETITIONS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def _replayable(work: Callable[[], object]) -> tuple[str, Callable[[], object]]:
    """The replay of `work` captured in a CUDA graph, or `work` where that fails: it waits for the
    device, say.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles and allocates what capturing must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:
        torch.cuda.synchronize()
        return "calls", work
    return "graph", graph.replay


def _require_interpreter(quick: bool) -> None:
    if not quick:
        raise ValueError(
            "a CPU runs kernels in Triton's interpreter, too slowly for real sizes: ask for "
            "quick ones"
        )
    import triton

    if not triton.knobs.runtime.interpret:
        raise ValueError("without a GPU, set TRITON_INTERPRET=1 before triton is imported")
