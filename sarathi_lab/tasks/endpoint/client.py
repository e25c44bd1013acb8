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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx2

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Request
from sarathi_lab.tasks.endpoint import protocol
from sarathi_lab.tasks.endpoint.protocol import Answer, AnswerError, Dialect

BUSY = (429, 503)  # statuses that ask to come again later
FORBIDDEN = (401, 403)
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a request is sent again, doubled each time
CONNECT_TIMEOUT = 10.0  # seconds
LISTING_TIMEOUT = 60.0  # seconds for the list of models
PROBE_TOKENS = 2
# Owners of models that are servers, not authors, and software in front of any server.
SERVERS = ("vllm", "sglang", "llamacpp", "fastdeploy", "tensorrt_llm", "tgi")
WEB_SERVERS = ("uvicorn", "hypercorn", "gunicorn", "nginx", "envoy", "istio-envoy", "cloudflare")


class ServerInfo(NamedTuple):
    """The model, its longest sequence (tokens), and the server's name."""

    model: str
    max_model_len: int | None
    name: str


@dataclass
class Client:
    """Sends requests past any proxy, each over its own connection, while it is `connected`.

    `timeout` is seconds for a request with its repetitions, `body` are fields of every request.
    """

    base_url: str
    api_key: str | None
    timeout: float
    retries: int
    model: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """Itself, for the length of the block."""
        headers = {"Accept": "text/event-stream, application/json"}
        headers["Content-Type"] = "application/json"
        if self.api_key:
            has_scheme = " " in self.api_key  # such as "Basic dXNlcjpwYXNzd29yZA=="
            headers["Authorization"] = self.api_key if has_scheme else f"Bearer {self.api_key}"
        self.start()
        async with httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),  # `answer` limits the whole
            # A kept connection that the server is just closing would fail a request for nothing.
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,
        ) as self._http:
            yield self

    @property
    def now(self) -> float:
        """Seconds since `start`."""
        return time.perf_counter() - self._start

    def start(self) -> None:
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
                f"{self.base_url} can't be reached ({self._reason(error)}); start the server, or "
                "correct task.base_url"
            ) from None
        if response.status_code in FORBIDDEN:
            raise self._forbidden(response.status_code)
        listed: Mapping[str, Any] = {}  # the wanted model as it is listed, else the first
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            data = response.json()["data"] if response.status_code == 200 else []
            models = [one for one in data if isinstance(one, dict) and _is_name(one.get("id"))]
            wanted = (model for model in models if model["id"] == self.model)
            listed = next(wanted, next(iter(models), {}))
        if self.model is None and not listed:
            raise UserError(
                f"{url} lists no model (status {response.status_code}); correct task.base_url, "
                "which mostly ends in /v1, or name a model: task.model=NAME"
            )
        longest = listed.get("max_model_len")
        is_known = self.model in (None, listed.get("id")) and type(longest) is int and longest > 0
        # Servers own the models that they list, or HTTP names them.
        name = str(listed.get("owned_by") or "").lower()
        if name not in SERVERS:
            software = response.headers.get("server", "").partition("/")[0].strip().lower()
            is_own = _is_name(software) and software not in WEB_SERVERS
            name = software if is_own else "server"
        return ServerInfo(self.model or listed["id"], longest if is_known else None, name)

    async def choose(
        self, dialects: Iterable[Dialect], model: str, token_ids: list[int], text: str
    ) -> Dialect:
        """The first dialect in which the server answers a small request. Raises UserError."""
        refusal = ""
        request = Request(0, 0.0, len(token_ids), PROBE_TOKENS, token_ids)
        for dialect in dialects:
            prompt = token_ids if dialect.sends_token_ids else text
            content = self.content(dialect, model, prompt, PROBE_TOKENS)
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
        body = {"model": model, **dialect.body(prompt, num_tokens), **self.body}
        return json.dumps(body).encode()

    async def answer(self, request: Request, path: str, content: bytes) -> Answer:
        """Send one request and read its answer to the end; a failure is the answer's `error`."""
        answer = Answer(request, sent_time=self.now)
        try:
            async with asyncio.timeout(self.timeout):
                await self._send(answer, f"{self.base_url}/{path}", content)
            if not answer.is_complete:
                raise AnswerError("the stream ended before the answer did")
            if not answer.piece_times or not answer.output_len:
                raise AnswerError("an answer without a token")
        except TimeoutError:
            answer.error = f"no end within {self.timeout:g} s"
        except (httpx2.HTTPError, AnswerError) as error:
            answer.error = self._reason(error)
        answer.end_time = self.now
        return answer

    async def _send(self, answer: Answer, url: str, content: bytes) -> None:
        """Send until the server has time for it, at most `retries` times more."""
        while True:
            async with self._http.stream("POST", url, content=content) as response:
                answer.status = status = response.status_code
                if status == 200:
                    response.encoding = "utf-8-sig"  # as the standard of event streams has it
                    async for sent in httpx2.EventSource(response):
                        answer.take(sent.data, self.now)
                    return
                if status not in BUSY or answer.num_retries >= self.retries:
                    raise AnswerError(f"status {status}: {await _message(response)}")
                wait = _wait(response.headers.get("retry-after"), answer.num_retries)
            answer.num_retries += 1
            await asyncio.sleep(wait)

    def _reason(self, error: Exception) -> str:
        """The error's message in one line, or at least its kind; nowhere with the key."""
        text = str(error).replace(self.api_key, "***") if self.api_key else str(error)
        return protocol.one_line(text) or type(error).__name__

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
    is_closed = protocol.is_closed(requests)
    slots: AbstractAsyncContextManager[Any]
    slots = asyncio.Semaphore(concurrency) if is_closed else nullcontext()

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
        return protocol.message_of(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip() or "no reason given"


def _is_name(text: object) -> bool:
    """Whether a server can be meant by it, or a model of it."""
    return isinstance(text, str) and bool(text) and text.isprintable()


def _wait(retry_after: str | None, num_retries: int) -> float:
    """Seconds: as the server asks (a number, or a date), else twice as long each time."""
    with suppress(ValueError):
        return max(0.0, float(retry_after or ""))
    with suppress(ValueError, TypeError, OverflowError):
        date = parsedate_to_datetime(retry_after or "")
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    return min(FIRST_WAIT * 2.0 ** min(num_retries, 10), LONGEST_WAIT)
