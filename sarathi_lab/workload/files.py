"""Requests from files of prompts: the lab's own, vLLM's, and conversations as ShareGPT has them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.config.paths import of_lab
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.base import Encode, LoadedRequests
from sarathi_lab.workload.text_files import JsonRows, json_rows, kind_of_text, read_text

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
Fields = Mapping[str, object]


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
        rows = _json_rows(file)
        requests = list[Request]()
        num_unanswered = 0
        num_later_turns = 0
        for line, entry in zip(rows.lines, rows.objects, strict=True):
            row = Row(entry, f"{file} line {line}", encode, vocab_size)
            turns = row.turns()
            if turns is None:
                requests.append(row.request(len(requests)))
            elif len(turns) < 2:
                num_unanswered += 1
            else:
                # A prompt and its answer are two turns, of which the first pair is replayed.
                num_later_turns += len(turns) // 2 - 1
                requests.append(row.first_exchange(turns).request(len(requests)))
        if not requests:
            raise UserError(
                f"{file} has no request with an answer, whose length is that of the output; write "
                "prompt and output_len of each"
            )
        dropped = {"blank": rows.num_blank, "without an answer": num_unanswered}
        num_rows = len(rows.objects) + rows.num_blank
        notes = []
        if num_later_turns:
            notes.append(f"later turns left out: {num_later_turns}")
        return LoadedRequests(
            f"{self.name} {file.name}",
            requests,
            num_rows,
            dropped,
            notes,
        )


def _json_rows(file: Path) -> JsonRows:
    remedy = f"name a file of prompts{EXAMPLES['prompts']}"
    text = read_text(file, f"workload.path={file}", remedy)
    rows = json_rows(text)
    if rows is None:
        raise UserError(f"{file} is {kind_of_text(text)}, not JSON; {remedy}")
    if rows.damaged:
        raise UserError(f"{file} {rows.damaged[0]}; write one object a line")
    return rows


@dataclass(frozen=True)
class Row:
    """An object of a file. Raises UserError, naming its `source`, for what is no request."""

    fields: Fields
    source: str
    encode: Encode | None
    vocab_size: int | None

    def turns(self) -> Sequence[Fields] | None:
        """Return the turns of a conversation from its first question on; None for other rows."""
        stated = _first_of(self.fields, TURNS)
        if not isinstance(stated, list):
            return None
        turns: list[Fields] = [turn for turn in stated if isinstance(turn, Mapping)]
        # Some conversations begin with a system prompt, or with an answer to what was cut off.
        for number, turn in enumerate(turns):
            speaker = str(_first_of(turn, SPEAKERS)).lower()
            if speaker not in (*OF_MODEL, "system"):
                return turns[number:]
        return []

    def first_exchange(self, turns: Sequence[Fields]) -> Row:
        """Return the first question of a conversation, with as many tokens as its answer has."""
        question = _first_of(turns[0], TEXTS)
        answer = _first_of(turns[1], TEXTS)
        num_tokens = len(self._tokens(answer))
        fields = {"prompt": question, "output_len": max(1, num_tokens)}
        return replace(self, fields=fields)

    def request(self, request_id: int) -> Request:
        """Return the row as a request."""
        fields = self.fields
        if ("prompt" in fields) == ("prompt_token_ids" in fields):
            raise UserError(f"{self.source} needs either prompt or prompt_token_ids; give one")
        token_ids = fields.get("prompt_token_ids")
        if "prompt" in fields:
            token_ids = self._tokens(fields["prompt"])
        if not isinstance(token_ids, list) or not token_ids:
            raise UserError(f"{self.source} has an empty prompt; give at least one token")
        largest = (self.vocab_size or MAX_VOCAB_SIZE) - 1
        remedy = "correct the prompt or take another model"
        for token_id in token_ids:
            require_int(
                f"{self.source}: token id",
                token_id,
                0,
                remedy,
                maximum=largest,
            )
        prompt = np.asarray(token_ids, dtype=np.int32)
        output_len = _first_of(fields, OUTPUT_LENGTHS)
        if output_len is None:
            raise UserError(f"{self.source} has no output_len; give the tokens to generate")
        name = f"{self.source}: output_len"
        output_len = require_int(name, output_len, 1, "give the tokens to generate")
        name = f"{self.source}: arrival_time"
        time = fields.get("arrival_time", 0.0)
        time = require_number(
            name,
            time,
            minimum=0,
            fix="use seconds from 0",
        )
        name = f"{self.source}: priority"
        priority = fields.get("priority", 0)
        priority = require_int(name, priority, -sys.maxsize, "use one such as 0, lower ones first")
        return Request(
            request_id,
            time,
            len(prompt),
            output_len,
            prompt,
            priority,
        )

    def _tokens(self, text: object) -> list[int]:
        if not isinstance(text, str):
            raise UserError(
                f"{self.source}: prompt is not text; correct it, or use prompt_token_ids for token "
                "ids"
            )
        as_bytes = text.encode("utf-8", "replace")  # halves of surrogate pairs
        if self.encode is None:  # without a tokenizer, a byte is a token
            return list(as_bytes)
        return self.encode(as_bytes.decode())


def _first_of(fields: Fields, names: Sequence[str]) -> object:
    return next((fields[name] for name in names if name in fields), None)
