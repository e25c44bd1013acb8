"""Equal requests under a policy, and what serving them takes, counted or on an executor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine import loop
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor, StepResult
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.policy import Orca, Policy, RequestLevel, Sarathi, SarathiServe
from sarathi_lab.results.metrics import device_idle_fraction
from sarathi_lab.results.serving_metrics import latency
from sarathi_lab.workload.base import random_prompt

FEWER, MORE = 1, 3  # batches of requests; the difference of their costs is the steady state's

BLOCK_SIZE = 16  # tokens
# Seconds by operation; in a simulation an array, of every draw of the cost model's constants.
Times = dict[str, Any]
OperationTimes = Callable[[Batch], Mapping[str, Any]]


def lengths(seq_len: int, pd_ratio: float, chunk_tokens: int = 1) -> tuple[int, int]:
    """P and D with P : D near `pd_ratio` and P + D near `seq_len`, P of whole chunks: the paper
    counts P / C of them, with no remainder.
    """
    share_of_prompt = pd_ratio / (pd_ratio + 1)
    num_chunks = round(seq_len * share_of_prompt / chunk_tokens)
    prompt_len = max(1, num_chunks) * chunk_tokens
    num_decodes = round(prompt_len / pd_ratio)
    return prompt_len, max(1, num_decodes)


@dataclass(frozen=True)
class Scenario:
    """Equal requests under "request_level", "orca_best", "orca_worst", with a chunk "sarathi" or
    "sarathi_serve", or under another policy.

    `num_decodes` counts decode iterations: the first output token comes with the prompt.
    """

    policy: str | Policy
    prompt_len: int
    num_decodes: int
    batch_size: int
    chunk: int | None = None

    @classmethod
    def of(
        cls, policy: str, seq_len: int, pd_ratio: float, batch: int, chunk: int | None = None
    ) -> Scenario:
        """Requests of about `seq_len` tokens; prompts in chunks are whole ones. Raises UserError
        for a chunk that decodes fill.
        """
        tokens = 1
        if chunk is not None:
            tokens = chunk - (batch - 1)  # the decodes ride in the chunk (section 4.3.2)
        if tokens < 1:
            raise UserError(
                f"task.sizes: a chunk of {chunk} has no room for a prompt beside {batch - 1} "
                "decodes; name a larger chunk or smaller batches"
            )
        return cls(policy, *lengths(seq_len, pd_ratio, tokens), batch, chunk)

    @property
    def baseline(self) -> Scenario:
        return replace(self, policy="request_level", chunk=None)

    def make_policy(self) -> Policy:
        """The policy itself. SARATHI's decodes ride in full batches of B - 1 only."""
        if isinstance(self.policy, Policy):
            return self.policy
        if self.policy == "request_level":
            return RequestLevel()
        if self.policy == "orca_best":
            return Orca()
        if self.policy == "orca_worst":
            return Orca(max_prefills=None)
        assert self.chunk is not None
        if self.policy == "sarathi":
            return Sarathi(chunk=self.chunk, min_decodes=self.batch_size - 1)
        return SarathiServe(chunk=self.chunk)

    @property
    def is_steady(self) -> bool:
        """Whether requests come as others go; else a batch starts and ends together."""
        if isinstance(self.policy, Policy):
            return not isinstance(self.policy, RequestLevel)
        return self.policy in ("sarathi", "orca_best")

    @property
    def longest(self) -> int:
        return self.prompt_len + self.num_decodes + 1

    def blocks(self, block_size: int) -> int:
        """Blocks of cache that hold the batch at its longest, with the policy's watermark."""
        blocks = self.batch_size * math.ceil(self.longest / block_size)
        return math.ceil(blocks / (1 - self.make_policy().watermark))

    @property
    def room(self) -> Room:
        kv_tokens = (self.blocks(BLOCK_SIZE) + 1) * BLOCK_SIZE
        return Room(kv_tokens, self.batch_size, self.longest + 1)


class Served(NamedTuple):
    """What serving a scenario gave; waits are those of all requests (metrics.md)."""

    seconds_per_request: float
    idle_share: float  # of the steady time
    num_iterations: int
    ttft_p50: float  # seconds
    tbt_p99: float
    replayed_share: float = 0.0  # of the iterations of the steady time, as CUDA graphs


def serve(
    executor: Executor,
    scenario: Scenario,
    *,
    num_blocks: int,
    block_size: int,
    vocab_size: int | None = None,
) -> Served | None:
    """Serve requests of `scenario`; None if the cache can't hold its batch."""
    if scenario.blocks(block_size) > num_blocks:
        return None
    batch_size = scenario.batch_size
    # The first of two batches brings the steady state about.
    num_batches = 2 if scenario.is_steady else 1
    requests = _requests(scenario, num_batches, vocab_size)
    policy = scenario.make_policy()
    engine = EngineConfig(policy, batch_size, num_blocks, block_size, scenario.longest)
    ledger = loop.serve(requests, engine, executor)
    iterations = ledger.iterations()
    served = ledger.requests()
    start = 0.0
    end = float(iterations.end.max())
    count = batch_size
    if scenario.is_steady:
        # From the admission that the last shorter request makes room for until a whole batch was
        # admitted since: B - 1 shorter requests and the first whole one start at once, and what
        # happens in between repeats with every batch.
        admitted = served.first_scheduled_time.to_numpy()
        first = 2 * batch_size - 2
        last = len(admitted) - 1
        start = admitted[first]
        end = admitted[last]
        count = last - first
    within = iterations[iterations.start.between(start, end, inclusive="left")]
    waits = latency(served)
    return Served(
        seconds_per_request=float(end - start) / count,
        idle_share=device_idle_fraction(within),
        num_iterations=len(iterations),
        ttft_p50=waits["ttft_p50"],
        tbt_p99=waits.get("tbt_p99", math.nan),  # outputs of one token have no gaps
        replayed_share=float(within.is_replayed.mean()),
    )


def request_times(cost: OperationTimes, scenario: Scenario) -> Times:
    """Seconds by operation and request: of a batch that starts and ends together, or, once as many
    come as go, of the batches between FEWER and MORE, so that filling and draining cancel.
    """
    if not scenario.is_steady:
        spent = _spent(cost, scenario, 1)
        return {name: seconds / scenario.batch_size for name, seconds in spent.items()}
    fewer = _spent(cost, scenario, FEWER)
    more = _spent(cost, scenario, MORE)
    num_requests = (MORE - FEWER) * scenario.batch_size
    times = {}
    for name in more:
        of_difference = more[name] - fewer[name]
        times[name] = of_difference / num_requests
    return times


def _requests(scenario: Scenario, num_batches: int, vocab_size: int | None = None) -> list[Request]:
    """Make `num_batches` batches of equal requests.

    For a steady state, B - 1 requests come first, whose outputs have evenly spread lengths. Without
    them all requests would start together and decode together, which the paper does not count.
    """
    prompt_len = scenario.prompt_len
    num_shorter = 0
    if scenario.is_steady:
        num_shorter = scenario.batch_size - 1
    numbers_of_decodes = []
    for i in range(1, num_shorter + 1):
        num_decodes = round(scenario.num_decodes * i / num_shorter)
        numbers_of_decodes.append(max(1, num_decodes))
    numbers_of_decodes += [scenario.num_decodes] * scenario.batch_size * num_batches
    requests = []
    for i, num_decodes in enumerate(numbers_of_decodes):
        prompt = random_prompt(i, prompt_len, vocab_size, 0)
        request = Request(i, 0.0, prompt_len, num_decodes + 1, prompt)
        requests.append(request)
    return requests


class _Unrecorded:
    """Keeps no record, which would take as long as the loop."""

    def record(self, result: StepResult, finished: list[SequenceState]) -> None: ...


def _spent(cost: OperationTimes, scenario: Scenario, num_batches: int) -> Times:
    """Seconds by operation of serving all, with a cache that holds a batch of the longest."""
    policy = scenario.make_policy()
    requests = _requests(scenario, num_batches)
    spent: Times = defaultdict(float)

    def iteration_time(batch: Batch) -> float:
        times = cost(batch)
        for name, seconds in times.items():
            spent[name] += seconds
        # Seconds may be of every draw. One schedule is served, by the clock of the undrawn model,
        # which is the first: else draws would differ by what they admit, too.
        in_draws = np.atleast_1d(sum(times.values()))
        return float(in_draws[0])

    # A block of the longest request each: nothing waits for cache, and blocks cost no time.
    num_blocks = math.ceil(scenario.batch_size / (1 - policy.watermark))
    longest = max(request.total_len for request in requests)
    engine = EngineConfig(policy, scenario.batch_size, num_blocks, block_size=longest)
    executor = SimulatedExecutor(iteration_time)
    loop.serve(requests, engine, executor, _Unrecorded())
    return spent


@dataclass(frozen=True)
class Composition:
    """What one batch is made of; the fields are the arguments of `make_batch`."""

    prefill_tokens: int = 0
    start: int = 0
    num_prefills: int = 1
    num_decodes: int = 0
    context: int = 1
    emits: bool = False

    def __post_init__(self) -> None:
        if self.prefill_tokens < 0:
            raise UserError(
                f"task.sizes: a chunk is {-self.prefill_tokens} tokens smaller than the decodes "
                "that ride on it; name a larger chunk or smaller batches"
            )

    def make(self) -> Batch:
        return make_batch(**vars(self))

    @property
    def room(self) -> Room:
        lengths = [self.context] * self.num_decodes
        if self.prefill_tokens:
            length = self.start + self.prefill_tokens
            lengths += [length] * self.num_prefills
        num_blocks = 1 + sum(math.ceil(length / BLOCK_SIZE) for length in lengths)
        return Room(
            kv_tokens=num_blocks * BLOCK_SIZE,
            batch_size=len(lengths),
            longest=max(lengths) + 1,
        )


Subject = Composition | Scenario


class Room(NamedTuple):
    """What work needs of a device: tokens of KV cache, sequences, tokens of the longest one, and of
    the largest batch (0: as many as the cache holds).
    """

    kv_tokens: int = BLOCK_SIZE
    batch_size: int = 1
    longest: int = 1
    batch_tokens: int = 0

    @classmethod
    def largest(cls, rooms: Iterable[Room]) -> Room:
        """Return the room for what needs each of `rooms`, one after the other."""
        return cls(*map(max, zip(cls(), *rooms, strict=True)))


@dataclass(frozen=True)
class Work:
    """A weighted sum of batches and of requests of scenarios. Where times cancel in the sum, their
    errors cancel, too.
    """

    terms: tuple[tuple[float, Subject], ...]

    def __add__(self, other: Work) -> Work:
        return Work(self.terms + other.terms)

    def __sub__(self, other: Work) -> Work:
        return self + -1.0 * other

    def __rmul__(self, weight: float) -> Work:
        terms = [(weight * factor, subject) for factor, subject in self.terms]
        return Work(tuple(terms))

    def times(self, times_of: Callable[[Subject], Mapping[str, Any]]) -> Times:
        """Return the sum of the seconds by operation of its batches and scenarios."""
        total: Times = defaultdict(float)
        for weight, subject in self.terms:
            for name, seconds in times_of(subject).items():
                total[name] += weight * seconds
        return total

    @property
    def is_difference(self) -> bool:
        """Whether times are subtracted."""
        return any(weight < 0 for weight, _ in self.terms)

    @property
    def batches(self) -> list[Batch]:
        return [subject.make() for _, subject in self.terms if isinstance(subject, Composition)]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens of all batches."""
        return sum(batch.num_tokens for batch in self.batches)


def batch(*, emits: bool = False, **sizes: int) -> Work:
    """Return the work of one iteration; `sizes` are fields of `Composition`."""
    return Work(((1.0, Composition(emits=emits, **sizes)),))


def chunked(prompt_len: int, chunk: int, *, emits: bool = False, **decodes: int) -> Work:
    """Return the work of a prompt in chunks of `chunk` tokens (the last may be shorter), each
    beside `decodes` (`num_decodes`, `context`); with `emits` the last one emits a token.
    """
    chunks = []
    for start in range(0, prompt_len, chunk):
        end = min(start + chunk, prompt_len)
        is_last = end == prompt_len
        chunk_with_decodes = Composition(
            prefill_tokens=end - start,
            start=start,
            emits=emits and is_last,
            **decodes,
        )
        chunks.append((1.0, chunk_with_decodes))
    return Work(tuple(chunks))


def request(scenario: Scenario) -> Work:
    """Return the work of one request of a scenario."""
    return Work(((1.0, scenario),))


def counted(scenario: Scenario) -> Work:
    """Return a request's share of single batches, decodes at their mean context.

    Under SARATHI, P / (C - (B-1)) chunks carry B-1 decodes each. Decodes that remain run in
    batches of B; prompt tokens that remain cost what they cost in whole prompts. Raises
    ValueError for other policies than that and request-level batching.
    """
    prompt_len = scenario.prompt_len
    num_decodes = scenario.num_decodes
    size = scenario.batch_size
    riders = size - 1
    context = prompt_len + num_decodes // 2  # the mean over a request's decodes
    prompts = batch(prefill_tokens=prompt_len, num_prefills=size)
    decodes = batch(num_decodes=size, context=context)
    if scenario.policy == "request_level":
        own_prompt = (1 / size) * prompts
        return own_prompt + (num_decodes / size) * decodes
    if scenario.policy != "sarathi" or scenario.chunk is None:
        raise ValueError(f"{scenario.policy} is not counted")
    chunks = chunked(prompt_len, scenario.chunk - riders, num_decodes=riders, context=context)
    num_chunks = len(chunks.terms)
    # The share of chunks that have decodes to carry; prompts or decodes remain.
    share = min(1.0, num_decodes / riders / num_chunks)
    num_remaining = num_decodes - share * num_chunks * riders
    remaining_prompts = ((1 - share) / size) * prompts
    remaining_decodes = (num_remaining / size) * decodes
    return share * chunks + remaining_prompts + remaining_decodes


def best_pd_ratio(chunk: int, batch_size: int) -> float:
    """Return the P:D at which chunks and decodes run out together, C / (B - 1) (section 4.3.3)."""
    return chunk / (batch_size - 1)
