"""Requests from files: prompts (JSONL) and traces of lengths and arrival times (Azure's CSV)."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from sarathi_lab.errors import UserError, require_int, require_number
from sarathi_lab.request import Request
from sarathi_lab.workload.base import Encode, LoadedRequests, random_prompt

Row = tuple[int, int, int]  # time in nanoseconds, prompt_len, output_len
MAX_VOCAB_SIZE = 2**31  # of the int32 that token ids are kept in


def _read_lines(path: str | None, option: str) -> tuple[Path, list[str]]:
    """The lines of a file that is there, is text and is not empty."""
    if path is None:
        raise UserError(f"workload={option} needs a file; add workload.path=FILE")
    file = Path(str(path)).expanduser()
    try:
        # Not splitlines(): JSON strings may hold other separators, such as U+2028, as they are.
        lines = file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise UserError(f"workload.path={path} is missing; name an existing file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); name a text file") from None
    except OSError as error:
        raise UserError(f"workload.path={path} can't be read ({error.strerror}); name a readable file") from None
    if not any(line.strip() for line in lines):
        raise UserError(f"{path} is empty; name a file with at least one request")
    return file, lines


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """One JSON object a line: `prompt` (text) or `prompt_token_ids`, `output_len`, and maybe `arrival_time` (seconds).

    Text is encoded by the checkpoint's tokenizer where there is one, else as its UTF-8 bytes.
    """

    name: ClassVar[str] = "prompts"
    path: str | None = None

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """Every line is a request; blank lines are dropped and counted."""
        file, lines = _read_lines(self.path, self.name)
        requests: list[Request] = []
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file} line {number}"
                requests.append(_prompt_request(len(requests), _json_object(line, where), vocab_size, encode, where))
        blank = len(lines) - len(requests)
        return LoadedRequests(f"{self.name} {file.name}", requests, len(lines), {"blank": blank})


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); write one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object; write one object a line")
    return row


def _prompt_request(
    request_id: int, row: dict[str, Any], vocab_size: int | None, encode: Encode | None, where: str
) -> Request:
    if ("prompt" in row) == ("prompt_token_ids" in row):
        raise UserError(f"{where} needs either prompt or prompt_token_ids; give one of them")
    token_ids = _text_tokens(row["prompt"], encode, where) if "prompt" in row else row["prompt_token_ids"]
    if not isinstance(token_ids, list) or not token_ids:
        raise UserError(f"{where} has an empty prompt; give at least one token")
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise UserError(f"{where}: token id {token_id} is not a whole number from 0; correct prompt_token_ids")
        if token_id >= (vocab_size or MAX_VOCAB_SIZE):
            size = f"the model's vocabulary of {vocab_size}" if vocab_size else "32 bits"
            raise UserError(f"{where}: token id {token_id} is outside {size}; correct the prompt or take another model")
    if "output_len" not in row:
        raise UserError(f"{where} has no output_len; give the tokens to generate")
    output_len = require_int(f"{where}: output_len", row.get("output_len"), 1, "give the tokens to generate")
    arrival = row.get("arrival_time", 0.0)
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival <= sys.float_info.max:
        raise UserError(f"{where}: arrival_time={arrival} is not a time; use seconds from 0")
    return Request(request_id, float(arrival), len(token_ids), output_len, np.asarray(token_ids, dtype=np.int32))


def _text_tokens(text: Any, encode: Encode | None, where: str) -> list[int]:
    if not isinstance(text, str):
        raise UserError(f"{where}: prompt is not text; use prompt_token_ids for token ids")
    try:
        as_bytes = text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: prompt has half of a surrogate pair, which is no text; correct the escape") from None
    return encode(text) if encode is not None else list(as_bytes)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Lengths and arrival times of Azure's LLM inference traces, with made-up prompts of those lengths.

    Columns TIMESTAMP, ContextTokens, GeneratedTokens, by name. Arrival is the time since the first row, times
    `time_scale` (2 halves the load). Rows with more than `max_len` tokens in all, or without a prompt or an output
    token, and those after the first `max_requests` usable ones are dropped and counted.
    """

    name: ClassVar[str] = "trace"
    columns: ClassVar[tuple[str, str, str]] = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    path: str | None = None
    seed: int
    max_requests: int | None = None
    time_scale: float = 1.0
    max_len: int | None = None

    def __post_init__(self) -> None:
        require_int("seed", self.seed, 0, "use a number such as 0")
        require_number("workload.time_scale", self.time_scale, above=0, fix="use 1 for the trace's own times")
        if self.max_requests is not None:
            require_int("workload.max_requests", self.max_requests, 1, "use null for the whole trace")
        if self.max_len is not None:
            require_int("workload.max_len", self.max_len, 2, "use null for no limit")

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """The usable rows in the order of arrival."""
        file, lines = _read_lines(self.path, self.name)
        rows = sorted(self._rows(file, lines), key=lambda row: row[0])
        dropped = {"without prompt or output": 0, f"over max_len={self.max_len}": 0, "after max_requests": 0}
        empty, long, late = dropped
        requests: list[Request] = []
        for time, prompt_len, output_len in rows:
            if prompt_len < 1 or output_len < 1:
                dropped[empty] += 1
            elif self.max_len is not None and prompt_len + output_len > self.max_len:
                dropped[long] += 1
            elif self.max_requests is not None and len(requests) >= self.max_requests:
                dropped[late] += 1
            else:
                i = len(requests)
                arrival = (time - rows[0][0]) / 1e9 * self.time_scale
                prompt = random_prompt(i, prompt_len, vocab_size, self.seed)
                requests.append(Request(i, arrival, prompt_len, output_len, prompt))
        if not requests:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
            raise UserError(
                f"{file}: all {len(rows)} rows were dropped ({reasons}); name another file or raise max_len"
            )
        return LoadedRequests(f"{self.name} {file.name}", requests, len(rows), dropped)

    def _rows(self, file: Path, lines: list[str]) -> Iterator[Row]:
        names = [name.strip() for name in _cells(file, 1, lines[0])]
        for column in self.columns:
            if column not in names:
                raise UserError(f"{file} has no column {column}, only {', '.join(names)}; use Azure's format")
        places = [names.index(column) for column in self.columns]
        num_rows = 0
        for number, line in enumerate(lines[1:], start=2):
            if not line.strip():
                continue  # a blank line at the end is no row
            num_rows += 1
            cells = _cells(file, number, line)
            if len(cells) <= max(places):
                raise _broken(file, number, f"{len(cells)} of {len(names)} columns")
            time, prompt_len, output_len = (cells[place] for place in places)
            try:
                yield _nanoseconds(time), _count(prompt_len), _count(output_len)
            except (ValueError, OverflowError) as error:
                raise _broken(file, number, error) from None
        if not num_rows:
            raise UserError(f"{file} is empty but for its header; name a file with at least one request")


def _cells(file: Path, number: int, line: str) -> list[str]:
    """The cells of one line; alone, so that an unclosed quote spoils no line but its own."""
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise _broken(file, number, error) from None


def _broken(file: Path, number: int, reason: object) -> UserError:
    return UserError(f"{file} line {number} is broken ({reason}); correct or remove it")


def _nanoseconds(text: str) -> int:
    """Nanoseconds since 1970, exact: the traces' times have seven fractional digits."""
    if not text.strip()[:1].isdigit():  # pandas would take "now" for a time
        raise ValueError(f"{text!r} is no time")
    return pd.Timestamp(text).value


def _count(text: str) -> int:
    if (count := int(text)) < 0:
        raise ValueError(f"{text} tokens")
    return count
