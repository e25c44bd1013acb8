"""Requests with the lengths of public traces, at their times or others, and random prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Never, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.arrivals import ArrivalKind
from sarathi_lab.config.checked import refuse_unread, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import json_object, readable
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.workload.base import (
    Arriving,
    Encode,
    LoadedRequests,
    random_prompt,
)
from sarathi_lab.workload.files import named_file, numbered_lines

PREFIX_IDS, PREFIX_TOKENS = "hash_ids", 512  # of a prompt: an id for so many tokens each


class _Format(NamedTuple):
    """A format by its columns or keys, and nanoseconds in a unit of its times; 0 for dates."""

    name: str
    columns: tuple[str, ...]  # maybe time, prompt and output tokens
    unit: int = 0


FORMATS = (
    _Format("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    _Format("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), 10**9),
    _Format("Mooncake", ("timestamp", "input_length", "output_length"), 10**6),
    _Format("lengths", ("num_prefill_tokens", "num_decode_tokens")),
)


def read_trace(file: Path) -> pd.DataFrame:
    """Read `file`: CSV, or JSONL with an object a line; the format follows from columns or keys.

    Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT (Timestamp in
    seconds, Request tokens, Response tokens), Mooncake (timestamp in milliseconds, input_length,
    output_length, and hash_ids of blocks of 512 tokens), or lengths alone (num_prefill_tokens,
    num_decode_tokens). Dates without an offset are UTC.

    Returns prompt_len, output_len, ids (tuples) and, of a file with times, time (nanoseconds from
    any zero), stably sorted by it. Raises UserError, naming the line. An unchanged file is not read
    again.
    """
    state = file.stat() if file.is_file() else None
    return _read(file, state and (state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=2)
def _read(file: Path, state: tuple[int, int] | None) -> pd.DataFrame:
    """Read `file` of this time and size, once for all runs of a sweep."""
    cells = _cells(file)
    form = _recognise(file, cells)
    *of_time, prompts, outputs = (cells[column] for column in form.columns)
    table = pd.DataFrame({"prompt_len": _counts(file, prompts)})
    table["output_len"] = _counts(file, outputs)
    table["ids"] = _prefix_ids(file, cells, table.prompt_len)
    if of_time:
        table["time"] = _counts(file, of_time[0], form.unit)
        table = table.sort_values("time", kind="stable", ignore_index=True)
    return table


def _cells(file: Path) -> pd.DataFrame:
    """Read the cells of `file` by number of their line: text of CSV, or values of JSONL."""
    first = next((line for _, line in numbered_lines(file) if line.strip()), "")
    if first.lstrip().startswith("{"):
        lines = {number: line for number, line in numbered_lines(file) if line.strip()}
        rows = [json_object(line, f"{file} line {number}") for number, line in lines.items()]
        return pd.DataFrame(rows, index=list(lines), dtype=object)
    if not first:
        raise UserError(f"{file} is empty; name a file with at least one request")
    with readable(file, "correct it, or name a file with at least one request"):
        cells = pd.read_csv(
            file, dtype=str, skipinitialspace=True, skip_blank_lines=False, index_col=False
        )
    cells.index += 2  # behind the header
    cells = cells.rename(columns=str.strip).dropna(how="all")
    if cells.empty:
        raise UserError(f"{file} is empty but for its header; name a file with requests")
    return cells


def _recognise(file: Path, cells: pd.DataFrame) -> _Format:
    for form in FORMATS:
        if set(form.columns) <= set(cells):
            return form
    known = "; ".join(f"{form.name} {', '.join(form.columns)}" for form in FORMATS)
    columns = ", ".join(map(str, cells))[:200]
    raise UserError(
        f"{file} has the columns {columns}, which no known format has; rename them to one of: "
        f"{known}"
    )


def _counts(file: Path, cells: pd.Series, unit: int = 1) -> NDArray[np.int64]:
    """Tokens, times in nanoseconds of numbers of `unit` ones, or those since 1970 of dates (0).

    Raises UserError, naming the line, for cells that are none.
    """
    text = cells.astype(str)
    if unit:
        numbers = pd.to_numeric(text, errors="coerce")
        is_valid = (numbers >= 0) & (numbers * float(unit) < 2**63)
        is_valid &= (unit > 1) | (numbers % 1 == 0)
        numbers = numbers.where(is_valid, 0)
        whole = np.floor(numbers)  # multiplied exactly, as no float is
        counts = whole.astype("int64") * unit + ((numbers - whole) * unit).round().astype("int64")
    else:
        text = text.where(text.str[:1].str.isdigit())  # pandas reads "now" as a time
        dates = pd.to_datetime(text, format="ISO8601", utc=True, errors="coerce")
        is_valid = dates.dt.year.between(1970, 2261)  # of nanoseconds in 64 bits
        counts = dates.where(is_valid, pd.Timestamp(0, tz="UTC")).dt.as_unit("ns").astype("int64")
    if not is_valid.all():
        row = int(np.argmin(is_valid))
        _refuse(file, cells.index[row], f"{cells.name}={str(cells.iloc[row])[:40]}")
    return counts.to_numpy()


def _refuse(file: Path, line: Any, reason: str) -> Never:
    raise UserError(f"{file} line {line} is broken ({reason}); correct or remove it")


def _prefix_ids(file: Path, cells: pd.DataFrame, prompt_lens: pd.Series) -> list[tuple[int, ...]]:
    """At most one id for every 512 tokens, incomplete blocks too; some writers omit the last."""
    if PREFIX_IDS not in cells:
        return [()] * len(cells)
    ids = [cell if isinstance(cell, list) or pd.notna(cell) else [] for cell in cells[PREFIX_IDS]]
    for line, value in zip(cells.index, ids, strict=True):
        if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
            _refuse(file, line, f"{PREFIX_IDS}={value}")
    most = -(-prompt_lens // PREFIX_TOKENS)
    return [tuple(value[:number]) for value, number in zip(ids, most, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Trace(Arriving):
    """Lengths of requests from a file in one of the formats of `read_trace`, with random prompts.

    `arrivals` None: the file's times, from its first row, or scaled to a mean of `rate` requests
    per second; of a file without times what the other settings imply, a closed batch without any.
    Any other kind of arrivals replaces the times. Where the file has ids of blocks of 512 tokens,
    equal ids give equal tokens.

    Rows with more than `max_len` tokens in all (None: what the model takes), or without a prompt or
    an output token, and those beside `max_requests` usable ones are dropped and counted: `part` 0
    has the first ones, 1 the next, its times from its first row.
    """

    name: ClassVar[str] = "trace"
    path: str | None = None
    max_requests: int | None = whole(None, minimum=1, fix="use null for the whole trace")
    max_len: int | None = whole(None, minimum=2, fix="use null for what the model takes")
    part: int = whole(0, minimum=0, fix="use 0 for the first max_requests rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_requests is None:
            refuse_unread(self, ("part",), " without max_requests; add it", "workload.")

    @property
    def arrival_kind(self) -> ArrivalKind | None:
        return self.arrivals

    def check_arrivals(self, kind: str | None) -> None:
        if kind is not None:  # else the file decides what is read
            super().check_arrivals(kind)

    def within(self, max_len: int) -> Self:
        """Limit the trace to `max_len` tokens of a model, unless it has a limit."""
        return self if self.max_len is not None else replace(self, max_len=max_len)

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        file = named_file(self.path, self.name)
        table = read_trace(file)
        used, dropped = self._usable(file, table)
        rows = used[["prompt_len", "output_len", "ids"]].itertuples(index=False)
        shapes = (
            (prompt_len, output_len, self._prompt(i, prompt_len, ids, vocab_size))
            for i, (prompt_len, output_len, ids) in enumerate(rows)
        )
        kind = self._kind_for(table)
        times, name = self._times(file, table, used), f"{self.name} {file.name}"
        of_file = {"rows_read": len(table), "dropped": dropped, "arrival_kind": kind}
        return self.loaded(name, times, shapes, **of_file)

    def _kind_for(self, table: pd.DataFrame) -> ArrivalKind | None:
        """Return the kind of arrivals, None for the file's times. Raises UserError for settings
        that nothing reads.
        """
        if self.arrivals is None and "time" in table:
            why = " on the trace's times; drop it, or exchange them with workload.arrivals"
            refuse_unread(self, ("cv", "users", "think_time"), why, "workload.")
            return None
        kind = self.implied_kind() if self.arrivals is None else self.arrivals
        self.check_arrivals(kind)
        return kind

    def _usable(self, file: Path, table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, int]]:
        """Return the rows that become requests, and how many others there are, by the reason."""
        filled = table[(table.prompt_len >= 1) & (table.output_len >= 1)]
        short = filled
        if self.max_len is not None:
            short = filled[filled.prompt_len <= self.max_len - filled.output_len]
        first = self.part * (self.max_requests or 0)
        used = short[first:][: self.max_requests]
        others = f"outside part={self.part}" if self.part else "after max_requests"
        dropped = {
            "without prompt or output": len(table) - len(filled),
            f"over max_len={self.max_len}": len(filled) - len(short),
            others: len(short) - len(used),
        }
        if used.empty:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
            raise UserError(
                f"{file}: all {len(table)} rows were dropped ({reasons}); name another file or "
                "raise max_len"
            )
        return used, dropped

    def _times(self, file: Path, table: pd.DataFrame, used: pd.DataFrame) -> NDArray[np.float64]:
        if self.arrivals is not None or "time" not in table:
            return self.times(len(used))
        start = used.time.iloc[0] if self.part else table.time[0]
        times = (used.time - start).to_numpy() / 1e9
        if self.rate is None:
            return times
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
        """Token ids [prompt_len]: blocks of 512 by seed and id only, then `random_prompt`'s; in
        simulations numbers that only tell blocks apart, or None without ids.
        """
        if vocab_size is None:
            shared = np.repeat([i % 2**31 for i in ids], PREFIX_TOKENS)[:prompt_len]
            rest = np.full(prompt_len - len(shared), NO_TOKEN - 1 - request_id)
            return np.concatenate([shared, rest]).astype(np.int32) if ids else None
        prompt = random_prompt(request_id, prompt_len, vocab_size, self.seed)
        assert prompt is not None, "there is a vocabulary"
        for start, block_id in zip(range(0, prompt_len, PREFIX_TOKENS), ids, strict=False):
            rng = np.random.default_rng([self.seed, 5, block_id])
            block = rng.integers(0, vocab_size, PREFIX_TOKENS, dtype=np.int32)
            prompt[start : start + PREFIX_TOKENS] = block[: prompt_len - start]
        return prompt
