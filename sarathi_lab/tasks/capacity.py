"""The task `capacity`: the highest rate of requests at which the policy meets the objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.checked import number, whole
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.crew import Crew, crew_size
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Executor
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment import capacity as search
from sarathi_lab.experiment.trials import Trial, Trials
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.results.metrics import add_costs, summarise
from sarathi_lab.results.plots.tasks import rate_curves
from sarathi_lab.results.result import ITERATIONS, REQUESTS, Result
from sarathi_lab.results.serving_metrics import is_met
from sarathi_lab.results.slo import Slo
from sarathi_lab.tasks import serve
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import AUTO, Plan, changed, make_plan, slo_reference

RATES = "use requests per second, or null"
SCALED = ("poisson", "gamma", "ramp")  # arrivals that have a rate; a file's have their own gaps
FIRST_TRIALS, LATER_TRIALS = 8, 4  # of a seed, about: the length of the progress bar
# Columns of capacity.parquet, where a run has them.
COLUMNS = (
    *("throughput", "output_throughput", "request_throughput", "duration", "num_preemptions"),
    *("slo_attainment", "goodput", "num_stalls", "longest_gap", "ttft_p50", "ttft_p90", "ttft_p99"),
    *("tbt_p50", "tbt_p90", "tbt_p99", "tpot_p50", "tpot_p99", "latency_p50", "latency_p99"),
    *("scheduling_delay_p50", "scheduling_delay_p99"),
)
TAGS = ("policy", "model", "device", "executor", "slo")  # labels
MORE, GIVEN = "raise task.doublings or workload.num_requests", "a longer file, or all of this one"
SHOWN = {"ttft_p50": "TTFT P50", "tbt_p99": "TBT P99", "tpot_p99": "TPOT P99"}


@dataclass(frozen=True)
class Capacity(Task):
    """Looks for the capacity with `seeds` sets of requests, to a rate of `precision` (a share).

    The workload's requests are doubled until the capacity stands still, `doublings` times at most;
    requests that are given, such as a trace's, are searched by half of them and by all. Leaves
    capacity.parquet (a row per run), and the tables of the first seed's run at its capacity.
    """

    reads = (
        *("policy", "workload", "executor", "model", "hardware", "slo", "device", "dtype", "seed"),
        *("chunk", "batch", "pd_ratio", "seq_len", "max_model_len", "cache", "stall"),
        "prompt_classes",
        *("cluster", "speculation"),
    )
    has_runs = True
    seeds: int = whole(3, minimum=1, fix="use a few sets of requests, such as 3")
    precision: float = number(0.05, above=0, fix="use a share of the rate, such as 0.05")
    doublings: int = whole(3, minimum=1, fix="use a few, such as 3")
    lowest: float | None = number(None, above=0, fix=RATES)
    highest: float | None = number(None, above=0, fix=RATES)
    processes: int | None = crew_size()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest is not None and self.highest is not None and self.lowest >= self.highest:
            raise UserError(
                f"task.lowest={self.lowest} is not below task.highest={self.highest}; exchange them"
            )

    def check(self, cfg: DictConfig) -> list[Plan]:
        """A plan for each seed, of equal sizes."""
        if getattr(cfg.policy, "chunk", None) == AUTO:
            raise UserError(
                f"chunk={AUTO} is advised for one load, not for every rate; name a chunk such as "
                "chunk=512"
            )
        seeds = range(cfg.seed, cfg.seed + self.seeds)
        configs = [self._with_arrivals(cfg, seed) for seed in seeds]
        plans = [make_plan(own) for own in configs]
        slo, name = plans[0].targets.slo, plans[0].load.name
        if self.processes is not None and self._size(plans[0]) != self.processes:
            raise UserError(
                f"task.processes={self.processes} has no effect: it is for executor=simulated, and "
                "a measurement is alone; drop it"
            )
        if not slo.bounds and not slo.is_relative:
            raise UserError(
                f"slo={slo.name} has no bounds that a rate could meet; name an objective, such as "
                "slo=strict or slo=mlperf-llama2-70b"
            )
        for plan in plans:  # refuses what has no gaps
            search.at_rate(plan.load.requests[: self._lengths(plan)[0]], 1.0)
        first, *others = (
            [(r.arrival_time, r.prompt_len, r.output_len) for r in plan.load.requests]
            for plan in plans[:2]
        )
        if first in others:
            raise UserError(
                f"task.seeds={self.seeds} has no effect: workload {name} has the same requests for "
                "every seed; use task.seeds=1"
            )
        longest = max(plan.max_model_len for plan in plans)
        if all(plan.max_model_len == longest for plan in plans):
            return plans
        return [make_plan(changed(own, max_model_len=longest)) for own in configs]

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        plans: list[Plan] = context.prepared or self.check(cfg)
        plan = plans[0]
        serve.print_plan(plan, context)
        trials, slo, saturation, found = self._search(plans, self._lengths(plan))
        peaks = plan.backend.peaks()
        crew = Crew(partial(_Objective, plan, slo, peaks), self._size(plan))
        with progress_of("summing up", len(trials.known), "runs") as advance:
            found_of = crew.map(_summary, trials.known.values(), advance)
        summaries = dict(zip(trials.known, found_of, strict=True))
        table = pd.DataFrame(
            dict(zip(("seed", "num_requests", "rate"), trial, strict=False))
            | {"slo_met": is_met(trial.requests, slo)}
            | {name: summaries[key].get(name, math.nan) for name in COLUMNS}
            for key, trial in sorted(trials.known.items())
        )
        labels = serve.labels_of(plan, context.name) | {"slo": plan.targets.slo.name}
        named = {name: labels[name] for name in ("policy", "slo", "model", "device", "workload")}
        tables, at_capacity = {"capacity.parquet": table.assign(**named)}, {}
        seed, bracket = next(iter(found.brackets.items()))
        if bracket.passing is not None and found.is_settled:
            key = (seed, found.num_requests, bracket.passing)
            best, at_capacity = trials.known[key], summaries[key]
            tables |= {ITERATIONS: _costs(plan, best, peaks), REQUESTS: best.requests}
        summary = {**at_capacity, **found.summary, "capacity_trials": float(len(trials.known))}
        summary["closed_rate"] = saturation
        where = f"{plan.policy.name}, {plan.spec.name} on {plan.backend.device_name}"
        return Result(
            tables=tables,
            figures={
                "capacity": rate_curves(
                    table[table.num_requests == found.num_requests], slo, summary["capacity"], where
                )
            },
            summary=summary,
            shown=_shown(slo, found, summary, MORE if _grows(plan) else GIVEN),
            labels={**labels, "is_baseline": False, "baselines": {}},
            tags=["capacity", *(str(labels[name]) for name in TAGS)],
            config=plan.config,
        )

    def _lengths(self, plan: Plan) -> list[int]:
        """Requests of the runs of a search; the last are all of the plan's."""
        doublings = self.doublings if _grows(plan) else 1
        return search.run_lengths(len(plan.load.requests), doublings)

    def _search(
        self, plans: Sequence[Plan], lengths: Sequence[int]
    ) -> tuple[Trials, Slo, float, search.Capacities]:
        """The runs, the objective in seconds, the saturation rate and what was found."""
        plan = plans[0]
        executor = plan.build()[1]
        plan = plan.with_cache_of(executor)
        slo = plan.targets.slo.resolved(slo_reference(plan, executor))
        tokens = sum(request.total_len - 1 for request in plan.load.requests[: 2 * lengths[0]])
        expected = tokens * (1 + FIRST_TRIALS + LATER_TRIALS * (len(plans) - 1))
        title = f"looking for the capacity under {slo.name}"
        grid = search.Grid(self.precision)
        crew = Crew(partial(_trials, plans, grid), self._size(plan))
        with progress_of(title, expected, "tokens") as progress:
            trials = _trials([plan, *plans[1:]], grid, executor, progress)
            if crew.size > 1:
                trials.share = partial(crew.do, Trials.serve)
            saturation = trials.saturation_rate(lengths[0])
            limits = search.limits_around(saturation, self.lowest, self.highest)
            return trials, slo, saturation, trials.capacity(slo, saturation, limits, lengths)

    def _size(self, plan: Plan) -> int | None:
        """Processes that serve: what is measured has the machine to itself."""
        return self.processes if isinstance(plan.backend, SimulatedBackend) else 1

    def _with_arrivals(self, cfg: DictConfig, seed: int) -> DictConfig:
        """`cfg` with another seed, the requests of its longest runs, and arrivals whose gaps a rate
        can stretch. Refuses a rate.
        """
        own = changed(cfg, seed=seed)
        if isinstance(own.workload.get("num_requests"), int):
            own.workload.num_requests <<= self.doublings
        kind = own.workload.get("arrivals")
        if "rate" in own.workload and kind in ("closed", *SCALED):
            if own.workload.rate is not None:
                raise UserError(
                    f"workload.rate={own.workload.rate} has no effect: task=capacity looks for the "
                    "rate; drop it"
                )
            own.workload.rate = 1.0
            if kind == "closed":
                own.workload.arrivals = "poisson"
        return own


def _trials(
    plans: Sequence[Plan],
    grid: search.Grid,
    executor: Executor | None = None,
    progress: Callable[[float], None] = lambda num_tokens: None,
) -> Trials:
    """Runs of the plans' requests, by seed, on `executor` or one of their own."""
    plan, own = plans[0], plans[0].engine
    cache = (own.num_blocks, own.block_size)
    sizes = (own.batch_size, plan.max_model_len, *cache, plan.backend.num_stages)
    executor = executor or plan.build()[1]
    engine = search.Engine(executor, *sizes, own.cluster, progress, speculation=own.speculation)
    loads = {int(own.config["seed"]): own.load.requests for own in plans}
    return Trials(engine, plan.policy, loads, grid)


def _costs(plan: Plan, trial: Trial, peaks: Peaks) -> pd.DataFrame:
    return add_costs(trial.iterations, plan.spec, plan.backend.dtype_bytes, peaks)


class _Objective(NamedTuple):
    plan: Plan
    slo: Slo
    peaks: Peaks


def _summary(of: _Objective, trial: Trial) -> dict[str, float]:
    plan, slo, peaks = of
    served = (trial.requests, float(trial.iterations.end.max()))
    own = summarise(_costs(plan, trial, peaks), trial.requests, peaks, None)
    return own | serve.serving_summary_of(plan, *served, peaks, slo)


def _grows(plan: Plan) -> bool:
    """Whether its workload makes as many requests as it is asked for."""
    return "num_requests" in plan.config["workload"]


def _shown(slo: Slo, found: search.Capacities, summary: Mapping[str, float], fix: str) -> list[str]:
    """The rate with its interval and objective, seeds without one, and latencies at that rate."""
    num_seeds = len(found.brackets)
    at_least = "at least " if found.is_lower_bound else ""
    interval = f"{summary['capacity_low']:.3g} to {summary['capacity_high']:.3g}"
    interval += f" with {summary['capacity_confidence']:.0%} confidence"
    at_capacity = [
        f"{words} {1e3 * summary[name]:.0f} ms" for name, words in SHOWN.items() if name in summary
    ]
    under = f"under {slo.name}: {slo.describe()}"
    runs = f"  {summary['capacity_trials']:.0f} runs; all at once {summary['closed_rate']:.3g}/s"
    if not found.is_settled:
        return [f"  {found.remark}; serve more requests: {fix}", runs]
    return [
        f"  capacity {at_least}{summary['capacity']:.3g} requests/s ({interval}, {num_seeds} "
        f"seed{'s' * (num_seeds > 1)}) {under}",
        *([f"  {found.remark}"] if found.remark else []),
        f"  it stands still: {found.history}",
        f"{runs}; at the capacity, {', '.join(at_capacity)}" if at_capacity else runs,
    ]
