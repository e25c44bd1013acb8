"""What a cluster is made of (config group `cluster`): how many instances, and who moves where."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sarathi_lab.config.checked import check_fields, flag, number, one_of, whole
from sarathi_lab.engine.admission import SchedulingPolicy, with_budget
from sarathi_lab.engine.cluster import Cluster, Handover, Instances, Link
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.routers import Routing
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.engine.taichi import TaiChi

INSTANCES = "use a number of engines such as 2"
TOKENS = "use the tokens of an iteration such as 2048, or null for the policy's own"
RATE = "use bytes per second, or null for the hardware's"
OBJECTIVE = "name an objective with both bounds, such as slo=mlperf-llama3-8b, or seconds"
SECONDS = "use seconds, or null for the hardware's"
AnyPolicy = SchedulingPolicy[Scheduler]
MakeScheduler = Callable[[AnyPolicy], Scheduler]


class Topology:
    """One engine, and the base of several. Sizes of batch and cache are those of an instance."""

    num_instances = 1

    def describe(self) -> str:
        """In words, such as "2 prefill and 2 decode instances"; empty for one engine."""
        return ""

    def executor(self, make: Callable[[], Executor], link: Link | None) -> Executor:
        """What runs the batches: of several instances their `Instances`."""
        return make()

    def scheduler(self, policy: AnyPolicy, make: MakeScheduler, executor: Executor) -> Any:
        """The scheduler for `executor`, which this topology has made."""
        return make(policy)

    def policies(self, policy: AnyPolicy) -> Sequence[AnyPolicy]:
        """The policy of each instance."""
        return [policy]


SINGLE = Topology()


@dataclass(frozen=True, kw_only=True)
class Several(Topology):
    """Several engines. Raises UserError for settings that none could have."""

    def __post_init__(self) -> None:
        check_fields(self, "cluster.")
        if isinstance(self, Routing):
            self.check_routing()

    @property
    def budgets(self) -> Sequence[int | None]:
        """Of each instance the tokens of an iteration; None: the policy's own."""
        return [None] * self.num_instances

    def executor(self, make: Callable[[], Executor], link: Link | None) -> Executor:
        return Instances([make() for _ in range(self.num_instances)], link)

    def scheduler(self, policy: AnyPolicy, make: MakeScheduler, executor: Executor) -> Cluster:
        assert isinstance(executor, Instances), "it was made by this topology"
        return self.cluster([make(own) for own in self.policies(policy)], executor)

    def policies(self, policy: AnyPolicy) -> Sequence[AnyPolicy]:
        """The policy of each instance; one that never cuts prompts has no budget to change."""
        cuts = getattr(policy, "budget_field", None) is not None
        return [with_budget(policy, own) if own and cuts else policy for own in self.budgets]

    @abstractmethod
    def cluster(self, schedulers: Sequence[Scheduler], instances: Instances) -> Cluster: ...


@dataclass(frozen=True, kw_only=True)
class Replicas(Several, Routing):
    """`num` engines, each with requests of its own from the first to the last token."""

    num: int = whole(2, minimum=1, fix=INSTANCES)

    @property
    def num_instances(self) -> int:  # type: ignore[override]
        return self.num

    def describe(self) -> str:
        return f"{self.num} replicas, {self.router}"

    def cluster(self, schedulers: Sequence[Scheduler], instances: Instances) -> Cluster:
        return Cluster(schedulers, instances, self.make_router())


@dataclass(frozen=True, kw_only=True)
class Linked(Several):
    """`prefill` engines and `decode` engines, between which sequences move.

    The KV cache moves over `link`: "nvlink", the links within a node, or "network", those between
    nodes, as the hardware file states both for a device, times the devices of an instance; or at
    `bytes_per_second` for an instance, with `latency` seconds before each transfer. With `serial`
    an instance sends or receives one cache at a time. `prefill_chunk` and `decode_chunk` are tokens
    of an iteration in place of the policy's.
    """

    prefill: int = whole(1, minimum=1, fix=INSTANCES)
    decode: int = whole(1, minimum=1, fix=INSTANCES)
    prefill_chunk: int | None = whole(None, minimum=1, fix=TOKENS)
    decode_chunk: int | None = whole(None, minimum=1, fix=TOKENS)
    link: str = one_of("nvlink", valid=("nvlink", "network"))
    bytes_per_second: float | None = number(None, above=0, fix=RATE)
    latency: float | None = number(None, minimum=0, fix=SECONDS)
    serial: bool = flag(True)

    @property
    def num_instances(self) -> int:  # type: ignore[override]
        return self.prefill + self.decode

    @property
    def budgets(self) -> Sequence[int | None]:
        return [self.prefill_chunk] * self.prefill + [self.decode_chunk] * self.decode

    def describe(self) -> str:
        return f"{self.prefill} prefill and {self.decode} decode instances over {self.link}"


@dataclass(frozen=True, kw_only=True)
class Disaggregated(Linked, Routing):
    """Prompts on some engines, decodes on the others (`Handover`); `router` chooses the former."""

    def cluster(self, schedulers: Sequence[Scheduler], instances: Instances) -> Cluster:
        return Handover(schedulers, instances, self.make_router(), self.prefill)


@dataclass(frozen=True, kw_only=True)
class PrefillAndDecodeHeavy(Linked):
    """`TaiChi`: prompts and decodes everywhere, in large chunks on `prefill` engines and in small
    ones on the others; requests move by the slack of their objectives `ttft` and `tpot` (seconds).
    """

    ttft: float = number(above=0, fix=OBJECTIVE)
    tpot: float = number(above=0, fix=OBJECTIVE)

    def cluster(self, schedulers: Sequence[Scheduler], instances: Instances) -> Cluster:
        return TaiChi(schedulers, instances, self.prefill, self.ttft, self.tpot)
