"""The task `capacity`: the highest rate of requests at which the policy meets the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.checked import number, whole
from sarathi_lab.config.console import counted, progress_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.extensions.under_load.search import (
    Capacity,
    RateGrid,
    RateSearch,
    RunAtRate,
    Server,
    at_rate,
    is_sustained,
    run_lengths,
)
from sarathi_lab.results.decode_cost import slo_in_seconds
from sarathi_lab.results.metrics import add_costs, summarise, throughput
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.results.result import ITERATIONS, REQUESTS, Result
from sarathi_lab.results.serving_metrics import Slo, bounded, latency
from sarathi_lab.results.table import SIMULATED
from sarathi_lab.tasks import serve
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.executed import serving_summary_of
from sarathi_lab.tasks.plan import AUTO, Plan, changed, make_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALED = ("poisson", "gamma")  # arrivals with a rate
OF_TABLE = ("policy", "slo", "model", "device")  # labels
SHOWN = {"ttft_p50": "TTFT P50", "tbt_p99": "TBT P99", "tpot_p99": "TPOT P99"}


class Searched(NamedTuple):
    """A search: its runs, the objective in seconds, the rate of requests that are all there at once
    (1/s), and the result.
    """

    search: RateSearch
    slo: Slo
    saturation: float
    capacity: Capacity


@dataclass(frozen=True)
class FindCapacity(Task):
    """Search of the capacity, to a rate of `precision` (a share).

    The workload's requests are doubled until the capacity converges, `doublings` times at most;
    given requests, such as a trace's, are searched by half of them and by all. Leaves
    capacity.parquet (a row per run), and the tables of the run at the capacity.
    """

    reads = (
        "policy",
        "workload",
        "executor",
        "model",
        "hardware",
        "slo",
        "device",
        "dtype",
        "seed",
        "chunk",
        "batch",
        "pd_ratio",
        "seq_len",
        "max_model_len",
        "cache",
        "stall",
        "host",
        "queue_order",
        "prompt_classes",
        "cluster",
        "speculation",
    )
    has_runs = True
    precision: float = number(0.05, above=0, fix="use a share of the rate, such as 0.05")
    doublings: int = whole(3, minimum=1, fix="use a few, such as 3")

    def check(self, cfg: DictConfig) -> Plan:
        if cfg.policy.get("chunk") == AUTO:
            raise UserError(
                f"chunk={AUTO} is advised for one load, not for every rate; name a chunk such as "
                "chunk=512"
            )
        plan = make_plan(self._with_arrivals(cfg))
        slo = plan.targets.slo
        if not slo.bounds and not slo.is_relative:
            raise UserError(
                f"slo={slo.name} has no bounds that a rate could meet; name an objective, such as "
                "slo=strict or slo=mlperf-llama2-70b"
            )
        shortest_run = plan.load.requests[: self._lengths(plan)[0]]
        at_rate(shortest_run, 1.0)  # raises for requests without gaps
        return plan

    def highest_rate(
        self, cfg: DictConfig, *, least: float = 0.0, start: float | None = None
    ) -> Capacity:
        """Search the capacity as `run` does, without its tables. Raises UserError for what makes no
        search.

        Args:
            cfg: The configuration of the run.
            least: The lowest rate (1/s) that is asked for.
            start: The rate (1/s) of the first run; None: that of all requests at once.
        """
        plan = self.check(cfg)
        return self._search(plan, ends_early=True, least=least, start=start).capacity

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        plan: Plan = context.prepared or self.check(cfg)
        serve.print_plan(plan, context)
        searched = self._search(plan)
        slo = searched.slo
        capacity = searched.capacity
        runs = [run for _, run in sorted(searched.search.runs.items()) if run is not None]
        labels = serve.labels_of(plan, context.name) | {"slo": slo.name}
        of_table = {name: labels[name] for name in (*OF_TABLE, "workload", "seed")}
        rows = [_row(run, slo) for run in runs]
        table = pd.DataFrame(rows).assign(**of_table)
        at_capacity, tables = _at_capacity(plan, searched)
        summary = {
            **at_capacity,
            "capacity": capacity.rate if capacity.is_settled else math.nan,
            "capacity_high": capacity.next_rate if capacity.is_settled else math.nan,
            "capacity_trials": float(len(runs)),
            "closed_rate": searched.saturation,
        }
        title = f"{plan.policy.name}, {plan.spec.name} on {plan.backend.device_name}, {slo.name}"
        figure = _draw(runs, slo, title)
        tags = [str(labels[name]) for name in (*OF_TABLE, "executor")]
        return Result(
            tables={"capacity.parquet": table, **tables},
            figures={"capacity": figure},
            summary=summary,
            shown=_shown(slo, capacity, summary),
            labels={**labels, "is_baseline": False, "baselines": {}},
            tags=["capacity", *tags],
            config=plan.config,
        )

    def _lengths(self, plan: Plan) -> list[int]:
        """List the numbers of requests per run, up to all of the plan's."""
        num_requests = len(plan.load.requests)
        is_drawn = "num_requests" in plan.config["workload"]
        # A file has no further requests: half of it and all of it are compared.
        if not is_drawn:
            return run_lengths(num_requests, doublings=1)
        return run_lengths(num_requests, self.doublings)

    def _search(
        self,
        plan: Plan,
        *,
        ends_early: bool = False,
        least: float = 0.0,
        start: float | None = None,
    ) -> Searched:
        lengths = self._lengths(plan)
        requests = plan.load.requests
        server, slo = _server_of(plan)
        saturation = server.saturation_rate(requests[: lengths[0]])
        title = f"capacity under {slo.name}"
        with progress_of(title, unit="lengths of runs", total=len(lengths)) as advance:
            grid = RateGrid(self.precision)
            search = RateSearch(server, requests, grid, ends_early, on_length=advance)
            capacity = search.capacity(
                slo, start or saturation, saturation, lengths, is_confirmed=True, least=least
            )
        return Searched(search, slo, saturation, capacity)

    def _with_arrivals(self, cfg: DictConfig) -> DictConfig:
        """Return `cfg` with the requests of its longest runs, and arrivals whose gaps a rate can
        stretch. Raises UserError for a rate.
        """
        config = changed(cfg)
        workload = config.workload
        if isinstance(workload.get("num_requests"), int):
            workload.num_requests *= 2**self.doublings
        kind = workload.get("arrivals")
        may_have_rate = kind in ("closed", *SCALED) or _is_drawn(config)
        if "rate" not in workload or not may_have_rate:
            return config
        if workload.rate is not None:
            raise UserError(
                f"workload.rate={workload.rate} has no effect: task=capacity searches the rate; "
                "drop it"
            )
        # Any rate does: the search stretches the gaps.
        workload.rate = 1.0
        if kind not in SCALED:
            is_gamma = kind is None and workload.get("cv") is not None
            workload.arrivals = "gamma" if is_gamma else "poisson"
        return config


def _server_of(plan: Plan) -> tuple[Server, Slo]:
    """Build the server of a plan, and return it with its objective in seconds."""
    _, executor = plan.build()
    engine = plan.engine.with_cache_of(executor)
    slo = slo_in_seconds(plan.targets.slo, engine, executor)
    server = Server(engine, executor, request_time=plan.load.request_time)
    return server, slo


def _is_drawn(cfg: DictConfig) -> bool:
    """Return whether times would be drawn at a rate, though no kind of arrivals is named."""
    workload = cfg.workload
    if workload.arrivals is not None or "path" in workload:
        return False
    is_of_users = any(workload.get(name) is not None for name in ("users", "think_time"))
    return not is_of_users


def _row(run: RunAtRate, slo: Slo) -> dict[str, float]:
    """Return the row of a run in capacity.parquet."""
    return {
        "num_requests": run.num_requests,
        "rate": run.rate,
        "slo_met": is_sustained(run.requests, slo),
        **latency(run.requests),
        **throughput(run.requests, float(run.iterations.end.max())),
    }


def _draw(runs: Sequence[RunAtRate], slo: Slo, title: str) -> Figure:
    """Draw a panel per bound: the bounded quantile over the rate, a line a length of runs."""
    # Its import takes half a second, and task=advise searches rates without a picture.
    from sarathi_lab.results.plots.panels import draw

    rates = [run.rate for run in runs]
    points = []
    for run in runs:
        series = f"{run.num_requests} requests"
        for name, seconds in bounded(run.requests, slo).items():
            points.append((name, series, run.rate, 1e3 * seconds))
    for name, seconds in slo.bounds.items():
        for rate in (min(rates), max(rates)):
            points.append((name, "bound of the objective", rate, 1e3 * seconds))
    table = pd.DataFrame(points, columns=["panel", "series", "x", "y"])
    table = table.assign(unit="ms", source=SIMULATED, device="", low=math.nan, high=math.nan)
    panels = {}
    for name in slo.bounds:
        panels[name] = f"{name.replace('_', ' ')}, P{100 * slo.quantile_of(name):g}"
    look = PlotSpec(title, "requests a second", log_x=True, is_by_device=True, panels=panels)
    return draw(look, table, is_all=True)


def _at_capacity(
    plan: Plan, searched: Searched
) -> tuple[dict[str, float], dict[str, pd.DataFrame]]:
    """Return quantities and tables of the run at the capacity; none without one."""
    capacity = searched.capacity
    if capacity.step < capacity.lowest or not capacity.is_settled:
        return {}, {}
    run = searched.search.runs[capacity.num_requests, capacity.step]
    assert run is not None, "it passed"
    backend = plan.backend
    peaks = backend.peaks()
    costs = add_costs(run.iterations, plan.spec, backend.dtype_bytes, peaks)
    seconds = float(costs.end.max())
    quantities = summarise(costs, run.requests, peaks, None, plan.spec)
    quantities |= serving_summary_of(plan, run.requests, seconds, peaks, searched.slo)
    return quantities, {ITERATIONS: costs, REQUESTS: run.requests}


def _shown(slo: Slo, capacity: Capacity, summary: Mapping[str, float]) -> list[str]:
    """Describe the rate with its interval and objective, and the latencies at that rate."""
    num_runs = counted(summary["capacity_trials"], "run")
    runs = f"  {num_runs}; with all requests at once {summary['closed_rate']:.3g} requests/s"
    if not capacity.is_settled:
        advice = "raise task.doublings or workload.num_requests, or name a longer file"
        return [f"  {capacity.remark}; serve more requests: {advice}", runs]
    at_least = "at least " if capacity.is_lower_bound else ""
    rate = f"{at_least}{capacity.rate:.3g} requests/s"
    lines = [f"  capacity {rate} under {slo.name}, whose bounds are {slo.describe()}"]
    if capacity.remark:
        lines.append(f"  {capacity.remark}")
    lines.append(f"  converged: {capacity.history}")
    latencies = []
    for name, heading in SHOWN.items():
        if name in summary:
            latencies.append(f"{heading} {1e3 * summary[name]:.0f} ms")
    if latencies:
        runs += f"; at the capacity, {', '.join(latencies)}"
    return [*lines, runs]
