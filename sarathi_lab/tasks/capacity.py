"""The task `capacity`: the highest rate of requests at which the policy meets the objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment.capacity import (
    Capacities,
    Engine,
    Grid,
    Trial,
    Trials,
    at_rate,
    limits_around,
)
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.results.intervals import FEWEST_PAIRS
from sarathi_lab.results.metrics import add_costs, summarise
from sarathi_lab.results.plots.tasks import rate_curves
from sarathi_lab.results.result import Result
from sarathi_lab.results.serving_metrics import is_met
from sarathi_lab.results.slo import Slo
from sarathi_lab.tasks import announce
from sarathi_lab.tasks.plan import AUTO, Plan, make_plan
from sarathi_lab.tasks.serve import SLO_REFERENCE, labels_of, serving_summary_of, slo_reference

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
SHOWN = {"ttft_p50": "TTFT P50", "tbt_p99": "TBT P99", "tpot_p99": "TPOT P99"}


@dataclass(frozen=True)
class Capacity:
    """Looks for the capacity with `seeds` sets of requests, to a rate of `precision` (a share).

    The search is between `lowest` and `highest` requests a second (null: far around the saturation
    rate). Leaves capacity.parquet (a row per run), the tables of the first seed's run at its
    capacity, capacity.png and summary.json. Raises UserError for settings that make no search, or
    no objective to look for.
    """

    reads: ClassVar[tuple[str, ...]] = (
        *("policy", "workload", "executor", "model", "hardware", "slo", "device", "dtype", "seed"),
        *("chunk", "batch", "pd_ratio", "seq_len", "max_model_len", "cache", "stall"),
        "prompt_classes",
    )
    has_runs: ClassVar[bool] = True
    seeds: int = 3
    precision: float = 0.05
    lowest: float | None = None
    highest: float | None = None

    def __post_init__(self) -> None:
        require_int("task.seeds", self.seeds, 1, "use a few sets of requests, such as 3")
        require_number(
            "task.precision", self.precision, above=0, fix="use a share of the rate, such as 0.05"
        )
        fix = "use requests per second, or null"
        for name, rate in (("lowest", self.lowest), ("highest", self.highest)):
            if rate is not None:
                require_number(f"task.{name}", rate, above=0, fix=fix)
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
        configs = [_with_arrivals(cfg, seed) for seed in range(cfg.seed, cfg.seed + self.seeds)]
        plans = [make_plan(own) for own in configs]
        slo, name = plans[0].targets.slo, plans[0].load.name
        if not slo.bounds and not slo.is_relative:
            raise UserError(
                f"slo={slo.name} has no bounds that a rate could meet; name an objective, such as "
                "slo=strict or slo=mlperf-llama2-70b"
            )
        for plan in plans:
            at_rate(plan.load.requests, 1.0)  # refuses what has no gaps
        if len(plans) > 1 and _shapes(plans[0]) == _shapes(plans[1]):
            raise UserError(
                f"task.seeds={self.seeds} has no effect: workload {name} has the same requests for "
                "every seed; use task.seeds=1"
            )
        longest = max(plan.max_model_len for plan in plans)
        if all(plan.max_model_len == longest for plan in plans):
            return plans
        return [make_plan(_with(own, max_model_len=longest)) for own in configs]

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """The search's runs and the capacity found."""
        plans: list[Plan] = context.prepared or self.check(cfg)
        announce.print_plan(plans[0], context)
        trials, slo, saturation, found = self._search(plans)
        plan, peaks = plans[0], plans[0].backend.peaks()
        table, best, summary = _results(plan, trials, slo, found, peaks)
        summary["closed_rate"] = saturation
        labels = {
            **labels_of(plan, context.name),
            "slo": plan.targets.slo.name,
            "is_baseline": False,
            "baselines": {},
        }
        named = {name: labels[name] for name in ("policy", "slo", "model", "device", "workload")}
        tables = {"capacity.parquet": table.assign(**named)}
        if best is not None:
            costs = add_costs(best.iterations, plan.spec, plan.backend.dtype_bytes, peaks)
            tables |= {"iterations.parquet": costs, "requests.parquet": best.requests}
        where = f"{plan.policy.name}, {plan.spec.name} on {plan.backend.device_name}"
        return Result(
            tables=tables,
            figures={"capacity": rate_curves(table, slo, summary["capacity"], where)},
            summary=summary,
            shown=_shown(plan, slo, found, summary),
            labels=labels,
            tags=["capacity", *(str(labels[name]) for name in TAGS)],
            config=plan.config,
        )

    def _search(self, plans: Sequence[Plan]) -> tuple[Trials, Slo, float, Capacities]:
        """The runs, the objective in seconds, the saturation rate and what was found."""
        plan = plans[0]
        executor = plan.backend.build(plan.spec, plan.checkpoint, plan.sizes)
        if plan.fills_memory and executor.num_blocks:
            plan = replace(plan, num_blocks=executor.num_blocks)
        slo = plan.targets.slo.resolved(slo_reference(plan, executor).get(SLO_REFERENCE))
        tokens = sum(request.total_len - 1 for request in plan.load.requests)
        expected = tokens * (1 + FIRST_TRIALS + LATER_TRIALS * (len(plans) - 1))
        title = f"looking for the capacity under {slo.name}"
        with console.progress_of(title, expected, "tokens") as progress:
            engine = Engine(
                executor,
                plan.batch_size,
                plan.max_model_len,
                plan.num_blocks,
                plan.block_size,
                plan.backend.num_stages,
                progress,
            )
            loads = {int(own.config["seed"]): own.load.requests for own in plans}
            trials = Trials(engine, plan.policy, loads, Grid(self.precision))
            saturation = trials.saturation_rate()
            limits = limits_around(saturation, self.lowest, self.highest)
            return trials, slo, saturation, trials.capacity(slo, saturation, limits)


def _with(cfg: DictConfig, **settings: object) -> DictConfig:
    own = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    assert isinstance(own, DictConfig)
    own.update(settings)
    return own


def _with_arrivals(cfg: DictConfig, seed: int) -> DictConfig:
    """`cfg` with another seed, and arrivals whose gaps a rate can stretch. Refuses a rate."""
    own = _with(cfg, seed=seed)
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


def _shapes(plan: Plan) -> list[tuple[float, int, int]]:
    return [(r.arrival_time, r.prompt_len, r.output_len) for r in plan.load.requests]


def _results(
    plan: Plan, trials: Trials, slo: Slo, found: Capacities, peaks: Peaks
) -> tuple[pd.DataFrame, Trial | None, dict[str, float]]:
    """All runs, the first seed's run at its capacity if it has one, and the summary."""
    bounded = replace(plan, targets=replace(plan.targets, slo=slo))
    summaries = {key: _summary_of(bounded, trial, peaks) for key, trial in trials.known.items()}
    rows = [
        {"seed": trial.seed, "rate": trial.rate, "slo_met": is_met(trial.requests, slo)}
        | {name: summaries[key].get(name, float("nan")) for name in COLUMNS}
        for key, trial in sorted(trials.known.items())
    ]
    seed, bracket = next(iter(found.brackets.items()))
    key = None if bracket.passing is None else (seed, bracket.passing)
    summary = {
        **(summaries[key] if key else {}),
        **found.summary,
        "capacity_trials": float(len(trials.known)),
    }
    return pd.DataFrame(rows), trials.known[key] if key else None, summary


def _summary_of(plan: Plan, trial: Trial, peaks: Peaks) -> dict[str, float]:
    iterations = add_costs(trial.iterations, plan.spec, plan.backend.dtype_bytes, peaks)
    return {
        **summarise(iterations, trial.requests, peaks, None),
        **serving_summary_of(plan, trial.requests, float(trial.iterations.end.max()), peaks, {}),
    }


def _shown(plan: Plan, slo: Slo, found: Capacities, summary: Mapping[str, float]) -> list[str]:
    """The rate with its interval and objective, seeds without one, and latencies at that rate."""
    num_seeds = len(found.brackets)
    few = ", too few for an interval of more than the grid" if num_seeds < FEWEST_PAIRS else ""
    interval = f"{summary['capacity_low']:.3g} to {summary['capacity_high']:.3g}"
    at_capacity = [
        f"{words} {1e3 * summary[name]:.0f} ms" for name, words in SHOWN.items() if name in summary
    ]
    return [
        f"  capacity {summary['capacity']:.3g} requests/s ({interval}, {num_seeds} "
        f"seed{'s' * (num_seeds > 1)}{few}) under {slo.name}: {slo.describe()}",
        *([f"  {found.remark}"] if found.remark else []),
        f"  {summary['capacity_trials']:.0f} runs of {len(plan.load.requests)} requests; all at "
        f"once {summary['closed_rate']:.3g} requests/s"
        + (f"; at the capacity, {', '.join(at_capacity)}" if at_capacity else ""),
    ]
