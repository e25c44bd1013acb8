"""Work to be timed as data: batch compositions, scenarios, and weighted sums of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.experiment.scenario import Scenario

BLOCK_SIZE = 16  # tokens


@dataclass(frozen=True)
class Composition:
    """What one batch is made of; the fields are the arguments of `make_batch`."""

    prefill_tokens: int = 0
    start: int = 0
    num_prefills: int = 1
    num_decodes: int = 0
    context: int = 1
    emits: bool = False

    def make(self) -> Batch:
        return make_batch(**vars(self))

    @property
    def room(self) -> Room:
        end = self.start + self.prefill_tokens
        ends = [self.context] * self.num_decodes
        ends += [end] * (self.num_prefills if self.prefill_tokens else 0)
        num_blocks = sum(-(-tokens // BLOCK_SIZE) for tokens in ends)
        return Room((num_blocks + 1) * BLOCK_SIZE, len(ends), max(ends) + 1)


Subject = Composition | Scenario


class Room(NamedTuple):
    """What work needs of a device: tokens of KV cache, sequences, tokens of the longest one."""

    kv_tokens: int = BLOCK_SIZE
    batch_size: int = 1
    longest: int = 1

    @classmethod
    def of(cls, subjects: Iterable[Subject]) -> Room:
        """Return the room for each of `subjects`, one after the other."""
        rooms = [one.room if isinstance(one, Composition) else _room(one) for one in subjects]
        return cls(*map(max, zip(cls(), *rooms, strict=True)))


def _room(scenario: Scenario) -> Room:
    kv_tokens = (scenario.blocks(BLOCK_SIZE) + 1) * BLOCK_SIZE
    return Room(kv_tokens, scenario.batch_size, scenario.longest + 1)


@dataclass(frozen=True)
class WorkSum:
    """A weighted sum of batches and of requests of scenarios. Times that cancel in it do so with
    their errors.
    """

    parts: tuple[tuple[float, Subject], ...]

    def __add__(self, other: WorkSum) -> WorkSum:
        return WorkSum(self.parts + other.parts)

    def __sub__(self, other: WorkSum) -> WorkSum:
        return self + -1.0 * other

    def __rmul__(self, weight: float) -> WorkSum:
        return WorkSum(tuple((weight * own, subject) for own, subject in self.parts))

    @property
    def subjects(self) -> Iterator[Subject]:
        """The batches and scenarios that a device runs: a request's time is counted there."""
        for _, subject in self.parts:
            if isinstance(subject, Composition):
                yield subject
            else:
                yield from counted(subject).subjects

    @property
    def batches(self) -> list[Batch]:
        return [subject.make() for _, subject in self.parts if isinstance(subject, Composition)]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens of all batches."""
        return sum(batch.num_tokens for batch in self.batches)


def batch(*, emits: bool = False, **sizes: int) -> WorkSum:
    """Return the work of one iteration; `sizes` are fields of `Composition`."""
    return WorkSum(((1.0, Composition(emits=emits, **sizes)),))


def chunked(prompt_len: int, chunk: int, *, emits: bool = False, **decodes: int) -> WorkSum:
    """Return the work of a prompt in chunks of `chunk` tokens (the last may be shorter), each
    beside `decodes` (`num_decodes`, `context`); with `emits` the last one emits a token.
    """
    ends = [min(start + chunk, prompt_len) for start in range(0, prompt_len, chunk)]
    chunks = [
        Composition(end - start, start, emits=emits and end == prompt_len, **decodes)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return WorkSum(tuple((1.0, one) for one in chunks))


def request(scenario: Scenario) -> WorkSum:
    """Return the work of one request of a scenario."""
    return WorkSum(((1.0, scenario),))


def counted(scenario: Scenario) -> WorkSum:
    """Return a request's share of single batches, decodes at their mean context.

    Under SARATHI P / (C - (B-1)) chunks each carry B-1 decodes. Left over are decodes in full
    batches of B, or else prompt tokens at the price of whole prompts. Raises ValueError for other
    policies than that and request-level batching.
    """
    prompt_len, num_decodes = scenario.prompt_len, scenario.num_decodes
    size, riders = scenario.batch_size, scenario.batch_size - 1
    context = prompt_len + num_decodes // 2
    prompts = batch(prefill_tokens=prompt_len, num_prefills=size)
    decodes = batch(num_decodes=size, context=context)
    if scenario.policy == "request_level":
        return (1 / size) * prompts + (num_decodes / size) * decodes
    if scenario.policy != "sarathi" or scenario.chunk is None:
        raise ValueError(f"{scenario.policy} is not counted")
    chunks = chunked(prompt_len, scenario.chunk - riders, num_decodes=riders, context=context)
    # The share of chunks that have decodes to carry; what is left over of either.
    share = min(1.0, num_decodes / riders / len(chunks.parts))
    left = num_decodes - share * len(chunks.parts) * riders
    return share * chunks + ((1 - share) / size) * prompts + (left / size) * decodes


def best_pd_ratio(chunk: int, batch_size: int) -> float:
    """Return the P:D at which chunks and decodes run out together, C / (B - 1) (section 4.3.3)."""
    return chunk / (batch_size - 1)
