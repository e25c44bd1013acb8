"""Requests with the lengths of public traces, at their times or others, and random prompts."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.checked import number, refuse_unread, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import json_object
from sarathi_lab.engine.prefix_cache import PREFIX_ID_TOKENS
from sarathi_lab.workload.base import (
    ArrivalKind,
    Arriving,
    Encode,
    LoadedRequests,
    random_prompt,
)
from sarathi_lab.workload.files import named_file, numbered_lines

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
    for line_number, line in numbered_lines(file):
        if not line.strip():
            continue
        try:
            if parser is None:
                parser = _Rows(file, line_number, line)
                if not parser.is_json:
                    continue
            *numbers, ids = parser.parse(line_number, line)
            for column, value in zip(columns, numbers, strict=True):
                column.append(value)
        except (csv.Error, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{file} line {line_number} is broken ({error}); correct or remove it"
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


@dataclass(frozen=True, kw_only=True)
class Trace(Arriving):
    """Lengths of requests from a file in one of the formats of `read_trace`, with random prompts.

    `arrivals` None: the file's times, from its first row, times `time_scale` (2 halves the load),
    or scaled to a mean of `rate` requests per second; a file without times gives a closed batch.
    Any other kind of arrivals replaces the times. Where the file has ids of blocks of 512 tokens,
    equal ids give equal tokens.

    Rows with more than `max_len` tokens in all (None: what the model takes), or without a prompt or
    an output token, and those after the first `max_requests` usable ones are dropped and counted.
    """

    name: ClassVar[str] = "trace"
    path: str | None = None
    arrivals: ArrivalKind | None = None
    max_requests: int | None = whole(None, minimum=1, fix="use null for the whole trace")
    time_scale: float = number(1.0, above=0, fix="use 1 for the trace's own times")
    max_len: int | None = whole(None, minimum=2, fix="use null for what the model takes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arrivals is not None:
            why = f" on {self.arrivals} arrivals; drop it, or use workload.arrivals=null for the "
            refuse_unread(self, ["time_scale"], f"{why}trace's own times", "workload.")
            return
        why = " on the trace's own times; drop it, or exchange them with workload.arrivals"
        refuse_unread(self, ("cv", "end_rate", "users", "think_time"), why, "workload.")
        if self.rate is not None and self.time_scale != 1:
            raise UserError(
                f"workload.rate={self.rate} and workload.time_scale={self.time_scale} both scale "
                "the trace's times; drop one"
            )

    def within(self, max_len: int) -> Self:
        """Limit the trace to `max_len` tokens of a model, unless it has a limit."""
        return self if self.max_len is not None else replace(self, max_len=max_len)

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        file = named_file(self.path, self.name)
        table = read_trace(file)
        used, dropped = self._usable(file, table)
        shapes = (
            (prompt_len, output_len, self._prompt(i, prompt_len, ids, vocab_size), ids)
            for i, (prompt_len, output_len, ids) in enumerate(map(table.row, used))
        )
        return self.loaded(
            f"{self.name} {file.name}",
            self._times(file, table, used),
            shapes,
            rows_read=len(table),
            dropped=dropped,
            notes=table.notes,
        )

    def _usable(self, file: Path, table: TraceTable) -> tuple[list[int], dict[str, int]]:
        is_empty = (table.prompt_lens < 1) | (table.output_lens < 1)
        is_long = np.zeros(len(table), dtype=bool)
        if self.max_len is not None:
            is_long = ~is_empty & (table.prompt_lens > self.max_len - table.output_lens)
        usable = np.flatnonzero(~(is_empty | is_long))
        used = usable[: self.max_requests].tolist()
        dropped = {
            "without prompt or output": int(is_empty.sum()),
            f"over max_len={self.max_len}": int(is_long.sum()),
            "after max_requests": len(usable) - len(used),
        }
        if not used:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
            raise UserError(
                f"{file}: all {len(table)} rows were dropped ({reasons}); name another file or "
                "raise max_len"
            )
        return used, dropped

    def _times(self, file: Path, table: TraceTable, used: Sequence[int]) -> NDArray[np.float64]:
        if self.arrivals is not None:
            return self.times(len(used))
        if table.times is None:
            why = f": {file} has no times; drop it, or make some with workload.arrivals=poisson "
            refuse_unread(self, ["time_scale"], f"{why}and workload.rate", "workload.")
            self.check_arrivals("closed")  # a rate needs times
            return np.zeros(len(used))
        times = (table.times[used] - table.times[0]) / 1e9
        if self.rate is None:
            return times * self.time_scale
        duration = times[-1] - times[0]
        if duration <= 0:
            raise UserError(
                f"workload.rate={self.rate} can't rescale {file}: its {len(times)} usable rows "
                "share one time; drop it, or make other times with workload.arrivals=poisson"
            )
        return times * (float((len(times) - 1) / duration) / self.rate)

    def _prompt(
        self, request_id: int, prompt_len: int, ids: Sequence[int], vocab_size: int | None
    ) -> NDArray[np.int32] | None:
        """Token ids [prompt_len]: blocks of 512 by seed and id only, then `random_prompt`'s."""
        prompt = random_prompt(request_id, prompt_len, vocab_size, self.seed)
        if prompt is None or vocab_size is None:
            return None
        for start, block_id in zip(range(0, prompt_len, PREFIX_ID_TOKENS), ids, strict=False):
            rng = np.random.default_rng([self.seed, 5, block_id])
            block = rng.integers(0, vocab_size, PREFIX_ID_TOKENS, dtype=np.int32)
            prompt[start : start + PREFIX_ID_TOKENS] = block[: prompt_len - start]
        return prompt
