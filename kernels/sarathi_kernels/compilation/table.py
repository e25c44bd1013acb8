"""Launches compiled in several processes, and what is wrong with the code, as a table."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from sarathi_kernels.compilation.compiled import Source, check, compile_source, source_of
from sarathi_kernels.compilation.configurations import record
from sarathi_kernels.compilation.launched import read
from sarathi_kernels.runtime.chip import CHIPS, Chip
from sarathi_kernels.runtime.launch import Launch


@dataclass(frozen=True)
class Unit:
    """One compilation: a launch on a chip, and what Triton makes of it."""

    launch: Launch
    chip: Chip
    source: Source


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table; what the code uses is 0 and empty where it does not compile."""

    kernel: str
    capability: int
    is_hot: bool
    registers: int = 0  # a thread
    spill_bytes: int = 0  # a thread
    shared_memory: int = 0  # bytes a block
    instructions: str = ""  # for matrix products
    compile_seconds: float = 0.0  # next to none where Triton's cache has it
    configuration: str
    complaint: str


def units_of(launches: Iterable[Launch], chip: Chip) -> list[Unit]:
    """The distinct compilations of these launches on `chip`, in their order."""
    units = [Unit(launch, chip, source_of(launch, chip.capability)) for launch in launches]
    return list({unit.source.key: unit for unit in reversed(units)}.values())[::-1]


def collect(
    capabilities: Sequence[int],
    kernels: Sequence[str] = (),
    *,
    quick: bool = False,
    files: Sequence[Path] = (),
) -> list[Unit]:
    """The compilations on these chips of the launches in `files`, or else of the engine's
    configurations; of all kernels if none is named.
    """
    launched = [pair for file in files for pair in read(file)]
    units = []
    for capability in capabilities:
        chip = CHIPS[capability]
        of_chip = [launch for place, launch in launched if place == capability]
        units += units_of(of_chip if files else record(chip, quick=quick), chip)
    return [unit for unit in units if not kernels or unit.source.source.name in kernels]


def row_of(unit: Unit) -> Row:
    """Compile and judge one unit; that it does not compile is a complaint, too."""
    started = time.perf_counter()
    try:
        compiled = compile_source(unit.source)
    except Exception as error:  # of Triton's many kinds none may lose the other rows
        lines = str(error).strip().splitlines() or ["no message"]
        return failed_row(unit, f"{type(error).__name__}: {lines[-1].strip()}")
    return replace(
        failed_row(unit, ""),
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        shared_memory=compiled.shared_memory,
        instructions="+".join(sorted(compiled.instructions)),
        compile_seconds=round(time.perf_counter() - started, 1),
        complaint="; ".join(check(compiled, unit.launch, unit.chip)),
    )


def failed_row(unit: Unit, reason: str) -> Row:
    """The row of a `unit` that does not compile."""
    return Row(
        kernel=unit.source.source.name,
        capability=unit.chip.capability,
        is_hot=unit.launch.is_hot,
        configuration=unit.source.configuration,
        complaint=f"does not compile: {reason}",
    )


_units: list[
    Unit
] = []  # what forked workers compile: kernels and meta tensors can't be sent to them


def _row_at(index: int) -> Row:
    return row_of(_units[index])


def compile_units(
    units: Sequence[Unit], jobs: int, on_row: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """The rows of `units` in their order, from `jobs` processes; `on_row` sees each as it is
    ready.
    """
    _units[:] = units
    rows: dict[int, Row] = {}
    try:
        _compile_into(rows, range(len(units)), jobs, on_row)
    except (
        BrokenProcessPool
    ):  # an assertion of the compiler ends its process: find out which, one by one
        for index in [i for i in range(len(units)) if i not in rows]:
            try:
                _compile_into(rows, [index], 1, on_row)
            except BrokenProcessPool:
                rows[index] = failed_row(units[index], "the compiler crashed")
                on_row(rows[index])
    return [rows[index] for index in range(len(units))]


def _compile_into(
    rows: dict[int, Row],
    indexes: Iterable[int],
    jobs: int,
    on_row: Callable[[Row], None],
) -> None:
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = {pool.submit(_row_at, index): index for index in indexes}
        for future in as_completed(futures):
            rows[futures[future]] = future.result()
            on_row(future.result())


def formatted(rows: Sequence[Row]) -> str:
    """The table to read."""
    cells = [[field.name for field in fields(Row)], *(list(map(str, astuple(row))) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)
