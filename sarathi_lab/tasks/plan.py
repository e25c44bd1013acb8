"""From a composed configuration to a checked plan: all that a run needs, nothing run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import (
    UserError,
    require_int,
    require_one_of,
)
from sarathi_lab.config.instantiate import (
    build,
    check_baselines,
    copied,
    copier,
    option_files,
    plain,
    read_option,
    resolved,
)
from sarathi_lab.engine.arrivals import Arrivals
from sarathi_lab.engine.config import EngineConfig, Topology
from sarathi_lab.engine.executor import Backend, Executor, Sizes
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.queues import QueueOrder
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.engine.speculation import Speculation
from sarathi_lab.executor.simulated.executor import PipelineExecutor, SimulatedExecutor
from sarathi_lab.experiment.advise import BestChunk, ChunkSearch, candidates, predict
from sarathi_lab.model.checkpoint import resolve_model, text_encoder
from sarathi_lab.model.roofline import TILE, Peaks, roofline_time
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.results.decode_cost import slo_in_seconds
from sarathi_lab.results.own_metrics import own_metrics
from sarathi_lab.results.serving_metrics import Targets
from sarathi_lab.results.steady import steady_part
from sarathi_lab.results.window import ADMISSION, ARRIVAL, RunPart, Window
from sarathi_lab.tasks.run_cache import cache_fields, explained_cache
from sarathi_lab.tasks.server_defaults import AUTO, fill_defaults
from sarathi_lab.workload import LoadedRequests, Workload
from sarathi_lab.workload.traces import Trace

IterationTime = Callable[[Batch], float]  # seconds
MakeExecutor = Callable[[], Executor]
Requests = Iterable[Request] | Arrivals


@dataclass(frozen=True)
class Plan:
    """One run, ready to execute. Sizes are in tokens and blocks.

    `targets` is what latencies are held against, `advice` what chunk=auto was resolved by,
    `assumed` what was not stated and has a server's value, in words, `metrics` a user's own.
    """

    cfg: DictConfig  # with what was assumed
    engine: EngineConfig
    backend: Backend
    spec: ModelSpec
    checkpoint: Path | None
    load: LoadedRequests
    window: Window
    targets: Targets = field(default_factory=Targets)
    advice: BestChunk | None = None
    assumed: str | None = None
    metrics: Mapping[str, Callable[..., object]] = field(default_factory=dict)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as plain values."""
        return resolved(self.cfg)

    @property
    def policy(self) -> Policy:
        return self.engine.policy

    @property
    def unserved(self) -> str | None:
        """Why the policy's server does not run on the device; None where it may."""
        device = self.backend.serving_device
        system = self.policy.system
        if system is None or device is None:
            return None
        return system.refuses(device)

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence."""
        assert self.engine.max_model_len is not None
        return self.engine.max_model_len

    @property
    def sizes(self) -> Sizes:
        return self.engine.sizes(self.load.requests)

    def build(self, make: MakeExecutor | None = None) -> tuple[Scheduler, Executor]:
        """Build the scheduler and the warmed-up executor, by `make` in place of the backend."""
        link = self.engine.cluster.link_between(self.backend, self.spec)
        if make is None:
            make = self._make_executor
        return self.engine.build(make, link)

    def _make_executor(self) -> Executor:
        return self.backend.build(self.spec, self.checkpoint, self.sizes)

    def simulate(self, iteration_time: IterationTime, requests: Requests, ledger: Ledger) -> None:
        """Serve requests on a virtual clock, by the seconds of a batch on every stage."""
        num_stages = self.backend.num_stages

        def times(batch: Batch) -> list[float]:
            return [iteration_time(batch)] * num_stages

        scheduler, executor = self.build(lambda: PipelineExecutor(num_stages, times))
        run_engine(requests, scheduler, executor, ledger)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed; the last one of a request is not."""
        return sum(request.total_len - 1 for request in self.load.requests)

    def roofline(self, peaks: Peaks) -> float:
        """Predict the seconds of the run if every iteration met its roofline time, on a virtual
        clock. On a pipeline the roofline is that of each stage's share of work and devices. NaN for
        a model without formulas, or for products whose peak is not known.
        """
        if not self.spec.has_formulas or math.isnan(peaks.rate(self.spec)):
            return math.nan

        def iteration_time(batch: Batch) -> float:
            dtype_bytes = self.backend.dtype_bytes
            return float(roofline_time(self.spec, batch, dtype_bytes, peaks))

        ledger = Ledger()
        with progress_of("predicting the roofline", self.num_tokens, "tokens") as advance:
            ledger.on_iteration = advance
            self.simulate(iteration_time, self.load.arrivals(), ledger)
        part = self.steady_part(ledger.requests())
        if part is None:  # requests arrive over time: there is no filling to leave out
            iterations = ledger.iterations()
            return float(iterations.end.max())
        return part.end - part.start

    def counted_part(self, iterations: pd.DataFrame, requests: pd.DataFrame) -> RunPart | None:
        """Return the part of a run that its metrics count; None for all of it. Raises RunError."""
        if self.window.is_whole:
            return self.steady_part(requests)
        column = ADMISSION if self.load.all_wait else ARRIVAL
        return self.window.of(iterations, requests, column)

    def steady_part(self, requests: pd.DataFrame) -> RunPart | None:
        """Return the part between filling and draining, where all `requests` wait from the start
        and no window is stated.
        """
        if not (self.load.all_wait and self.window.is_whole):
            return None
        return steady_part(requests, self.engine.num_slots)


@dataclass(frozen=True)
class Setup:
    """What a run and its baselines share: where they compute, and which requests they serve."""

    backend: Backend
    spec: ModelSpec
    checkpoint: Path | None
    cluster: Topology
    load: LoadedRequests


def make_plans(cfg: DictConfig) -> tuple[Plan, dict[str, Plan]]:
    """Return the plan of a run, and those of its baselines by name, on the same requests.

    They differ in the policy, and in the defaults of its server, its cache among them: so a
    baseline is the same beside the runs of all servers.
    """
    check_baselines(cfg.baselines)
    setup = make_setup(cfg)
    copy = copier(cfg)
    # Each has a copy of the configuration, in which its server's defaults are filled.
    run = _checked(_parts(copy(), setup))
    plan = _fitted(run)
    options = option_files("policy")
    baselines = {}
    for name in cfg.baselines:
        own = copy()
        own.policy = read_option("policy", options[name])
        with _explained_baseline(name, cfg.baselines):
            baseline = _parts(own, setup)
            if baseline.policy != run.policy:  # a run is no baseline of itself
                baselines[name] = _fitted(baseline)
    # Only when all are checked: one engine may be made for the largest of them.
    for checked in (plan, *baselines.values()):
        checked.backend.expect(checked.spec, checked.checkpoint, checked.sizes)
    return plan, baselines


@contextmanager
def _explained_baseline(name: str, baselines: Sequence[str]) -> Iterator[None]:
    """Name the baseline in an error of the block: its policy is not the one that is typed."""
    try:
        yield
    except UserError as error:
        others = ",".join(other for other in baselines if other != name)
        raise UserError(
            f"baseline {name}: {error}, or leave it out by baselines=[{others}]"
        ) from None


def make_plan(cfg: DictConfig, setup: Setup | None = None) -> Plan:
    """Build and check all parts of a run.

    Args:
        cfg: The run's configuration.
        setup: What it shares with another run, where that was made before.

    Raises:
        UserError: For anything that the user can mend.
    """
    parts = _parts(copied(cfg), setup or make_setup(cfg))
    checked = _checked(parts)
    return _fitted(checked)


def changed(cfg: DictConfig, **settings: object) -> DictConfig:
    """Return `cfg` with other values of settings, or other nodes."""
    copy = copied(cfg)
    copy.update(settings)
    return copy


def make_setup(cfg: DictConfig) -> Setup:
    """Build the device, and generate the requests. Raises UserError."""
    if cfg.batch is not None:  # first, as the number of requests follows from it
        advice = "use the number of sequences to serve at a time, such as 8"
        require_int("batch", cfg.batch, 1, advice)
    backend: Backend = build(cfg.executor)
    spec, checkpoint = resolve_model(cfg, backend)
    cluster: Topology = build(cfg.cluster)
    backend = cluster.backend(backend, spec)
    if cfg.max_model_len is not None:
        advice = "use null for the longest request of the workload"
        require_int("max_model_len", cfg.max_model_len, 2, advice)
    return Setup(backend, spec, checkpoint, cluster, _load(cfg, backend, spec, checkpoint))


def _parts(cfg: DictConfig, setup: Setup) -> Plan:
    """Build all parts of a run, the policy not yet fitted to the others; fill defaults in `cfg`."""
    require_one_of("queue_order", cfg.queue_order, get_args(QueueOrder))
    backend = setup.backend
    spec = setup.spec
    load = setup.load
    # Before anything is built of `cfg`, which they complete.
    assumed = fill_defaults(cfg, backend, spec, load)
    policy: Policy = build(cfg.policy, Policy)
    max_model_len = cfg.max_model_len or max(request.total_len for request in load.requests)
    engine = EngineConfig(
        policy=policy,
        batch_size=cfg.batch,
        max_model_len=max_model_len,
        num_micro_batches=backend.num_stages,
        queue_order=cfg.queue_order,
        cluster=setup.cluster,
        speculation=build(cfg.speculation, Speculation),
        **cache_fields(cfg, backend, spec, policy, max_model_len),
    )
    window: Window = build(cfg.window)
    targets = Targets(build(cfg.slo), cfg.stall, plain(cfg.prompt_classes))
    return Plan(
        cfg,
        engine,
        backend,
        spec,
        setup.checkpoint,
        load,
        window,
        targets,
        assumed=assumed,
        metrics=own_metrics(plain(cfg.metrics), settings=list(map(str, cfg))),
    )


def _checked(plan: Plan) -> Plan:
    """Return `plan`. Raises UserError for what its user stated and its parts can't do together; a
    baseline's policy may read less than is stated for the run.
    """
    engine = plan.engine
    backend = plan.backend
    engine.cluster.check(plan.policy, backend, plan.spec, shares_prefixes=engine.shares_prefixes)
    engine.speculation.check(backend)
    plan.window.check(plan.load)
    priorities = {request.priority for request in plan.load.requests}
    if engine.queue_order == "priority" and len(priorities) < 2:
        raise UserError(
            "queue_order=priority has no effect: all requests have the same priority; drop it, or "
            "add workload.priorities=[0,1] (for workload=prompts: priority in the file's rows)"
        )
    return plan


def _load(
    cfg: DictConfig, backend: Backend, spec: ModelSpec, checkpoint: Path | None
) -> LoadedRequests:
    """Generate the requests. Raises UserError for one longer than weights were made for."""
    workload = build(cfg.workload, Workload)
    if isinstance(workload, Trace):  # whose longer requests were refused by its server, too
        workload = workload.within(cfg.max_model_len or spec.max_position)
    # Simulations need no tokens, which take longer to draw than all else.
    vocab_size = spec.vocab_size if backend.computes_tokens else None
    load: LoadedRequests = workload.generate(vocab_size, text_encoder(checkpoint))
    longest = max(request.total_len for request in load.requests)
    if checkpoint is not None and longest > spec.max_position:
        raise UserError(
            f"the longest request has {longest} tokens, but {spec.name} was made for "
            f"{spec.max_position}; shorten it"
        )
    return replace(load, request_time=backend.request_time)


def _fitted(plan: Plan) -> Plan:
    """Return `plan` with its policy fitted to the device and the workload. Raises UserError."""
    # The cost model is asked for only by policies that predict, as its tables take time to read.
    predictor = partial(plan.backend.predictor, plan.spec)
    policy = plan.policy.on_device(predictor, plan.engine.batch_size, plan.max_model_len)
    fitted = _with_policy(plan, policy)
    if policy.budget == AUTO:
        fitted = _with_advised_chunk(fitted)
    engine = fitted.engine
    with explained_cache(engine, plan.backend, plan.spec, plan.cfg.cache.memory_share):
        engine.check(plan.load.requests)
    return fitted


def _with_policy(plan: Plan, policy: Policy) -> Plan:
    engine = replace(plan.engine, policy=policy)
    return replace(plan, engine=engine)


def _with_advised_chunk(plan: Plan) -> Plan:
    """Return `plan` with the chunk that is advised for it. Raises UserError where none is."""
    advice = _advice(plan)
    # What is recorded and fingerprinted is the number, not "auto".
    plan.cfg.policy[plan.policy.budget_field] = advice.chunk
    policy = plan.policy.with_budget(advice.chunk)
    advised = _with_policy(plan, policy)
    return replace(advised, advice=advice)


def _advice(plan: Plan) -> BestChunk:
    """Return the chunk that the device's cost model predicts to be best. Raises UserError."""
    engine = plan.engine
    load = plan.load
    predictor = plan.backend.predictor(plan.spec)
    is_one_engine = plan.backend.num_stages == 1 and engine.cluster.is_single
    has_known_times = not (load.waits_for_answers or engine.speculation.tokens)
    if predictor is None or not (is_one_engine and has_known_times):
        raise UserError(
            f"chunk={AUTO} needs a device with a cost model (executor=simulated), one engine "
            "without stages and drafts, and requests that do not wait for answers as those of "
            "users and sessions do; name a number such as chunk=256"
        )
    executor = SimulatedExecutor(predictor)
    stated = slo_in_seconds(plan.targets.slo, engine, executor)
    slo = stated if stated.bounds else None

    def predict_chunk(chunk: int) -> dict[str, float]:
        policy = plan.policy.with_budget(chunk)
        return predict(load.requests, replace(engine, policy=policy), executor, slo)

    search = ChunkSearch(predict_chunk, slo, TILE)
    first = candidates(load.requests, engine.batch_size, TILE)
    return search.search(first, arrive=load.has_times)
