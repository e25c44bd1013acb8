"""What the logs' client takes of a prompt of token ids before it is sent.

    python experiments/lab/rankings/client.py     # in an environment with openai==2.41.0

Prints the CPU time by prompt length, and when the server has prompts that come 50 ms apart.
"""

from __future__ import annotations

import asyncio
import time

from openai import AsyncOpenAI

PORT, LENGTHS, APART = 8127, (128, 20000, 25000, 30000), 0.05  # seconds
got: list[float] = []  # when the server had a whole prompt


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.split("content-length:")[1].split("\r")[0]))
    got.append(time.perf_counter())
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    writer.write(b"data: [DONE]\n\n")
    writer.close()


async def send(client: AsyncOpenAI, num_tokens: int, after: float = 0.0) -> float:
    """Send a prompt and return when it was begun."""
    await asyncio.sleep(after)
    begun, prompt = time.perf_counter(), list(range(128)) + [7] * (num_tokens - 128)
    stream = await client.completions.create(model="", prompt=prompt, stream=True)
    async for _ in stream:
        pass
    return begun


async def main() -> None:
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none")
    async with await asyncio.start_server(answer, "127.0.0.1", PORT):
        for length in 3 * LENGTHS:
            cpu = time.process_time()
            await send(client, length)
            print(f"{length} tokens: {1e3 * (time.process_time() - cpu):.0f} ms of CPU")
        got.clear()
        begun = await asyncio.gather(*(send(client, LENGTHS[2], i * APART) for i in range(4)))
        for start, end in zip(begun, sorted(got), strict=True):
            print(f"begun at {start - begun[0]:.3f} s, at the server at {end - begun[0]:.3f} s")


if __name__ == "__main__":
    asyncio.run(main())
