"""The task `capacity`: the highest rate of requests at which the policy meets the objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from sarathi_lab.config.checked import number, whole
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.extensions.capacity import search
from sarathi_lab.results.metrics import add_costs, summarise, throughput
from sarathi_lab.results.plots.style import WIDTH, finished, panels, tick_in_steps
from sarathi_lab.results.result import ITERATIONS, REQUESTS, Result
from sarathi_lab.results.serving_metrics import Slo, latency
from sarathi_lab.tasks import serve
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import AUTO, Plan, changed, make_plan, slo_reference

SCALED = ("poisson", "gamma")  # arrivals with a rate
FIRST_TRIALS, LATER_TRIALS = 8, 4  # expected per seed, for the progress bar
# By bound: the column of capacity.parquet that it is for, and its name.
BOUNDED = {
    "tbt": ("tbt_p99", "TBT P99 [ms]"),
    "ttft": ("ttft_p99", "TTFT P99 [ms]"),
    "tpot": ("tpot_p99", "TPOT P99 [ms]"),
    "scheduling_delay": ("scheduling_delay_p50", "scheduling delay P50 [ms]"),
}
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
        *("chunk", "batch", "pd_ratio", "seq_len", "max_model_len", "cache", "stall", "host"),
        "queue_order",
        "prompt_classes",
        *("cluster", "speculation"),
    )
    has_runs = True
    seeds: int = whole(3, minimum=1, fix="use a few sets of requests, such as 3")
    precision: float = number(0.05, above=0, fix="use a share of the rate, such as 0.05")
    doublings: int = whole(3, minimum=1, fix="use a few, such as 3")

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
        slo = plans[0].targets.slo
        if not slo.bounds and not slo.is_relative:
            raise UserError(
                f"slo={slo.name} has no bounds that a rate could meet; name an objective, such as "
                "slo=strict or slo=mlperf-llama2-70b"
            )
        for plan in plans:  # raises for requests without gaps
            search.at_rate(plan.load.requests[: self._lengths(plan)[0]], 1.0)
        sizes = ("arrival_time", "prompt_len", "output_len")
        loads = [[*map(attrgetter(*sizes), plan.load.requests)] for plan in plans[:2]]
        if loads[0] in loads[1:]:
            raise UserError(
                f"task.seeds={self.seeds} has no effect: workload {plans[0].load.name} has the "
                "same requests for every seed; use task.seeds=1"
            )
        longest = max(plan.max_model_len for plan in plans)
        if all(plan.max_model_len == longest for plan in plans):
            return plans
        return [make_plan(changed(config, max_model_len=longest)) for config in configs]

    def highest_rate(self, cfg: DictConfig) -> search.Capacity:
        """Search the capacity, as `run` does. Raises UserError for what makes no search."""
        plans = self.check(cfg)
        return self._search(plans, self._lengths(plans[0]))[-1]

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        plans: list[Plan] = context.prepared or self.check(cfg)
        plan = plans[0]
        serve.print_plan(plan, context)
        trials, slo, saturation, found = self._search(plans, self._lengths(plan))
        rows = [
            {"seed": trial.seed, "num_requests": trial.num_requests, "rate": trial.rate}
            | {"slo_met": search.is_sustained(trial.requests, slo), **latency(trial.requests)}
            | throughput(trial.requests, float(trial.iterations.end.max()))
            for _, trial in sorted(trials.known.items())
        ]
        labels = serve.labels_of(plan, context.name) | {"slo": plan.targets.slo.name}
        named = {name: labels[name] for name in ("policy", "slo", "model", "device", "workload")}
        table = pd.DataFrame(rows).assign(**named)
        tables, at_capacity = {"capacity.parquet": table}, {}
        seed, step = next(iter(found.steps.items()))
        if step >= found.lowest and found.is_settled:
            best, peaks = trials.known[seed, found.num_requests, step], plan.backend.peaks()
            costs = add_costs(best.iterations, plan.spec, plan.backend.dtype_bytes, peaks)
            served = (best.requests, float(costs.end.max()))
            at_capacity = summarise(costs, best.requests, peaks, None)
            at_capacity |= serve.serving_summary_of(plan, *served, peaks, slo)
            tables |= {ITERATIONS: costs, REQUESTS: best.requests}
        summary = {**at_capacity, **found.summary, "capacity_trials": float(len(rows))}
        summary["closed_rate"] = saturation
        where = f"{plan.policy.name}, {plan.spec.name} on {plan.backend.device_name}"
        longest = table[table.num_requests == found.num_requests]
        tags = ("policy", "model", "device", "executor", "slo")
        return Result(
            tables=tables,
            figures={"capacity": rate_curves(longest, slo, summary["capacity"], where)},
            summary=summary,
            shown=_shown(slo, found, summary),
            labels={**labels, "is_baseline": False, "baselines": {}},
            tags=["capacity", *(str(labels[name]) for name in tags)],
            config=plan.config,
        )

    def _lengths(self, plan: Plan) -> list[int]:
        """List the numbers of requests per run, up to all of the plan's."""
        doublings = self.doublings if "num_requests" in plan.config["workload"] else 1
        return search.run_lengths(len(plan.load.requests), doublings)

    def _search(
        self, plans: Sequence[Plan], lengths: Sequence[int]
    ) -> tuple[search.Trials, Slo, float, search.Capacity]:
        """Return the runs, the objective in seconds, the saturation rate and the result."""
        plan = plans[0]
        executor = plan.build()[1]
        plan = replace(plan, engine=plan.engine.with_cache_of(executor))
        slo = plan.targets.slo.resolved(slo_reference(plan, executor))
        tokens = sum(request.total_len - 1 for request in plan.load.requests[: 2 * lengths[0]])
        expected = tokens * (1 + FIRST_TRIALS + LATER_TRIALS * (len(plans) - 1))
        engine, loads = plan.engine, {int(one.config["seed"]): one.load.requests for one in plans}
        with progress_of(f"capacity under {slo.name}", expected, "tokens") as progress:
            trials = search.Trials(engine, executor, loads, search.Grid(self.precision), progress)
            saturation = trials.saturation_rate(lengths[0])
            found = trials.capacity(slo, saturation, saturation, lengths)
        return trials, slo, saturation, found

    def _with_arrivals(self, cfg: DictConfig, seed: int) -> DictConfig:
        """Return `cfg` with another seed, the requests of its longest runs, and arrivals whose gaps
        a rate can stretch. Raises UserError for a rate.
        """
        config = changed(cfg, seed=seed)
        if isinstance(config.workload.get("num_requests"), int):
            config.workload.num_requests <<= self.doublings
        kind = config.workload.get("arrivals")
        if "rate" in config.workload and (kind in ("closed", *SCALED) or _is_drawn(config)):
            if config.workload.rate is not None:
                raise UserError(
                    f"workload.rate={config.workload.rate} has no effect: task=capacity "
                    "searches the rate; drop it"
                )
            config.workload.rate = 1.0
            if kind not in SCALED:
                is_gamma = kind is None and config.workload.get("cv") is not None
                config.workload.arrivals = "gamma" if is_gamma else "poisson"
        return config


def _is_drawn(cfg: DictConfig) -> bool:
    """Return whether times would be drawn at a rate, though no kind of arrivals is named."""
    workload = cfg.workload
    of_users = (workload.get("users"), workload.get("think_time"))
    return workload.arrivals is None and "path" not in workload and of_users == (None, None)


def _shown(slo: Slo, found: search.Capacity, summary: Mapping[str, float]) -> list[str]:
    """Describe the rate with its interval and objective, and the latencies at that rate."""
    runs = f"  {summary['capacity_trials']:.0f} runs; all at once {summary['closed_rate']:.3g}/s"
    if not found.is_settled:
        fix = "raise task.doublings or workload.num_requests, or name a longer file"
        return [f"  {found.remark}; serve more requests: {fix}", runs]
    low, high, confidence = (summary[f"capacity_{end}"] for end in ("low", "high", "confidence"))
    num_seeds = len(found.steps)
    interval = f"{low:.3g} to {high:.3g} with {confidence:.0%} confidence, {num_seeds} seeds"
    if num_seeds == 1:  # which has no interval
        interval = "1 seed"
    at_capacity = [
        f"{words} {1e3 * summary[name]:.0f} ms" for name, words in SHOWN.items() if name in summary
    ]
    return [
        f"  capacity {'at least ' if found.is_lower_bound else ''}{found.median:.3g} requests/s "
        f"({interval}) under {slo.name}: {slo.describe()}",
        *([f"  {found.remark}"] if found.remark else []),
        f"  converged: {found.history}",
        f"{runs}; at the capacity, {', '.join(at_capacity)}" if at_capacity else runs,
    ]


def rate_curves(table: pd.DataFrame, slo: Slo, capacity: float, where: str) -> Figure:
    """Draw a panel per bound of `slo`: the quantile over the rate, a line per seed, crossed where a
    run missed a bound.

    `table` has the columns of capacity.parquet; `where` names policy, model and device.
    """
    import seaborn as sns  # takes two seconds

    names = [name for name in BOUNDED if name in slo.bounds]
    figure, axes = panels(1, len(names), (min(WIDTH, 4.6 * len(names)), 3.6))
    seeds = table.seed.map("seed {}".format)
    outcomes = table.slo_met.map({True: "met", False: "missed"})
    for ax, name in zip(axes, names, strict=True):
        column, label = BOUNDED[name]
        curves: Any = {"x": table.rate, "y": 1e3 * table[column], "hue": seeds, "ax": ax}
        sns.lineplot(**curves, linewidth=0.9, legend=False)
        markers = {"met": "o", "missed": "X"}
        sns.scatterplot(**curves, style=outcomes, markers=markers, legend=ax is axes[0])
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
