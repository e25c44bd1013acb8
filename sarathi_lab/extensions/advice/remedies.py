"""What would meet an objective that nothing meets: a lower rate, more replicas, a looser bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.console import amount
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import option_files, read_option
from sarathi_lab.config.run_context import RunContext, as_command
from sarathi_lab.engine.loop import serve
from sarathi_lab.experiment.advisor import Row, choose
from sarathi_lab.extensions.advice.compared import Compared
from sarathi_lab.extensions.under_load.capacity import FindCapacity
from sarathi_lab.extensions.under_load.search import WAITS, mean_rate
from sarathi_lab.results.objective import outcome
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.tasks.plan import Plan, make_plan

WORDS = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TPOT", "scheduling_delay": "scheduling delay"}
MOST_REPLICAS = 16
STEP = 1.4  # between the chunks whose rates are searched
SCREENED_PRECISION = 0.1  # of these rates
TRIED_REPLICAS = 3  # numbers of them, from the one that the highest rate suggests
DIGITS = 3  # of a looser bound
NOT_REPEATED = ("task", "output", "tracking", "baselines", "resume", "hydra")  # in commands


class Remedy(NamedTuple):
    """What would meet the objective, and the command that shows it."""

    words: str
    command: str


class Nearest(NamedTuple):
    """A row of a policy's table for which remedies are looked for, and the highest rate at which it
    meets the objective (requests/s).
    """

    compared: Compared
    row: pd.Series
    rate: float = 0.0
    is_settled: bool = True  # whether longer runs give the same rate
    num_searched: int = 1  # policies and chunks of which it has the highest rate

    @property
    def chunk(self) -> int:
        return int(self.row["chunk"])

    @property
    def words(self) -> str:
        option = self.compared.option
        return f"{option.label} with {option.typed_chunk(self.chunk)}"

    @property
    def cfg(self) -> DictConfig:
        """The configuration of a run as in the row."""
        return self.compared.option.with_chunk(self.chunk)


@dataclass(frozen=True)
class Commands:
    """Commands like the typed one, whose `settings` are repeated; `policy` is the option of it."""

    settings: Sequence[str]
    policy: str | None

    @classmethod
    def of_run(cls, context: RunContext) -> Commands:
        return cls(context.settings, context.policy)

    def of(self, nearest: Nearest, *added: str, without: Sequence[str] = ()) -> str:
        """Return the command of a policy with its chunk and the settings `added`, which replace
        typed ones of their names.
        """
        option = nearest.compared.option
        chosen = list(self._policy(option.typed))
        if "task=advise" not in added:  # which names its chunks itself
            chosen.append(option.typed_chunk(nearest.chunk))
        chosen += added
        names = {_name(setting) for setting in chosen} | {*without}
        repeated = []
        for setting in self.settings:
            group = _name(setting).partition(".")[0]
            is_other_policy = group == "policy" and option.typed is not None
            if _name(setting) in names or group in NOT_REPEATED or is_other_policy:
                continue
            repeated.append(setting)
        if "executor" not in map(_name, repeated):  # task=advise implies it
            repeated.insert(0, "executor=simulated")
        # The task first, as it is what a reader looks for.
        tasks = [setting for setting in chosen if setting.startswith("task")]
        others = [setting for setting in chosen if not setting.startswith("task")]
        return as_command([*tasks, *repeated, *others])

    def _policy(self, typed: Sequence[str] | None) -> Sequence[str]:
        if typed is not None:
            return typed
        is_typed = any(setting.startswith("policy") for setting in self.settings)
        return () if is_typed or self.policy is None else (f"policy={self.policy}",)


def _name(setting: str) -> str:
    """Return the name that a setting sets."""
    return setting.lstrip("+~").partition("=")[0]


class Remedies(NamedTuple):
    """What would meet the objective; `nearest` is what a rate and replicas were looked for."""

    found: Sequence[Remedy] = ()
    nearest: Nearest | None = None
    has_lower_rate: bool = False
    capacity_plan: Plan | None = None  # of the runs that found the lower rate


def remedies(
    nearest_of: Compared, compared: Sequence[Compared], slo: Slo, commands: Commands
) -> Remedies:
    """Return what would meet an objective that no run of `compared` meets, as far as anything does:
    a rate and replicas of the policy and chunk of the highest rate, a bound of any. The search
    begins with the policy `nearest_of`, which comes nearest.
    """
    nearest = _with_rate(nearest_of, compared)
    lower_rate = _lower_rate(nearest, commands)
    more_replicas = _more_replicas(nearest, slo, commands)
    looser_bound = _looser_bound(compared, slo, commands)
    found = [remedy for remedy in (lower_rate, more_replicas, looser_bound) if remedy is not None]
    has_lower_rate = lower_rate is not None or more_replicas is not None
    capacity_plan = None
    if lower_rate is not None:
        capacity_plan = FindCapacity().check(_of_capacity(nearest.cfg))
    return Remedies(found, nearest, has_lower_rate, capacity_plan)


def _with_rate(best: Compared, compared: Sequence[Compared]) -> Nearest:
    """Search the highest rate at which a policy and a chunk meet the objective. Which chunk that is
    an overloaded run does not tell, so the largest whose times between tokens are within bounds is
    searched, then larger ones while the rate rises, and other policies with the chunk of the most;
    all in short searches, and the one of the highest rate in a full one.
    """
    nearest = Nearest(best, _first_row(best))
    if best.plan.load.waits_for_answers:
        return nearest
    try:
        nearest = _screened(nearest)
        number = 1
        for row in _larger_rows(nearest):
            number += 1
            larger = _screened(Nearest(best, row))
            if larger.rate < nearest.rate:
                break
            nearest = larger
        for other in compared:
            if other is best:
                continue
            number += 1
            rows = _cut_rows(other)
            distances = (rows.chunk - nearest.chunk).abs().to_numpy()
            row = rows.iloc[int(distances.argmin())]
            screened = _screened(Nearest(other, row))
            if screened.rate > nearest.rate:
                nearest = screened
        found = FindCapacity().highest_rate(_of_capacity(nearest.cfg))
    except UserError:  # of requests that have no rate
        return nearest._replace(rate=0.0)
    return nearest._replace(rate=found.rate, is_settled=found.is_settled, num_searched=number)


def _screened(nearest: Nearest) -> Nearest:
    """Return `nearest` with the highest rate of a short, coarse search."""
    search = FindCapacity(precision=SCREENED_PRECISION, doublings=1)
    return nearest._replace(rate=search.highest_rate(_of_capacity(nearest.cfg)).rate)


def _cut_rows(compared: Compared) -> pd.DataFrame:
    """Return the rows of chunks: no setting of a command leaves prompts whole for every policy."""
    return compared.table[~compared.table.is_whole.astype(bool)]


def _first_row(compared: Compared) -> pd.Series:
    table = _cut_rows(compared)
    within = table[table.gap_bounds_missed == 0]
    return choose(table) if within.empty else within.sort_values("chunk").iloc[-1]


def _larger_rows(nearest: Nearest) -> list[pd.Series]:
    """Return rows of larger chunks, each by `STEP` at least."""
    rows = []
    chunk = nearest.chunk
    for _, row in _cut_rows(nearest.compared).sort_values("chunk").iterrows():
        if row.chunk >= STEP * chunk:
            rows.append(row)
            chunk = int(row.chunk)
    return rows


def _of_capacity(cfg: DictConfig) -> DictConfig:
    """Return the configuration of a search that begins with half of the requests."""
    if "rate" in cfg.workload:
        cfg.workload.rate = None
    if isinstance(cfg.workload.get("num_requests"), int):
        cfg.workload.num_requests = _half(cfg)
    return cfg


def _half(cfg: DictConfig) -> int:
    return max(2, cfg.workload.num_requests // 2)


def _lower_rate(nearest: Nearest, commands: Commands) -> Remedy | None:
    stated = _stated_rate(nearest.compared)
    is_stated = math.isfinite(stated) and nearest.compared.plan.load.has_times
    if not nearest.rate or (is_stated and nearest.rate >= stated):
        return None
    beside = f", of {amount(stated)} here" if is_stated else ""
    searched = ""
    if nearest.num_searched > 1:
        searched = f", the highest of {nearest.num_searched} policies and chunks that were searched"
    about = "" if nearest.is_settled else "about "
    cfg = nearest.cfg
    number = []
    if isinstance(cfg.workload.get("num_requests"), int):
        number = [f"workload.num_requests={_half(cfg)}"]
    return Remedy(
        f"a lower rate: {nearest.words} meets it up to {about}{amount(nearest.rate)} "
        f"requests/s{searched}{beside}",
        commands.of(nearest, "task=capacity", *number, without=["workload.rate"]),
    )


def _stated_rate(compared: Compared) -> float:
    """Return the rate that was typed (1/s), else the mean of the requests that were drawn."""
    rate = compared.option.cfg.workload.get("rate")
    return float(rate) if rate is not None else mean_rate(compared.plan.load.requests)


def _more_replicas(nearest: Nearest, slo: Slo, commands: Commands) -> Remedy | None:
    """Look for the fewest replicas that meet the objective at the stated rate, or of users."""
    plan = nearest.compared.plan
    arrives = plan.load.has_times or plan.load.waits_for_answers
    if not arrives or plan.backend.num_stages > 1:
        return None
    present = plan.engine.cluster.num_instances
    first = present + 1
    if nearest.rate:
        first = max(first, math.ceil(present * _stated_rate(nearest.compared) / nearest.rate))
    for number in range(first, min(first + TRIED_REPLICAS, MOST_REPLICAS + 1)):
        cfg = _with_replicas(nearest.cfg, number, present)
        measured = _outcome(cfg, slo)
        if measured["slo_met"]:
            more = [f"cluster.num={number}"]
            if isinstance(cfg.workload.get("num_requests"), int):
                more.append(f"workload.num_requests={cfg.workload.num_requests}")
            devices = number * plan.backend.num_devices
            return Remedy(
                f"more replicas: {number} ({devices} devices) of {nearest.words} meet it "
                f"({_values(measured, slo)})",
                commands.of(nearest, "cluster=replicas", *more, "baselines=[]"),
            )
    return None


def _with_replicas(cfg: DictConfig, number: int, present: int) -> DictConfig:
    """Return `cfg` with so many engines, and as many requests for each as now."""
    if present == 1:
        cfg.cluster = read_option("cluster", option_files("cluster")["replicas"])
    cfg.cluster.num = number
    if isinstance(cfg.workload.get("num_requests"), int):
        cfg.workload.num_requests = cfg.workload.num_requests * number // present
    return cfg


def _outcome(cfg: DictConfig, slo: Slo) -> dict[str, float]:
    plan = make_plan(cfg)
    executor = plan.build()[1]
    engine = plan.engine.with_cache_of(executor)
    return outcome(serve(plan.load.arrivals(), engine, executor).requests(), slo)


def _looser_bound(compared: Sequence[Compared], slo: Slo, commands: Commands) -> Remedy | None:
    """Find the policy and chunk that miss the fewest bounds, by the least, while they keep up."""
    nearest = _nearest_steady(compared)
    if nearest is None:
        return None
    is_queue = nearest.compared.plan.load.all_wait
    if is_queue and WAITS & {*_missed(nearest.row, slo)}:
        return None  # a wait of the whole queue is no property of a server
    looser = []
    stated = []
    for name in _missed(nearest.row, slo):
        setting = f"slo.{name}"
        value = nearest.row[slo.quantity_of(name)]
        bound = slo.bounds[name]
        factor = nearest.cfg.slo.tbt_factor
        if name == "tbt" and factor is not None:
            # Stated in decode iterations, it is loosened in these.
            setting = "slo.tbt_factor"
            value *= factor / bound
            bound = factor
        looser.append(f"{setting}={_rounded_up(value):g}")
        stated.append(f"{bound:g}")
    words = f"{' '.join(looser)} in place of {' and '.join(stated)}"
    task = ["task=advise", f"task.chunks=[{nearest.chunk}]", "task.policies=[]"]
    return Remedy(
        f"a looser bound: {words}, with {nearest.words}",
        commands.of(nearest, *task, *looser),
    )


def _nearest_steady(compared: Sequence[Compared]) -> Nearest | None:
    """Return the run that misses the fewest bounds, by the least, of those that keep up with the
    arrivals; None if none does.
    """
    best: Nearest | None = None
    for each in compared:
        is_whole = each.table.is_whole.astype(bool)
        is_steady = each.table.is_steady.astype(bool)
        # No setting of a command leaves prompts whole for every policy.
        for _, row in each.table[is_steady & ~is_whole].iterrows():
            if best is None or _distance(row) < _distance(best.row):
                best = Nearest(each, row)
    return best


def _distance(row: Row) -> tuple[int, float]:
    """Return how far a run is from its objective."""
    return row["bounds_missed"], row["bound_use"]


def _missed(row: Row, slo: Slo) -> list[str]:
    return [name for name, bound in slo.bounds.items() if row[slo.quantity_of(name)] > bound]


def _rounded_up(value: float) -> float:
    scale = 10.0 ** (math.floor(math.log10(value)) - DIGITS + 1)
    return math.ceil(value / scale) * scale


def _values(row: Row, slo: Slo) -> str:
    """Return the bounded quantities, such as "TTFT P99 734 ms, TBT P99 48.2 ms"."""
    shown = []
    for name in slo.bounds:
        quantity = slo.quantity_of(name)
        quantile = quantity.rpartition("_p")[2]
        shown.append(f"{WORDS[name]} P{quantile} {amount(1e3 * row[quantity])} ms")
    return ", ".join(shown)
