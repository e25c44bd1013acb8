"""Requests from files of prompts: the lab's own, vLLM's, and conversations as ShareGPT has them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.config.paths import of_lab
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.base import Encode, LoadedRequests
from sarathi_lab.workload.text_files import json_rows, kind_of_text, read_text

MAX_VOCAB_SIZE = 2**31  # token ids are int32

EXAMPLES = {
    "trace": ", such as AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset",
    "prompts": ', each line a JSON object of "prompt" (text) and "output_len"',
}
# Names of the tokens to generate: the lab's, vLLM's custom data set's, OpenAI's.
OUTPUT_LENGTHS = ("output_len", "output_tokens", "max_tokens")
# Keys of a list of turns: ShareGPT's of two versions, WildChat's, OpenAI's; of a turn's speaker and
# text.
TURNS = ("conversations", "items", "conversation", "messages")
SPEAKERS = ("from", "role")
TEXTS = ("value", "content")
OF_MODEL = ("gpt", "assistant", "model", "chatgpt", "bing", "bard")
Row = Mapping[str, object]


def named_file(path: str | None, option: str) -> Path:
    """Return the file of workload=`option`. Raises UserError without one."""
    if path is None:
        raise UserError(f"workload={option} needs a file; add workload.path=FILE{EXAMPLES[option]}")
    return of_lab(Path(str(path)).expanduser())


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts from a file of JSON, an object a line or a list of them.

    An object has `prompt` (text) or `prompt_token_ids`, and `output_len`, which vLLM's custom data
    sets call `output_tokens`; maybe `arrival_time` (seconds) and `priority` (lower first). Of a
    conversation (ShareGPT, WildChat, messages) the first question is the prompt, and the tokens of
    its answer are those to generate, as in vLLM's and SGLang's clients. Text is encoded by the
    checkpoint's tokenizer where there is one, else as its UTF-8 bytes.
    """

    name: ClassVar[str] = "prompts"
    path: str | None = None

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        file = named_file(self.path, self.name)
        remedy = f"name a file of prompts{EXAMPLES[self.name]}"
        text = read_text(file, f"workload.path={file}", remedy)
        if not text.strip():
            raise UserError(f"{file} is empty; name a file with at least one request")
        rows = json_rows(text)
        if rows is None:
            raise UserError(f"{file} is {kind_of_text(text)}, not JSON; {remedy}")
        if rows.damaged:
            raise UserError(f"{file} {rows.damaged[0]}; write one object a line")
        requests = list[Request]()
        num_unanswered = 0
        num_later_turns = 0
        for line, entry in zip(rows.lines, rows.objects, strict=True):
            source = f"{file} line {line}"
            row: Row = entry
            turns = _turns_of(entry)
            if turns is not None:
                # A prompt and its answer are two turns, of which the first pair is replayed.
                num_later_turns += max(0, len(turns) // 2 - 1)
                if len(turns) < 2:
                    num_unanswered += 1
                    continue
                row = _first_exchange(turns, encode, source)
            request = _prompt_request(len(requests), row, vocab_size, encode, source)
            requests.append(request)
        if num_unanswered and not requests:
            raise UserError(
                f"{file} has conversations without an answer, whose length nothing tells; write "
                "prompt and output_len of each"
            )
        if not requests:
            raise UserError(f"{file} has no request; name a file with at least one request")
        dropped = {"blank": rows.num_blank, "without an answer": num_unanswered}
        num_rows = len(rows.objects) + rows.num_blank
        notes = []
        if num_later_turns:
            notes.append(f"later turns left out: {num_later_turns}")
        return LoadedRequests(f"{self.name} {file.name}", requests, num_rows, dropped, notes)


def _turns_of(row: Row) -> Sequence[Row] | None:
    """Return the turns of a conversation from its first question on; None for other rows."""
    stated = _first_of(row, TURNS)
    if not isinstance(stated, list):
        return None
    turns: list[Row] = [turn for turn in stated if isinstance(turn, Mapping)]
    speakers = [str(_first_of(turn, SPEAKERS)).lower() for turn in turns]
    # Some conversations begin with a system prompt, or with an answer to what was cut off.
    for number, speaker in enumerate(speakers):
        if speaker not in (*OF_MODEL, "system"):
            return turns[number:]
    return []


def _first_exchange(turns: Sequence[Row], encode: Encode | None, source: str) -> Row:
    """Make a prompt and its length of output of a conversation's first question and answer."""
    answer = _text_tokens(_first_of(turns[1], TEXTS), encode, source)
    question = _first_of(turns[0], TEXTS)
    return {"prompt": question, "output_len": max(1, len(answer))}


def _first_of(row: Row, names: Sequence[str]) -> object:
    return next((row[name] for name in names if name in row), None)


def _prompt_request(
    request_id: int, row: Row, vocab_size: int | None, encode: Encode | None, source: str
) -> Request:
    if ("prompt" in row) == ("prompt_token_ids" in row):
        raise UserError(f"{source} needs either prompt or prompt_token_ids; give one of them")
    token_ids = row.get("prompt_token_ids")
    if "prompt" in row:
        token_ids = _text_tokens(row["prompt"], encode, source)
    if not isinstance(token_ids, list) or not token_ids:
        raise UserError(f"{source} has an empty prompt; give at least one token")
    largest = (vocab_size or MAX_VOCAB_SIZE) - 1
    remedy = "correct the prompt or take another model"
    for token_id in token_ids:
        require_int(f"{source}: token id", token_id, 0, remedy, maximum=largest)
    output_len = _output_len(row, source)
    time = row.get("arrival_time", 0.0)
    time = require_number(f"{source}: arrival_time", time, minimum=0, fix="use seconds from 0")
    priority = row.get("priority", 0)
    remedy = "use one such as 0, lower ones first"
    priority = require_int(f"{source}: priority", priority, -sys.maxsize, remedy)
    prompt = np.asarray(token_ids, dtype=np.int32)
    return Request(request_id, time, len(prompt), output_len, prompt, priority)


def _output_len(row: Row, source: str) -> int:
    remedy = "give the tokens to generate"
    for name in OUTPUT_LENGTHS:
        if name in row:
            return require_int(f"{source}: {name}", row[name], 1, remedy)
    raise UserError(f"{source} has no output_len; {remedy}")


def _text_tokens(text: object, encode: Encode | None, source: str) -> list[int]:
    remedy = "correct it, or use prompt_token_ids for token ids"
    message = f"{source}: prompt is not text; {remedy}"
    if not isinstance(text, str):
        raise UserError(message)
    try:
        as_bytes = text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        raise UserError(message) from None
    if encode is None:  # without a tokenizer, a byte is a token
        return list(as_bytes)
    return encode(text)
