"""Replicas that share the experts of a mixture and step together: data-parallel attention, as in
vLLM's data with expert parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from pathlib import Path

from sarathi_lab.config.checked import whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Backend, Executor, Sizes, StepResult
from sarathi_lab.engine.request import Batch, Chunk, Queues, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import CostModel
from sarathi_lab.executor.simulated.drawn_times import AS_STATED, DrawnTimes
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.experts import Experts
from sarathi_lab.extensions.cluster.cluster import Link, Schedulers
from sarathi_lab.extensions.cluster.routers import Router
from sarathi_lab.extensions.cluster.topologies import Replicas, Results
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import ModelSpec

GRAPH_STEP = 8  # tokens between the sizes of recorded CUDA graphs: vLLM's, up to 256


@dataclass(eq=False, slots=True)
class LockstepBatch(Batch):
    """The batches of one iteration of all replicas, with the chunks and the sums of all."""

    of_replicas: tuple[Batch, ...] = ()  # one each, maybe empty
    waited: float = 0.0  # seconds for which replicas waited for the slowest, of all together

    @classmethod
    def of(cls, of_replicas: tuple[Batch, ...]) -> LockstepBatch:
        """Return the batch of one iteration, with the sums over its replicas."""
        chunks: list[Chunk] = []
        for batch in of_replicas:
            chunks += batch.chunks
        joined = cls(chunks, of_replicas=of_replicas)
        # The sums that `Batch.add` keeps: all of its fields that are numbers of tokens or chunks.
        for column in fields(Batch):
            if column.type == "int":
                numbers = map(attrgetter(column.name), of_replicas)
                setattr(joined, column.name, sum(numbers))
        for batch in of_replicas:
            if batch.window:  # the same for all, as they serve one model
                joined.window = batch.window
        return joined


class LockstepReplicas(Schedulers):
    """Replicas of an engine with separate caches that run one batch each at a time, as a layer's
    experts wait for the tokens of all. The batches of one iteration are one `LockstepBatch`. A
    request stays at the replica that `router` chooses when it arrives.

    Replicas count iterations together, from 0 when all are idle (vLLM's waves), so that a
    `prefill_schedule_interval` is that of all.
    """

    def __init__(self, schedulers: Sequence[Scheduler], router: Router) -> None:
        super().__init__(schedulers)
        self._router = router
        self._step = 0
        self.waited = 0.0  # seconds for which replicas waited for others, of all together

    def add(self, request: Request) -> SequenceState:
        index = self._router(self.schedulers, request)
        return self.schedulers[index].add(request)

    def schedule(self, now: float) -> Batch | None:
        if not any(replica.running for replica in self.schedulers):
            self._step = 0
        batches = []
        for replica in self.schedulers:
            replica.shared_step = self._step
            batch = replica.schedule(now)
            # Who has nothing to do takes part with an empty batch: experts wait for all.
            batches.append(batch or Batch())
        if not any(batches):
            return None
        self._step += 1
        return LockstepBatch.of(tuple(batches))

    def advance(self, batch: Batch) -> None:
        joined = _joined(batch)
        for replica, own in zip(self.schedulers, joined.of_replicas, strict=True):
            replica.advance(own)
        joined.queues = queues_of(joined)

    def update(self, result: StepResult) -> list[SequenceState]:
        joined = _joined(result.batch)
        self.waited += joined.waited
        finished = []
        start = 0  # of the replica's tokens among those of all, which follow one another
        for replica, own in zip(self.schedulers, joined.of_replicas, strict=True):
            end = start + own.num_emits
            token_ids = result.token_ids[start:end]
            own_result = replace(result, batch=own, token_ids=token_ids)
            finished += replica.update(own_result)
            start = end
        joined.queues = queues_of(joined)
        return finished


def _joined(batch: Batch) -> LockstepBatch:
    assert isinstance(batch, LockstepBatch), "replicas in lockstep make no other batch"
    return batch


def queues_of(batch: LockstepBatch) -> Queues:
    """Sum the queues of all replicas after `batch`."""
    queues = [own.queues for own in batch.of_replicas if own.queues is not None]
    lengths = zip(*queues, strict=True)  # of one queue in all replicas, a tuple each
    return Queues(*map(sum, lengths))


@dataclass(frozen=True, kw_only=True)
class Lockstep(Replicas):
    """`num` engines in lockstep on one executor. If all of them replay a recorded CUDA graph (of at
    most `graph_tokens`), they compute as many tokens as the fullest, in whole steps.
    """

    graph_tokens: int = whole(0, minimum=0, fix="use a number of tokens such as 512, 0 for none")

    def describe(self) -> str:
        return f"{self.num} replicas in lockstep, {self.router}"

    def backend(self, backend: Backend, spec: ModelSpec) -> Backend:
        """Spread the experts of `spec` over the replicas. Raises UserError for a real device, or a
        model of which replicas share nothing.
        """
        simulated = self.simulated(backend)
        num_experts = spec.num_experts
        if not num_experts or num_experts % self.num:
            remedy = "use cluster=replicas"
            if num_experts:
                remedy = "use a number that divides them"
            raise UserError(
                f"cluster=lockstep cluster.num={self.num} shares the experts of a mixture; model "
                f"{spec.name} has {num_experts}; {remedy}"
            )
        return LockstepBackend(**vars(simulated), sharing=self)

    def executor(self, make: Callable[[], Executor], link: Link | None) -> Executor:
        return make()

    def cluster(self, schedulers: Sequence[Scheduler], executor: Executor) -> LockstepReplicas:
        return LockstepReplicas(schedulers, self.new_router())

    def results(
        self, scheduler: Schedulers, summary: Mapping[str, float], num_devices: int
    ) -> Results:
        """Return the quantities of the replicas; they are idle while they wait for the slowest."""
        assert isinstance(scheduler, LockstepReplicas), "`cluster` has made it"
        tables, quantities = super().results(scheduler, summary, num_devices)
        duration = summary["duration"]
        waited = scheduler.waited / (self.num * duration)
        # The executor's time is that of all replicas, which step together.
        busy = summary["busy_time"] / duration
        quantities["instance_idle_fraction"] = 1 - busy + waited
        return tables, quantities

    def computed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Pad the `tokens` of each replica as the experts compute them."""
        num_steps = math.ceil(max(tokens) / GRAPH_STEP)
        padded = num_steps * GRAPH_STEP
        if padded > self.graph_tokens:
            return tokens
        return [padded] * len(tokens)


class SharedExperts(Experts):
    """The `experts` of one replica's model, spread equally over the replicas of `sharing`.

    Replicas gather all tokens with the router's logits, and scatter the sums, in a ring over the
    links of the hardware. Raises UserError for unknown links.
    """

    def __init__(self, experts: Experts, sharing: Lockstep) -> None:
        vars(self).update(vars(experts))
        self.sharing = sharing
        self.seconds = cache(lambda num_tokens: self.of_all((num_tokens,)))
        self._link_rate = experts.hardware.link_rate

    def of_all(self, tokens: Sequence[int]) -> float:
        """Compute the seconds by the `tokens` of each replica, or of one if the others idle."""
        spec = self.spec
        devices = self.sharing.num
        if len(tokens) > 1:  # alone a replica replays no graph of the others' size
            tokens = self.sharing.computed(tokens)
        total = sum(tokens)
        exchange = self._exchange(total)
        if total == 0:
            return self.layer_share * exchange
        pairs = total * self.shape.top_k / devices
        chosen = spec.share_of_experts(total) * spec.num_experts / devices
        # vLLM's kernels write zeros for pairs whose experts are on other devices, and run
        # activation and sum over them.
        pairs_of_others = (devices - 1) * pairs
        padding = self.traffic(self.shape, pairs_of_others, spec.gated_ffn)
        seconds = self.time(pairs, chosen) + padding + exchange
        return self.layer_share * seconds

    def _exchange(self, num_tokens: int) -> float:
        """Compute the seconds to gather and scatter the tokens of all replicas."""
        spec = self.spec
        devices = self.sharing.num
        # A token is gathered and its sum scattered; the router's logits are gathered only.
        values_of_token = 2 * spec.hidden_size + spec.num_experts
        entries = num_tokens * values_of_token
        share_of_others = (devices - 1) / devices
        num_bytes = share_of_others * entries * self.dtype_bytes
        latency = 2 * self.hardware.link_latency  # to gather, and to scatter
        return latency + num_bytes / self._link_rate


@dataclass(frozen=True)
class LockstepBackend(SimulatedBackend):
    """Simulated devices of each replica of `sharing`, with its share of the experts."""

    sharing: Lockstep = field(kw_only=True)

    @property
    def assumptions(self) -> Sequence[str]:
        """What is taken for the exchange between replicas, which no table has."""
        rate = self.hardware.link_rate / 1e9
        latency = self.hardware.link_latency * 1e6
        return [
            f"{self.sharing.num} replicas in lockstep, which share the experts; no table has their "
            f"exchange: {rate:.3g} GB/s and {latency:.3g} µs a transfer are taken"
        ]

    def build(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> Executor:
        cost = self.cost_of(spec)
        if self.variant == AS_STATED:
            return SimulatedExecutor(
                self.slowed(lambda batch: iteration_time(cost, batch)), self.host
            )
        drawn_time = DrawnTimes(cost).iteration_time_of(self.variant)

        def drawn(batch: Batch) -> float:
            if not isinstance(batch, LockstepBatch):
                return drawn_time(batch)
            seconds = iteration_time(cost, batch)
            # The others wait for the fullest replica, so that all err as it does.
            fullest = max(batch.of_replicas, key=lambda own: own.num_tokens)
            factor = drawn_time(fullest) / cost.iteration_time(fullest)
            batch.waited *= factor
            return factor * seconds

        return SimulatedExecutor(self.slowed(drawn), self.host)

    def peaks(self) -> Peaks:
        """Return the peaks of all replicas."""
        return super().peaks().times(self.sharing.num)

    def cost_of(self, spec: ModelSpec) -> CostModel:
        if self.composes_kernels:
            raise UserError(
                "executor.cost_model=measured_kernels has times of single iterations, not of "
                "replicas; use executor.cost_model=profiled"
            )
        cost = copy(super().cost_of(spec))  # which other backends keep
        assert isinstance(cost.experts, Experts), "replicas share nothing else"
        cost.experts = SharedExperts(cost.experts, self.sharing)
        return cost

    def _held(self, spec: ModelSpec) -> ModelSpec:
        held = super()._held(spec)
        number = held.num_experts // self.sharing.num
        chosen = min(held.experts_per_token, number)  # counts for no memory
        return replace(held, num_experts=number, experts_per_token=chosen)


def iteration_time(cost: CostModel, batch: Batch) -> float:
    """Compute the seconds of a `LockstepBatch`: replicas wait for the slowest, and for the experts
    that they share, over the tokens of all. Other batches are those of one, beside idle ones.
    """
    experts = cost.experts
    layers = cost.spec.num_layers
    assert isinstance(experts, SharedExperts), "the cost model is a `LockstepBackend`'s"
    if not isinstance(batch, LockstepBatch):
        return cost.iteration_time(batch)
    times = []  # without the experts
    num_tokens = []
    for own in batch.of_replicas:
        own_experts = layers * experts.seconds(own.num_tokens)
        times.append(cost.iteration_time(own) - own_experts)
        num_tokens.append(own.num_tokens)
    slowest = max(times)
    batch.waited = sum(slowest - time for time in times)
    of_experts = layers * experts.of_all(num_tokens)
    return slowest + of_experts
