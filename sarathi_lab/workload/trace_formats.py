"""Reads tables of request lengths, and maybe arrival times, in the formats of public traces."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import json_object
from sarathi_lab.engine.prefix_cache import PREFIX_ID_TOKENS
from sarathi_lab.workload.files import numbered_lines

PREFIX_IDS = "hash_ids"


@dataclass(frozen=True)
class TraceTable:
    """The rows of a file in the order of their times, as they come among equals.

    `times` are nanoseconds from any zero; `num_early` rows were earlier than the one before them in
    the file, `num_together` at the same time as another.
    """

    times: NDArray[np.int64] | None
    prompt_lens: NDArray[np.int64]
    output_lens: NDArray[np.int64]
    prefix_ids: Sequence[tuple[int, ...]] | None
    num_early: int = 0
    num_together: int = 0

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def row(self, number: int) -> tuple[int, int, tuple[int, ...]]:
        """Prompt and output tokens and the prefix ids of a row."""
        ids = () if self.prefix_ids is None else self.prefix_ids[number]
        return int(self.prompt_lens[number]), int(self.output_lens[number]), ids

    @property
    def notes(self) -> list[str]:
        counts = {
            "rows before the row above them (sorted)": self.num_early,
            "rows at the same time as another": self.num_together,
        }
        return [f"{count} {words}" for words, count in counts.items() if count]


class _Format(NamedTuple):
    """The columns, or keys, that a format is known by: maybe time, prompt and output tokens; and
    what makes a reader of one file's times, as nanoseconds.
    """

    name: str
    columns: tuple[str, ...]
    reader: Callable[[], Callable[[Any], int]] | None = None


class _Dates:
    """Reads dates as nanoseconds since 1970, exact: Azure's have seven fractional digits. All of a
    file, or none of it, say how far they are from UTC.
    """

    def __init__(self) -> None:
        self._has_offset: bool | None = None

    def __call__(self, value: Any) -> int:
        text = str(value)
        if not text.strip()[:1].isdigit():  # pandas would take "now" for a time
            raise ValueError(f"{text!r} is no time")
        time = pd.Timestamp(text)
        has_offset = time.tzinfo is not None
        if self._has_offset not in (None, has_offset):
            raise ValueError(f"{text!r} and earlier times: some have an offset from UTC, some none")
        self._has_offset = has_offset
        return time.value


def _from_number(unit: int) -> Callable[[Any], int]:
    """For times that count from the start of the trace, in `unit` nanoseconds."""

    def nanoseconds(value: Any) -> int:
        number = float(value)
        if isinstance(value, bool) or not 0 <= number * unit < 2**63:
            raise ValueError(f"{value!r} is no time")
        return int(number) * unit if number.is_integer() else round(number * unit)

    return nanoseconds


SECONDS, MILLISECONDS = partial(_from_number, 10**9), partial(_from_number, 10**6)
FORMATS = (
    _Format("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _Dates),
    _Format("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), SECONDS),
    _Format("Mooncake", ("timestamp", "input_length", "output_length"), MILLISECONDS),
    _Format("lengths", ("num_prefill_tokens", "num_decode_tokens")),
)


def read_trace(file: Path) -> TraceTable:
    """The table in `file`: CSV, or JSONL with an object a line; told apart by columns or keys.

    Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT (Timestamp in
    seconds, Request tokens, Response tokens), Mooncake (timestamp in milliseconds, input_length,
    output_length, and hash_ids of blocks of 512 tokens), or lengths alone (num_prefill_tokens,
    num_decode_tokens). Raises UserError, naming the line. An unchanged file is not read again.
    """
    try:
        state = file.stat()
    except OSError:
        return _read(file, 0, 0)  # which says what is wrong
    return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read(file: Path, mtime_ns: int, size: int) -> TraceTable:
    """The table in `file` as it was then; all runs of a sweep plan from the same."""
    form: _Format | None = None
    columns = array("q"), array("q"), array("q")  # a trace may have millions of rows
    prefix_ids: list[tuple[int, ...]] = []
    for number, line in numbered_lines(file):
        if not line.strip():
            continue
        try:
            if form is None:
                is_json = line.lstrip().startswith("{")
                first = json_object(line, f"{file} line {number}") if is_json else _cells(line)
                names = [name.strip() for name in first]
                form = _recognised(file, names)
                nanoseconds = form.reader and form.reader()
                if not is_json:
                    places = [names.index(column) for column in form.columns]
                    continue
            if is_json:
                values, ids = _json_row(json_object(line, f"{file} line {number}"), form)
            else:
                values, ids = _csv_row(_cells(line), places, len(names)), None
            *time, prompt_len, output_len = values
            columns[0].append(nanoseconds(*time) if nanoseconds else 0)
            columns[1].append(_count(prompt_len))
            columns[2].append(_count(output_len))
            prefix_ids.append(() if ids is None else _ids(ids, columns[1][-1]))
        except (csv.Error, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{file} line {number} is broken ({error}); correct or remove it"
            ) from None
    if form is None:
        raise UserError(f"{file} is empty; name a file with at least one request")
    if not prefix_ids:
        raise UserError(
            f"{file} is empty but for its header; name a file with at least one request"
        )
    times, prompt_lens, output_lens = (np.frombuffer(column, dtype=np.int64) for column in columns)
    known_ids = prefix_ids if any(prefix_ids) else None
    if nanoseconds is None:
        return TraceTable(None, prompt_lens, output_lens, known_ids)
    order = np.argsort(times, kind="stable")
    return TraceTable(
        times[order],
        prompt_lens[order],
        output_lens[order],
        known_ids and [known_ids[i] for i in order.tolist()],
        num_early=int((np.diff(times) < 0).sum()),
        num_together=int((np.diff(times[order]) == 0).sum()),
    )


def _recognised(file: Path, names: Sequence[str]) -> _Format:
    for form in FORMATS:
        if set(form.columns) <= set(names):
            return form
    known = "; ".join(f"{form.name} {', '.join(form.columns)}" for form in FORMATS)
    shown = ", ".join(names)
    raise UserError(
        f"{file} has the columns {shown if len(shown) < 200 else shown[:200] + '...'}, which no "
        f"known format has; rename them to one of: {known}"
    )


def _json_row(row: Mapping[str, Any], form: _Format) -> tuple[list[Any], Any]:
    """The format's columns, and the ids of prefixes if there are any."""
    if missing := [column for column in form.columns if column not in row]:
        raise ValueError(f"it has no {', '.join(missing)}")
    return [row[column] for column in form.columns], row.get(PREFIX_IDS)


def _csv_row(cells: Sequence[str], places: Sequence[int], width: int) -> list[str]:
    if len(cells) <= max(places):
        raise ValueError(f"{len(cells)} of {width} columns")
    return [cells[place] for place in places]


def _cells(line: str) -> list[str]:
    """The cells of one line; alone, so that an unclosed quote spoils no line but its own."""
    return line.split(",") if '"' not in line else next(csv.reader([line]))


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or (count := int(value)) < 0:
        raise ValueError(f"{value} tokens")
    return count


def _ids(value: Any, prompt_len: int) -> tuple[int, ...]:
    """At most one id for every 512 tokens, begun ones too; some writers leave the last out."""
    if not isinstance(value, list):
        raise ValueError(f"{PREFIX_IDS} is no list")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(f"{PREFIX_IDS} has {item}, not a whole number from 0")
    return tuple(value[: -(-prompt_len // PREFIX_ID_TOKENS)])
