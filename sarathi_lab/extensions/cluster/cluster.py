"""Several instances of an engine on one clock, a router, and links that move the KV cache of a
sequence between instances. To the loop, `Instances` is an executor and `Cluster` a scheduler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from sarathi_lab.engine.executor import Executor, StepResult
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler

Router = Callable[[Sequence[Scheduler], Request], int]  # chooses an instance of the schedulers
WAITING_WEIGHT = 4  # of a waiting request beside a running one, as in vLLM's front end


def load_of(scheduler: Scheduler) -> int:
    """Count the requests of an instance, those without a place in its cache four times."""
    num_waiting = len(scheduler.waiting) + len(scheduler.swapped)
    return WAITING_WEIGHT * num_waiting + len(scheduler.running)


def least_loaded(schedulers: Sequence[Scheduler], request: Request) -> int:
    """The index of the first with the least load (vLLM's data-parallel front end)."""
    loads = [load_of(one) for one in schedulers]
    return loads.index(min(loads))


class Schedulers(ABC):
    """Several schedulers with the interface of one `Scheduler`."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers
        self.policy = schedulers[0].policy

    @property
    def next_time(self) -> float:
        """Seconds of the next event besides arrivals and batches; infinity without one."""
        return math.inf

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self.schedulers)

    @property
    def waiting(self) -> list[SequenceState]:
        return [sequence for scheduler in self.schedulers for sequence in scheduler.waiting]

    def check_fits(self, request: Request) -> None:
        """Raise UserError if model or cache of one are too small for `request`, even alone."""
        for scheduler in {type(one.policy): one for one in self.schedulers}.values():
            scheduler.check_fits(request)

    @abstractmethod
    def add(self, request: Request) -> SequenceState: ...

    @abstractmethod
    def schedule(self, now: float) -> Batch | None: ...

    @abstractmethod
    def advance(self, batch: Batch) -> None: ...

    @abstractmethod
    def update(self, result: StepResult) -> list[SequenceState]: ...


@dataclass(frozen=True)
class Link:
    """The link of an instance: a transfer takes `latency` seconds, then `bytes_per_token` bytes a
    cached token at `bytes_per_second`.

    With `is_serial` a transfer waits for earlier ones at both ends; else transfers do not slow each
    other.
    """

    bytes_per_second: float
    latency: float
    bytes_per_token: float
    is_serial: bool = True

    def seconds(self, num_tokens: int) -> float:
        return self.latency + num_tokens * self.bytes_per_token / self.bytes_per_second


class Transfer(NamedTuple):
    """A transfer of the cache of `num_tokens` tokens between instances `source` and `target`."""

    end: float  # seconds since the start of the run
    start: float
    requested: float  # the earliest start, with a free link
    request_id: int
    source: int
    target: int
    num_tokens: int
    num_bytes: float


class Instances:
    """Several executors as one `Executor` on one clock: the first batch to end is collected first.

    A batch runs on the executor of its `instance`. `link` moves caches between them, if any.
    """

    num_blocks = num_layers = None

    def __init__(self, executors: Sequence[Executor], link: Link | None = None) -> None:
        self.executors = executors
        self.link = link
        self.capacity = sum(executor.capacity for executor in executors)
        self.feeds_tokens = executors[0].feeds_tokens
        self.start()

    def start(self) -> None:
        for executor in self.executors:
            executor.start()
        self.now = 0.0
        self.num_in_flight = 0
        self._free_at = [0.0] * len(self.executors)  # when each one's link is idle again

    def has_room(self, instance: int) -> bool:
        """Whether the instance could take a batch now."""
        executor = self.executors[instance]
        return executor.num_in_flight < executor.capacity

    def submit(self, batch: Batch) -> None:
        executor = self.executors[batch.instance]
        executor.wait_until(self.now)
        executor.submit(batch)
        self.num_in_flight += 1

    def collect(self) -> StepResult:
        """Advance the clock to the end of the batch that ends first, of equal ones the first."""
        self.num_in_flight -= 1
        first = min(self._busy(), key=lambda executor: executor.next_end)
        result = first.collect()
        self.now = max(self.now, first.now)
        return result

    @property
    def next_end(self) -> float:
        return min(executor.next_end for executor in self._busy())

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)

    def send(self, source: int, target: int, sequence: SequenceState) -> Transfer:
        """Start to move the computed tokens of `sequence`, now or when its links are free."""
        assert self.link is not None, "a cluster that moves caches has a link"
        num_tokens, start = sequence.num_computed, self.now
        if self.link.is_serial:
            start = max(start, self._free_at[source], self._free_at[target])
        end = start + self.link.seconds(num_tokens)
        self._free_at[source] = self._free_at[target] = end
        num_bytes = num_tokens * self.link.bytes_per_token
        number = sequence.request.request_id
        return Transfer(end, start, self.now, number, source, target, num_tokens, num_bytes)

    def write_profile(self, directory: Path) -> Mapping[str, float]:
        """Nothing is profiled."""
        return {}

    def _busy(self) -> list[Executor]:
        return [executor for executor in self.executors if executor.num_in_flight]


class Cluster(Schedulers):
    """The schedulers of several instances as one.

    A request goes to the instance that `router` chooses of the first `num_entries` (all, unless
    sequences move on, as in `Handover`). While no instance has room for a batch, new requests wait
    for the next batch to end.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        instances: Instances,
        router: Router,
        num_entries: int | None = None,
    ) -> None:
        super().__init__(schedulers)
        self.instances = instances
        self.transfers: list[Transfer] = []
        self._router = router
        self._entries = schedulers[:num_entries]
        # When each had no batch; it is asked again at another time, or after a change.
        self._refused = [math.nan] * len(schedulers)

    def add(self, request: Request) -> SequenceState:
        place = self.route(request)
        self._refused[place] = math.nan
        return self.schedulers[place].add(request)

    def route(self, request: Request) -> int:
        return self._router(self._entries, request)

    def schedule(self, now: float) -> Batch | None:
        """Make a batch for an instance that has room at time `now` (seconds), or None."""
        for place, scheduler in enumerate(self.schedulers):
            if self._refused[place] != now and self.instances.has_room(place):
                if (batch := scheduler.schedule(now)) is not None:
                    batch.instance = place
                    return batch
                self._refused[place] = now
        return None

    def advance(self, batch: Batch) -> None:
        self.schedulers[batch.instance].advance(batch)
        self._refused[batch.instance] = math.nan

    def update(self, result: StepResult) -> list[SequenceState]:
        place = result.batch.instance
        self._refused[place] = math.nan
        return self.schedulers[place].update(result)


class Handover(Cluster):
    """A cluster whose first `num_entries` instances compute prompts and emit first tokens; then a
    sequence moves to one of the others, which decode (DistServe, arXiv 2401.09670; Splitwise,
    arXiv 2311.18677).

    The least loaded instance with room in its cache takes it; until there is one, the sequence
    keeps its blocks, so that prompts wait, too. Its cache moves over the link as a whole, and its
    blocks are free when it has arrived. There it is admitted like a swapped sequence, before
    waiting ones, and preempted as the scheduler does.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        instances: Instances,
        router: Router,
        num_entries: int,
    ) -> None:
        super().__init__(schedulers, instances, router, num_entries)
        self._num_entries = num_entries
        self._leaving: deque[tuple[int, SequenceState]] = deque()  # with their instances
        # A heap of transfers, each with its sequence before and after.
        self._moving: list[tuple[Transfer, SequenceState, SequenceState]] = []
        self._coming = [0] * len(schedulers)  # tokens in transfer to each
        self._num_coming = [0] * len(schedulers)

    @property
    def has_work(self) -> bool:
        return bool(self._leaving or self._moving) or super().has_work

    @property
    def next_time(self) -> float:
        return self._moving[0][0].end if self._moving else math.inf

    def schedule(self, now: float) -> Batch | None:
        while self._moving and self._moving[0][0].end <= now:
            self._arrive(*heappop(self._moving))
        self._send_off()
        return super().schedule(now)

    def update(self, result: StepResult) -> list[SequenceState]:
        finished, batch = super().update(result), result.batch
        self.move_on(batch.instance, result)
        assert batch.queues is not None, "it is booked"
        num_running = len(self.schedulers[batch.instance].running)
        batch.queues = batch.queues._replace(num_running=num_running)
        return finished

    def move_on(self, place: int, result: StepResult) -> None:
        """Let sequences leave the instance after this batch."""
        if place < self._num_entries:
            for sequence, *_, emits_token in result.batch.chunks:
                if emits_token and not sequence.is_finished:
                    self.schedulers[place].running.leave(sequence)
                    self._leaving.append((place, sequence))

    def target(self, sequence: SequenceState, places: Sequence[int]) -> int | None:
        """The least loaded of `places` with room for `sequence` and those in transfer."""
        fitting = [place for place in places if self._fits(sequence, place)]
        return min(fitting, key=self._load, default=None)

    def _load(self, place: int) -> int:
        return load_of(self.schedulers[place]) + self._num_coming[place]

    def _fits(self, sequence: SequenceState, place: int) -> bool:
        scheduler = self.schedulers[place]
        num_tokens = sequence.num_known + self._coming[place]
        num_others = len(scheduler.running) + len(scheduler.swapped) + self._num_coming[place]
        watermark = scheduler.policy.watermark
        fits = scheduler.blocks.can_hold(num_tokens, watermark)
        return num_others < scheduler.max_num_seqs and fits

    def _send_off(self) -> None:
        """Start the transfers of waiting sequences that can start, in order."""
        places = range(self._num_entries, len(self.schedulers))
        while self._leaving:
            source, sequence = self._leaving[0]
            if (target := self.target(sequence, places)) is None:
                return
            self._leaving.popleft()
            self._send(source, target, sequence)

    def _send(self, source: int, target: int, sequence: SequenceState) -> None:
        transfer = self.instances.send(source, target, sequence)
        self.transfers.append(transfer)
        self._coming[target] += sequence.num_known
        self._num_coming[target] += 1
        heappush(self._moving, (transfer, sequence, moved(sequence)))

    def _arrive(self, transfer: Transfer, before: SequenceState, after: SequenceState) -> None:
        source, target = transfer.source, transfer.target
        self._coming[target] -= after.num_known
        self._num_coming[target] -= 1
        self.schedulers[source].blocks.free(before)
        self.schedulers[target].enqueue_transferred(after)
        self._refused[source] = self._refused[target] = math.nan


def moved(sequence: SequenceState) -> SequenceState:
    """Copy `sequence` without its blocks, for another instance."""
    return replace(
        sequence,
        block_ids=[],
        host_block_ids=[],
        num_published=0,
        blocks_are_neighbours=True,
    )
