"""How many engines serve a run, and where requests go (config group `cluster`): here one engine;
see `extensions.cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from sarathi_lab.engine.admission import SchedulingPolicy
from sarathi_lab.engine.executor import Backend, Executor
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.model.spec import ModelSpec

AnyPolicy = SchedulingPolicy[Scheduler]
MakeScheduler = Callable[[AnyPolicy], Scheduler]


class Topology:
    """One engine, and the base of several. Sizes of batch and cache are those of an instance."""

    num_instances = 1
    is_single = True  # one scheduler and one executor, without a router

    def describe(self) -> str:
        """Describe several engines, such as "2 prefill and 2 decode instances"."""
        return ""

    def check(
        self, policy: Any, backend: Backend, spec: ModelSpec, *, shares_prefixes: bool
    ) -> None:
        """Raise UserError for parts of a run that do not fit, and settings that nothing reads."""

    def link_between(self, backend: Backend, spec: ModelSpec) -> Any:
        """What moves the cache of `spec` between instances on `backend`; None: nothing moves."""
        return None

    def executor(self, make: Callable[[], Executor], link: Any) -> Executor:
        """Make what runs the batches, of instances that `make` makes."""
        return make()

    def scheduler(self, policy: AnyPolicy, make: MakeScheduler, executor: Executor) -> Any:
        """Make the scheduler for `executor`, which this topology has made."""
        return make(policy)

    def policies(self, policy: AnyPolicy) -> Sequence[AnyPolicy]:
        """List the policy of each instance."""
        return [policy]

    def results(
        self, scheduler: Any, summary: Mapping[str, float], num_devices: int
    ) -> tuple[dict[str, pd.DataFrame], dict[str, float]]:
        """Further tables and metrics of a run with `summary` on `num_devices`."""
        return {}, {}


SINGLE = Topology()
