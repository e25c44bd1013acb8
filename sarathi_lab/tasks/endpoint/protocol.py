"""Requests to a server that speaks OpenAI's API, and the meaning of its events. No network here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sarathi_lab.engine.request import Request

APIS = {"completions": "completions", "chat": "chat/completions"}  # paths below the base URL
PROMPTS = ("auto", "token_ids", "text")
END = "[DONE]"
MOST_TOKENS = 2**31 - 1  # that a server may say it counted in one request
MOST_SHOWN = 300  # characters of what a server says
TEXTS = ("text", "content", "reasoning_content", "reasoning")  # where an event has its token
# Common words, each of which is one token, with the space before it, in most vocabularies.
COMMON_WORDS = (
    "the of and to in is was for on that by with as at from it an be are this which or had not but "
    "have all one new been who time first other also two more after some would about only over "
    "when there than most into such may then people world between made under where used through "
    "many state city year part number book day house"
)
WORDS = tuple(COMMON_WORDS.split())


@dataclass
class Answer:
    """What became of one request; times in seconds since the start, one per streamed piece.

    `error` is the reason of a failure, empty for an answer that came to its end.
    """

    request: Request
    sent_time: float | None = None
    end_time: float | None = None
    piece_times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    is_complete: bool = False
    num_retries: int = 0
    status: int | None = None
    error: str = ""

    def take(self, data: str, now: float) -> None:
        """Add what an event says, at `now`. Raises AnswerError."""
        if not data.strip():  # an event's name, its id or a wait, alone
            return
        event = read_event(data)
        if event.text and self.is_complete:
            raise AnswerError("a token after the answer's end")
        if event.is_piece and not self.is_complete:
            self.piece_times.append(now)
            self.pieces.append(event.text)
        for name in ("prompt_tokens", "completion_tokens"):
            if (count := getattr(event, name)) is not None:
                setattr(self, name, count)
        self.is_complete |= event.is_last

    @property
    def prompt_len(self) -> int:
        """Tokens as the server counted them, else as the workload has them."""
        return self.request.prompt_len if self.prompt_tokens is None else self.prompt_tokens

    @property
    def output_len(self) -> int:
        """Tokens as the server counted them, else streamed pieces."""
        return len(self.pieces) if self.completion_tokens is None else self.completion_tokens

    @property
    def finish_time(self) -> float:
        """Seconds of the last token, or of the failure."""
        assert self.end_time is not None, "the answer has come to its end"
        return self.end_time if self.error else self.piece_times[-1]


def is_closed(requests: Sequence[Request]) -> bool:
    """Whether all requests are there from the start."""
    return all(request.arrival_time == 0 for request in requests)


class AnswerError(Exception):
    """An answer that is none; the message states what the server sent instead."""


@dataclass(frozen=True)
class Dialect:
    """How requests are written: the API, prompts as token ids or text, and the extensions used.

    Servers differ in what they take: vLLM, SGLang and TensorRT-LLM know token ids and `ignore_eos`,
    others refuse them.
    """

    api: str
    sends_token_ids: bool
    fixes_length: bool  # by ignore_eos and min_tokens, which are no part of OpenAI's API
    asks_usage: bool

    @property
    def path(self) -> str:
        return APIS[self.api]

    def body(self, prompt: str | list[int], num_tokens: int) -> dict[str, Any]:
        """A greedy request for `num_tokens` tokens, streamed; without the model's name."""
        chat = {"messages": [{"role": "user", "content": prompt}]}
        body: dict[str, Any] = chat if self.api == "chat" else {"prompt": prompt}
        body |= {"max_tokens": num_tokens, "temperature": 0.0, "stream": True}
        if self.fixes_length:
            body |= {"ignore_eos": True, "min_tokens": num_tokens}
        if self.asks_usage:
            body["stream_options"] = {"include_usage": True}
        return body

    def describe(self) -> str:
        """How prompts are sent and what fixes the output's length, in words."""
        prompts = "token ids" if self.sends_token_ids else "text"
        length = "ignore_eos and min_tokens" if self.fixes_length else "max_tokens alone"
        return f"{self.api} API, prompts as {prompts}, lengths by {length}"


def dialects(api: str, prompts: str) -> Iterator[Dialect]:
    """Those that `api` and `prompts` (one of PROMPTS) leave open, the most exact first."""
    takes_text_only = api == "chat" or prompts == "text"
    as_token_ids = {"token_ids": [True], "auto": [True, False]}.get(prompts, [False])
    options = ([False] if takes_text_only else as_token_ids, (True, False), (True, False))
    return (Dialect(api, *chosen) for chosen in itertools.product(*options))


class Texts:
    """The texts of requests that were made from text; token ids of others become as many words."""

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}

    def encode(self, text: str) -> list[int]:
        """Its UTF-8 bytes, the tokens of a workload without a tokenizer; keeps the text."""
        token_ids = list(text.encode("utf-8"))
        self._texts[_key(token_ids)] = text
        return token_ids

    def prompt(self, request: Request, *, as_token_ids: bool) -> str | list[int]:
        """The prompt to send: the request's text if it has one, else token ids or as many words."""
        assert request.prompt_token_ids is not None, "the workload was asked for tokens"
        text = self._texts.get(_key(request.prompt_token_ids))
        if text is not None:
            return text
        token_ids = [int(token_id) for token_id in request.prompt_token_ids]
        return token_ids if as_token_ids else words(token_ids)


def _key(token_ids: Any) -> bytes:
    return np.asarray(token_ids, dtype=np.int32).tobytes()


def words(token_ids: Sequence[int]) -> str:
    """A common word for each id: the same ids give the same text, of about as many tokens."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)


class Event(NamedTuple):
    """One event of a stream; the counts are those of its `usage`, None where it has none."""

    text: str = ""
    is_piece: bool = False  # whether it is a token, or several
    is_last: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def read_event(data: str) -> Event:
    """The meaning of an event's data. Raises AnswerError for malformed data and reported errors."""
    if data.strip() == END:
        return Event(is_last=True)
    try:
        chunk = json.loads(data)
        if not chunk.get("error"):
            return _event(chunk)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise AnswerError(f"malformed event {data[:80]!r}") from None
    raise AnswerError(f"error in the stream: {message_of(chunk)}")


def _event(chunk: Mapping[str, Any]) -> Event:
    usage = chunk.get("usage") or {}
    counts = [_count(name, usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
    choices = chunk.get("choices") or []
    if not choices:  # the last event, for the usage alone
        return Event("", False, False, *counts)
    choice = choices[0]
    delta = choice.get("delta")
    said = choice if delta is None else delta
    parts = [_text(said[name]) for name in TEXTS if said.get(name) is not None]
    text = next((part for part in parts if part), "")
    is_last = bool(choice.get("finish_reason"))  # some servers write "" until then
    # Part of a character has no text yet but is a token; a role and a finish_reason are none.
    is_piece = bool(text) or (bool(parts) and not is_last and "role" not in said)
    return Event(text, is_piece, is_last, *counts)


def _count(name: str, count: Any) -> int | None:
    """Tokens as `usage` has them."""
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_TOKENS:
        raise AnswerError(f"malformed event: {name}={str(count)[:40]} is no number of tokens")
    return count


def _text(part: Any) -> str:
    if not isinstance(part, str):
        raise AnswerError(f"malformed event: {str(part)[:40]!r} is no text")
    try:
        part.encode()
    except UnicodeEncodeError:
        raise AnswerError(f"malformed event: {part[:40]!r} has half of a surrogate pair") from None
    return part


def message_of(body: Any) -> str:
    """What an error's body says: {"error": {"message": ...}}, {"detail": ...} or the like."""
    for _ in range(3):
        if not isinstance(body, dict):
            break
        named = (body[name] for name in ("error", "message", "detail") if body.get(name))
        body = next(named, str(body))
    return str(body)


def one_line(text: str) -> str:
    """The beginning of a server's text in one line, as a terminal and a file can take it."""
    shown = " ".join(text.split())[:MOST_SHOWN]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
