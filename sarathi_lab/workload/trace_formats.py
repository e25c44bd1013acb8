"""Traces of requests, read in the formats of `trace_formats.yaml`."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import stated_beside
from sarathi_lab.workload.recording import Recording, RowCheck, recorded
from sarathi_lab.workload.text_files import JsonRows, json_rows, kind_of_text, read_text

SECOND = 10**9
NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": SECOND}
DATE = "date"
NAMES_OF_UNITS = {
    DATE: "dates",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}
# Numbers from the first of these on are times since 1970 in the unit behind it: as seconds, 1e11
# is the year 5138.
FIRST_OF_UNITS = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"), (1e9, "s"))
FIX = "name a trace, such as AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset"
PRIORITY = "priority"  # column of any format
# Columns that may be a time, a length, or what requests share, by a part of their names.
SUSPECT = re.compile(
    rf"^{PRIORITY}$|time|stamp|arriv|delay|interval|elapsed|second|_ms$|_ns$|_at$"
    "|len|token|toks|size|images|duration|pages|chars"
    "|session|conversation|chat|turn|hash|prefix",
    re.IGNORECASE,
)
# Columns that restate others, and are passed over in silence.
DERIVED = ("num_total_tokens", "Total tokens", "pd_ratio", "input_tok_ids", "batch_size")
SEPARATORS = (",", ";", "\t")  # of CSV
LARGEST_CELL = 2**30  # characters; the identifiers of a long prompt's blocks have many
NO_TABLES = ("empty", "YAML", "a log", "HTML or XML")  # kinds of text
SURPLUS = "cells behind the last column"
# Share of the rows whose number of ids a size of blocks must explain.
EXPLAINED = 0.95
BLOCK_SIZES = tuple(2**power for power in range(13))
# Keys of a conversation's requests, as Weka writes them.
WEKA = "Weka"
WEKA_KEYS = ("t", "in", "out", "think_time", "id", "hash_ids")
Numbering = dict[tuple[str, int], int]  # of blocks, by their scope and id


@dataclass(frozen=True)
class TraceFormat:
    """Names of a format's columns.

    Attributes:
        name: How messages name it.
        prompt: Prompt tokens.
        output: Output tokens.
        time: Times of arrival; "": it has none.
        unit: Of its times, among `NANOSECONDS`; or `DATE`; "": what their numbers say.
        marks: Further columns by which it is told from others.
        ids: Identifiers of the blocks of a prompt.
        block_size: Tokens of such a block, unless the numbers of ids say otherwise.
        session: The conversation of a request, by one of these names.
        delay: Time between the answer before and a request, in the unit of the times.
        passed_over: Columns that are understood and change nothing.
        restated_by_ids: Columns that say no more than the identifiers of blocks.
    """

    name: str
    prompt: str
    output: str
    time: str = ""
    unit: str = "s"
    marks: Sequence[str] = ()
    ids: str = "hash_ids"
    block_size: int = 512
    session: Sequence[str] = ()
    delay: str = ""
    passed_over: Sequence[str] = ()
    restated_by_ids: Sequence[str] = ()

    @property
    def needed(self) -> list[str]:
        """Columns without which a file is of another format."""
        names = [self.prompt, self.output, *self.marks]
        if self.time:
            names.insert(0, self.time)
        return names

    def understood(self, cells: pd.DataFrame) -> set[str]:
        """Return the columns that are read, or whose content others have."""
        names = {self.ids, *DERIVED}
        names.update(self.needed)
        names.update(self.session)
        names.update(self.passed_over)
        if self.session_in(cells) is not None:
            names.add(self.delay)
        if self.ids in cells:
            names.update(self.restated_by_ids)
        if _has_priorities(cells):
            names.add(PRIORITY)
        return names

    def session_in(self, cells: pd.DataFrame) -> str | None:
        """Return the column that names conversations; None without one."""
        return next((name for name in self.session if name in cells), None)


def _stated(section: str) -> Any:
    """Return a section of trace_formats.yaml."""
    return stated_beside(__file__, "trace_formats.yaml")[section]


@cache
def formats() -> list[TraceFormat]:
    """List all formats, in the order in which they are tried; those of people's own files last."""
    of_systems = [TraceFormat(**columns) for columns in _stated("formats")]
    plain = []
    for unit, times in _stated("plain_times").items():
        for time in times:
            plain += _plain(time, unit)
    return of_systems + plain


def _plain(time: str = "", unit: str = "s") -> list[TraceFormat]:
    """List the formats of people's own files that have times in this column."""
    sessions = ("session_id", "conversation_id")
    lengths = _stated("plain_lengths")
    return [
        TraceFormat(
            "plain",
            prompt,
            output,
            time,
            unit,
            session=sessions,
        )
        for prompt, output in lengths
    ]


@dataclass(frozen=True)
class TraceFile:
    """A trace as read.

    Attributes:
        recording: Its requests.
        num_rows: Rows of the file.
        has_times: Whether requests have times of arrival, or a delay after another one.
        block_size: Tokens of the blocks that its ids stand for.
        notes: What of the file is not read, and what is taken for granted.
    """

    recording: Recording
    num_rows: int
    has_times: bool
    block_size: int
    notes: Sequence[str]


def read_trace_file(file: Path, block_size: int | None = None) -> TraceFile:
    """Read a trace in one of `formats`: CSV, JSON or JSON lines, maybe packed by gzip.

    A row that can't be read is left out and counted. Dates without an offset are UTC.

    Args:
        file: The file.
        block_size: Tokens of a block, if they are stated.

    Raises:
        UserError: For a file of another kind, or without a row that can be read.
    """
    cells, damaged = _read_cells(file)
    trace_format = _recognise(file, cells)
    notes = _notes_on_columns(cells, trace_format)
    if trace_format.name == WEKA and _begin_alike(cells):
        trace_format = replace(trace_format, time="")
        notes.append("t counts within each conversation: they have no times of arrival")
    if not trace_format.unit:
        unit = _unit_of(file, cells[trace_format.time])
        trace_format = replace(trace_format, unit=unit)
        notes.append(f"{trace_format.time} read as {NAMES_OF_UNITS[unit]}")
    recording = _recording(cells, trace_format, damaged)
    requests = recording.requests
    if requests.empty:
        raise UserError(
            f"{file} {recording.example or 'has no request'}: no row can be read; correct it, or "
            f"{FIX}"
        )
    ids_size = trace_format.block_size
    if requests.block_ids.map(bool).any():
        ids_size = block_size or _size_of_blocks(file, requests, trace_format)
        if ids_size != trace_format.block_size:
            notes.append(f"{trace_format.ids} of {ids_size} tokens each")
    elif block_size is not None:
        raise UserError(f"workload.block_size={block_size} has no effect: {file} has no block ids")
    num_rows = len(cells) + len(damaged)
    return TraceFile(
        recording,
        num_rows,
        bool(trace_format.time),
        ids_size,
        notes,
    )


# -- cells ---------------------------------------------------------------------------------------

# A row for each request, by number of its line, and what of the file is no row, in words.
CellsAndDamage = tuple[pd.DataFrame, list[str]]


def _read_cells(file: Path) -> CellsAndDamage:
    """Read the cells of a trace by number of their line, and list what of the file is none."""
    if file.is_dir():
        raise UserError(
            f"workload.path={file} is a folder; make one file of it, as by jq -c . "
            f"{file}/*.json > all.jsonl"
        )
    text = read_text(file, f"workload.path={file}", FIX)
    rows = json_rows(text)
    if rows is None:
        return _cells_of_csv(file, text)
    objects = rows.objects
    if not objects:
        reason = "is an empty list"
        if rows.damaged:
            reason = rows.damaged[0]
        raise UserError(f"{file} {reason}; {FIX}")
    has_conversations = any("requests" in entry for entry in objects)
    if has_conversations:
        return _cells_of_conversations(rows)
    lines = list(rows.lines)
    cells = pd.DataFrame(objects, index=lines, dtype=object)
    return cells, [*rows.damaged]


def _cells_of_csv(file: Path, text: str) -> CellsAndDamage:
    kind = kind_of_text(text)
    if kind in NO_TABLES:
        raise UserError(f"{file} is {kind}; {FIX}")
    csv.field_size_limit(LARGEST_CELL)
    content = text.lstrip("\r\n")
    reader = csv.DictReader(
        io.StringIO(content, newline=""),
        delimiter=_separator(text),
        restkey=SURPLUS,
        skipinitialspace=True,
        strict=True,
    )
    usable = {}
    damaged = []
    try:
        headings = reader.fieldnames or ()
        names = [name.strip() for name in headings]
        reader.fieldnames = names
        for row in reader:
            surplus = row.pop(SURPLUS, ())
            if any(surplus):
                # Values stand under wrong headings, as a decimal comma leaves them.
                damaged.append(f"line {reader.line_num}: more cells than the {len(names)} headings")
            else:
                usable[reader.line_num] = row
    except csv.Error as error:
        raise UserError(f"{file} behind line {reader.line_num}: {error}; correct it") from None
    num_different = len(set(names))
    if num_different < len(names):
        raise UserError(f"{file} has two columns of one name: {', '.join(names)}; rename one")
    if not usable and not damaged:
        raise UserError(f"{file} is empty but for its header ({kind}); name a file with requests")
    cells = pd.DataFrame(
        list(usable.values()),
        index=list(usable),
        columns=names,
        dtype=object,
    )
    with_gaps = cells.mask(cells == "")
    without_empty_rows = with_gaps.dropna(how="all")
    return without_empty_rows, damaged


def _separator(text: str) -> str:
    """Return what separates the columns: the separator that the header has most."""
    lines = text.strip().splitlines()
    header = lines[0]
    return max(SEPARATORS, key=header.count)


def _cells_of_conversations(rows: JsonRows) -> CellsAndDamage:
    """Read Weka's conversations: a row for each of their requests, counted from 1."""
    damaged = [*rows.damaged]
    cells = []
    numbering: Numbering = {}
    for line, conversation in zip(rows.lines, rows.objects, strict=True):
        requests = conversation.get("requests")
        if not isinstance(requests, list):
            damaged.append(f"line {line}: requests is not a list")
            continue
        name = str(conversation.get("id", line))
        scope = name
        if conversation.get("hash_id_scope") == "global":
            scope = ""
        for request in requests:
            # A subagent's requests run beside the conversation, of which they are no turns.
            if not isinstance(request, Mapping) or "in" not in request:
                damaged.append(f"conversation {name}: an entry without `in`, such as a subagent")
                continue
            ids = _numbered(request.get("hash_ids"), scope, numbering)
            cells.append({**request, "id": name, "hash_ids": ids})
    table = pd.DataFrame(cells, columns=WEKA_KEYS, dtype=object)
    table.index += 1
    return table, damaged


def _numbered(stated_ids: object, scope: str, numbering: Numbering) -> object:
    """Number the blocks of all conversations: equal ids of two scopes are two blocks."""
    ids = []
    for number in _ids(stated_ids) or ():
        new = len(numbering)
        block = (scope, number)
        block_id = numbering.setdefault(block, new)
        ids.append(block_id)
    return ids or stated_ids


# -- formats -------------------------------------------------------------------------------------


def _recognise(file: Path, cells: pd.DataFrame) -> TraceFormat:
    """Return the first format whose columns a file has. Raises UserError for none."""
    names = {str(name) for name in cells}
    for trace_format in formats():
        if names.issuperset(trace_format.needed):
            return trace_format
    for trace_format in _plain():
        # No further column could be a time.
        others = names - trace_format.understood(cells)
        if names.issuperset(trace_format.needed) and not others:
            return trace_format
    raise _unknown_format(file, names)


def _unknown_format(file: Path, names: set[str]) -> UserError:
    """Make the error of a file in no format: what reads it, or the columns that it lacks."""
    for key, content in _stated("read_elsewhere").items():
        if key in names:
            return UserError(f"{file} has {content}")

    def closeness(trace_format: TraceFormat) -> tuple[int, int]:
        needed = trace_format.needed
        common = names.intersection(needed)
        # Of formats with as many columns in common, the one that lacks the fewest.
        return len(common), -len(needed)

    closest = max(formats(), key=closeness)
    missing = [name for name in closest.needed if name not in names]
    all_columns = ", ".join(sorted(names))
    columns = all_columns[:200]  # a message is one line
    num_common, _ = closeness(closest)
    if num_common > 1:
        return UserError(
            f"{file} has the columns {columns}, and lacks {', '.join(missing)} of "
            f"{closest.name}'s; add or rename columns"
        )
    by_format = {}
    # Of several formats with one name the first is shown, so it is set last.
    for trace_format in reversed(formats()):
        by_format[trace_format.name] = ", ".join(trace_format.needed)
    columns_of_formats = []
    for name, needed in by_format.items():
        columns_of_formats.append(f"{name} {needed}")
    return UserError(
        f"{file} has the columns {columns}, which no known format has; name its columns in its "
        f"first line as one of: {'; '.join(columns_of_formats)}"
    )


def _notes_on_columns(cells: pd.DataFrame, trace_format: TraceFormat) -> list[str]:
    """Name columns that are not read and look like a time, a length or what requests share."""
    understood = trace_format.understood(cells)
    suspects = []
    for name in map(str, cells):
        if name not in understood and SUSPECT.search(name):
            suspects.append(name)
    if not suspects:
        return []
    return [f"columns not read: {', '.join(suspects)}"]


def _has_priorities(cells: pd.DataFrame) -> bool:
    """Return whether requests have priorities that are whole numbers, and no classes by name."""
    if PRIORITY not in cells:
        return False
    priorities = cells[PRIORITY].fillna(0)
    numbers = pd.to_numeric(priorities, errors="coerce")
    is_whole = numbers % 1 == 0
    return bool(is_whole.all())


def _begin_alike(cells: pd.DataFrame) -> bool:
    """Return whether all of several conversations begin at 0, on a clock of their own each."""
    if "id" not in cells:
        return False
    first_requests = cells.drop_duplicates("id")
    begin_at_0 = first_requests.t == 0
    return len(begin_at_0) > 1 and bool(begin_at_0.all())


def _unit_of(file: Path, column: pd.Series) -> str:
    """Tell the unit of times whose column states none. Raises UserError for whole numbers that may
    be seconds or milliseconds.
    """
    numbers = pd.to_numeric(column.astype(str), errors="coerce")
    if numbers.isna().mean() > 0.5:
        return DATE
    for first, unit in FIRST_OF_UNITS:
        if numbers.median() >= first:
            return unit
    valid = numbers.dropna()
    is_whole = valid % 1 == 0
    largest = numbers.max()
    # Milliseconds are written whole, so that a fraction tells seconds.
    if is_whole.all() and numbers.min() < largest:
        name = column.name
        raise UserError(
            f"{file} has whole numbers up to {largest:.0f} as {name}, which may be "
            f"seconds or milliseconds; rename the column {name}_s or {name}_ms"
        )
    return "s"


# -- requests ------------------------------------------------------------------------------------


def _recording(cells: pd.DataFrame, trace_format: TraceFormat, damaged: Sequence[str]) -> Recording:
    """Read the columns of a format."""
    check = RowCheck(cells.index, "line")
    table = pd.DataFrame(index=cells.index)
    prompts = cells[trace_format.prompt]
    outputs = cells[trace_format.output]
    table["prompt_len"] = check.numbers(prompts, 0, is_whole=True)
    table["output_len"] = check.numbers(outputs, 0, is_whole=True)
    if _has_priorities(cells):
        priorities = cells[PRIORITY].fillna(0)
        table[PRIORITY] = pd.to_numeric(priorities)
    if trace_format.ids in cells:
        stated_ids = cells[trace_format.ids]
        ids = stated_ids.map(_ids)
        check.require(stated_ids, ids.notna())
        table["block_ids"] = ids
    session = trace_format.session_in(cells)
    if session is not None:
        sessions = cells[session].fillna("")
        table["session"] = sessions.astype(str)
        in_session = table.groupby("session")
        table["turn"] = in_session.cumcount()
        if trace_format.delay in cells:
            stated_delays = cells[trace_format.delay]
            delays = pd.to_numeric(stated_delays, errors="coerce")
            unit_size = NANOSECONDS[trace_format.unit]
            table["delay"] = delays * unit_size / SECOND
    if trace_format.time:
        times = cells[trace_format.time]
        table["arrival"] = _arrivals(times, trace_format.unit, table, check)
    return recorded(table, check, damaged)


def _arrivals(column: pd.Series, unit: str, table: pd.DataFrame, check: RowCheck) -> pd.Series:
    """Read seconds of arrival since the first one; a turn that follows an answer has those of the
    turn before, and is sorted behind it.
    """
    nanoseconds = _nanoseconds(column, unit)
    is_valid = nanoseconds.notna()
    since_first = nanoseconds - nanoseconds.min()
    seconds = since_first.astype("float64") / SECOND
    if "delay" not in table:
        check.require(column, is_valid)
        return seconds
    is_in_session = table.session != ""
    is_later_turn = table.turn > 0
    follows = is_in_session & is_later_turn & table.delay.notna()
    of_first_turns = seconds.where(~follows)
    of_sessions = of_first_turns.groupby(table.session).ffill()
    is_usable = is_valid | follows
    check.require(column, is_usable & of_sessions.notna())
    return of_sessions


def _nanoseconds(column: pd.Series, unit: str) -> pd.Series:
    """Read times as nanoseconds from any zero, missing where they are not valid: whole numbers, as
    no float holds nanoseconds since 1970.
    """
    text = column.astype(str)
    if unit == DATE:
        return _nanoseconds_of_dates(text)
    unit_size = NANOSECONDS[unit]
    numbers = pd.to_numeric(text, errors="coerce")
    fits_64_bits = numbers * float(unit_size) < 2**63
    is_valid = fits_64_bits & (numbers >= 0)
    valid = numbers[is_valid]
    whole_units = np.floor(valid)
    fraction = (valid - whole_units) * unit_size
    # Whole units are multiplied exactly, as no float is.
    nanoseconds = whole_units.astype("Int64") * unit_size
    nanoseconds += fraction.round().astype("Int64")
    return nanoseconds.reindex(column.index)


def _nanoseconds_of_dates(text: pd.Series) -> pd.Series:
    begins_with_digit = text.str[:1].str.isdigit()  # pandas reads "now" as a time
    stated = text.where(begins_with_digit)
    dates = pd.to_datetime(
        stated,
        format="ISO8601",
        utc=True,
        errors="coerce",
    )
    is_valid = dates.dt.year.between(1970, 2261)  # of nanoseconds in 64 bits
    valid = dates[is_valid].dt.as_unit("ns")
    nanoseconds = valid.astype("int64")
    # Int64 holds missing values as well, which the reindexing makes of the other rows.
    return nanoseconds.astype("Int64").reindex(text.index)


def _ids(value: Any) -> tuple[int, ...] | None:
    """Read the identifiers of a prompt's blocks; None for what is none."""
    ids: Any = value
    if isinstance(value, str):
        numbers = value.strip("[] ").replace("|", ",")  # "1|2|3" is a list as well
        try:
            ids = json.loads(f"[{numbers}]")
        except ValueError:
            return None
    if isinstance(ids, list):
        # A boolean is a number to Python, and no identifier.
        for number in ids:
            if type(number) is not int or number < 0:
                return None
        return tuple(ids)
    is_empty_cell = pd.isna(ids)
    if is_empty_cell:
        return ()
    return None


def _size_of_blocks(file: Path, requests: pd.DataFrame, trace_format: TraceFormat) -> int:
    """Return the tokens of a block: those of the format, else a power of two by which each prompt
    has as many blocks as ids. Raises UserError where none fits.
    """
    with_ids = requests[requests.block_ids.map(bool)]
    lengths = with_ids.prompt_len.to_numpy()
    numbers = with_ids.block_ids.map(len).to_numpy()

    def share_explained(size: int) -> float:
        # Some writers leave out the last block where it is not full.
        num_whole = lengths // size
        num_touched = np.ceil(lengths / size)
        has_touched = num_touched == numbers
        has_whole = num_whole == numbers
        is_explained = has_touched | has_whole
        return float(is_explained.mean())

    usual = trace_format.block_size
    best = max(BLOCK_SIZES, key=share_explained)
    for size in (usual, best):
        if share_explained(size) >= EXPLAINED:
            return size
    example = f"{numbers[-1]} for {lengths[-1]} tokens"
    raise UserError(
        f"{file}: no size of blocks explains the numbers of {trace_format.ids}, such as "
        f"{example}; add workload.block_size={usual}, or what they have"
    )
