"""Several instances of an engine on one clock, and links that move the KV cache of a sequence
between instances. To the loop, `Instances` is an executor and `Cluster` a scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from sarathi_lab.engine.executor import Executor, StepResult
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.cluster.routers import WAITING_WEIGHT, Router, load_of


@dataclass(frozen=True)
class Link:
    """The link of an instance: a transfer takes `latency` seconds, then its bytes at
    `bytes_per_second`. It waits for earlier ones at both ends.

    The bytes are `bytes_per_token` of each cached token, `window_bytes_per_token` of the newest
    `window` tokens, which layers with a window keep, and `state_bytes` of a sequence.
    """

    bytes_per_second: float
    latency: float
    bytes_per_token: float
    state_bytes: float = 0
    window: int = 0
    window_bytes_per_token: float = 0

    def num_bytes(self, num_tokens: int) -> float:
        num_in_window = min(num_tokens, self.window)
        in_window = num_in_window * self.window_bytes_per_token
        return num_tokens * self.bytes_per_token + in_window + self.state_bytes

    def seconds(self, num_tokens: int) -> float:
        num_bytes = self.num_bytes(num_tokens)
        return self.latency + num_bytes / self.bytes_per_second


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

    num_blocks = None

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
        self.wait_until(first.now)
        return result

    @property
    def next_end(self) -> float:
        return min(executor.next_end for executor in self._busy())

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)

    def send(self, source: int, target: int, sequence: SequenceState) -> Transfer:
        """Start to move the computed tokens of `sequence`, now or when its links are free."""
        assert self.link is not None, "a cluster that moves caches has a link"
        num_tokens = sequence.num_computed
        start = max(self.now, self._free_at[source], self._free_at[target])
        end = start + self.link.seconds(num_tokens)
        self._free_at[source] = end
        self._free_at[target] = end
        return Transfer(
            end,
            start,
            requested=self.now,
            request_id=sequence.request.request_id,
            source=source,
            target=target,
            num_tokens=num_tokens,
            num_bytes=self.link.num_bytes(num_tokens),
        )

    def write_profile(self, directory: Path) -> None:
        """Nothing is profiled."""

    def _busy(self) -> list[Executor]:
        return [executor for executor in self.executors if executor.num_in_flight]


class Schedulers:
    """Several schedulers with the interface of one `Scheduler`, but for `add`, `schedule`,
    `advance` and `update`, in which subclasses differ.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers
        self.policy = schedulers[0].policy
        self.transfers: list[Transfer] = []  # of caches between instances

    @property
    def next_time(self) -> float:
        """Seconds of the next event besides arrivals and batches; infinity without one."""
        return math.inf

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self.schedulers)

    @property
    def waiting(self) -> list[SequenceState]:
        waiting: list[SequenceState] = []
        for scheduler in self.schedulers:
            waiting += scheduler.waiting
        return waiting

    def warm(self, request: Request) -> None:
        """Let each engine's prefix cache have a prompt."""
        for scheduler in self.schedulers:
            scheduler.warm(request)

    def check_fits(self, request: Request) -> None:
        """Raise UserError if model or cache of one are too small for `request`, even alone."""
        # Instances of one policy have the same cache.
        by_policy = {type(scheduler.policy): scheduler for scheduler in self.schedulers}
        for scheduler in by_policy.values():
            scheduler.check_fits(request)


class Cluster(Schedulers):
    """The schedulers of several instances as one, between which subclasses move sequences.

    A request goes to the instance that `router` chooses of the first `num_entries` (all, unless
    sequences move on). While no instance has room for a batch, new requests wait for the next batch
    to end. A sequence moves with its whole cache over the link, and its blocks are free when that
    has arrived. There it runs as soon as it finds room, and is preempted as others are.
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
        self.num_entries = len(schedulers)
        if num_entries is not None:
            self.num_entries = num_entries
        self._router = router
        # When each last had no batch: not asked again at that time, unless something changes (NaN).
        self._no_batch_at = [math.nan] * len(schedulers)
        self._leaving: deque[tuple[int, SequenceState]] = deque()  # with their instances
        # A heap of transfers, each with its sequence before and after.
        self._moving: list[tuple[Transfer, SequenceState, SequenceState]] = []
        # By instance, sequences that have arrived there and have no room yet.
        self._arrived: list[deque[SequenceState]] = [deque() for _ in schedulers]

    @property
    def has_work(self) -> bool:
        is_moving = self._leaving or self._moving or any(self._arrived)
        return bool(is_moving) or super().has_work

    @property
    def next_time(self) -> float:
        if not self._moving:
            return math.inf
        first_transfer, _, _ = self._moving[0]
        return first_transfer.end

    def add(self, request: Request) -> SequenceState:
        """Give a request to the instance that the router names."""
        entries = self.schedulers[: self.num_entries]
        instance = self._router(entries, request)
        self._no_batch_at[instance] = math.nan
        return self.schedulers[instance].add(request)

    def schedule(self, now: float) -> Batch | None:
        """Make a batch for an instance that has room at time `now` (seconds), or None."""
        # Arrivals first: they free blocks at their source, which its next batch may need.
        while self.next_time <= now:
            self._arrive(*heappop(self._moving))
        while self._leaving and self.send(*self._leaving[0]):
            self._leaving.popleft()
        for instance, scheduler in enumerate(self.schedulers):
            # Asked at this time already, and nothing has changed since.
            was_asked = self._no_batch_at[instance] == now
            if was_asked or not self.instances.has_room(instance):
                continue
            arrived = self._arrived[instance]
            while arrived and scheduler.receive(arrived[0]):
                arrived.popleft()
            batch = scheduler.schedule(now)
            if batch is not None:
                batch.instance = instance
                return batch
            self._no_batch_at[instance] = now
        return None

    def advance(self, batch: Batch) -> None:
        instance = batch.instance
        self.schedulers[instance].advance(batch)
        self._no_batch_at[instance] = math.nan

    def update(self, result: StepResult) -> list[SequenceState]:
        batch = result.batch
        instance = batch.instance
        scheduler = self.schedulers[instance]
        self._no_batch_at[instance] = math.nan
        finished = scheduler.update(result)
        self.move_on(instance, result)
        assert batch.queues is not None, "the scheduler has updated it"
        # What has arrived over a link waits as well.
        num_arrived = len(self._arrived[instance])
        num_waiting = batch.queues.num_waiting + num_arrived
        num_running = len(scheduler.running)
        batch.queues = batch.queues._replace(num_running=num_running, num_waiting=num_waiting)
        return finished

    def move_on(self, instance: int, result: StepResult) -> None:
        """Let sequences leave the instance after this batch."""

    def send(self, source: int, sequence: SequenceState) -> bool:
        """Start to move `sequence` to the least loaded instance behind the entries with room for it
        and those that are on their way; False if there is none.
        """
        loads: dict[int, int] = {}
        for instance in range(self.num_entries, len(self.schedulers)):
            coming = self._coming_to(instance)
            if self._fits([sequence, *coming], instance):
                loads[instance] = self._load_of(instance) + len(coming)
        if not loads:
            return False
        target = min(loads, key=loads.__getitem__)
        transfer = self.instances.send(source, target, sequence)
        self.transfers.append(transfer)
        after = moved(sequence)
        heappush(self._moving, (transfer, sequence, after))
        return True

    def _load_of(self, instance: int) -> int:
        """Count the requests of an instance, as `load_of`; those that have arrived wait, too."""
        num_arrived = len(self._arrived[instance])
        scheduler = self.schedulers[instance]
        return load_of(scheduler) + WAITING_WEIGHT * num_arrived

    def _coming_to(self, instance: int) -> list[SequenceState]:
        """The sequences in transfer to an instance."""
        return [after for transfer, _, after in self._moving if transfer.target == instance]

    def _fits(self, sequences: Sequence[SequenceState], instance: int) -> bool:
        """Whether an instance has places and cache for all of `sequences`."""
        scheduler = self.schedulers[instance]
        num_arrived = len(self._arrived[instance])
        num_seqs = len(scheduler.running) + num_arrived + len(sequences)
        if num_seqs > scheduler.max_num_seqs:
            return False
        num_tokens = sum(sequence.num_known for sequence in sequences)
        watermark = scheduler.policy.watermark
        return scheduler.blocks.can_hold(num_tokens, watermark)

    def _arrive(self, transfer: Transfer, before: SequenceState, after: SequenceState) -> None:
        source = transfer.source
        target = transfer.target
        self.schedulers[source].blocks.free(before)
        self._arrived[target].append(after)
        self._no_batch_at[source] = math.nan
        self._no_batch_at[target] = math.nan


class Handover(Cluster):
    """A cluster whose first `num_entries` instances compute prompts and emit first tokens; then a
    sequence moves to one of the others, which decode (DistServe, arXiv 2401.09670; Splitwise,
    arXiv 2311.18677). Until one has room, it keeps its blocks, so that prompts wait, too.
    """

    def move_on(self, instance: int, result: StepResult) -> None:
        if instance >= self.num_entries:
            return
        for sequence, *_, emits_token in result.batch.chunks:
            if emits_token and not sequence.is_finished:
                self.schedulers[instance].running.leave(sequence)
                self._leaving.append((instance, sequence))


def moved(sequence: SequenceState) -> SequenceState:
    """Copy `sequence` without its blocks, for another instance."""
    return replace(sequence, block_ids=[], num_published=0)
