"""Compile every kernel configuration that the engine can pick, for GPUs that need not be there, and
check the code.

    python -m sarathi_kernels.compilation [--capability 90] [--kernel NAME] [--quick] [--jobs N]
    make gpu_launches     # the launches of all tests that run on a GPU, which --launches reads

Prints what each uses, and the seconds of compiling it, and exits with 1 if anything is wrong:
spilled registers in a hot kernel, more shared memory than the chip has, a product without tensor
cores. What is compiled stays in Triton's cache (TRITON_CACHE_DIR), where launches on a GPU find it,
too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from sarathi_kernels.compilation.table import Row, collect, compile_units, formatted
from sarathi_kernels.runtime.chip import CHIPS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_kernels.compilation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--capability", type=int, action="append", choices=list(CHIPS), help="default: all"
    )
    parser.add_argument(
        "--kernel", action="append", metavar="NAME", default=[], help="default: all"
    )
    parser.add_argument("--quick", action="store_true", help="only what the tests compile")
    parser.add_argument(
        "--launches", type=Path, nargs="+", metavar="FILE", default=(), help="those of tests"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes"
    )
    return parser


def main() -> int:
    """0 if nothing is wrong, 1 with complaints, 2 for a mistake in the command."""
    arguments = _parser().parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: TRITON_INTERPRET=1 replaces the compiler; unset it", file=sys.stderr)
        return 2
    chips, names = arguments.capability or list(CHIPS), arguments.kernel
    try:
        units = collect(chips, names, quick=arguments.quick, files=arguments.launches)
    except OSError as error:
        print(f"error: {error.filename} can't be read ({error.strerror})", file=sys.stderr)
        return 2
    if not units:
        print(f"error: no launch of {' or '.join(names) or 'a kernel'}", file=sys.stderr)
        return 2
    started, done = time.monotonic(), 0

    def show_progress(row: Row) -> None:
        nonlocal done
        done += 1
        if row.complaint or done % 10 == 0 or done == len(units):
            seconds = time.monotonic() - started
            complaint = f" ({row.configuration}): {row.complaint}" if row.complaint else ""
            print(
                f"[{done}/{len(units)}, {seconds:.0f} s] sm_{row.capability} "
                f"{row.kernel}{complaint}",
                flush=True,
            )

    rows = compile_units(units, max(1, arguments.jobs), show_progress)
    print(formatted(rows))
    complaints = [row for row in rows if row.complaint]
    for row in complaints:
        print(
            f"sm_{row.capability} {row.kernel} ({row.configuration}): {row.complaint}",
            file=sys.stderr,
        )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
