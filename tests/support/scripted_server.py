"""A server of OpenAI's API on loopback that behaves as each prompt tells it to: well, or badly in a
known way.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

# What the usage of some manners says instead of the tokens that came.
COUNTS = {"infinite": float("inf"), "negative": -1, "huge": 10**20, "none": 0}
RETRY_AFTER = 0.3  # seconds that a busy server asks for


class Seen(NamedTuple):
    """One request as it came in."""

    time: float
    path: str
    body: dict[str, Any]
    key: str | None


class ScriptedServer(ThreadingHTTPServer):
    """Manners are the words of text prompts; token ids are answered well, where they are taken at
    all.

    `first` and `gap` are the seconds before an answer's first token and between its tokens.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, **settings: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: list[dict[str, Any]] = [{"id": "org/scripted", "owned_by": "vllm"}]
        self.takes_token_ids = True
        self.refused_fields: tuple[str, ...] = ()
        self.key: str | None = None
        self.first = 0.0
        self.gap = 0.0
        for name, value in settings.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self.seen: list[Seen] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def of(self, manner: str) -> list[Seen]:
        """The requests with that prompt."""
        return [seen for seen in self.seen if _prompt(seen.body) == manner]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


@contextmanager
def scripted(**settings: Any) -> Iterator[ScriptedServer]:
    """A running server; ends with the block."""
    server = ScriptedServer(**settings)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _prompt(body: dict[str, Any]) -> Any:
    return body["messages"][0]["content"] if "messages" in body else body.get("prompt")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ScriptedServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._answer(404, {"detail": "Not Found"})
        elif self._is_known():
            self._answer(200, {"object": "list", "data": self.server.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.seen.append(
                Seen(time.perf_counter(), self.path, body, self.headers.get("Authorization"))
            )
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            self._serve(body)
        finally:
            with server.lock:
                server.in_flight -= 1

    def _is_known(self) -> bool:
        if self.server.key is None or self.headers.get("Authorization") in (
            f"Bearer {self.server.key}",
            self.server.key,
        ):
            return True
        self._answer(401, {"error": {"message": "no key"}})
        return False

    def _serve(self, body: dict[str, Any]) -> None:
        prompt = _prompt(body)
        if not self._is_known():
            return
        if refused := sorted(set(body) & set(self.server.refused_fields)):
            self._answer(422, {"detail": f"Unexpected fields: {refused}"})
        elif isinstance(prompt, list) and not self.server.takes_token_ids:
            self._answer(400, {"detail": "prompt must be a string."})
        elif prompt == "busy" and len(self.server.of("busy")) < 3:
            self._answer(
                429, {"error": {"message": "come again"}}, {"Retry-After": str(RETRY_AFTER)}
            )
        elif prompt == "always busy":
            self._answer(503, {"error": {"message": "no time"}}, {"Retry-After": "0"})
        elif prompt == "fails":
            self._answer(500, {"error": {"message": "out of\nmemory"}})
        elif prompt == "repeats":
            self._answer(400, {"error": {"message": f"no such key: {self.server.key}"}})
        elif prompt == "refuses":
            self._answer(400, {"object": "error", "message": "too long"})
        else:
            self._stream(prompt if isinstance(prompt, str) else "", body)

    def _answer(
        self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, manner: str, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self._events(manner, body):
            if event == "\ufeff":
                self.wfile.write(b"3\r\n\xef\xbb\xbf\r\n")
                continue
            data = f"data: {event}\n\n".encode() if event else b": still here\n\nretry: 9\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            if manner == "breaks off" and event and '"1"' in event:
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")

    def _events(self, manner: str, body: dict[str, Any]) -> Iterator[str]:
        """The data of each event; empty: a comment."""
        num_tokens = 2 if manner == "ends early" else body["max_tokens"]
        is_chat = "messages" in body
        if manner == "marked":  # as some systems mark UTF-8: before the first line
            yield "\ufeff"
        if is_chat:
            yield _chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        yield ""
        time.sleep(8.0 if manner == "slow" else self.server.first)
        step = 2 if manner == "pairs" else 1
        for i in range(0, num_tokens, step):
            if i:
                time.sleep(self.server.gap)
            if manner == "malformed" and i == 2:
                yield '{"choices": [{"text'
            if manner == "error" and i == 2:
                yield json.dumps({"error": {"message": "the engine died", "code": 500}})
                return
            is_last = i + step >= num_tokens
            text: Any = {"half": "\ud83d", "number": i}.get(manner, str(i))
            said = {"delta": {"content": text}} if is_chat else {"text": text}
            unfinished = "" if manner == "blank reason" else None
            yield _chunk(
                {**said, "finish_reason": "length" if is_last and manner != "stops" else unfinished}
            )
        if manner == "stops":
            return
        if manner != "no usage" and body.get("stream_options", {}).get("include_usage"):
            prompt = _prompt(body)
            counts = {"prompt_tokens": len(prompt if isinstance(prompt, list) else prompt.split())}
            usage = {**counts, "completion_tokens": COUNTS.get(manner, num_tokens)}
            yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"
        if manner == "goes on":
            yield _chunk({"text": "more", "finish_reason": None})


def _chunk(choice: dict[str, Any]) -> str:
    return json.dumps({"choices": [{"index": 0, **choice}], "usage": None})
