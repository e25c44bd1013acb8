"""Readers of the formats of public traces: request lengths, and maybe arrival times."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Sequence
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
    """The rows of a file, stably sorted by time.

    `times` are nanoseconds from any zero; `num_early` rows were earlier than the row above them,
    `num_together` at the same time as another.
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
    """A format by its columns or keys: maybe time, prompt and output tokens; and a factory of a
    parser of one file's times, in nanoseconds.
    """

    name: str
    columns: tuple[str, ...]
    time_parser: Callable[[], Callable[[Any], int]] | None = None


class _Dates:
    """Parses dates to exact nanoseconds since 1970 (Azure's have seven fractional digits). All of
    a file, or none, must have an offset from UTC.
    """

    def __init__(self) -> None:
        self._has_offset: bool | None = None

    def __call__(self, value: Any) -> int:
        text = str(value)
        if not text.strip()[:1].isdigit():  # pandas parses "now" as a time
            raise ValueError(f"{text!r} is not a time")
        time = pd.Timestamp(text)
        has_offset = time.tzinfo is not None
        if self._has_offset not in (None, has_offset):
            raise ValueError(f"{text!r} and earlier times differ in having an offset from UTC")
        self._has_offset = has_offset
        return time.value


def _from_number(unit: int) -> Callable[[Any], int]:
    """Make a parser of times since the start of the trace in `unit` nanoseconds."""

    def nanoseconds(value: Any) -> int:
        number = float(value)
        if isinstance(value, bool) or not 0 <= number * unit < 2**63:
            raise ValueError(f"{value!r} is not a time")
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
    """Read `file`: CSV, or JSONL with an object a line; the format follows from columns or keys.

    Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT (Timestamp in
    seconds, Request tokens, Response tokens), Mooncake (timestamp in milliseconds, input_length,
    output_length, and hash_ids of blocks of 512 tokens), or lengths alone (num_prefill_tokens,
    num_decode_tokens). Raises UserError, naming the line. An unchanged file is not read again.
    """
    try:
        state = file.stat()
    except OSError:
        return _read(file, 0, 0)  # raises the error
    return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read(file: Path, mtime_ns: int, size: int) -> TraceTable:
    """Read `file` of this time and size, once for all runs of a sweep."""
    parser: _Rows | None = None
    columns = array("q"), array("q"), array("q")  # a trace may have millions of rows
    prefix_ids: list[tuple[int, ...]] = []
    for number, line in numbered_lines(file):
        if not line.strip():
            continue
        try:
            if parser is None:
                parser = _Rows(file, number, line)
                if not parser.is_json:
                    continue
            *numbers, ids = parser.parse(number, line)
            for column, value in zip(columns, numbers, strict=True):
                column.append(value)
        except (csv.Error, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{file} line {number} is broken ({error}); correct or remove it"
            ) from None
        prefix_ids.append(ids)
    if parser is None or not prefix_ids:
        header = "" if parser is None else " but for its header"
        raise UserError(f"{file} is empty{header}; name a file with at least one request")
    times, prompt_lens, output_lens = (np.frombuffer(column, dtype=np.int64) for column in columns)
    known_ids = prefix_ids if any(prefix_ids) else None
    if parser.nanoseconds is None:
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


class _Rows:
    """Parser of the rows of `file`, by its first `line`: a CSV header or a JSON object. Lines are
    parsed one by one, so that an unclosed quote breaks only its own line.
    """

    def __init__(self, file: Path, number: int, line: str) -> None:
        self._file = file
        self.is_json = line.lstrip().startswith("{")
        self._names = [name.strip() for name in self._split(number, line)]
        self._columns, self.nanoseconds = self._recognise()
        self._places = [self._names.index(column) for column in self._columns]

    def parse(self, number: int, line: str) -> tuple[int, int, int, tuple[int, ...]]:
        """Time (0 without times), prompt and output tokens, and prefix ids of a row."""
        cells = self._split(number, line)
        if isinstance(cells, dict):
            if missing := [column for column in self._columns if column not in cells]:
                raise ValueError(f"it has no {', '.join(missing)}")
            values, ids = [cells[column] for column in self._columns], cells.get(PREFIX_IDS)
        else:
            if len(cells) <= max(self._places):
                raise ValueError(f"{len(cells)} of {len(self._names)} columns")
            values, ids = [cells[place] for place in self._places], None
        *time, prompt, output = values
        at = self.nanoseconds(*time) if self.nanoseconds else 0
        prompt_len = _count(prompt)
        return at, prompt_len, _count(output), () if ids is None else _ids(ids, prompt_len)

    def _split(self, number: int, line: str) -> dict[str, Any] | list[str]:
        if self.is_json:
            return json_object(line, f"{self._file} line {number}")
        return line.split(",") if '"' not in line else next(csv.reader([line]))

    def _recognise(self) -> tuple[tuple[str, ...], Callable[[Any], int] | None]:
        for form in FORMATS:
            if set(form.columns) <= set(self._names):
                return form.columns, form.time_parser and form.time_parser()
        known = "; ".join(f"{form.name} {', '.join(form.columns)}" for form in FORMATS)
        shown = ", ".join(self._names)
        raise UserError(
            f"{self._file} has the columns {shown if len(shown) < 200 else shown[:200] + '...'}, "
            f"which no known format has; rename them to one of: {known}"
        )


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or (count := int(value)) < 0:
        raise ValueError(f"{value} tokens")
    return count


def _ids(value: Any, prompt_len: int) -> tuple[int, ...]:
    """At most one id for every 512 tokens, incomplete blocks too; some writers omit the last."""
    if not isinstance(value, list):
        raise ValueError(f"{PREFIX_IDS} is not a list")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(f"{PREFIX_IDS} has {item}, not a whole number from 0")
    return tuple(value[: -(-prompt_len // PREFIX_ID_TOKENS)])
