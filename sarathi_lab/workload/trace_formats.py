"""Reads tables of request lengths, and maybe arrival times, in the formats of public traces."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import UserError
from sarathi_lab.workload.files import empty_file, json_object, numbered_lines

PREFIX_BLOCK = 512  # tokens that one of Mooncake's hash ids stands for
PREFIX_IDS = "hash_ids"


@dataclass(frozen=True)
class TraceTable:
    """The rows of a file in the order of their times, as they come among equals.

    `times` are nanoseconds from any zero, None where the file has none; `prefix_ids` are those of
    `Request`, None where the file has none. `num_early` rows were earlier than the one before them
    in the file, `num_together` at the same time as another.
    """

    times: NDArray[np.int64] | None
    prompt_lens: NDArray[np.int64]
    output_lens: NDArray[np.int64]
    prefix_ids: Sequence[tuple[int, ...]] | None
    num_early: int = 0
    num_together: int = 0

    def __len__(self) -> int:
        return len(self.prompt_lens)


@dataclass(frozen=True)
class _Format:
    """The columns, or keys, that a format is known by, and how it writes times (as nanoseconds)."""

    name: str
    time: str | None
    prompt: str
    output: str
    nanoseconds: Callable[[Any], int] = int

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(
            column for column in (self.time, self.prompt, self.output) if column is not None
        )


def _from_date(value: Any) -> int:
    """Nanoseconds since 1970, exact: Azure's times have seven fractional digits."""
    text = str(value)
    if not text.strip()[:1].isdigit():  # pandas would take "now" for a time
        raise ValueError(f"{text!r} is no time")
    return pd.Timestamp(text).value


def _from_number(unit: int) -> Callable[[Any], int]:
    """For times that count from the start of the trace, in `unit` nanoseconds."""

    def nanoseconds(value: Any) -> int:
        number = float(value)
        if isinstance(value, bool) or not 0 <= number * unit < 2**63:
            raise ValueError(f"{value!r} is no time")
        return int(number) * unit if number.is_integer() else round(number * unit)

    return nanoseconds


FORMATS = (
    _Format("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _from_date),
    _Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _from_number(10**9)),
    _Format("Mooncake", "timestamp", "input_length", "output_length", _from_number(10**6)),
    _Format("lengths", None, "num_prefill_tokens", "num_decode_tokens"),
)

Cells = tuple[Any, ...]  # time (None without), prompt and output length, prefix ids (None without)


def read_trace(file: Path) -> TraceTable:
    """The table in `file`: CSV, or JSONL with an object a line; its format is recognised by columns
    or keys.

    Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT (Timestamp in
    seconds, Request tokens, Response tokens), Mooncake (timestamp in milliseconds, input_length,
    output_length, and hash_ids of blocks of 512 tokens), or lengths alone (num_prefill_tokens,
    num_decode_tokens); other columns are not read. Raises UserError for what is none of them,
    naming the line. A file that has not changed since is not read again.
    """
    try:
        state = file.stat()
    except OSError:
        return _read(file, 0, 0)  # which says what is wrong
    return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read(file: Path, mtime_ns: int, size: int) -> TraceTable:
    """The table in `file` as it was then; all runs of a sweep plan from the same."""
    lines = ((number, line) for number, line in numbered_lines(file) if line.strip())
    first = next(lines, None)
    if first is None:
        raise empty_file(file)
    if first[1].lstrip().startswith("{"):
        form, rows = _json_rows(file, first, lines)
    else:
        form, rows = _csv_rows(file, first, lines)
    return _table(file, form, rows)


def _recognised(file: Path, names: Iterable[str]) -> _Format:
    have = list(names)
    for form in FORMATS:
        if set(form.columns) <= set(have):
            return form
    known = "; ".join(f"{form.name} {', '.join(form.columns)}" for form in FORMATS)
    shown = ", ".join(have)
    raise UserError(
        f"{file} has the columns {shown if len(shown) < 200 else shown[:200] + '...'}, which no "
        "known format has; "
        f"rename them to one of: {known}"
    )


def _json_rows(
    file: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]
) -> tuple[_Format, Iterator[tuple[int, Cells]]]:
    form = _recognised(file, json_object(first[1], f"{file} line {first[0]}"))

    def rows() -> Iterator[tuple[int, Cells]]:
        for number, line in chain([first], lines):
            row = json_object(line, f"{file} line {number}")
            if missing := [column for column in form.columns if column not in row]:
                raise _broken(file, number, f"it has no {', '.join(missing)}")
            time = row[form.time] if form.time is not None else None
            yield number, (time, row[form.prompt], row[form.output], row.get(PREFIX_IDS))

    return form, rows()


def _csv_rows(
    file: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]
) -> tuple[_Format, Iterator[tuple[int, Cells]]]:
    names = [name.strip() for name in _cells(file, *first)]
    form = _recognised(file, names)
    places = [names.index(column) for column in form.columns]

    def rows() -> Iterator[tuple[int, Cells]]:
        for number, line in lines:
            cells = _cells(file, number, line)
            if len(cells) <= max(places):
                raise _broken(file, number, f"{len(cells)} of {len(names)} columns")
            found = [cells[place] for place in places]
            yield number, (*([None] if form.time is None else []), *found, None)

    return form, rows()


def _cells(file: Path, number: int, line: str) -> list[str]:
    """The cells of one line; alone, so that an unclosed quote spoils no line but its own."""
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise _broken(file, number, error) from None


def _table(file: Path, form: _Format, rows: Iterator[tuple[int, Cells]]) -> TraceTable:
    columns = array("q"), array("q"), array("q")  # a trace may have millions of rows
    prefix_ids: list[tuple[int, ...]] = []
    for number, (time, prompt_len, output_len, ids) in rows:
        try:
            columns[0].append(0 if form.time is None else form.nanoseconds(time))
            columns[1].append(_count(prompt_len))
            columns[2].append(_count(output_len))
            if ids is not None:
                prefix_ids += [()] * (len(columns[1]) - 1 - len(prefix_ids))
                prefix_ids.append(_ids(ids, columns[1][-1]))
        except (TypeError, ValueError, OverflowError) as error:
            raise _broken(file, number, error) from None
    if not columns[1]:
        raise UserError(
            f"{file} is empty but for its header; name a file with at least one request"
        )
    prefix_ids += [()] * (len(columns[1]) - len(prefix_ids) if prefix_ids else 0)
    times, prompt_lens, output_lens = (np.frombuffer(column, dtype=np.int64) for column in columns)
    if form.time is None:
        return TraceTable(None, prompt_lens, output_lens, prefix_ids or None)
    return _sorted(times, prompt_lens, output_lens, prefix_ids)


def _sorted(
    times: NDArray[np.int64],
    prompt_lens: NDArray[np.int64],
    output_lens: NDArray[np.int64],
    prefix_ids: Sequence[tuple[int, ...]],
) -> TraceTable:
    order = np.argsort(times, kind="stable")
    return TraceTable(
        times[order],
        prompt_lens[order],
        output_lens[order],
        [prefix_ids[i] for i in order.tolist()] if prefix_ids else None,
        num_early=int((np.diff(times) < 0).sum()),
        num_together=int((np.diff(times[order]) == 0).sum()),
    )


def _broken(file: Path, number: int, reason: object) -> UserError:
    return UserError(f"{file} line {number} is broken ({reason}); correct or remove it")


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
    return tuple(value[: -(-prompt_len // PREFIX_BLOCK)])
