"""Random queues of requests, with the engines that serve them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from textwrap import shorten

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.request import Request
from sarathi_lab.policy import Policy

# Tokens.
LONGEST_PROMPT = 28
LONGEST_OUTPUT = 12
STREAM = 40  # requests of equal size that arrive while others wait
STREAM_INTERVAL = 0.4  # seconds
ARRIVALS = (0.0, 0.0, 3.0, 4.5, 12.0)  # seconds, of requests that are no stream
NUM_SHOWN = 6  # requests of a queue


@dataclass(frozen=True)
class Case:
    """Queue of requests and the engine that serves it."""

    requests: tuple[Request, ...]
    engine: EngineConfig

    def __str__(self) -> str:
        queue = []
        for request in self.requests[:NUM_SHOWN]:
            lengths = f"{request.prompt_len}+{request.output_len}"
            queue.append(f"{lengths} at {request.arrival_time:g} s")
        if len(self.requests) > NUM_SHOWN:
            queue.append("...")
        engine = self.engine
        policy = shorten(repr(engine.policy), 160)
        return (
            f"{len(self.requests)} requests ({', '.join(queue)}), {policy}, "
            f"batch {engine.batch_size}, {engine.num_blocks} blocks of {engine.block_size}, "
            f"{engine.num_micro_batches} in flight"
        )


def draw_case(policy: Policy, random: Random, max_requests: int) -> Case:
    """Draw a stream every fourth time, else up to `max_requests` and an often tight cache."""
    is_stream = random.random() < 0.25
    batch_size = random.randint(1, 5)
    requests = _stream(random) if is_stream else _queue(random, max_requests)
    block_size = random.choice((1, 3, 4, 8))
    longest = max(request.total_len for request in requests)
    # A stream shows starvation, which a short cache must not explain.
    spare_blocks = batch_size * longest
    if not is_stream:
        spare_blocks = random.randint(-1, 12)
    num_blocks = math.ceil(longest / block_size) + spare_blocks
    if policy.budget_field and random.random() < 0.75:
        budget = random.randint(batch_size, 24)
        policy = policy.with_budget(budget)
    num_stages = 1
    if not is_stream:
        num_stages = random.choice((1, 1, 2, 4))
    engine = EngineConfig(
        policy,
        batch_size=batch_size,
        num_blocks=max(1, num_blocks),
        block_size=block_size,
        max_model_len=longest,
        num_micro_batches=num_stages,
    )
    return Case(requests, engine)


def _stream(random: Random) -> tuple[Request, ...]:
    prompt_len = random.randint(1, 9)
    output_len = random.randint(1, 5)
    requests = []
    for number in range(STREAM):
        requests.append(Request(number, STREAM_INTERVAL * number, prompt_len, output_len))
    return tuple(requests)


def _queue(random: Random, max_requests: int) -> tuple[Request, ...]:
    size = random.randint(1, max_requests)
    lengths = []
    for _ in range(size):
        prompt_len = random.randint(1, LONGEST_PROMPT)
        output_len = random.randint(1, LONGEST_OUTPUT)
        lengths.append((prompt_len, output_len))
    times = sorted(random.choice(ARRIVALS) for _ in range(size))
    requests = []
    for number, arrival_time in enumerate(times):
        request = Request(number, arrival_time, *lengths[number])
        requests.append(request)
    return tuple(requests)
