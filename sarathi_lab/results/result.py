"""The result of a task, and the writer that saves, tracks and prints it."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from omegaconf import OmegaConf
from rich.table import Table

from sarathi_lab.config.console import console, print_place, print_words
from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.results.load import without_unread
from sarathi_lab.results.table import RESULTS, rows_of_run
from sarathi_lab.results.tracking import TrackedRun, Tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TYPED = ("policy", "workload")  # settings of a sweep whose labels are as typed
ITERATIONS, REQUESTS = "iterations.parquet", "requests.parquet"


@dataclass(frozen=True)
class DisplayTable:
    """A table for display under a bold `title`: `rows` by heading, right-aligned except those in
    `left`, `unbroken` ones never wrapped, numbers in `formats` by heading; NaN is "-".
    """

    rows: Iterable[Mapping[Any, object]]
    left: Collection[str] = ()
    unbroken: Collection[str] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    markup: bool = False  # whether cells hold rich's styles, such as [green]

    def cells(self) -> list[list[str]]:
        """Return the headings and the rows below them as text."""
        rows = list(self.rows)
        headings = list(rows[0]) if rows else []
        lines = [[self._cell(name, row[name]) for name in headings] for row in rows]
        return [[*map(str, headings)], *lines]

    def table(self) -> Table:
        headings, *lines = self.cells()
        table = Table(box=None, padding=(0, 1), pad_edge=True)
        for name in headings:
            justify: Any = "left" if name in self.left else "right"
            table.add_column(name, justify=justify, no_wrap=name in self.unbroken)
        for line in lines:
            table.add_row(*line)
        return table

    def _cell(self, name: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        return "-" if pd.isna(value) else format(value, self.formats.get(name, ""))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown, the headings first."""
    headings, *lines = (f"| {' | '.join(' '.join(one.split()) for one in row)} |" for row in rows)
    return "\n".join([headings, "|" + " --- |" * len(rows[0]), *lines])


@dataclass(frozen=True)
class Result:
    """The outcome of a task.

    `tables` are saved as NAME.csv unless NAME ends in .csv or .parquet, `figures` as NAME.png,
    `summary` (SI units) as summary.json and long rows (results.parquet). iterations.parquet is the
    history in W&B. Other files of the folder are tracked, too.
    """

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    summary: Mapping[str, float] = field(default_factory=dict)
    shown: Sequence[DisplayTable | str] = ()  # printed last, in this order
    places: Mapping[str, Path | str] | None = None  # printed last; None: the folder
    labels: Mapping[str, Any] = field(default_factory=dict)  # flat, to filter by in W&B; run.json
    tags: Sequence[str] = ()  # in W&B
    config: dict[str, Any] | None = None  # config.yaml; None: the run's, resolved
    float_format: str | None = None  # of CSV files, such as "%.6g"
    error: RunError | None = None  # raised when all is kept: a part of the work failed
    artifact: str | None = None  # of W&B: results of equal work are versions of one name


class Stopped(RunError):
    """Error of a run whose finished part, `result`, is kept."""

    def __init__(self, message: str, result: Result | None = None) -> None:
        super().__init__(message)
        self.result = result or Result()


def write(result: Result, context: RunContext, tracker: Tracker, *, is_run: bool = False) -> None:
    """Save, track and print `result`; run.json marks the folder of a run (`is_run`) as complete."""
    folder = context.run_dir
    _save(result, folder)
    if result.summary:
        write_json(folder / "summary.json", result.summary)
        rows = rows_of_run(result.summary, {"name": context.name, **result.labels})
        rows.to_parquet(folder / RESULTS, index=False)
    track(result, context, tracker)
    if is_run:
        # Some options share a class, whose name the label is.
        typed = {name: context.varied[name] for name in TYPED if name in context.varied}
        labels = {"task": context.task, **context.varied, **result.labels, **typed}
        labels |= {"swept": list(context.swept), "status": "finished"}
        write_json(folder / "run.json", labels)
    show(result.shown)
    for name in result.figures:
        print_place("figure", folder / f"{name}.png")
    # A run's is printed once it has ended.
    places = ({} if is_run else {"results": folder}) if result.places is None else result.places
    for what, where in places.items():
        print_place(what, where)


def write_stopped(result: Result, context: RunContext, error: str) -> None:
    """Save the part of a run that stopped, without run.json."""
    _save(result, context.run_dir)
    why = {"task": context.task, **result.labels, "error": error}
    write_json(context.run_dir / "failed.json", why)


def track(
    result: Result, context: RunContext, tracker: Tracker, *, has_failed: bool = False
) -> None:
    """Track a saved result; of a failed run its labels and summary only."""
    tracker.track(
        TrackedRun(
            name=context.name,
            group=context.group,
            job_type=context.experiment or context.task,
            tags=result.tags or (context.task,),
            config=_columns(result, context),
            iterations=None if has_failed else result.tables.get(ITERATIONS),
            summary=result.summary,
            folder=None if has_failed else context.run_dir,
            artifact=result.artifact,
            has_failed=has_failed,
        )
    )


def _columns(result: Result, context: RunContext) -> dict[str, Any]:
    """Return a run's columns in a dashboard, and the settings that its executor reads."""
    columns = {"task": context.task, "hostname": platform.node(), "command": context.command}
    columns |= result.labels
    if where := columns.get("device"):
        if columns.get("executor") != "simulated":  # two machines may have the same model of CPU
            where = f"{where} ({columns['hostname']})"
        named = [columns.get("policy", context.task), columns.get("chunk")]
        policy = " ".join(str(one) for one in named if one is not None)
        columns |= {"where": where, "policy_where": f"{policy}, {where}"}
    return {**columns, "settings": without_unread(result.config or {})}


def show(shown: Iterable[DisplayTable | str]) -> None:
    out = console()
    for part in shown:
        if isinstance(part, str):
            print_words(part)
            continue
        if part.title:
            print_words(f"\n{part.title}", style="bold")
        out.print(part.table(), markup=part.markup)


def _save(result: Result, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in result.tables.items():
        if name.endswith(".parquet"):
            table.to_parquet(folder / name, index=False)
        else:
            path = folder / f"{name.removesuffix('.csv')}.csv"
            table.to_csv(path, index=False, float_format=result.float_format)
    for name, figure in result.figures.items():
        figure.savefig(folder / f"{name}.png", dpi=150)
    OmegaConf.save(OmegaConf.create(result.config), folder / "config.yaml")
