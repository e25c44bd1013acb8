"""A server of OpenAI's API on the network: its models, the dialect it takes, and its answers under
a load that is free of coordinated omission.

A client that waits for an answer before it sends the next request asks less of a slow server than
of a fast one, and leaves the waiting that it causes out of the record. Here every request that
arrives over time has a task of its own, without a limit on those in flight, and its latency counts
from its time of arrival, also where it was sent late or again. Only requests that all arrive at
once are limited in number.

Its protocol is read here, not by openai's client: that one builds bodies when they are sent, takes
six times as long for an event, on the loop that takes the times, lets malformed events pass, and
gives a broken stream no reason.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Request
from sarathi_lab.tasks.endpoint.protocol import (
    Answer,
    AnswerError,
    Dialect,
    is_closed,
    message_of,
    read_event,
)

BUSY = (429, 503)  # statuses that ask to come again later
FORBIDDEN = (401, 403)
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a request is sent again, doubled each time
CONNECT_TIMEOUT = 10.0  # seconds
LISTING_TIMEOUT = 60.0  # seconds for the list of models
PROBE_TOKENS = 2
# Owners of models that are servers, not authors, and software in front of any server.
SERVERS = ("vllm", "sglang", "llamacpp", "fastdeploy", "tensorrt_llm", "tgi")
WEB_SERVERS = ("uvicorn", "hypercorn", "gunicorn", "nginx", "envoy", "istio-envoy", "cloudflare")


@dataclass(frozen=True)
class ServerInfo:
    """The model's name and owner, its longest sequence (tokens), and the server's software."""

    model: str
    owner: str
    max_model_len: int | None
    software: str

    @property
    def name(self) -> str:
        """The server's name: servers own the models they list, else the one that HTTP names."""
        if self.owner.lower() in SERVERS:
            return self.owner.lower()
        product = self.software.partition("/")[0].strip().lower()
        return product if product and product not in WEB_SERVERS else "server"


@dataclass
class Client:
    """Sends requests past any proxy, each over its own connection; an async context manager.

    `timeout` is seconds for a request with its repetitions, `body` are fields of every request.
    """

    base_url: str
    api_key: str | None
    timeout: float
    retries: int
    model: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        headers = {"Accept": "text/event-stream, application/json"}
        headers["Content-Type"] = "application/json"
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        self._http = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),  # `answer` limits the whole
            # A kept connection that the server is just closing would fail a request for nothing.
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,
        )
        self.start()

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
        """The model to use. Raises UserError if the server is away, or lists no model to choose."""
        url = f"{self.base_url}/models"
        try:
            async with asyncio.timeout(LISTING_TIMEOUT):
                response = await self._http.get(url)
        except TimeoutError:
            raise UserError(
                f"{url} gives no answer in time; see whether the server is busy loading"
            ) from None
        except httpx2.HTTPError as error:
            raise UserError(
                f"{self.base_url} can't be reached ({_reason(error)}); start the server, or "
                "correct task.base_url"
            ) from None
        if response.status_code in FORBIDDEN:
            raise self._forbidden(response.status_code)
        listed: Mapping[str, Any] = {}  # the wanted model as it is listed, else the first
        with suppress(ValueError, KeyError, TypeError):
            data = response.json()["data"] if response.status_code == 200 else []
            models = [model for model in data if isinstance(model, dict)]
            wanted = (model for model in models if model.get("id") == self.model)
            listed = next(wanted, next(iter(models), {}))
        if self.model is None and listed.get("id") is None:
            raise UserError(
                f"{url} lists no model (status {response.status_code}); correct task.base_url, "
                "which mostly ends in /v1, or name a model: task.model=NAME"
            )
        longest = listed.get("max_model_len")
        is_known = self.model in (None, listed.get("id")) and isinstance(longest, int)
        return ServerInfo(
            self.model or str(listed["id"]),
            str(listed.get("owned_by") or ""),
            longest if is_known else None,
            response.headers.get("server", ""),
        )

    async def choose(
        self, dialects: Iterable[Dialect], model: str, token_ids: list[int], text: str
    ) -> Dialect:
        """The first dialect in which the server answers a small request. Raises UserError."""
        refusal = ""
        for dialect in dialects:
            content = self.content(
                dialect, model, token_ids if dialect.sends_token_ids else text, PROBE_TOKENS
            )
            request = Request(0, 0.0, len(token_ids), PROBE_TOKENS, token_ids)
            answer = await self.answer(request, dialect.path, content)
            if answer.is_complete:  # without a token, too: a model may end at once
                return dialect
            refusal = answer.error
            if answer.status in FORBIDDEN:
                raise self._forbidden(answer.status)
            if answer.status is None or answer.status < 400 or answer.status in BUSY:
                break  # the reason is not in the request's fields
        raise UserError(
            f"{self.base_url} answers no request of model {model} ({refusal}); see the server's "
            "log, or change task.api, task.prompts or task.model"
        )

    def content(
        self, dialect: Dialect, model: str, prompt: str | list[int], num_tokens: int
    ) -> bytes:
        """A request's body, ready to be sent."""
        return json.dumps(
            {"model": model, **dialect.body(prompt, num_tokens), **self.body}
        ).encode()

    async def answer(self, request: Request, path: str, content: bytes) -> Answer:
        """Send one request and read its answer to the end; a failure is the answer's `error`."""
        answer = Answer(request, sent_time=self.now)
        try:
            async with asyncio.timeout(self.timeout):
                await self._send(answer, f"{self.base_url}/{path}", content)
            if not answer.is_complete:
                raise AnswerError("the stream ended before the answer did")
            if not answer.piece_times:
                raise AnswerError("an answer without a token")
        except TimeoutError:
            answer.error = f"no end within {self.timeout:g} s"
        except (httpx2.HTTPError, AnswerError) as error:
            answer.error = _reason(error)
        answer.end_time = self.now
        return answer

    async def _send(self, answer: Answer, url: str, content: bytes) -> None:
        """Send until the server has time for it, at most `retries` times more."""
        while True:
            async with self._http.stream("POST", url, content=content) as response:
                answer.status = response.status_code
                if response.status_code == 200:
                    return await self._read(answer, response)
                if response.status_code not in BUSY or answer.num_retries >= self.retries:
                    raise AnswerError(f"status {response.status_code}: {await _message(response)}")
                wait = _wait(response.headers.get("retry-after"), answer.num_retries)
            answer.num_retries += 1
            await asyncio.sleep(wait)

    async def _read(self, answer: Answer, response: httpx2.Response) -> None:
        async for sent in httpx2.EventSource(response):
            event, now = read_event(sent.data), self.now
            if event.is_piece:
                answer.piece_times.append(now)
                answer.pieces.append(event.text)
            if event.prompt_tokens is not None:
                answer.prompt_tokens = event.prompt_tokens
            if event.completion_tokens is not None:
                answer.completion_tokens = event.completion_tokens
            answer.is_complete |= event.is_last

    def _forbidden(self, status: int | None) -> UserError:
        key = "refuses the API key" if self.api_key else "wants an API key"
        return UserError(
            f"{self.base_url} {key} (status {status}); put it into the variable that "
            "task.api_key_variable names"
        )


async def drive(
    client: Client,
    path: str,
    requests: Sequence[Request],
    contents: Mapping[int, bytes],
    concurrency: int,
    on_answer: Callable[[Answer], None],
) -> None:
    """Send every request at its time and call `on_answer` with each answer; the clock starts now.

    `contents` are the bodies by request id, made beforehand so that making one delays no other. At
    most `concurrency` are in flight if all arrive at once, else as many as arrive.
    """
    is_limited = is_closed(requests)
    slots: AbstractAsyncContextManager[Any]
    slots = asyncio.Semaphore(concurrency) if is_limited else nullcontext()

    async def serve(request: Request) -> None:
        await asyncio.sleep(max(0.0, request.arrival_time - client.now))
        async with slots:
            on_answer(await client.answer(request, path, contents[request.request_id]))

    client.start()
    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(serve(request))


async def _message(response: httpx2.Response) -> str:
    text = (await response.aread()).decode("utf-8", "replace")
    try:
        return message_of(json.loads(text))
    except (ValueError, RecursionError):
        return " ".join(text.split())[:200] or "no reason given"


def _wait(retry_after: str | None, num_retries: int) -> float:
    """Seconds: as the server asks (a number, or a date), else twice as long each time."""
    try:
        return max(0.0, float(retry_after or ""))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(retry_after or "")
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return min(FIRST_WAIT * 2**num_retries, LONGEST_WAIT)


def _reason(error: Exception) -> str:
    """The error's message in one line, or at least its kind."""
    return " ".join(str(error).split()) or type(error).__name__
