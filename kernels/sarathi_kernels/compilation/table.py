"""Compiles launches and judges the code: the rows of kernels/compiled.csv."""

from __future__ import annotations

import ast
import csv
import hashlib
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import triton

from sarathi_kernels.compilation.compiled import Source, check, compile_source, source_of
from sarathi_kernels.compilation.configurations import record
from sarathi_kernels.runtime.chip import CHIPS, Chip
from sarathi_kernels.runtime.launch import Launch

PACKAGE = Path(__file__).parents[1]
CONFIGURING = (
    "plan.py",
    "chip.py",
    "configurations.py",
)  # choose among kernels
TABLE_COMMAND = "python -m sarathi_kernels.compilation --write kernels/compiled.csv"


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
    copies: str = ""  # asynchronous, from global to shared memory
    blocks_per_sm: int = 0
    configuration: str
    complaint: str
    triton: str
    sources: str  # see `source_hash`


def source_hash() -> str:
    """A hash of the code that defines kernels or chooses their configurations: a table of another
    is out of date. Layout, comments, docstrings, imports and the files' names do not count.
    """
    texts = {path.name: path.read_text() for path in PACKAGE.rglob("*.py")}
    return hash_of_code(
        text for name, text in texts.items() if "\n@triton.jit" in text or name in CONFIGURING
    )


def hash_of_code(texts: Iterable[str]) -> str:
    """Of the statements of these modules, in any order of the modules."""
    code = sorted(ast.unparse(_Statements().visit(ast.parse(text))) for text in texts)
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:12]


class _Statements(ast.NodeTransformer):
    """Leaves out imports, docstrings and messages, which versions of Python write differently."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("")


def units_of(launches: Iterable[Launch], chip: Chip) -> list[Unit]:
    """The distinct compilations of these launches on `chip`, in their order."""
    units = [Unit(launch, chip, source_of(launch, chip.capability)) for launch in launches]
    return list({unit.source.key: unit for unit in reversed(units)}.values())[::-1]


def collect(capabilities: Sequence[int], kernels: Sequence[str], quick: bool) -> list[Unit]:
    """The compilations of the engine's configurations on these chips; of all kernels if none is
    named.
    """
    units = [
        unit for c in capabilities for unit in units_of(record(CHIPS[c], quick=quick), CHIPS[c])
    ]
    return [unit for unit in units if not kernels or unit.source.source.name in kernels]


def row_of(unit: Unit, sources: str) -> Row:
    """Compile and judge one unit; that it does not compile is a complaint, too."""
    try:
        compiled = compile_source(unit.source)
    except Exception as error:  # of Triton's many kinds none may lose the other rows
        lines = str(error).strip().splitlines() or ["no message"]
        return _failed(unit, sources, f"{type(error).__name__}: {lines[-1].strip()}")
    return replace(
        _failed(unit, sources, ""),
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        shared_memory=compiled.shared_memory,
        instructions="+".join(sorted(compiled.instructions)),
        copies="+".join(sorted(compiled.copies)),
        blocks_per_sm=compiled.blocks_per_sm(unit.chip),
        complaint="; ".join(check(compiled, unit.launch, unit.chip)),
    )


def _failed(unit: Unit, sources: str, reason: str) -> Row:
    return Row(
        kernel=unit.source.source.name,
        capability=unit.chip.capability,
        is_hot=unit.launch.is_hot,
        configuration=unit.source.configuration,
        complaint=f"does not compile: {reason}",
        triton=triton.__version__,
        sources=sources,
    )


_units: list[
    Unit
] = []  # what forked workers compile: kernels and meta tensors can't be sent to them


def _row_at(index: int, sources: str) -> Row:
    return row_of(_units[index], sources)


def compile_units(
    units: Sequence[Unit], jobs: int, on_row: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """The rows of `units` in their order, from `jobs` processes; `on_row` sees each as it is
    ready.
    """
    _units[:] = units
    rows: dict[int, Row] = {}
    sources = source_hash()
    try:
        _compile_into(rows, range(len(units)), jobs, sources, on_row)
    except (
        BrokenProcessPool
    ):  # an assertion of the compiler ends its process: find out which, one by one
        for index in [i for i in range(len(units)) if i not in rows]:
            try:
                _compile_into(rows, [index], 1, sources, on_row)
            except BrokenProcessPool:
                rows[index] = _failed(units[index], sources, "the compiler crashed")
                on_row(rows[index])
    return [rows[index] for index in range(len(units))]


def _compile_into(
    rows: dict[int, Row],
    indexes: Iterable[int],
    jobs: int,
    sources: str,
    on_row: Callable[[Row], None],
) -> None:
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = {pool.submit(_row_at, index, sources): index for index in indexes}
        for future in as_completed(futures):
            rows[futures[future]] = future.result()
            on_row(future.result())


def write_table(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows as text. Raises OSError if there is no such file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def formatted(rows: Sequence[Row]) -> str:
    """The table to read, without the columns that are the same in all rows."""
    names = [field.name for field in fields(Row)][:-2]
    cells = [names, *([str(getattr(row, name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)
