"""A server on the network: what it says of itself, which requests it takes, and answers with their
times.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Request
from sarathi_lab.tasks.endpoint.protocol import AnswerError, Dialect, Event, message_of, read_event

BUSY = (429, 503)  # statuses that ask to come again later
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a request is sent again, doubled each time
CONNECT_TIMEOUT = 10.0  # seconds
LISTING_TIMEOUT = 60.0  # seconds for the list of models
PROBE_TOKENS = 2
# Owners of models that are servers, not the models' authors, and software that says nothing of the
# server behind it.
SERVERS = ("vllm", "sglang", "llamacpp", "fastdeploy", "tensorrt_llm", "tgi")
WEB_SERVERS = ("uvicorn", "hypercorn", "gunicorn", "nginx", "envoy", "istio-envoy", "cloudflare")


@dataclass
class Answer:
    """What became of one request: times in seconds since the start, one of `piece_times` per
    streamed piece.

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

    def take(self, event: Event, now: float) -> None:
        """Add what one event says, received at `now`."""
        if event.is_piece:
            self.piece_times.append(now)
            self.pieces.append(event.text)
        if event.prompt_tokens is not None:
            self.prompt_tokens = event.prompt_tokens
        if event.completion_tokens is not None:
            self.completion_tokens = event.completion_tokens
        self.is_complete = self.is_complete or event.is_last


@dataclass(frozen=True)
class Settings:
    """How a server is spoken to. `timeout` is seconds for a request, `body` goes with each."""

    base_url: str
    api_key: str | None
    timeout: float
    retries: int
    model: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself: the model's name, who owns it, its longest sequence, and the
    server's software.
    """

    model: str
    owner: str
    max_model_len: int | None
    software: str

    @property
    def name(self) -> str:
        """What the server is called by: servers own the models they list, else the one that HTTP
        names.
        """
        if self.owner.lower() in SERVERS:
            return self.owner.lower()
        product = self.software.partition("/")[0].strip().lower()
        return product if product and product not in WEB_SERVERS else "server"


class Client:
    """Speaks to one server, past any proxy, over a connection for each request; an asynchronous
    context manager.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        headers = {
            "Accept": "text/event-stream, application/json",
            "Content-Type": "application/json",
        }
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        self._http = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),  # `answer` limits the whole
            # None is kept for another request: one that the server is just closing would fail a
            # request for nothing.
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,
        )
        self._start = time.perf_counter()

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(*error)

    @property
    def now(self) -> float:
        """Seconds since `start`."""
        return time.perf_counter() - self._start

    def start(self) -> None:
        """Set the clock to 0."""
        self._start = time.perf_counter()

    async def info(self) -> ServerInfo:
        """What `/models` lists. Raises UserError if nothing answers, or nothing that lists models
        nor takes a name.
        """
        url = f"{self._settings.base_url}/models"
        try:
            async with asyncio.timeout(LISTING_TIMEOUT):
                response = await self._http.get(url)
        except TimeoutError:
            raise UserError(
                f"{url} gives no answer in time; see whether the server is busy loading"
            ) from None
        except httpx2.HTTPError as error:
            raise UserError(
                f"{self._settings.base_url} can't be reached ({_reason(error)}); start the "
                "server, or correct "
                "task.base_url"
            ) from None
        if response.status_code in (401, 403):
            raise self._forbidden(response.status_code)
        listed = _listed_model(response, self._settings.model)
        software = response.headers.get("server", "")
        if self._settings.model is None and listed.get("id") is None:
            raise UserError(
                f"{url} lists no model (status {response.status_code}); correct "
                "task.base_url, which mostly ends in /v1, or name a model: task.model=NAME"
            )
        longest = (
            listed.get("max_model_len")
            if self._settings.model in (None, listed.get("id"))
            else None
        )
        return ServerInfo(
            self._settings.model or str(listed["id"]),
            str(listed.get("owned_by") or ""),
            longest if isinstance(longest, int) else None,
            software,
        )

    async def choose(
        self, dialects: Iterable[Dialect], model: str, token_ids: list[int], text: str
    ) -> Dialect:
        """The first of `dialects` in which the server answers a request of a few tokens.

        Raises UserError if it answers in none.
        """
        refusal = ""
        for dialect in dialects:
            prompt = token_ids if dialect.sends_token_ids else text
            request = Request(0, 0.0, len(token_ids), PROBE_TOKENS, token_ids)
            answer = await self.answer(
                request, dialect.path, self.content(dialect, model, prompt, PROBE_TOKENS)
            )
            if (
                answer.is_complete
            ):  # if without a token: a model may end at once, unless told not to
                return dialect
            refusal = answer.error
            if answer.status in (401, 403):
                raise self._forbidden(answer.status)
            if (
                answer.status is None or answer.status < 400 or answer.status in BUSY
            ):  # not for the request's fields
                break
        raise UserError(
            f"{self._settings.base_url} answers no request of model {model} ({refusal}); see "
            "the server's log, or "
            "change task.api, task.prompts or task.model"
        )

    def content(
        self, dialect: Dialect, model: str, prompt: str | list[int], num_tokens: int
    ) -> bytes:
        """A request's body, ready to be sent."""
        return json.dumps(
            {"model": model, **dialect.body(prompt, num_tokens), **self._settings.body}
        ).encode()

    async def answer(self, request: Request, path: str, content: bytes) -> Answer:
        """Send one request and read its answer to the end; whatever goes wrong is in the answer's
        `error`.
        """
        answer = Answer(request, sent_time=self.now)
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._ask(answer, f"{self._settings.base_url}/{path}", content)
            if not answer.is_complete:
                raise AnswerError("the stream ended before the answer did")
            if not answer.piece_times:
                raise AnswerError("an answer without a token")
        except TimeoutError:
            answer.error = f"no end within {self._settings.timeout:g} s"
        except httpx2.HTTPError as error:
            answer.error = _reason(error)
        except AnswerError as error:
            answer.error = str(error)
        answer.end_time = self.now
        return answer

    async def _ask(self, answer: Answer, url: str, content: bytes) -> None:
        """Send until the server has time for it, at most `retries` times more."""
        while True:
            async with self._http.stream("POST", url, content=content) as response:
                answer.status = response.status_code
                if response.status_code == 200:
                    async for event in httpx2.EventSource(response):
                        answer.take(read_event(event.data), self.now)
                    return
                if response.status_code not in BUSY or answer.num_retries >= self._settings.retries:
                    raise AnswerError(f"status {response.status_code}: {await _words(response)}")
                wait = _wait(response.headers.get("retry-after"), answer.num_retries)
            answer.num_retries += 1
            await asyncio.sleep(wait)

    def _forbidden(self, status: int | None) -> UserError:
        key = "refuses the API key" if self._settings.api_key else "wants an API key"
        return UserError(
            f"{self._settings.base_url} {key} (status {status}); put it into the variable that "
            "task.api_key_variable "
            "names"
        )


def _listed_model(response: httpx2.Response, wanted: str | None) -> Mapping[str, Any]:
    """The wanted model as it is listed, else the first; {} if none is."""
    try:
        listed = response.json()["data"] if response.status_code == 200 else []
        models = [model for model in listed if isinstance(model, dict)]
    except (ValueError, KeyError, TypeError):
        return {}
    return next(
        (model for model in models if model.get("id") == wanted), models[0] if models else {}
    )


async def _words(response: httpx2.Response) -> str:
    """What a refusal says, in one line."""
    text = (await response.aread()).decode("utf-8", "replace")
    try:
        return message_of(json.loads(text))
    except (ValueError, RecursionError):
        return " ".join(text.split())[:200] or "no reason given"


def _wait(retry_after: str | None, num_retries: int) -> float:
    """Seconds: as the server asks (a number, or a date), else twice as long each time."""
    own = min(FIRST_WAIT * 2**num_retries, LONGEST_WAIT)
    if retry_after is None:
        return own
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return own


def _reason(error: Exception) -> str:
    """The error's own words, or at least its kind."""
    return " ".join(str(error).split()) or type(error).__name__
