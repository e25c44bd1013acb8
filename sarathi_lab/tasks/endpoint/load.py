"""Load generation free of coordinated omission: each request is sent at its time of arrival.

A client that waits for an answer before it sends the next request asks less of a slow server than
of a fast one, and leaves the waiting that it causes out of the record. Here every request that
arrives over time has a task of its own, without a limit on those in flight, and its latency counts
from its time of arrival, also where it was sent late or again. Only requests that all arrive at
once are limited in number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from sarathi_lab.engine.request import Request
from sarathi_lab.tasks.endpoint.client import Client
from sarathi_lab.tasks.endpoint.protocol import Answer


def is_closed(requests: Sequence[Request]) -> bool:
    """Whether all requests are there from the start."""
    return all(request.arrival_time == 0 for request in requests)


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
    slots: AbstractAsyncContextManager[Any] = (
        asyncio.Semaphore(concurrency) if is_closed(requests) else nullcontext()
    )

    async def serve(request: Request) -> None:
        await asyncio.sleep(max(0.0, request.arrival_time - client.now))
        async with slots:
            on_answer(await client.answer(request, path, contents[request.request_id]))

    client.start()
    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(serve(request))
