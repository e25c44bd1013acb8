"""Compiles launches and judges the code: the rows of kernels/compiled.csv."""

from __future__ import annotations

import ast
import csv
import hashlib
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

import triton

from sarathi_kernels.compilation.compiled import Source, check, compile_source, source_of
from sarathi_kernels.compilation.configurations import record, record_batches
from sarathi_kernels.compilation.expert_configurations import (
    record_expert_batches,
    record_experts,
)
from sarathi_kernels.runtime.chip import CHIPS, Chip
from sarathi_kernels.runtime.launch import Launch

PACKAGE = Path(__file__).parents[1]
CONFIGURATIONS = "sarathi_kernels.compilation.configurations"  # of all rows but experts'
EXPERTS = "sarathi_kernels.experts."
EXPERT_CONFIGURATIONS = "sarathi_kernels.compilation.expert_configurations"
TABLE_COMMAND = "python -m sarathi_kernels.compilation --write kernels/compiled.csv"


@dataclass(frozen=True)
class Unit:
    """One compilation: a launch on a chip, and what Triton makes of it."""

    launch: Launch
    chip: Chip
    source: Source
    batch: str = ""  # for which the launch is, if for a whole one


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table; what the code uses is 0 and empty where it does not compile."""

    kernel: str
    capability: int
    batch: str = ""
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


@cache
def source_hash(kernel: str) -> str:
    """A hash of the code that `kernel` and its launches depend on: a row of another is out of date.

    That is the module that defines it and all of the package that this imports, and the
    configurations that it is compiled in. Layout, comments,
    docstrings, imports and the files' names do not count.
    """
    trees = modules()
    ahead = [name for name in trees if _defines(trees[name], kernel)]
    is_experts = any(name.startswith(EXPERTS) for name in ahead)
    reached = {EXPERT_CONFIGURATIONS if is_experts else CONFIGURATIONS}
    while ahead:
        name = ahead.pop()
        if name in trees and name not in reached:
            reached.add(name)
            ahead += _imported(trees[name])
    return hash_of_code(_unparsed(trees[name]) for name in reached)


@cache
def modules() -> dict[str, ast.Module]:
    """The package's modules by name."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(
            path.read_text()
        )
        for path in PACKAGE.rglob("*.py")
    }


def _defines(module: ast.Module, function: str) -> bool:
    return any(isinstance(s, ast.FunctionDef) and s.name == function for s in module.body)


@cache  # as most kernels share most modules
def _unparsed(module: ast.Module) -> str:
    return ast.unparse(module)


@cache
def _imported(module: ast.Module) -> list[str]:
    """What may be modules among the names that a module imports."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    return [
        name
        for node in imports
        for name in (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
    ]


def hash_of_code(texts: Iterable[str]) -> str:
    """Of the statements of these modules, in any order of the modules."""
    code = sorted(map(_statements, texts))
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:12]


@cache
def _statements(text: str) -> str:
    return ast.unparse(_Statements().visit(ast.parse(text)))


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


def collect(
    capabilities: Sequence[int], kernels: Sequence[str], quick: bool, batches: bool = False
) -> list[Unit]:
    """The compilations of the engine's configurations on these chips; of all kernels if none is
    named, only of what `batches` launch if that is asked for. What several batches launch is there
    once for each.
    """
    units: list[Unit] = []
    for chip in map(CHIPS.__getitem__, capabilities):
        named = [
            Unit(each, chip, source_of(each, chip.capability), name)
            for name, each in (
                *record_batches(chip, quick=quick),
                *record_expert_batches(chip, quick=quick),
            )
        ]
        units += {(unit.source.key, unit.batch): unit for unit in named}.values()
        keys = {unit.source.key for unit in named}
        launches = record(chip, quick=quick) + record_experts(chip, quick=quick)
        others = [] if batches else units_of(launches, chip)
        units += [unit for unit in others if unit.source.key not in keys]
    return [unit for unit in units if not kernels or unit.source.source.name in kernels]


def row_of(unit: Unit) -> Row:
    """Compile and judge one unit; that it does not compile is a complaint, too."""
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
        copies="+".join(sorted(compiled.copies)),
        blocks_per_sm=compiled.blocks_per_sm(unit.chip),
        complaint="; ".join(check(compiled, unit.launch, unit.chip)),
    )


def failed_row(unit: Unit, reason: str) -> Row:
    """The row of a `unit` that does not compile."""
    return Row(
        kernel=unit.source.source.name,
        capability=unit.chip.capability,
        batch=unit.batch,
        is_hot=unit.launch.is_hot,
        configuration=unit.source.configuration,
        complaint=f"does not compile: {reason}",
        triton=triton.__version__,
        sources=source_hash(unit.source.source.name),
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


def as_text(row: Row) -> dict[str, str]:
    """The row as a file has it."""
    return {name: str(value) for name, value in asdict(row).items()}


def identity(row: Mapping[str, str]) -> tuple[str, ...]:
    """What the figures of a row follow from."""
    names = ("kernel", "capability", "batch", "configuration", "triton", "sources")
    return tuple(row[name] for name in names)


def identity_of(unit: Unit) -> tuple[str, ...]:
    """The identity of the row that `unit` will have."""
    return identity(as_text(failed_row(unit, "")))


def write_table(path: Path, rows: Sequence[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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
