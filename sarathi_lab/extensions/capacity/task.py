"""The task `capacity`: the highest rate of requests at which the policy meets the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from sarathi_lab.config.checked import number, whole
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.extensions.capacity import search
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.results.metrics import add_costs, summarise
from sarathi_lab.results.plots.style import WIDTH, finished, marker, panels, tick_in_steps
from sarathi_lab.results.result import ITERATIONS, REQUESTS, Result
from sarathi_lab.results.serving_metrics import Slo, is_met
from sarathi_lab.tasks import serve
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import AUTO, Plan, changed, make_plan, slo_reference

RATES = "use requests per second, or null"
SCALED = ("poisson", "gamma", "ramp")  # arrivals with a rate
FIRST_TRIALS, LATER_TRIALS = 8, 4  # expected per seed, for the progress bar
# Optional columns of capacity.parquet.
COLUMNS = (
    *("throughput", "output_throughput", "request_throughput", "duration", "num_preemptions"),
    *("slo_attainment", "goodput", "num_stalls", "longest_gap", "ttft_p50", "ttft_p90", "ttft_p99"),
    *("tbt_p50", "tbt_p90", "tbt_p99", "tpot_p50", "tpot_p99", "latency_p50", "latency_p99"),
    *("scheduling_delay_p50", "scheduling_delay_p99"),
)
# By bound: the column of capacity.parquet that it is for, and its name.
BOUNDED = {
    "tbt": ("tbt_p99", "TBT P99 [ms]"),
    "ttft": ("ttft_p99", "TTFT P99 [ms]"),
    "tpot": ("tpot_p99", "TPOT P99 [ms]"),
    "scheduling_delay": ("scheduling_delay_p50", "scheduling delay P50 [ms]"),
}
TAGS = ("policy", "model", "device", "executor", "slo")  # labels
MORE, GIVEN = "raise task.doublings or workload.num_requests", "a longer file, or all of this one"
SHOWN = {"ttft_p50": "TTFT P50", "tbt_p99": "TBT P99", "tpot_p99": "TPOT P99"}


@dataclass(frozen=True)
class Capacity(Task):
    """Search of the capacity with `seeds` sets of requests, to a rate of `precision` (a share).

    The workload's requests are doubled until the capacity converges, `doublings` times at most;
    given requests, such as a trace's, are searched by half of them and by all. Leaves
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest is not None and self.highest is not None and self.lowest >= self.highest:
            raise UserError(
                f"task.lowest={self.lowest} is not below task.highest={self.highest}; exchange them"
            )

    def check(self, cfg: DictConfig) -> list[Plan]:
        """Make a plan for each seed, of equal sizes."""
        if getattr(cfg.policy, "chunk", None) == AUTO:
            raise UserError(
                f"chunk={AUTO} is advised for one load, not for every rate; name a chunk such as "
                "chunk=512"
            )
        seeds = range(cfg.seed, cfg.seed + self.seeds)
        configs = [self._with_arrivals(cfg, seed) for seed in seeds]
        plans = [make_plan(config) for config in configs]
        slo, name = plans[0].targets.slo, plans[0].load.name
        if not slo.bounds and not slo.is_relative:
            raise UserError(
                f"slo={slo.name} has no bounds that a rate could meet; name an objective, such as "
                "slo=strict or slo=mlperf-llama2-70b"
            )
        for plan in plans:  # raises for requests without gaps
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
        return [make_plan(changed(config, max_model_len=longest)) for config in configs]

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        plans: list[Plan] = context.prepared or self.check(cfg)
        plan = plans[0]
        serve.print_plan(plan, context)
        trials, slo, saturation, found = self._search(plans, self._lengths(plan))
        peaks = plan.backend.peaks()
        summaries = {}
        with progress_of("summarising", len(trials.known), "runs") as advance:
            for key, trial in trials.known.items():
                summaries[key] = _summary(plan, slo, peaks, trial)
                advance(1)
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
        """List the numbers of requests per run, up to all of the plan's."""
        doublings = self.doublings if _grows(plan) else 1
        return search.run_lengths(len(plan.load.requests), doublings)

    def _search(
        self, plans: Sequence[Plan], lengths: Sequence[int]
    ) -> tuple[search.Trials, Slo, float, search.Capacities]:
        """Return the runs, the objective in seconds, the saturation rate and the result."""
        plan = plans[0]
        executor = plan.build()[1]
        plan = plan.with_cache_of(executor)
        slo = plan.targets.slo.resolved(slo_reference(plan, executor))
        tokens = sum(request.total_len - 1 for request in plan.load.requests[: 2 * lengths[0]])
        expected = tokens * (1 + FIRST_TRIALS + LATER_TRIALS * (len(plans) - 1))
        engine, loads = plan.engine, {int(one.config["seed"]): one.load.requests for one in plans}
        with progress_of(f"capacity under {slo.name}", expected, "tokens") as progress:
            trials = search.Trials(engine, executor, loads, search.Grid(self.precision), progress)
            saturation = trials.saturation_rate(lengths[0])
            limits = search.limits_around(saturation, self.lowest, self.highest)
            return trials, slo, saturation, trials.capacity(slo, saturation, limits, lengths)

    def _with_arrivals(self, cfg: DictConfig, seed: int) -> DictConfig:
        """Return `cfg` with another seed, the requests of its longest runs, and arrivals whose gaps
        a rate can stretch. Raises UserError for a rate.
        """
        config = changed(cfg, seed=seed)
        if isinstance(config.workload.get("num_requests"), int):
            config.workload.num_requests <<= self.doublings
        kind = config.workload.get("arrivals")
        if "rate" in config.workload and kind in ("closed", *SCALED):
            if config.workload.rate is not None:
                raise UserError(
                    f"workload.rate={config.workload.rate} has no effect: task=capacity "
                    "searches the rate; drop it"
                )
            config.workload.rate = 1.0
            if kind == "closed":
                config.workload.arrivals = "poisson"
        return config


def _costs(plan: Plan, trial: search.Trial, peaks: Peaks) -> pd.DataFrame:
    return add_costs(trial.iterations, plan.spec, plan.backend.dtype_bytes, peaks)


def _summary(plan: Plan, slo: Slo, peaks: Peaks, trial: search.Trial) -> dict[str, float]:
    served = (trial.requests, float(trial.iterations.end.max()))
    general = summarise(_costs(plan, trial, peaks), trial.requests, peaks, None)
    return general | serve.serving_summary_of(plan, *served, peaks, slo)


def _grows(plan: Plan) -> bool:
    """Whether its workload generates any number of requests."""
    return "num_requests" in plan.config["workload"]


def _shown(slo: Slo, found: search.Capacities, summary: Mapping[str, float], fix: str) -> list[str]:
    """Describe the rate with its interval and objective, and the latencies at that rate."""
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
        f"  converged: {found.history}",
        f"{runs}; at the capacity, {', '.join(at_capacity)}" if at_capacity else runs,
    ]


def rate_curves(table: pd.DataFrame, slo: Slo, capacity: float, where: str) -> Figure:
    """Draw a panel per bound of `slo`: the quantile over the rate, a line per seed, filled where a
    run met all bounds.

    `table` has the columns of capacity.parquet; `where` names policy, model and device.
    """
    names = [name for name in BOUNDED if name in slo.bounds]
    figure, axes = panels(1, len(names), (min(WIDTH, 4.6 * len(names)), 3.6))
    for ax, name in zip(axes, names, strict=True):
        column, label = BOUNDED[name]
        for i, (seed, rows) in enumerate(table.groupby("seed")):
            line = rows.sort_values("rate")
            style: dict[str, Any] = {"color": f"C{i}", "marker": marker(i), "linestyle": ""}
            ax.plot(line.rate, 1e3 * line[column], color=f"C{i}", linewidth=0.9)
            for own, fill, key in (
                (line[line.slo_met], "full", f"seed {seed}"),
                (line[~line.slo_met], "none", None),
            ):
                ax.plot(own.rate, 1e3 * own[column], fillstyle=fill, label=key, **style)
        ax.axhline(1e3 * slo.bounds[name], color="black", ls="--", lw=0.9, label="bound")
        is_log = table[column].gt(0).all()
        ax.set(xscale="log", yscale="log" if is_log else "linear")
        for axis in (ax.xaxis, ax.yaxis) if is_log else (ax.xaxis,):
            tick_in_steps(axis)
        if capacity > 0:
            ax.axvline(capacity, color="0.4", linestyle=":", label=f"capacity {capacity:.3g}/s")
        ax.set(xlabel="requests per second", ylabel=label)
    axes[0].legend(fontsize="small")
    return finished(figure, f"{where}, {slo.name}")
