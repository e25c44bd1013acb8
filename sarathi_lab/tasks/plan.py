"""From a composed configuration to a checked plan: everything a run needs, made and validated,
nothing run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError, require_bool, require_int, require_one_of
from sarathi_lab.config.instantiate import build, option_files, read_option, resolved
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Backend, Predictor, Sizes
from sarathi_lab.engine.queues import QueueOrder
from sarathi_lab.engine.scheduler import Preemption, Scheduler
from sarathi_lab.experiment.advisor import BASELINES, Advice, Prediction, advise
from sarathi_lab.model.checkpoint import resolve_model, text_encoder
from sarathi_lab.model.roofline import TILE
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy, with_budget
from sarathi_lab.results.saturation import SaturationLimits
from sarathi_lab.results.slo import Targets
from sarathi_lab.results.window import Window
from sarathi_lab.tasks.sizes import longest_len, named_max_model_len, read_cache
from sarathi_lab.workload import LoadedRequests
from sarathi_lab.workload.traces import Trace

AUTO = "auto"  # for a chunk: the one that the device's cost model predicts to be best


@dataclass(frozen=True)
class Plan:
    """One run, ready to execute. `config` is fully resolved; lengths and sizes are in tokens and
    blocks.

    `targets` is what latencies are held against, `advice` what chunk=auto was resolved by, None for
    a named chunk.
    """

    config: dict[str, Any]
    policy: Policy
    backend: Backend
    spec: ModelSpec
    checkpoint: Path | None
    load: LoadedRequests
    batch_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    fills_memory: bool  # the cache takes what the memory holds; num_blocks is then an estimate
    queue_order: QueueOrder
    preemption: Preemption
    num_host_blocks: int  # of the cache in host memory, for what is swapped out
    shares_prefixes: bool  # between sequences whose tokens begin alike
    window: Window
    saturation_limits: SaturationLimits
    writes_trace: bool
    targets: Targets = field(default_factory=Targets)
    advice: Advice | None = None

    @property
    def sizes(self) -> Sizes:
        """What the executor is made for."""
        return Sizes(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            batch_size=self.batch_size,
            max_model_len=self.max_model_len,
            max_batch_tokens=self._most_tokens(),
            chunk=self.policy.budget,
            fills_memory=self.fills_memory,
            num_host_blocks=self.num_host_blocks,
        )

    def _most_tokens(self) -> int:
        """Tokens of the largest batch that the policy may make."""
        policy = self.policy
        if not policy.is_capped:
            return self._longest_prompts()
        return max(policy.budget or 0, self.batch_size) + (
            self.batch_size if policy.decodes_on_top else 0
        )

    def _longest_prompts(self) -> int:
        """Tokens of the largest batch of whole prompts, beside as many decodes as there may be."""
        longest = sorted((request.total_len for request in self.load.requests), reverse=True)
        return sum(longest[: self.policy.most_prefills or self.batch_size]) + self.batch_size

    def scheduler(self) -> Scheduler:
        """A fresh scheduler with an empty cache."""
        return Scheduler(
            self.policy,
            BlockManager(
                self.num_blocks,
                self.block_size,
                self.num_host_blocks,
                shares_prefixes=self.shares_prefixes,
            ),
            batch_size=self.batch_size,
            max_model_len=self.max_model_len,
            num_micro_batches=self.backend.num_stages,
            queue_order=self.queue_order,
            preemption=self.preemption,
        )


@dataclass(frozen=True)
class Prepared:
    """What task=serve runs: a plan, and those of its baselines by name, on the same requests."""

    plan: Plan
    baselines: Mapping[str, Plan]


def prepare(cfg: DictConfig) -> Prepared:
    """Plan a run and its baselines, which differ in their policy only. Raises UserError."""
    run = _parts(cfg)
    plan = _fitted(run)
    others = {name: _with_policy(run, baseline_config(cfg, name)) for name in cfg.baselines}
    # A run is not its own baseline.
    baselines = {name: _fitted(own) for name, own in others.items() if own.policy != run.policy}
    return Prepared(plan, baselines)


def make_plan(cfg: DictConfig, chunks: Sequence[int] | None = None) -> Plan:
    """Build and check all parts of a run. Raises UserError for anything that the user can mend.

    chunk=auto is chosen from `chunks`, or as `advisor.advise` does if they are None.
    """
    return _fitted(_parts(cfg), chunks)


def baseline_config(cfg: DictConfig, name: str) -> DictConfig:
    """`cfg` with its policy exchanged for the option `name` of the policy group."""
    options = option_files("policy")
    if name not in options:
        raise UserError(f"baselines: {name} is not a policy; use some of {', '.join(options)}")
    exchanged = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    assert isinstance(exchanged, DictConfig)
    exchanged.policy = read_option("policy", options[name])
    return exchanged


def _parts(cfg: DictConfig) -> Plan:
    """All parts of a run, the policy not yet fitted to the others."""
    batch_size = require_int(
        "batch", cfg.batch, 1, "use the number of sequences to serve at a time, such as 8"
    )
    policy: Policy = build(cfg.policy)
    require_one_of("queue_order", cfg.queue_order, get_args(QueueOrder))
    require_one_of("preemption", cfg.preemption, get_args(Preemption))
    backend = build(cfg.executor)
    spec, checkpoint = resolve_model(cfg, backend)
    load = _load(cfg, backend, spec, checkpoint)
    max_model_len = longest_len(cfg, load, spec, checkpoint)
    cache = read_cache(cfg, backend, spec, batch_size * backend.num_stages, max_model_len)
    # Before a cache of that many blocks is made.
    backend.check(
        spec, cache.num_blocks * cache.block_size, cache.num_host_blocks * cache.block_size
    )
    plan = Plan(
        config=resolved(cfg),
        policy=policy,
        backend=backend,
        spec=spec,
        checkpoint=checkpoint,
        load=load,
        batch_size=batch_size,
        max_model_len=max_model_len,
        queue_order=cfg.queue_order,
        preemption=cfg.preemption,
        **cache._asdict(),
        window=build(cfg.window),
        saturation_limits=build(cfg.stop_when_saturated),
        writes_trace=require_bool("trace", cfg.trace, "use true to write trace.json, else false"),
        targets=read_targets(cfg),
    )
    _check_load(plan)
    return plan


def _with_policy(plan: Plan, cfg: DictConfig) -> Plan:
    """`plan` with the policy of `cfg`, which differs from its own configuration in that alone."""
    settings = OmegaConf.to_container(cfg.policy, resolve=True)
    return replace(plan, policy=build(cfg.policy), config={**plan.config, "policy": settings})


def _fitted(plan: Plan, chunks: Sequence[int] | None = None) -> Plan:
    """`plan` with a policy that knows its device and has a chunk; raises UserError if a request
    does not fit.
    """
    policy = plan.policy.on_device(
        lambda: plan.backend.predictor(plan.spec), plan.batch_size, plan.max_model_len
    )
    plan = replace(plan, policy=policy)
    if policy.budget == AUTO:
        plan = _with_advice(plan, chunks)
    scheduler = plan.scheduler()
    for request in plan.load.requests:
        scheduler.check_fits(request)
    return plan


def _check_load(plan: Plan) -> None:
    """Refuse settings that the requests give no meaning to."""
    plan.window.check(plan.load)
    plan.saturation_limits.check(plan.load)
    priorities = {request.priority for request in plan.load.requests}
    if plan.queue_order == "priority" and len(priorities) < 2:
        raise UserError(
            "queue_order=priority has no effect: all requests have the same priority; drop it, or "
            "add workload.priorities=[0,1] (for workload=prompts: priority in the file's rows)"
        )


def _with_advice(plan: Plan, chunks: Sequence[int] | None) -> Plan:
    """`plan` with the chunk that its device's cost model predicts to be best."""
    advice = _advise(plan, _predictor(plan), chunks)
    settings = {**plan.config["policy"], plan.policy.budget_field: advice.chunk}
    config = {**plan.config, "policy": settings}
    return replace(
        plan, config=config, policy=with_budget(plan.policy, advice.chunk), advice=advice
    )


def _predictor(plan: Plan) -> Predictor:
    """The cost model that chunk=auto is chosen by. Raises UserError where there is none to choose
    by.
    """
    if plan.backend.num_stages > 1:
        raise UserError(
            f"chunk={AUTO} is for one batch at a time, not for the {plan.backend.num_stages} of a "
            "pipeline; name a number such as chunk=256, or use executor.pipeline_parallel=1"
        )
    if plan.load.num_users is not None:
        raise UserError(
            f"chunk={AUTO} is chosen by when requests arrive, which workload.arrivals=users leaves "
            "to the answers; name a number such as chunk=256"
        )
    predictor = plan.backend.predictor(plan.spec)
    if predictor is None:
        raise UserError(
            f"chunk={AUTO} needs a cost model of {plan.backend.device_name}, which has none; name "
            "a number such as chunk=256, or add executor=simulated"
        )
    return predictor


def _advise(plan: Plan, predictor: Predictor, chunks: Sequence[int] | None) -> Advice:
    prediction = Prediction(
        plan.load.requests,
        plan.batch_size,
        predictor,
        plan.max_model_len,
        plan.num_blocks,
        plan.block_size,
        # Those that the run does not have need not fit the cache.
        tuple(name for name in BASELINES if name in plan.config["baselines"]),
    )
    return advise(
        prediction,
        TILE,
        policy=lambda chunk: with_budget(plan.policy, chunk),
        chunks=chunks,
    )


def read_targets(cfg: DictConfig) -> Targets:
    """What latencies are held against. Raises UserError."""
    bounds = cfg.prompt_classes
    return Targets(build(cfg.slo), cfg.stall, list(bounds) if OmegaConf.is_list(bounds) else bounds)


def _load(
    cfg: DictConfig, backend: Backend, spec: ModelSpec, checkpoint: Path | None
) -> LoadedRequests:
    workload = build(cfg.workload)
    if isinstance(workload, Trace):
        workload = workload.within(named_max_model_len(cfg) or spec.max_position)
    return workload.generate(
        spec.vocab_size if backend.computes_tokens else None, text_encoder(checkpoint)
    )
