"""The assembly of an engine: its schedulers, with their caches, and its executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Backend, Executor, Sizes
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.queues import QueueOrder
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.engine.speculation import NO_SPECULATION, Speculation
from sarathi_lab.model.layers import CachedWindow
from sarathi_lab.model.spec import ModelSpec

MakeScheduler = Callable[[Policy], Scheduler]


class Topology:
    """One engine, and the base of several. Sizes of batch and cache are those of an instance."""

    is_single = True  # one scheduler and one executor, without a router

    @property
    def num_instances(self) -> int:
        return 1

    def describe(self) -> str:
        """Describe several engines, such as "2 prefill and 2 decode instances"."""
        return ""

    def check(
        self, policy: Policy, backend: Backend, spec: ModelSpec, *, shares_prefixes: bool
    ) -> None:
        """Raise UserError for parts of a run that do not fit, and settings that nothing reads."""

    def backend(self, backend: Backend, spec: ModelSpec) -> Backend:
        """Return `backend` as the instances of `spec` share it."""
        return backend

    def link_between(self, backend: Backend, spec: ModelSpec) -> object:
        """What moves the cache of `spec` between instances on `backend`; None: nothing moves."""
        return None

    def executor(self, make: Callable[[], Executor], link: Any) -> Executor:
        """Make what runs the batches, of instances that `make` makes."""
        return make()

    def scheduler(self, policy: Policy, make: MakeScheduler, executor: Executor) -> Any:
        """Make the scheduler for `executor`, which this topology has made."""
        return make(policy)

    def policies(self, policy: Policy) -> Sequence[Policy]:
        """List the policy of each instance."""
        return [policy]

    def results(
        self, scheduler: Any, summary: Mapping[str, float], num_devices: int
    ) -> tuple[dict[str, pd.DataFrame], dict[str, float]]:
        """Further tables and metrics of a run with `summary` on `num_devices`."""
        return {}, {}


SINGLE = Topology()


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine, from which its scheduler and its executor are built.

    Attributes:
        policy: Fills the batches.
        batch_size: The most sequences of a batch.
        num_blocks: Blocks of the cache; an estimate with `fills_memory`.
        block_size: Tokens of a block.
        max_model_len: The most tokens of a sequence; None: those of the longest request served.
        num_micro_batches: Batches in flight, one for each stage of a pipeline.
        fills_memory: The cache takes what the device holds.
        shares_prefixes: Sequences share the blocks of equal prefixes.
        queue_order: The order in which waiting sequences are admitted.
        cluster: Several instances of these sizes, or one.
        speculation: How decodes get drafts.
        state_tokens: Tokens whose cache is as large as a sequence's states
            (`ModelSpec.state_tokens`).
        aligns_chunks: Chunks end where blocks do (`Scheduler.aligned`).
        window: What some layers see of a context (`ModelSpec.cached_window`); None: all of it.
    """

    policy: Policy
    batch_size: int
    num_blocks: int
    block_size: int
    max_model_len: int | None = None
    num_micro_batches: int = 1
    fills_memory: bool = False
    shares_prefixes: bool = False
    queue_order: QueueOrder = "fcfs"
    cluster: Topology = SINGLE
    speculation: Speculation = NO_SPECULATION
    state_tokens: int = 0
    aligns_chunks: bool = False
    window: CachedWindow | None = None

    @property
    def num_slots(self) -> int:
        """The most sequences in flight, of all stages and instances."""
        return self.batch_size * self.num_micro_batches * self.cluster.num_instances

    def sizes(self, requests: Sequence[Request] = ()) -> Sizes:
        """Return what an executor that serves `requests` must have room for."""
        return Sizes(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            batch_size=self.batch_size,
            max_model_len=self.max_model_len,
            max_batch_tokens=self._max_batch_tokens(requests) if requests else None,
            chunk=self.policy.budget,
            fills_memory=self.fills_memory,
            num_drafts=self.speculation.tokens,
        )

    def _max_batch_tokens(self, requests: Sequence[Request]) -> int:
        policy = self.policy
        most_decoded = self.batch_size * (1 + self.speculation.tokens)
        if policy.is_capped:
            budget = max(policy.budget or 0, self.batch_size)
            return budget + most_decoded if policy.decodes_on_top else budget
        # The longest prompts whole, beside as many decodes as there may be. A preempted sequence
        # computes its output again, too.
        longest = sorted((request.total_len for request in requests), reverse=True)
        num_prompts = policy.most_prefills or self.batch_size
        return sum(longest[:num_prompts]) + most_decoded

    def with_cache_of(self, executor: Executor) -> EngineConfig:
        """Take over the size of the cache that `executor` has filled the device's memory with."""
        if not self.fills_memory or executor.num_blocks is None:
            return self
        return replace(self, num_blocks=executor.num_blocks)

    def build(
        self, make_executor: Callable[[], Executor], link: Any = None
    ) -> tuple[Scheduler, Executor]:
        """Build an engine with an empty cache.

        Args:
            make_executor: Makes the executor of an instance.
            link: Moves the cache between the instances of a cluster; None: nothing moves.

        Returns:
            The scheduler and the executor, which belong together.
        """
        executor = self.cluster.executor(make_executor, link)
        return self.with_cache_of(executor).make_scheduler(executor), executor

    def make_scheduler(self, executor: Executor) -> Scheduler:
        """Build the scheduler, with an empty cache, for an executor that `build` returned."""
        scheduler: Scheduler = self.cluster.scheduler(self.policy, self.make_engine, executor)
        return scheduler

    def make_engine(self, policy: Policy) -> Scheduler:
        """Build the scheduler of one instance. Raises UserError for sizes that `policy` refuses."""
        assert self.max_model_len is not None, "set by `loop.serve` or by the caller"
        return Scheduler(
            policy,
            BlockManager(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                shares_prefixes=self.shares_prefixes,
                state_blocks=-(-self.state_tokens // self.block_size),
                window=self.window,
            ),
            batch_size=self.batch_size,
            max_model_len=self.max_model_len,
            num_micro_batches=self.num_micro_batches,
            queue_order=self.queue_order,
            speculation=self.speculation,
            aligns_chunks=self.aligns_chunks,
        )

    def check(self, requests: Sequence[Request]) -> None:
        """Raise UserError for a policy that these sizes do not suit, or a request that can never be
        served.
        """
        # Several instances may have one policy, and not every policy can be a dictionary's key.
        checked: list[Policy] = []
        for policy in self.cluster.policies(self.policy):
            if policy in checked:
                continue
            checked.append(policy)
            scheduler = self.make_engine(policy)
            for request in requests:
                scheduler.check_fits(request)
