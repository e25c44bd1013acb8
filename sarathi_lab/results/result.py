"""The result of a task, and the writer that saves, tracks and prints it."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from omegaconf import OmegaConf
from rich.console import JustifyMethod
from rich.table import Table

from sarathi_lab.config.console import console, print_place, print_words
from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.results.load import LABELS, load_summary, without_unread
from sarathi_lab.results.table import (
    RESULTS,
    SIMULATED,
    Summary,
    rows_of_run,
)
from sarathi_lab.results.tracking import Tracker, as_tree, summary_columns
from sarathi_lab.results.wandb_writer import TrackedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TYPED = ("policy", "workload")  # settings of a sweep whose labels are as typed
PADDING = 1  # columns of text on both sides of a table's column
HEADING_WIDTHS = (99, 24, 16, 12, 8, 1)  # letters of a line, tried in this order
NARROWEST_PROSE = 12  # columns of text that prose is wrapped into
ITERATIONS = "iterations.parquet"
REQUESTS = "requests.parquet"
Column = tuple[str, ...]  # a heading and the cells below it
Cells = list[str]  # of a row


@dataclass(frozen=True)
class DisplayTable:
    """A table for display under a bold `title`: `rows` by heading, right-aligned except those in
    `left`, `unbroken` ones never wrapped, numbers in `formats` by heading; NaN is "-".

    Numbers are never cut or wrapped. Columns that have no room follow in further tables, each with
    the `keys`, the columns that name a row (default: those in `left`).
    """

    rows: Iterable[Mapping[Any, object]]
    left: Collection[str] = ()
    unbroken: Collection[str] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    keys: Collection[str] = ()

    def cells(self) -> list[Cells]:
        """Return the headings and the rows below them as text."""
        rows = list(self.rows)
        if not rows:
            return [[]]
        names = list(rows[0])
        headings = list(map(str, names))
        lines = [headings]
        for row in rows:
            cells = [self._cell(name, row[name]) for name in names]
            lines.append(cells)
        return lines

    def tables(self, width: int) -> list[Table]:
        """Return tables of at most `width` columns of text that together have all columns."""
        rows = self.cells()
        columns = list(zip(*rows, strict=True))
        keys = self._keys_within(columns, width // 2)
        width_of_keys = sum(map(self._least_width, keys))
        # At least one column beside the keys, or a narrow terminal would never reach the end.
        columns_of_tables: list[list[Column]] = [[]]
        used = width_of_keys
        for column in columns:
            if column in keys:
                continue
            needed = self._least_width(column)
            has_room = used + needed <= width
            if columns_of_tables[-1] and not has_room:
                columns_of_tables.append([])
                used = width_of_keys
            columns_of_tables[-1].append(column)
            used += needed
        tables = []
        for others in columns_of_tables:
            # In the order of the rows: a key need not come first.
            shown = [column for column in columns if column in [*keys, *others]]
            table = self._table(shown, width)
            tables.append(table)
        return tables

    def _keys_within(
        self,
        columns: Sequence[Column],
        width: int,
    ) -> list[Column]:
        """Return the columns that name a row: the first that fit, else the first column."""
        names = self.keys or self.left
        keys: list[Column] = []
        used = 0
        for column in columns:
            if column[0] in names:
                used += self._least_width(column)
                if used > width:
                    break
                keys.append(column)
        return keys or list(columns[:1])

    def _least_width(self, column: Column) -> int:
        """Return the columns of text that a column needs: headings and prose wrap at words."""
        heading, *cells = column
        # A heading wraps at spaces, a number must not be broken.
        of_heading = _longest_word(heading)
        of_cells = _letters_of(cells)
        if self._is_prose(heading):
            text = " ".join(cells)
            wrapped = min(of_cells, NARROWEST_PROSE)
            of_cells = max(_longest_word(text), wrapped)
        return 2 * PADDING + max(of_heading, of_cells)

    def _is_prose(self, heading: str) -> bool:
        if heading in self.unbroken:
            return False
        return heading in self.left

    def _table(self, columns: Sequence[Column], width: int) -> Table:
        """Return a table of `columns` whose headings are wrapped if they have no room."""
        # Without room even for one column beside the keys, lines are folded: nothing is cut.
        least_width = sum(map(self._least_width, columns))
        has_room = least_width <= width
        wrapped = self._wrapped_headings(columns, width)
        table = Table(box=None, padding=(0, PADDING), pad_edge=True)
        for column, heading in zip(columns, wrapped, strict=True):
            name = column[0]
            justify: JustifyMethod = "left" if name in self.left else "right"
            is_unbroken = has_room and not self._is_prose(name)
            table.add_column(heading, justify=justify, no_wrap=is_unbroken, overflow="fold")
        cells_of_columns = [column[1:] for column in columns]
        for row in zip(*cells_of_columns, strict=True):
            table.add_row(*row)
        return table

    def _wrapped_headings(
        self,
        columns: Sequence[Column],
        width: int,
    ) -> Cells:
        """Wrap the headings of numbers as little as lets the columns fit into `width`."""
        for letters in HEADING_WIDTHS:
            headings = []
            total = 0
            for column in columns:
                heading = column[0]
                least = self._least_width(column)
                if not self._is_prose(heading):
                    room = max(letters, least - 2 * PADDING)
                    # Line by line: `fill` takes a line's end for a space.
                    lines = heading.split("\n")
                    wrapped = [textwrap.fill(line, room) for line in lines]
                    heading = "\n".join(wrapped)
                    of_heading = 2 * PADDING + _letters_of(wrapped)
                    least = max(least, of_heading)
                headings.append(heading)
                total += least
            if total <= width:
                break
        return headings

    def _cell(self, name: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        if pd.isna(value):
            return "-"
        return format(value, self.formats.get(name, ""))


def _longest_word(text: str) -> int:
    lengths = map(len, text.split())
    return max(lengths, default=0)


def _letters_of(cells: Sequence[str]) -> int:
    """Return the letters of the longest line."""
    lines = "\n".join(cells).split("\n")
    return max(map(len, lines))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown, the headings first."""
    lines = []
    for row in rows:
        # A line's end would end the row.
        cells = [" ".join(cell.split()) for cell in row]
        joined = " | ".join(cells)
        lines.append(f"| {joined} |")
    num_columns = len(rows[0])
    lines.insert(1, "|" + " --- |" * num_columns)
    return "\n".join(lines)


@dataclass(frozen=True)
class Result:
    """The outcome of a task.

    `tables` are saved as NAME.csv unless NAME ends in .csv or .parquet, `figures` as NAME.png,
    `summary` (SI units) as the long rows of results.parquet. iterations.parquet is the history in
    W&B. Other files of the folder are tracked, too.
    """

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    summary: Summary = field(default_factory=dict)
    shown: Sequence[DisplayTable | str] = ()  # printed last, in this order
    places: Mapping[str, Path | str] | None = None  # printed last; None: the folder
    labels: Mapping[str, Any] = field(default_factory=dict)  # flat, to filter by in W&B; run.json
    tags: Sequence[str] = ()  # in W&B
    config: dict[str, object] | None = None  # config.yaml; None: the run's, resolved
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
        labels = {"name": context.name, **result.labels}
        rows = rows_of_run(result.summary, labels)
        rows.to_parquet(folder / RESULTS, index=False)
    track(result, context, tracker, is_run=is_run)
    if is_run:
        # After all else: its presence says that nothing of the run is missing.
        labels_of_run = _labels_of_run(result, context)
        write_json(folder / LABELS, labels_of_run)
    show(result.shown)
    for name in result.figures:
        print_place("figure", folder / f"{name}.png")
    places = result.places
    if places is None:
        places = {}
        if not is_run:  # a run's folder is printed once it has ended
            places = {"results": folder}
    for name, path in places.items():
        print_place(name, path)


def _labels_of_run(
    result: Result,
    context: RunContext,
) -> dict[str, Any]:
    """Return what run.json states of a finished run."""
    labels = {"task": context.task, **context.varied, **result.labels}
    for name in TYPED:
        # A label is the name of a class, which several options may share: the option says more.
        if name in context.varied:
            labels[name] = context.varied[name]
    labels["swept"] = list(context.swept)
    labels["status"] = "finished"
    return labels


def write_stopped(result: Result, context: RunContext, error: str) -> None:
    """Save the part of a run that stopped, without run.json."""
    _save(result, context.run_dir)
    labels = {"task": context.task, **result.labels, "error": error}
    write_json(context.run_dir / "failed.json", labels)


def track(
    result: Result,
    context: RunContext,
    tracker: Tracker,
    *,
    is_run: bool = False,
    has_failed: bool = False,
) -> None:
    """Leave a saved result to be tracked.

    A run that the tracker keeps no tables of, such as a simulated one, is light: it has its labels,
    the settings that its command states, and its summary. Its baselines' summaries are columns of
    it, and they have no runs of their own. Of a failed run no tables are tracked, either.
    """
    is_measured = result.labels.get("executor") != SIMULATED
    has_tables = not is_run or tracker.keeps_tables(is_measured=is_measured)
    if is_run and not has_tables and result.labels.get("is_baseline"):
        return
    baselines: Mapping[str, str] = result.labels.get("baselines", {})
    summaries = {}
    for name, relative_folder in baselines.items():
        folder = context.run_dir / relative_folder
        summaries[name] = load_summary(folder)
    is_light = not has_tables
    has_files = has_tables and not has_failed
    tracker.leave(
        TrackedRun(
            name=context.name,
            group=context.group,
            job_type=context.experiment or context.task,
            folder=str(context.run_dir),
            tags=result.tags or (context.task,),
            config=_columns(result, context, is_light=is_light),
            summary=summary_columns(result.summary, summaries),
            has_history=has_files and ITERATIONS in result.tables,
            has_tables=has_files,
            artifact=result.artifact,
            baselines=list(baselines.values()),
            has_failed=has_failed,
        )
    )


def _columns(
    result: Result,
    context: RunContext,
    *,
    is_light: bool,
) -> dict[str, object]:
    """Return a run's columns in a dashboard, and its `settings`.

    Of a light run they are the settings that its command states, else all that its executor reads.
    """
    columns: dict[str, object] = {
        "task": context.task,
        "command": context.command,
        "hostname": platform.node(),
        "swept": list(context.swept),
        **result.labels,
    }
    columns |= _machine_columns(columns, context.task)
    if not is_light:
        settings = without_unread(result.config or {})
        return {**columns, "settings": settings}
    # A sweep has thousands of light runs: what is stated twice or empty is left out.
    stated = {}
    for name, value in context.stated.items():
        if name not in columns:
            stated[name] = value
    light = {}
    for name, value in columns.items():
        if value is not None and name != "versions":
            light[name] = value
    return {**light, "settings": as_tree(stated)}


def _machine_columns(
    columns: Mapping[str, object],
    task: str,
) -> dict[str, str]:
    """Return the columns by which a dashboard groups runs: the machine, and the policy on it."""
    device = columns.get("device")
    if not device:
        return {}
    machine = str(device)
    if columns.get("executor") != SIMULATED:  # two machines may have the same model of CPU
        machine = f"{device} ({columns['hostname']})"
    policy = str(columns.get("policy", task))
    chunk = columns.get("chunk")
    if chunk is not None:
        policy += f" {chunk}"
    return {"where": machine, "policy_where": f"{policy}, {machine}"}


def show(shown: Iterable[DisplayTable | str]) -> None:
    """Print tables and lines."""
    out = console()
    for item in shown:
        if isinstance(item, str):
            print_words(item)
            continue
        if item.title:
            print_words(f"\n{item.title}", style="bold")
        tables = item.tables(out.width)
        for i, table in enumerate(tables):
            if i > 0:
                out.print()
            out.print(table)


def _save(result: Result, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in result.tables.items():
        if name.endswith(".parquet"):
            table.to_parquet(folder / name, index=False)
        else:
            path = folder / f"{name.removesuffix('.csv')}.csv"
            table.to_csv(path, index=False, float_format=result.float_format)
    if result.figures:
        from sarathi_lab.results.plots.files import save_figure  # matplotlib takes a second

        for name, figure in result.figures.items():
            save_figure(figure, folder / f"{name}.png")
    config = OmegaConf.create(result.config)
    OmegaConf.save(config, folder / "config.yaml")
