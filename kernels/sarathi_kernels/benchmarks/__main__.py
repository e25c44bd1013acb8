"""`python -m sarathi_kernels.benchmarks [--quick]`: a table of times, and a CSV file; with `--tune`
the fastest tiles, which launches take from then on.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from sarathi_kernels.attention.support import SUPPORTED_HEAD_SIZES
from sarathi_kernels.benchmarks.measure import COLUMNS, Row, run
from sarathi_kernels.runtime.tuned import FILE, write


def _line(row: Row) -> str:
    head = f"{row['operation']:<22}{row['case']:<40}{row['implementation']:<16}"
    if row["error"]:
        return f"{head}failed: {row['error']}"
    times = (
        f"{row['median_seconds'] * 1e6:>12.1f}{row['q20'] * 1e6:>12.1f}{row['q80'] * 1e6:>12.1f}"
    )
    rates = f"{row['flops_per_second'] / 1e12:>10.1f}{row['bytes_per_second'] / 1e9:>10.0f}"
    return f"{head}{times}{rates}  {row['timing']} x {row['repetitions']}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_kernels.benchmarks", description=run.__doc__
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that everything runs"
    )
    parser.add_argument(
        "--operation", action="append", metavar="NAME", help="only this operation (repeatable)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16, on a CPU float16"
    )
    parser.add_argument(
        "--csv", metavar="FILE", help="write the rows, in long format, to FILE as well"
    )
    parser.add_argument(
        "--tune", action="store_true", help=f"measure tiles of attention instead, into {FILE.name}"
    )
    parser.add_argument(
        "--head-size", type=int, action="append", choices=SUPPORTED_HEAD_SIZES, metavar="SIZE",
        help=f"tune for this one (repeatable), {', '.join(map(str, SUPPORTED_HEAD_SIZES))}",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.tune and (options.csv or options.operation):
        parser.error("--tune measures attention alone, without a CSV file; drop the other options")
    if options.head_size and not options.tune:
        parser.error("--head-size is an option of --tune; add that")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of all benchmarks as they are measured; returns 1 if any failed, 2 if none
    could be run.
    """
    options = _arguments(arguments)
    if torch.cuda.is_available():
        device = torch.device("cuda")
        name = torch.cuda.get_device_name()
        default_dtype = "bfloat16"
    else:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        device = torch.device("cpu")
        name = "CPU, kernels interpreted"
        default_dtype = "float16"  # the interpreter rounds to bfloat16 wrongly
    dtype = getattr(torch, options.dtype or default_dtype)
    print(f"{name}, {dtype}, torch {torch.__version__}")
    if options.tune:
        return _tune(device, dtype, options.head_size, quick=options.quick)
    titles = f"{'operation':<22}{'case':<40}{'implementation':<16}"
    print(
        f"{titles}{'median µs':>12}{'q20 µs':>12}{'q80 µs':>12}{'TFLOP/s':>10}{'GB/s':>10}",
        flush=True,
    )
    try:
        with _reporter(options.csv) as report:
            rows = run(device, dtype, options.quick, options.operation, report)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(row["error"] for row in rows))


def _tune(
    device: torch.device, dtype: torch.dtype, head_sizes: Sequence[int] | None, *, quick: bool
) -> int:
    """Write the fastest tiles; return 2 where they can't be measured or written."""
    if device.type != "cuda" and not quick:
        print("error: tiles are measured on a GPU; use --quick to try it", file=sys.stderr)
        return 2
    from sarathi_kernels.benchmarks.tuning import HEAD_SIZE, tune  # here: they import Triton

    for head_size in head_sizes or [HEAD_SIZE]:
        fastest = tune(device, dtype, partial(print, flush=True), head_size, quick=quick)
        if device.type != "cuda":
            continue  # times of the interpreter mean nothing
        try:
            write(fastest)
        except OSError as error:
            print(f"error: {FILE} can't be written ({error.strerror})", file=sys.stderr)
            return 2
    return 0


@contextmanager
def _reporter(path: str | None) -> Iterator[Callable[[Row], None]]:
    """Prints each row, and writes it to the file at once, so that what was measured outlives an
    interruption.
    """
    with nullcontext() if path is None else Path(path).open("w", newline="") as file:
        writer = None if file is None else csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if writer is not None:
            writer.writeheader()

        def report(row: Row) -> None:
            print(_line(row), flush=True)
            if writer is not None and file is not None:
                writer.writerow(row)
                file.flush()

        yield report


if __name__ == "__main__":
    sys.exit(main())
