"""Clusters (config group `cluster`): how many instances, and which requests move where."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pandas as pd

from sarathi_lab.config.checked import (
    check_fields,
    flag,
    number,
    one_of,
    refuse_unread,
    share,
    whole,
)
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.config import MakeScheduler, Topology
from sarathi_lab.engine.executor import Backend, Executor
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.extensions.cluster.cluster import (
    Cluster,
    Handover,
    Instances,
    Link,
    Router,
    Transfer,
    least_loaded,
)
from sarathi_lab.extensions.cluster.taichi import TaiChi
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.serving_metrics import quantiles

INSTANCES = "use a number of engines such as 2"
TOKENS = "use the tokens of an iteration such as 2048, or null for the policy's"
RATE = "use bytes per second, or null for the hardware's"
OBJECTIVE = "name an objective with both bounds, such as slo=mlperf-llama3-8b, or seconds"
SECONDS = "use seconds, or null for the hardware's"


def round_robin() -> Router:
    """Make a router that takes instances in turn."""
    turns = count()
    return lambda schedulers, request: next(turns) % len(schedulers)


def cached_tokens(scheduler: Scheduler, sequence: SequenceState) -> int:
    """Tokens at the start of `sequence` that the instance has in its prefix cache."""
    prefix = scheduler.blocks.prefix
    return 0 if prefix is None else prefix.find(sequence) * prefix.block_size


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Settings of a router by its name: "round_robin", "least_loaded" or "prefix_aware".

    "prefix_aware" takes the instance with the longest cached prefix of the prompt; the least loaded
    one if that is no more than the share `cache_threshold` of the prompt, or if instances are out
    of balance: their requests differ by more than `balance_abs_threshold`, and the most are more
    than `balance_rel_threshold` times the fewest. That is SGLang's cache-aware router with its
    defaults; it estimates what an instance has cached, here the cache is queried.
    """

    router: str = one_of("least_loaded", valid=("round_robin", "least_loaded", "prefix_aware"))
    cache_threshold: float = share(0.3, fix="use a share of the prompt such as 0.3")
    balance_abs_threshold: int = whole(64, minimum=0, fix="use a number of requests such as 64")
    balance_rel_threshold: float = number(1.5, minimum=1, fix="use a ratio from 1, such as 1.5")

    def check_routing(self) -> None:
        """Raise UserError for settings that the router does not read."""
        if self.router != "prefix_aware":
            names = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")
            why = f" on cluster.router={self.router}; drop it, or use cluster.router=prefix_aware"
            refuse_unread(self, names, why, "cluster.")

    def make_router(self) -> Router:
        """A router for one run."""
        if self.router == "prefix_aware":
            return self._longest_prefix
        return round_robin() if self.router == "round_robin" else least_loaded

    def _longest_prefix(self, schedulers: Sequence[Scheduler], request: Request) -> int:
        numbers = [len(one.waiting) + len(one.swapped) + len(one.running) for one in schedulers]
        fewest, most = min(numbers), max(numbers)
        is_unequal = most - fewest > self.balance_abs_threshold
        if not (is_unequal and most > self.balance_rel_threshold * fewest):
            probe = SequenceState(request, order=-1)  # shares block keys between instances
            cached = [cached_tokens(one, probe) for one in schedulers]
            if max(cached) > self.cache_threshold * request.prompt_len:
                longest = [i for i, tokens in enumerate(cached) if tokens == max(cached)]
                return min(longest, key=numbers.__getitem__)
        return least_loaded(schedulers, request)


@dataclass(frozen=True, kw_only=True)
class Several(Topology):
    """Several simulated engines. Raises UserError for settings that none could have."""

    is_single = False

    def __post_init__(self) -> None:
        check_fields(self, "cluster.")
        if isinstance(self, Routing):
            self.check_routing()

    @property
    def budgets(self) -> Sequence[int | None]:
        """Tokens of an iteration of each instance; None: the policy's."""
        return [None] * self.num_instances

    def check(
        self, policy: Any, backend: Backend, spec: ModelSpec, *, shares_prefixes: bool
    ) -> None:
        named, fix = f"a cluster of {self.describe()}", "or use cluster=single"
        if not isinstance(backend, SimulatedBackend):
            raise UserError(f"{named} is simulated only; add executor=simulated, {fix}")
        if (stages := backend.num_stages) > 1:
            raise UserError(
                f"executor.pipeline_parallel={stages}: the instances of {named} are no pipelines; "
                f"use executor.tensor_parallel, {fix}"
            )
        if getattr(self, "router", "") == "prefix_aware" and not shares_prefixes:
            raise UserError(
                "cluster.router=prefix_aware has no effect as nothing is cached; add "
                "cache.prefix=true"
            )

    def executor(self, make: Callable[[], Executor], link: Link | None) -> Executor:
        return Instances([make() for _ in range(self.num_instances)], link)

    def results(
        self, scheduler: Cluster, summary: Mapping[str, float], num_devices: int
    ) -> tuple[dict[str, pd.DataFrame], dict[str, float]]:
        moves = pd.DataFrame(scheduler.transfers, columns=list(Transfer._fields))
        found = transfer_metrics(moves)
        found |= cluster_metrics(summary, self.num_instances, num_devices)
        return {"transfers.parquet": moves} if len(moves) else {}, found

    def scheduler(self, policy: Policy, make: MakeScheduler, executor: Executor) -> Cluster:
        assert isinstance(executor, Instances), "it was made by this topology"
        return self.cluster([make(each) for each in self.policies(policy)], executor)

    def policies(self, policy: Policy) -> Sequence[Policy]:
        """The policy of each instance; one that never cuts prompts has no budget to change."""
        cuts = policy.budget_field is not None
        return [policy.with_budget(one) if one and cuts else policy for one in self.budgets]

    @abstractmethod
    def cluster(self, schedulers: Sequence[Scheduler], instances: Instances) -> Cluster: ...


@dataclass(frozen=True, kw_only=True)
class Replicas(Several, Routing):
    """`num` engines, each of which serves its requests from the first to the last token."""

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

    def check(
        self, policy: Any, backend: Backend, spec: ModelSpec, *, shares_prefixes: bool
    ) -> None:
        super().check(policy, backend, spec, shares_prefixes=shares_prefixes)
        assert isinstance(backend, SimulatedBackend), "others are refused"
        if backend.host.overlaps:
            raise UserError(
                f"host={backend.host.name} schedules ahead, but sequences leave an engine at "
                "their first token; use host=none or another one that does not"
            )
        for name in ("prefill_chunk", "decode_chunk"):
            if (budget := getattr(self, name)) is not None and policy.budget_field is None:
                raise UserError(
                    f"cluster.{name}={budget} has no effect on policy {policy.name}, which never "
                    "cuts prompts; drop it"
                )
        self.link_between(backend, spec)  # an unknown rate is refused at once

    def link_between(self, backend: Backend, spec: ModelSpec) -> Link:
        """The link of an instance on `backend`, each of whose devices sends its part of the KV
        cache of `spec`. Raises UserError for an unknown rate.
        """
        assert isinstance(backend, SimulatedBackend), "others are refused"
        hardware = backend.hardware
        name = {"nvlink": "link_bytes_per_second", "network": "network_bytes_per_second"}
        stated = getattr(hardware, name[self.link])
        if self.bytes_per_second is None and stated is None:
            raise UserError(
                f"hardware {hardware.name} has no {name[self.link]}, which "
                f"cluster.link={self.link} needs; add cluster.bytes_per_second"
            )
        rate = self.bytes_per_second
        if rate is None:
            rate = backend.num_devices * hardware.link_efficiency * stated
        latency = hardware.link_latency if self.latency is None else self.latency
        return Link(rate, latency, spec.kv_bytes_per_token(backend.dtype_bytes), self.serial)


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


def cluster_metrics(
    summary: Mapping[str, float], num_instances: int, num_devices: int
) -> dict[str, float]:
    """Return the quantities of several engines, from the `summary` of all of them."""
    rates = ("throughput", "output_throughput", "request_throughput", "goodput")
    return {
        "num_devices": float(num_devices),
        "instance_idle_fraction": 1 - summary["busy_time"] / (num_instances * summary["duration"]),
        **{f"{name}_per_device": summary[name] / num_devices for name in rates if name in summary},
    }


def transfer_metrics(transfers: pd.DataFrame) -> dict[str, float]:
    """Return the quantities of cache transfers; their time includes the wait for the link."""
    if transfers.empty:
        return {}
    seconds = transfers.end - transfers.requested
    num_bytes = float(transfers.num_bytes.sum())
    moved = {"num_transfers": float(len(transfers)), "transfer_bytes": num_bytes}
    return {**moved, **quantiles("transfer_time", seconds)}
