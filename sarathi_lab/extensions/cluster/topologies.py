"""Several simulated engines on one clock (config group `cluster`): how many, and which requests
move where.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.config.checked import check_fields, one_of, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.config import MakeScheduler, Topology
from sarathi_lab.engine.executor import Backend, Executor
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.extensions.cluster.cluster import (
    Cluster,
    Handover,
    Instances,
    Link,
    Schedulers,
    Transfer,
)
from sarathi_lab.extensions.cluster.routers import ROUTERS, Router
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.serving_metrics import quantiles

INSTANCES = "use a number of engines such as 2"
TOKENS = "use the tokens of an iteration such as 2048, or null for the policy's"
# The fields of a hardware file with the rate of a device.
LINKS = {"nvlink": "link_bytes_per_second", "network": "network_bytes_per_second"}
RATES = ("throughput", "output_throughput", "request_throughput", "goodput")
# Tables by their file's name, and quantities by name.
Results = tuple[dict[str, pd.DataFrame], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Several(Topology):
    """Several simulated engines. Raises UserError for settings that none could have."""

    is_single = False
    router = ""  # a name of `ROUTERS`, where there is a choice

    def __post_init__(self) -> None:
        check_fields(self, "cluster.")

    def check(
        self, policy: Policy, backend: Backend, spec: ModelSpec, *, shares_prefixes: bool
    ) -> None:
        stages = self.simulated(backend).num_stages
        if stages > 1:
            raise UserError(
                f"executor.pipeline_parallel={stages}: the instances of a cluster of "
                f"{self.describe()} are no pipelines; use executor.tensor_parallel, or use "
                "cluster=single"
            )
        if self.router == "prefix_aware" and not shares_prefixes:
            raise UserError(
                "cluster.router=prefix_aware has no effect as nothing is cached; add "
                "cache.prefix=true"
            )

    def simulated(self, backend: Backend) -> SimulatedBackend:
        """Return `backend`. Raises UserError for a real device."""
        if isinstance(backend, SimulatedBackend):
            return backend
        raise UserError(
            f"a cluster of {self.describe()} is simulated only; add executor=simulated, or use "
            "cluster=single"
        )

    def policies(self, policy: Policy) -> Sequence[Policy]:
        return [policy] * self.num_instances

    def executor(self, make: Callable[[], Executor], link: Link | None) -> Executor:
        executors = [make() for _ in range(self.num_instances)]
        return Instances(executors, link)

    def scheduler(self, policy: Policy, make: MakeScheduler, executor: Executor) -> Schedulers:
        schedulers = list(map(make, self.policies(policy)))
        return self.cluster(schedulers, executor)

    def new_router(self) -> Router:
        """Make the router of a run, which may count its requests."""
        return ROUTERS[self.router]()

    @abstractmethod
    def cluster(self, schedulers: Sequence[Scheduler], executor: Executor) -> Schedulers:
        """Make the scheduler of `schedulers` for what the method `executor` has made."""

    def results(
        self, scheduler: Schedulers, summary: Mapping[str, float], num_devices: int
    ) -> Results:
        """Return the table of transfers, if any, and the quantities of the instances and of the
        transfers, whose time includes the wait for the link.
        """
        # The time is summed over the instances.
        instance_seconds = self.num_instances * summary["duration"]
        busy = summary["busy_time"] / instance_seconds
        quantities = {"num_devices": float(num_devices), "instance_idle_fraction": 1 - busy}
        for rate in RATES:
            if rate in summary:
                quantities[f"{rate}_per_device"] = summary[rate] / num_devices
        if not scheduler.transfers:
            return {}, quantities
        columns = list(Transfer._fields)
        moves = pd.DataFrame(scheduler.transfers, columns=columns)
        seconds = moves.end - moves.requested
        quantities |= quantiles("transfer_time", seconds)
        quantities["num_transfers"] = float(len(moves))
        quantities["transfer_bytes"] = float(moves.num_bytes.sum())
        return {"transfers.parquet": moves}, quantities


@dataclass(frozen=True, kw_only=True)
class Replicas(Several):
    """`num` engines, each of which serves its requests from the first to the last token."""

    num: int = whole(2, minimum=1, fix=INSTANCES)
    router: str = one_of("least_loaded", valid=tuple(ROUTERS))

    @property
    def num_instances(self) -> int:
        return self.num

    def describe(self) -> str:
        return f"{self.num} replicas, {self.router}"

    def cluster(self, schedulers: Sequence[Scheduler], executor: Executor) -> Schedulers:
        return Cluster(schedulers, _instances(executor), self.new_router())


@dataclass(frozen=True, kw_only=True)
class Disaggregated(Several):
    """Prompts on `prefill` engines, decodes on `decode` engines (`Handover`); `router` chooses of
    the former.

    The KV cache moves over `link`: "nvlink", the links within a node, or "network", those between
    nodes, as the hardware file states both for a device, times the devices of an instance, which
    sends or receives one cache at a time. `prefill_chunk` and `decode_chunk` are tokens of an
    iteration in place of the policy's.
    """

    prefill: int = whole(1, minimum=1, fix=INSTANCES)
    decode: int = whole(1, minimum=1, fix=INSTANCES)
    prefill_chunk: int | None = whole(None, minimum=1, fix=TOKENS)
    decode_chunk: int | None = whole(None, minimum=1, fix=TOKENS)
    link: str = one_of("nvlink", valid=tuple(LINKS))
    router: str = one_of("least_loaded", valid=tuple(ROUTERS))

    @property
    def num_instances(self) -> int:
        return self.prefill + self.decode

    def describe(self) -> str:
        link = "the links of a node"
        if self.link == "network":
            link = "the network"
        return f"{self.prefill} prefill and {self.decode} decode instances over {link}"

    def check(
        self, policy: Policy, backend: Backend, spec: ModelSpec, *, shares_prefixes: bool
    ) -> None:
        super().check(policy, backend, spec, shares_prefixes=shares_prefixes)
        host = self.simulated(backend).host
        if host.overlaps:
            raise UserError(
                f"host={host.name} schedules ahead, but sequences leave an engine at their first "
                "token; use host=none or another one that does not"
            )
        budgets = {"prefill_chunk": self.prefill_chunk, "decode_chunk": self.decode_chunk}
        for name, budget in budgets.items():
            if budget is not None and policy.budget_field is None:
                raise UserError(
                    f"cluster.{name}={budget} has no effect on policy {policy.name}, which never "
                    "cuts prompts; drop it"
                )
        self.link_between(backend, spec)  # an unknown rate is refused at once

    def policies(self, policy: Policy) -> Sequence[Policy]:
        of_prefills = _with_budget(policy, self.prefill_chunk)
        of_decodes = _with_budget(policy, self.decode_chunk)
        # Prefill instances first: `Handover` knows them by their number.
        policies = [of_prefills] * self.prefill
        policies += [of_decodes] * self.decode
        return policies

    def link_between(self, backend: Backend, spec: ModelSpec) -> Link:
        """The link of an instance on `backend`, each of whose devices sends its part of the KV
        cache of `spec`. Raises UserError for an unknown rate.
        """
        device = self.simulated(backend)
        hardware = device.hardware
        stated = hardware.required(LINKS[self.link], f"cluster.link={self.link}")
        rate = device.num_devices * hardware.link_efficiency * stated
        # A head that several devices hold is sent to each of them.
        on_device = device.parallel.with_heads_of_device(spec)
        num_parts = device.parallel.tensor
        written_bytes = num_parts * on_device.kv_bytes_per_token(device.dtype_bytes)
        kept_bytes = num_parts * on_device.cache_bytes_per_token(device.dtype_bytes)
        window_layers = on_device.cached_window
        window = 0
        if window_layers is not None:
            window = window_layers.window.size
        return Link(
            rate,
            hardware.link_latency,
            bytes_per_token=kept_bytes,
            state_bytes=spec.state_bytes(device.dtype_bytes),
            window=window,
            window_bytes_per_token=written_bytes - kept_bytes,
        )

    def cluster(self, schedulers: Sequence[Scheduler], executor: Executor) -> Cluster:
        return Handover(schedulers, _instances(executor), self.new_router(), self.prefill)


def _with_budget(policy: Policy, budget: int | None) -> Policy:
    """Return the policy with a stated budget; one without budgets, such as a baseline, as it is."""
    if budget is None or policy.budget_field is None:
        return policy
    return policy.with_budget(budget)


def _instances(executor: Executor) -> Instances:
    assert isinstance(executor, Instances), "`Several.executor` makes no other"
    return executor
