"""Formats of public traces: which columns or keys a file has, and what each of them is here.

| format | columns or keys | unit of times |
| --- | --- | --- |
| Azure's LLM inference traces | TIMESTAMP, ContextTokens, GeneratedTokens | date |
| BurstGPT | Timestamp, Request tokens, Response tokens | s |
| Bailian (Qwen's) | chat_id, timestamp, input_length, output_length, hash_ids | s |
| Mooncake, also with AIPerf's session_id and delay | the same without chat_id | ms |
| vidur, Sarathi-Serve, Frontier | arrived_at, num_prefill_tokens, num_decode_tokens | s |
| splitwise-sim | arrival_timestamp, prompt_size, token_size | s |
| LLMServingSim, also with an agent's sub_requests | arrival_time_ns, input_toks, output_toks | ns |
| Dynamo | created_time, input_tokens, output_tokens | ms |
| Weka (kv-cache-tester), an object a conversation | t, in, out, hash_ids, think_time | s |
| lengths | num_prefill_tokens, num_decode_tokens, or a pair of `PLAIN_LENGTHS` alone | |
| plain | timestamp, input_tokens, output_tokens, or others of `PLAIN` | by the name, s or date |
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import readable
from sarathi_lab.workload.recording import Recording, RowCheck, recorded
from sarathi_lab.workload.text_files import JsonRows, json_rows, kind_of_text, read_text

DATE = 0  # unit of a column of dates
UNSTATED = -1  # of one whose name tells none: dates, seconds, or smaller units since 1970
SECOND, MILLISECOND, MICROSECOND, NANOSECOND = 10**9, 10**6, 10**3, 1  # in nanoseconds
# Numbers from the first of these on are times since 1970 in the unit behind it: as seconds, 1e11
# is the year 5138.
FIRST_OF_UNITS = ((1e17, NANOSECOND), (1e14, MICROSECOND), (1e11, MILLISECOND), (1e9, SECOND))
# More requests a second than any trace has: whole numbers that dense are no milliseconds.
IMPLAUSIBLE_RATE = 1000
UNITS = {
    DATE: "dates",
    UNSTATED: "seconds or dates",
    SECOND: "seconds",
    MILLISECOND: "milliseconds",
    MICROSECOND: "microseconds",
    NANOSECOND: "nanoseconds",
}
FIX = "name a trace, such as AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset"
# Columns that may be a time, a length, or what requests share, by a part of their names.
LOOKS_LIKE_TIME = re.compile(r"time|stamp|arriv|delay|interval|elapsed|second|_ms$|_ns$|_at$", re.I)
LOOKS_LIKE_LENGTH = re.compile(r"len|token|toks|size|images|duration|pages|chars", re.I)
LOOKS_LIKE_SESSION = re.compile(r"session|conversation|chat|turn|hash|prefix", re.I)
LOOKS = (LOOKS_LIKE_TIME, LOOKS_LIKE_LENGTH, LOOKS_LIKE_SESSION)
# Columns that restate others, and are passed over in silence.
DERIVED = ("num_total_tokens", "Total tokens", "pd_ratio", "input_tok_ids", "batch_size")
PRIORITY = "priority"  # column of any format
SEPARATORS = (",", ";", "\t")  # of CSV
LARGEST_CELL = 2**30  # characters; the identifiers of a long prompt's blocks have many
OTHER_KINDS = ("YAML", "a log", "HTML or XML")  # of text, which are no CSV
# Share of the rows whose number of ids a size of blocks must explain.
EXPLAINED = 0.95
BLOCK_SIZES = tuple(2**power for power in range(13))
# Keys of files that another class reads, and how.
READ_ELSEWHERE = {
    "conversations": "conversations as text; workload=prompts workload.path=FILE reads it",
    "conversation": "conversations as text; workload=prompts workload.path=FILE reads it",
    "prompt": "prompts as text; workload=prompts workload.path=FILE reads it",
    "prompt_token_ids": "prompts; workload=prompts workload.path=FILE reads it",
    "items": "conversations as text; workload=prompts workload.path=FILE reads it",
    "messages": "conversations as text; workload=prompts workload.path=FILE reads it",
    "text_input": "prompts as text; write them as prompt and output_len for workload=prompts",
    "turns": "turns as text, without lengths; write prompt and output_len for workload=prompts",
    "text": "prompts as text, without lengths; write prompt and output_len for workload=prompts",
    "benchmarks": "results of GuideLLM; task=validate task.run=FILE reads it",
    "request_throughput": "results of a benchmark client; task=validate task.run=FILE reads it",
    "metrics": "results of AIPerf; task=validate task.run=FILE reads it",
    "ttft_s": "results of LLMPerf; task=validate task.run=FILE reads it",
    "experiments": "results of genai-perf; task=validate task.run=FILE reads it",
}


@dataclass(frozen=True)
class TraceFormat:
    """Names of a format's columns.

    Attributes:
        name: How messages name it.
        prompt: Prompt tokens.
        output: Output tokens.
        time: Times of arrival; "": it has none.
        unit: Nanoseconds in a unit of its times, or `DATE`.
        marks: Further columns by which it is told from others.
        ids: Identifiers of the blocks of a prompt.
        block_size: Tokens of such a block, unless the numbers of ids say otherwise.
        session: The conversation of a request, by one of these names.
        delay: Time between the answer before and a request, in the unit of the times.
        also: Columns that are understood and change nothing.
        chain: Names of a request and of the one before it in its conversation, which say no more
            than the identifiers of blocks.
        links: Further columns of which that is true.
    """

    name: str
    prompt: str
    output: str
    time: str = ""
    unit: int = SECOND
    marks: Sequence[str] = ()
    ids: str = "hash_ids"
    block_size: int = 512
    session: Sequence[str] = ()
    delay: str = ""
    also: Sequence[str] = ()
    chain: Sequence[str] = ()
    links: Sequence[str] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns without which a file is of another format."""
        return (*filter(None, (self.time, self.prompt, self.output)), *self.marks)

    @property
    def read(self) -> set[str]:
        """Columns that are read, or whose content others have."""
        names = (*self.needed, self.ids, *self.session, self.delay, *self.also, *DERIVED)
        return {*names}


SESSIONS = ("session_id", "conversation_id")
MOONCAKE = TraceFormat(
    "Mooncake",
    "input_length",
    "output_length",
    "timestamp",
    MILLISECOND,
    session=SESSIONS,
    delay="delay",
    also=("turn_index",),
)
WEKA = TraceFormat("Weka", "in", "out", "t", block_size=64, session=("id",), delay="think_time")
FORMATS = (
    TraceFormat("Azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP", DATE),
    TraceFormat(
        "BurstGPT", "Request tokens", "Response tokens", "Timestamp", also=("Elapsed time",)
    ),
    TraceFormat(
        "Bailian",
        "input_length",
        "output_length",
        "timestamp",
        marks=("chat_id",),
        block_size=16,
        chain=("chat_id", "parent_chat_id"),
        links=("turn",),
    ),
    MOONCAKE,
    # As AIPerf writes it, where no turn has a time.
    replace(MOONCAKE, name="Mooncake without times", time=""),
    TraceFormat(
        "vidur",
        "num_prefill_tokens",
        "num_decode_tokens",
        "arrived_at",
        ids="block_hash_ids",
        block_size=16,
    ),
    TraceFormat("splitwise-sim", "prompt_size", "token_size", "arrival_timestamp"),
    TraceFormat(
        "LLMServingSim",
        "input_toks",
        "output_toks",
        "arrival_time_ns",
        NANOSECOND,
        session=("session_id",),
        delay="delay",
    ),
    TraceFormat(
        "Dynamo",
        "input_tokens",
        "output_tokens",
        "created_time",
        MILLISECOND,
        session=SESSIONS,
        delay="delay",
    ),
    WEKA,
    TraceFormat("lengths", "num_prefill_tokens", "num_decode_tokens"),
)
# Columns of people's own files.
PLAIN_TIMES = {
    **dict.fromkeys(("timestamp", "arrival_time"), UNSTATED),
    **dict.fromkeys(("timestamp_s", "arrival_s", "arrival_time_s"), SECOND),
    **dict.fromkeys(("timestamp_ms", "arrival_ms"), MILLISECOND),
    **dict.fromkeys(("arrival_time_ms", "arrival_timestamp_ms"), MILLISECOND),
}
PLAIN_LENGTHS = (
    ("input_tokens", "output_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("prompt_tokens", "completion_tokens"),
    ("prompt_len", "output_len"),
    ("input_len", "output_len"),
    ("input_token_num", "output_token_num"),
)
PLAIN = tuple(
    TraceFormat("plain", *lengths, time, unit, session=SESSIONS)
    for (time, unit), lengths in product(PLAIN_TIMES.items(), PLAIN_LENGTHS)
)
# The same without times, where no further column could be one.
PLAIN_WITHOUT_TIMES = tuple(
    TraceFormat("lengths", *lengths, session=SESSIONS) for lengths in PLAIN_LENGTHS
)


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
    notes: Sequence[str] = field(default_factory=tuple)


def read_trace_file(file: Path, block_size: int | None = None) -> TraceFile:
    """Read a trace in one of `FORMATS`: CSV, JSON or JSON lines, maybe packed by gzip, or a folder
    of files of JSON.

    A row that can't be read is left out and counted. Dates without an offset are UTC.

    Args:
        file: The file.
        block_size: Tokens of a block, if they are stated.

    Raises:
        UserError: For a file of another kind, or without a row that can be read.
    """
    cells, damaged = _read_cells(file)
    trace_format = _recognise(file, cells)
    notes = list[str]()
    if trace_format is WEKA and _begin_alike(cells):
        trace_format = replace(WEKA, time="")
        notes.append("t counts within each conversation: they have no times of arrival")
    if trace_format.unit == UNSTATED:
        unit = _unit_of(file, cells[trace_format.time])
        trace_format = replace(trace_format, unit=unit)
        notes.append(f"{trace_format.time} read as {UNITS[unit]}")
    recording = _recording(cells, trace_format, damaged)
    if recording.requests.empty:
        raise UserError(
            f"{file} {recording.example or 'has no request'}: no row can be read; correct it, or "
            f"{FIX}"
        )
    notes = [*_notes_on_columns(cells, trace_format), *notes]
    if _is_chained(cells, trace_format):
        notes.append(
            f"no {trace_format.ids}: a prompt is taken to begin with that of its "
            f"{trace_format.chain[1]}"
        )
    ids_size = trace_format.block_size
    if recording.requests.block_ids.map(len).any():
        ids_size = _size_of_blocks(file, recording.requests, trace_format, block_size)
        if ids_size != trace_format.block_size:
            notes.append(f"{trace_format.ids} of {ids_size} tokens each")
    elif block_size is not None:
        raise UserError(f"workload.block_size={block_size} has no effect: {file} has no block ids")
    has_times = bool(trace_format.time)
    num_rows = len(cells) + len(damaged)
    return TraceFile(recording, num_rows, has_times, ids_size, notes)


def _read_cells(file: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read the cells of a trace, and list what of the file is none."""
    if file.is_dir():
        return _cells_of_json(file, _rows_of_folder(file))
    text = read_text(file, f"workload.path={file}", FIX)
    rows = json_rows(text)
    if rows is not None:
        return _cells_of_json(file, rows)
    return _cells_of_csv(file, text)


def _rows_of_folder(folder: Path) -> JsonRows:
    """Read the objects of all files of JSON in a folder, as Weka's conversations come. Raises
    UserError for a folder without any.
    """
    objects = list[dict[str, object]]()
    damaged = list[str]()
    for path in sorted(folder.glob("*.json*")):
        rows = json_rows(read_text(path, f"workload.path={path}", FIX))
        if rows is not None:
            objects += rows.objects
            damaged += [f"{path.name} {reason}" for reason in rows.damaged]
    if not objects:
        raise UserError(f"workload.path={folder} is a folder without files of JSON; {FIX}")
    return JsonRows(objects, range(1, len(objects) + 1), damaged)


def _cells_of_csv(file: Path, text: str) -> tuple[pd.DataFrame, list[str]]:
    """Read the text of CSV's cells by number of their line, and list rows that are damaged."""
    if not text.strip():
        raise UserError(f"{file} is empty; name a file with at least one request")
    kind = kind_of_text(text)
    if kind in OTHER_KINDS:
        raise UserError(f"{file} is {kind}, which has no requests; {FIX}")
    with readable(file, "correct it, or name a file with at least one request", csv.Error):
        header, rows = _rows_of_csv(text)
    num_columns = len(header)
    damaged = list[str]()
    usable = dict[int, list[str]]()
    for line, row in rows.items():
        if len(row) == num_columns:
            usable[line] = row
        elif any(row[num_columns:]):
            # Values stand under wrong headings, as a decimal comma leaves them.
            damaged.append(f"line {line}: {len(row)} cells under {num_columns} headings")
        elif any(row):
            missing = [""] * (num_columns - len(row))
            usable[line] = [*row[:num_columns], *missing]
    if not usable and not damaged:
        raise UserError(f"{file} is empty but for its header ({kind}); name a file with requests")
    cells = pd.DataFrame(list(usable.values()), index=list(usable), columns=header, dtype=object)
    return cells.mask(cells == "").dropna(how="all"), damaged


def _rows_of_csv(text: str) -> tuple[list[str], dict[int, list[str]]]:
    """Split CSV's text into the names of its columns, all different, and the cells of each row by
    the number of its first line. Raises csv.Error, naming the line.
    """
    csv.field_size_limit(LARGEST_CELL)
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=_separator(text), skipinitialspace=True, strict=True)
    rows = {}
    first_line = 1
    try:
        for row in reader:
            rows[first_line] = row
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise csv.Error(f"line {first_line}: {error}") from None
    header_line = next(line for line, row in rows.items() if any(row))
    names = list[str]()
    for cell in rows.pop(header_line):
        name = cell.strip()
        names.append(f"{name}.{names.count(name)}" if name in names else name)
    return names, rows


def _separator(text: str) -> str:
    """Return the separator of which the header of CSV has most."""
    header = text.lstrip().partition("\n")[0]
    return max(SEPARATORS, key=header.count)


def _cells_of_json(file: Path, rows: JsonRows) -> tuple[pd.DataFrame, list[str]]:
    """Read the values of objects by number of their line, and list what is none."""
    if not rows.objects:
        reason = rows.damaged[0] if rows.damaged else "is an empty list"
        raise UserError(f"{file} {reason}; {FIX}")
    damaged = [*rows.damaged]
    if any("sub_requests" in entry for entry in rows.objects):
        return _cells_of_agents(rows, damaged), damaged
    has_conversations = any(isinstance(entry.get("requests"), list) for entry in rows.objects)
    if not has_conversations:
        return pd.DataFrame(rows.objects, index=list(rows.lines), dtype=object), damaged
    conversations = list[Mapping[str, object]]()
    for line, conversation in zip(rows.lines, rows.objects, strict=True):
        if isinstance(conversation.get("requests"), list):
            conversations.append(conversation)
        else:
            damaged.append(f"line {line}: requests is not a list")
    return _cells_of_conversations(conversations, damaged), damaged


def _cells_of_agents(rows: JsonRows, damaged: list[str]) -> pd.DataFrame:
    """Read a row each of an agent's calls, of which the next one is sent when its tool is done, and
    add to `damaged` what is none.
    """
    cells = list[Mapping[str, object]]()
    for line, entry in zip(rows.lines, rows.objects, strict=True):
        if "sub_requests" not in entry:
            cells.append(entry)
            continue
        calls = entry["sub_requests"]
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            damaged.append(f"line {line}: sub_requests is not a list of objects")
            continue
        shared = {
            "session_id": entry.get("session_id", f"line {line}"),
            "arrival_time_ns": entry.get("arrival_time_ns"),
        }
        pause = None  # before the first call there is none
        for call in calls:
            cells.append({**call, **shared, "delay": pause})
            pause = call.get("tool_duration_ns", 0)
    table = pd.DataFrame(cells, dtype=object).drop(columns="tool_duration_ns", errors="ignore")
    table.index += 1  # messages count calls from 1
    return table


def _cells_of_conversations(
    conversations: Sequence[Mapping[str, Any]], damaged: list[str]
) -> pd.DataFrame:
    """Read Weka's conversations, whose ids count within each of them unless they are global, and
    add to `damaged` what is not replayed.
    """
    keys = ("t", "in", "out", "think_time")
    cells = list[dict[str, object]]()
    numbering = dict[tuple[str, object], int]()
    for conversation in conversations:
        name = str(conversation.get("id", len(cells)))
        is_local = conversation.get("hash_id_scope", "local") == "local"
        scope = name if is_local else ""
        for request in conversation["requests"]:
            if not isinstance(request, Mapping):
                damaged.append(f"conversation {name}: {request} is no request")
                continue
            if "in" not in request:
                # A subagent runs beside the conversation, of which its requests are no turns.
                of_subagent = request.get("requests")
                number = len(of_subagent) if isinstance(of_subagent, list) else 1
                damaged += [f"conversation {name}: a request of a subagent"] * number
                continue
            row = {key: request.get(key) for key in keys}
            row["id"] = name
            stated_ids = request.get("hash_ids") or []
            row["hash_ids"] = stated_ids
            if _ids(stated_ids) is not None:
                ids = []
                for number in stated_ids:
                    # Equal numbers of two conversations are two blocks, unless ids are global.
                    ids.append(numbering.setdefault((scope, number), len(numbering)))
                row["hash_ids"] = ids
            cells.append(row)
    table = pd.DataFrame(cells, columns=[*keys, "id", "hash_ids"], dtype=object)
    table.index += 1
    return table


def _recognise(file: Path, cells: pd.DataFrame) -> TraceFormat:
    names = {*cells}
    for trace_format in (*FORMATS, *PLAIN):
        if names >= {*trace_format.needed}:
            return trace_format
    for trace_format in PLAIN_WITHOUT_TIMES:
        if {PRIORITY, *trace_format.read} >= names >= {*trace_format.needed}:
            return trace_format
    for key, content in READ_ELSEWHERE.items():
        if key in names:
            raise UserError(f"{file} has {content}")
    columns = ", ".join(map(str, cells))[:200]
    if all(str(name)[:1].isdigit() for name in cells):
        header = ",".join(PLAIN[0].needed)
        raise UserError(
            f"{file} has no header: its first row is {columns}; put the names of its columns in "
            f"front, such as {header}"
        )
    raise UserError(f"{file} has the columns {columns}, {_what_is_missing(names)}")


def _what_is_missing(names: set[object]) -> str:
    """Name the columns that the closest format has as well, or all formats if none is close."""

    def closeness(trace_format: TraceFormat) -> tuple[int, int]:
        num_missing = len({*trace_format.needed} - names)
        return len(trace_format.needed) - num_missing, -num_missing

    closest = max((*FORMATS, PLAIN[0]), key=closeness)
    num_common, _ = closeness(closest)
    if num_common > 1:
        missing = [name for name in closest.needed if name not in names]
        if closest.time in missing:
            missing[missing.index(closest.time)] += f" ({UNITS[closest.unit]})"
        return f"and lacks {', '.join(missing)} of {closest.name}'s; add or rename columns"
    formats = "; ".join(f"{form.name} {', '.join(form.needed)}" for form in (*FORMATS, PLAIN[0]))
    return f"which no known format has; rename them to one of: {formats}"


def _recording(cells: pd.DataFrame, trace_format: TraceFormat, damaged: Sequence[str]) -> Recording:
    """Read the columns of a format."""
    check = RowCheck(cells.index, "line")
    table = pd.DataFrame(index=cells.index)
    table["prompt_len"] = check.numbers(cells[trace_format.prompt], 0, is_whole=True)
    table["output_len"] = check.numbers(cells[trace_format.output], 0, is_whole=True)
    if _has_priorities(cells):
        table[PRIORITY] = pd.to_numeric(cells[PRIORITY].fillna(0))
    if _is_chained(cells, trace_format):
        table["block_ids"] = _chained_ids(cells, trace_format, table)
    elif trace_format.ids in cells:
        ids = cells[trace_format.ids].map(_ids)
        check.require(cells[trace_format.ids], ids.notna())
        table["block_ids"] = ids
    session = next((name for name in trace_format.session if name in cells), None)
    if session is not None:
        table["session"] = cells[session].fillna("").astype(str)
        table["turn"] = table.groupby("session").cumcount()
    if session is not None and trace_format.delay in cells:
        delays = pd.to_numeric(cells[trace_format.delay], errors="coerce")
        table["delay"] = delays * trace_format.unit / SECOND
    if trace_format.time:
        table["arrival"] = _arrivals(cells, trace_format, table, check)
    return recorded(table, check, damaged)


def _has_priorities(cells: pd.DataFrame) -> bool:
    """Return whether requests have priorities that are whole numbers, and no classes by name."""
    if PRIORITY not in cells:
        return False
    numbers = pd.to_numeric(cells[PRIORITY].fillna(0), errors="coerce")
    return bool((numbers % 1 == 0).all())


def _is_chained(cells: pd.DataFrame, trace_format: TraceFormat) -> bool:
    """Return whether conversations are known by the names of their requests alone."""
    if not trace_format.chain or not {*trace_format.chain} <= {*cells}:
        return False
    return trace_format.ids not in cells or not cells[trace_format.ids].map(_ids).any()


def _chained_ids(
    cells: pd.DataFrame, trace_format: TraceFormat, table: pd.DataFrame
) -> list[tuple[int, ...]]:
    """Make identifiers of blocks by which a prompt begins with the whole blocks of the one before
    it in its conversation.
    """
    size = trace_format.block_size
    names, names_before = (cells[column] for column in trace_format.chain)
    ids_of = dict[str, tuple[int, ...]]()
    num_ids = 0
    made = list[tuple[int, ...]]()
    for name, before, length in zip(names, names_before, table.prompt_len, strict=True):
        num_tokens = 0 if math.isnan(length) else int(length)
        num_whole = num_tokens // size
        shared = ids_of.get(str(before), ())[:num_whole]
        num_new = math.ceil(num_tokens / size) - len(shared)
        ids = (*shared, *range(num_ids, num_ids + num_new))
        num_ids += num_new
        made.append(ids)
        ids_of[str(name)] = ids[:num_whole]
    return made


def _arrivals(
    cells: pd.DataFrame, trace_format: TraceFormat, table: pd.DataFrame, check: RowCheck
) -> pd.Series:
    """Read seconds of arrival since the first one; a turn that follows an answer has those of the
    turn before, and is sorted behind it.
    """
    column = cells[trace_format.time]
    follows = pd.Series(False, index=cells.index)
    if "delay" in table:
        follows = table.delay.notna() & (table.turn > 0) & (table.session != "")
    # Whole numbers, as no float holds nanoseconds since 1970.
    nanoseconds, is_valid = _nanoseconds(column, trace_format.unit)
    check.require(column, is_valid | follows)
    first = nanoseconds[is_valid].min() if is_valid.any() else 0
    seconds = ((nanoseconds - first) / SECOND).where(is_valid & ~follows)
    if follows.any():
        seconds = seconds.groupby(table.session).ffill()
        check.require(column, seconds.notna())
    return seconds


def _nanoseconds(column: pd.Series, unit: int) -> tuple[pd.Series, pd.Series]:
    """Read times as nanoseconds from any zero, and which of them are valid."""
    text = column.astype(str)
    if unit == DATE:
        text = text.where(text.str[:1].str.isdigit())  # pandas reads "now" as a time
        dates = pd.to_datetime(text, format="ISO8601", utc=True, errors="coerce")
        is_valid = dates.dt.year.between(1970, 2261)  # of nanoseconds in 64 bits
        dates = dates.where(is_valid, pd.Timestamp(0, tz="UTC"))
        return dates.dt.as_unit("ns").astype("int64"), is_valid
    numbers = pd.to_numeric(text, errors="coerce")
    is_valid = (numbers >= 0) & (numbers * float(unit) < 2**63)
    numbers = numbers.where(is_valid, 0)
    whole_units = np.floor(numbers)  # multiplied exactly, as no float is
    fraction = ((numbers - whole_units) * unit).round().astype("int64")
    return whole_units.astype("int64") * unit + fraction, is_valid


def _begin_alike(cells: pd.DataFrame) -> bool:
    """Return whether all of several conversations begin at 0, on a clock of their own each."""
    (name,) = WEKA.session
    if name not in cells:
        return False
    first_times = cells.drop_duplicates(name)[WEKA.time]
    return len(first_times) > 1 and bool((first_times == 0).all())


def _unit_of(file: Path, column: pd.Series) -> int:
    """Tell the unit of times whose column states none. Raises UserError for whole numbers that may
    be seconds or milliseconds.
    """
    numbers = pd.to_numeric(column.astype(str), errors="coerce")
    if numbers.isna().mean() > 0.5:
        return DATE
    numbers = numbers.dropna()
    for first, unit in FIRST_OF_UNITS:
        if numbers.median() >= first:
            return unit
    span = numbers.max() - numbers.min()
    is_whole = bool((numbers % 1 == 0).all())
    seconds = span * MILLISECOND / SECOND  # if they are milliseconds
    is_too_dense = len(numbers) - 1 > IMPLAUSIBLE_RATE * seconds
    if not is_whole or span == 0 or is_too_dense:
        return SECOND
    raise UserError(
        f"{file} has whole numbers up to {numbers.max():.0f} as {column.name}, which may be "
        f"seconds or milliseconds; rename the column {column.name}_s or {column.name}_ms"
    )


def _ids(value: Any) -> tuple[int, ...] | None:
    """Read the identifiers of a prompt's blocks; None for what is none."""
    ids: object = value
    if isinstance(value, str):
        text = value
        if "[" not in text:  # "1|2|3" is a list as well
            text = f"[{text.replace('|', ',')}]"
        try:
            ids = json.loads(text)
        except ValueError:
            return None
    if isinstance(ids, list):
        # A boolean is a number to Python, and no identifier.
        is_valid = [type(number) is int and number >= 0 for number in ids]
        return tuple(ids) if all(is_valid) else None
    if pd.isna(value):  # an empty cell
        return ()
    return None


def _size_of_blocks(
    file: Path, requests: pd.DataFrame, trace_format: TraceFormat, stated: int | None
) -> int:
    """Return the tokens of a block: the stated ones, else those of the format, else a power of two
    by which each prompt has as many blocks as ids. Raises UserError where none fits.
    """
    if stated is not None:
        return stated
    with_ids = requests[requests.block_ids.map(len) > 0]
    lengths = with_ids.prompt_len.to_numpy()
    numbers = with_ids.block_ids.map(len).to_numpy()

    def share_explained(size: int) -> float:
        # Some writers leave out the last block where it is not full.
        is_rounded_up = np.ceil(lengths / size) == numbers
        is_rounded_down = lengths // size == numbers
        return float((is_rounded_up | is_rounded_down).mean())

    usual = trace_format.block_size
    size = max((usual, *BLOCK_SIZES), key=share_explained)
    if share_explained(usual) >= EXPLAINED:
        return usual
    if share_explained(size) >= EXPLAINED:
        return size
    is_explained = np.ceil(lengths / usual) == numbers
    row = int(np.argmin(is_explained))  # the first that is not
    raise UserError(
        f"{file}: no size of blocks explains the numbers of {trace_format.ids}, such as "
        f"{numbers[row]} for {lengths[row]} tokens; add workload.block_size={usual}, or what they "
        "have"
    )


def _notes_on_columns(cells: pd.DataFrame, trace_format: TraceFormat) -> list[str]:
    """Name columns that are not read and look like a time, a length or what requests share."""
    understood = trace_format.read
    if not any(name in cells for name in trace_format.session):
        understood.discard(trace_format.delay)  # of no conversation
    if trace_format.ids in cells or _is_chained(cells, trace_format):
        understood |= {*trace_format.links, *trace_format.chain}
    suspects = list[str]()
    if PRIORITY in cells and not _has_priorities(cells):
        suspects.append(PRIORITY)
    for name in map(str, cells):
        is_suspect = any(pattern.search(name) for pattern in LOOKS)
        if is_suspect and name not in understood:
            suspects.append(name)
    if not suspects:
        return []
    columns = "columns" if len(suspects) > 1 else "column"
    return [f"{columns} not read: {', '.join(suspects)}"]
