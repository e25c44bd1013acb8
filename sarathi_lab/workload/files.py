"""Requests from files of prompts (JSONL), and the lines of text files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.config.paths import json_object, of_lab, readable
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.base import Encode, LoadedRequests

MAX_VOCAB_SIZE = 2**31  # token ids are int32

EXAMPLES = {
    "trace": ", such as AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset",
    "prompts": ', each line a JSON object of "prompt" (text) and "output_len"',
}


def named_file(path: str | None, option: str) -> Path:
    """Return the file of workload=`option`. Raises UserError without one."""
    if path is None:
        raise UserError(f"workload={option} needs a file; add workload.path=FILE{EXAMPLES[option]}")
    return of_lab(Path(str(path)).expanduser())


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield number, from 1, and text of every line. Raises UserError for other files."""
    # Not splitlines: JSON strings may contain other separators, such as U+2028.
    source = readable(f"workload.path={file}", "name a text file")
    with source, file.open(encoding="utf-8-sig") as lines:
        yield from enumerate(lines, start=1)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """One JSON object a line: `prompt` (text) or `prompt_token_ids`, and `output_len`.

    Maybe `arrival_time` (seconds) and `priority` (lower first). Text is encoded by the checkpoint's
    tokenizer where there is one, else as its UTF-8 bytes.
    """

    name: ClassVar[str] = "prompts"
    path: str | None = None

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        file, number = named_file(self.path, self.name), 0
        requests: list[Request] = []
        for number, line in numbered_lines(file):
            if line.strip():
                where = f"{file} line {number}"
                row = json_object(line, where)
                requests.append(_prompt_request(len(requests), row, vocab_size, encode, where))
        if not requests:
            raise UserError(f"{file} is empty; name a file with at least one request")
        dropped = {"blank": number - len(requests)}
        return LoadedRequests(f"{self.name} {file.name}", requests, number, dropped)


def _prompt_request(
    request_id: int, row: dict[str, Any], vocab_size: int | None, encode: Encode | None, where: str
) -> Request:
    if ("prompt" in row) == ("prompt_token_ids" in row):
        raise UserError(f"{where} needs either prompt or prompt_token_ids; give one of them")
    token_ids = row.get("prompt_token_ids")
    if "prompt" in row:
        token_ids = _text_tokens(row["prompt"], encode, where)
    if not isinstance(token_ids, list) or not token_ids:
        raise UserError(f"{where} has an empty prompt; give at least one token")
    most, fix = (vocab_size or MAX_VOCAB_SIZE) - 1, "correct the prompt or take another model"
    for token_id in token_ids:
        require_int(f"{where}: token id", token_id, 0, fix, maximum=most)
    fix = "give the tokens to generate"
    if "output_len" not in row:
        raise UserError(f"{where} has no output_len; {fix}")
    output_len = require_int(f"{where}: output_len", row["output_len"], 1, fix)
    time, fix = row.get("arrival_time", 0.0), "use seconds from 0"
    time = require_number(f"{where}: arrival_time", time, minimum=0, fix=fix)
    priority, fix = row.get("priority", 0), "use one such as 0, lower ones first"
    priority = require_int(f"{where}: priority", priority, -sys.maxsize, fix)
    prompt = np.asarray(token_ids, dtype=np.int32)
    return Request(request_id, time, len(prompt), output_len, prompt, priority)


def _text_tokens(text: Any, encode: Encode | None, where: str) -> list[int]:
    try:
        as_bytes = text.encode("utf-8")
    except (AttributeError, UnicodeEncodeError):  # half of a surrogate pair
        fix = "correct it, or use prompt_token_ids for token ids"
        raise UserError(f"{where}: prompt is not text; {fix}") from None
    return list(as_bytes) if encode is None else encode(text)
