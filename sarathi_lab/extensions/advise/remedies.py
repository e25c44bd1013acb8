"""What would meet an objective that nothing meets: more sequences, a lower rate, more replicas, a
looser bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.console import amount
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import name_of, option_files, read_option
from sarathi_lab.config.run_context import RunContext, as_command
from sarathi_lab.engine.loop import serve
from sarathi_lab.experiment.advise import Row, is_overloaded, missed_bounds
from sarathi_lab.extensions.advise.limits import in_time_alone, out_of_reach
from sarathi_lab.extensions.advise.options import LONGER, PolicyRuns, with_fitting_sequences
from sarathi_lab.extensions.advise.sequences import more_sequences
from sarathi_lab.extensions.advise.slow_end import assumed_error
from sarathi_lab.extensions.under_load.capacity import FindCapacity
from sarathi_lab.extensions.under_load.search import (
    WAITS,
    Capacity,
    LateTokens,
    ObjectiveMissed,
    bisected,
    is_sustained,
    mean_rate,
)
from sarathi_lab.results.objective import outcome
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.tasks.plan import Plan, make_plan

NAMES = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TPOT", "scheduling_delay": "scheduling delay"}
MOST_REPLICAS = 16
MOST_SEARCHED = 3  # chunks for which a rate is searched
LARGER = 4 / 3  # times the tokens of a chunk, from which another one may have another rate
SHORT_SEARCH = FindCapacity(doublings=1)  # that tells chunks from each other
BEYOND_SUGGESTED = 2  # numbers of replicas, beyond the one that the highest rate suggests
DIGITS = 3  # of a looser bound
NOT_REPEATED = ("task", "output", "tracking", "resume", "hydra")  # in commands


class Remedy(NamedTuple):
    """What would meet the objective, and the command that shows it."""

    text: str
    command: str


class Remedies(NamedTuple):
    """What would meet the objective, and the run of the server that does: with more sequences, at a
    lower rate or in replicas; and notes on what of these does not, or could not be tried.
    """

    commands: Sequence[Remedy] = ()
    server: Plan | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Trial:
    """A policy and chunk, and the highest rate at which they meet the objective.

    Attributes:
        runs: The policy.
        row: The run with the chunk, of its table.
        capacity: The search of the rate; None where there was none.
        refused: Why there was none; "": there was, no rate meets the objective, or no request has a
            time.
    """

    runs: PolicyRuns
    row: Row
    capacity: Capacity | None = None
    refused: str = ""

    @property
    def rate(self) -> float:
        """The highest rate (requests/s); 0 where none meets the objective, or none was searched."""
        if self.capacity is None:
            return 0.0
        return self.capacity.rate

    @property
    def name(self) -> str:
        chunk_setting = self.runs.settings_of(self.row)[-1]
        return f"{self.runs.option.label} with {chunk_setting}"

    @property
    def slo(self) -> Slo:
        assert self.runs.slo is not None, "what has no objective needs no remedy"
        return self.runs.slo

    @property
    def cfg(self) -> DictConfig:
        """The configuration of its run."""
        return self.runs.config_of(self.row)

    @property
    def alone(self) -> list[str]:
        """The settings of an advice that has no other policy and chunk."""
        return ["task=advise", f"task.chunks=[{self.row['chunk']:.0f}]", "task.policies=[]"]

    @cached_property
    def at_a_rate(self) -> DictConfig:
        """Its configuration for a search of the rate, from half of the requests on."""
        cfg = self.cfg
        if "rate" in cfg.workload:
            cfg.workload.rate = None
        num_requests = cfg.workload.get("num_requests")
        if isinstance(num_requests, int):
            cfg.workload.num_requests = max(2, num_requests // 2)
        return with_fitting_sequences(cfg, FindCapacity().check(cfg))

    def in_replicas(self, number: int) -> DictConfig:
        """Return its configuration with `number` engines, and as many requests as the longer runs
        of advice have. Raises UserError.
        """
        cfg = self.cfg
        if self.runs.plan.engine.cluster.num_instances == 1:
            cfg.cluster = read_option("cluster", option_files("cluster")["replicas"])
        cfg.cluster.num = number
        num_requests = cfg.workload.get("num_requests")
        if isinstance(num_requests, int):
            cfg.workload.num_requests = LONGER * num_requests
        return with_fitting_sequences(cfg, make_plan(cfg))

    def command(self, context: RunContext, *added: str, without: Sequence[str] = ()) -> str:
        """Return a command like the typed one, with this policy and chunk and the settings
        `added`, which replace typed ones of their names.
        """
        own = list(self.runs.option.typed)
        not_repeated = {*NOT_REPEATED}
        if own:
            not_repeated.add("policy")  # typed of another one
        elif context.policy is not None:
            own.append(f"policy={context.policy}")
        own += self.runs.settings_of(self.row)
        if "task=advise" in added:
            own.pop()  # its chunk, as the task names its chunks itself
        replaced = set(without)
        for setting in (*own, *added):
            replaced.add(name_of(setting))
        executor = "executor=simulated"  # which task=advise implies
        repeated = []
        for setting in context.settings:
            name = name_of(setting)
            group, _, _ = name.partition(".")
            is_replaced = name in replaced or group in not_repeated
            if name == "executor":
                executor = setting
            elif not is_replaced:
                repeated.append(setting)
        # The task first, as it is what a reader looks for.
        of_task = [setting for setting in added if setting.startswith("task")]
        others = [setting for setting in added if setting not in of_task]
        return as_command([*of_task, executor, *repeated, *own, *others])


def remedies(best: PolicyRuns, row: Row, context: RunContext) -> Remedies:
    """Return what would meet an objective that no run meets, as far as anything does: more
    sequences, which need no other device; else a rate and replicas of the policy that comes
    nearest, and looser bounds.

    Args:
        best: The policy that comes nearest.
        row: Its run that comes nearest.
        context: The command that was typed, which the remedies' commands repeat.
    """
    larger, refused = more_sequences(best, row)
    notes = []
    error = assumed_error(best)
    if error is not None:
        slowdown = 1 + error
        notes.append(
            f"these are of the predicted times; executor.slowdown={slowdown:g} "
            "in a command shows the slow end of their assumed error"
        )
    if refused:
        notes.append(f"not tried: more sequences from {refused}")
    if larger is None:
        others = _of_as_many_sequences(best, row, context)
        return others._replace(notes=[*notes, *others.notes])
    batch_size = larger.plan.engine.batch_size
    settings = [setting for setting in context.settings if name_of(setting) != "batch"]
    settings.append(f"batch={batch_size}")
    # The remedies below are of the larger batch, so their commands must have it.
    of_larger = replace(context, settings=settings)
    present = best.plan_of(row).engine.batch_size
    larger_row = larger.best
    remedy = _larger_batch(Trial(larger, larger_row), present, of_larger)
    if larger_row["slo_met"]:
        server = larger.plan_of(larger_row)
        return Remedies([remedy], server, notes)
    others = _of_as_many_sequences(larger, larger_row, of_larger)
    commands = [remedy, *others.commands]
    return others._replace(commands=commands, notes=[*notes, *others.notes])


def _larger_batch(trial: Trial, present: int, context: RunContext) -> Remedy:
    """State a trial with more sequences than the `present` number."""
    batch_size = trial.runs.plan.engine.batch_size
    verdict = "comes nearer, and misses it"
    if trial.row["slo_met"]:
        verdict = "meets it"
    quantities = quantities_of(trial.row, trial.slo)
    text = (
        f"more sequences: batch={batch_size} (--max-num-seqs), as all {present} are in use and the "
        f"KV cache has room: {trial.name} {verdict} ({quantities})"
    )
    command = trial.command(context, *trial.alone)
    return Remedy(text, command)


def _of_as_many_sequences(best: PolicyRuns, row: Row, context: RunContext) -> Remedies:
    nearest = Trial(best, row)
    looser_bound = _looser_bound(nearest, context)
    if out_of_reach(best.plan, nearest.slo):  # also at a lower rate, and in replicas
        if looser_bound is None:
            return Remedies()
        return Remedies([looser_bound])
    trial = _with_rate(best, nearest.slo)
    lower_rate = _lower_rate(trial, context)
    notes = _notes_on_rate(trial)
    more_replicas = None
    try:
        more_replicas = _more_replicas(trial, context)
    except UserError as error:  # such as of a model in stages, which replicas can't have
        notes.append(f"not tried: more replicas ({error})")
    tried = [lower_rate, more_replicas, looser_bound]
    commands = [remedy for remedy in tried if remedy is not None]
    server = None
    if lower_rate is not None:
        # Its sequences and lengths are those of the runs that found the rate, not of this load.
        server = FindCapacity().check(trial.at_a_rate)
    elif more_replicas is not None:
        server = trial.runs.plan_of(trial.row)
    return Remedies(commands, server, notes)


def _with_rate(best: PolicyRuns, slo: Slo) -> Trial:
    """Search the highest rate at which a policy meets the objective: in short runs with each of the
    chunks that may have it, then in longer ones with the best of these.
    """
    first, *others = _chunks_for_a_rate(best, slo)
    highest = Trial(best, first)
    if others:
        highest = _searched(highest, SHORT_SEARCH)
    for row in others:
        trial = _searched(Trial(best, row), SHORT_SEARCH, above=highest.rate)
        if trial.rate > highest.rate:
            highest = trial
    return _searched(highest, FindCapacity())


def _chunks_for_a_rate(best: PolicyRuns, slo: Slo) -> list[pd.Series]:
    """Return the rows of the chunks to search a rate with, which an overloaded run does not tell:
    the largest of those that miss the fewest bounds between tokens and stall requests the shortest,
    and the next that are larger by a third each. In none of them does a prompt that is alone take
    too long.
    """
    rows = best.table.sort_values("chunk")
    is_fast = []
    for chunk in rows.chunk:
        is_fast.append(in_time_alone(best.plan, slo, int(chunk)))
    if any(is_fast):
        rows = rows[is_fast]
    # Chunks of whole prompts have few gaps with a stall, so that a P99 of all gaps hides them.
    calmest = rows
    for column in ("gap_bounds_missed", "stall_class"):
        numbers = calmest[column]
        calmest = calmest[numbers == numbers.min()]
    previous = calmest.iloc[-1]
    searched = [previous]
    for _, row in rows.iterrows():
        if row.chunk >= LARGER * previous.chunk:
            searched.append(row)
            previous = row
    return searched[:MOST_SEARCHED]


def _searched(trial: Trial, task: FindCapacity, *, above: float = 0.0) -> Trial:
    """Return a trial with its search of a rate `above` another, where its requests may have one;
    from the rate on that it has.
    """
    if trial.runs.plan.load.waits_for_answers:
        return trial
    next_rate = (1 + task.precision) * above
    least = max(_least_rate(trial), next_rate)
    start = trial.rate or None
    try:
        capacity = task.highest_rate(trial.at_a_rate, least=least, start=start)
    except UserError as error:  # such as of requests that have no rate
        return replace(trial, refused=str(error))
    return replace(trial, capacity=capacity)


def _least_rate(trial: Trial) -> float:
    """Return the lowest rate (1/s) to search: what the most replicas that are tried would have
    each; 0 for requests that come all at once.
    """
    least = _stated_rate(trial.runs) / MOST_REPLICAS
    if math.isfinite(least):
        return least
    return 0.0


def _notes_on_rate(trial: Trial) -> list[str]:
    """Say why there is no lower rate that meets the objective."""
    if trial.refused:
        return [f"not tried: a lower rate ({trial.refused})"]
    if trial.capacity is None or trial.rate:
        return []
    least = _least_rate(trial)
    if not least:
        return ["no rate meets it"]
    return [
        f"no lower rate meets it, either, down to {amount(least)} requests/s, "
        f"a {MOST_REPLICAS}th of the present one"
    ]


def _lower_rate(trial: Trial, context: RunContext) -> Remedy | None:
    stated = _stated_rate(trial.runs)
    has_times = trial.runs.plan.load.has_times
    is_stated = has_times and math.isfinite(stated)
    is_lower = not is_stated or trial.rate < stated
    if not trial.rate or not is_lower:
        return None
    assert trial.capacity is not None, "it has a rate"
    text = f"a lower rate: {trial.name} meets it up to {amount(trial.rate)} requests/s"
    if is_stated:
        text += f", of {amount(stated)} here"
    if trial.capacity.is_lower_bound:
        text += ", and no higher rate was tried"
    if not trial.capacity.is_settled:
        text += f" (not settled: {trial.capacity.history})"
    settings = ["task=capacity", *_size_settings(trial.at_a_rate)]
    command = trial.command(context, *settings, without=["workload.rate"])
    return Remedy(text, command)


def _size_settings(cfg: DictConfig) -> list[str]:
    """Return the settings of a run's requests, and of its sequences where these are stated."""
    sizes = []
    num_requests = cfg.workload.get("num_requests")
    if isinstance(num_requests, int):
        sizes.append(f"workload.num_requests={num_requests}")
    if cfg.batch is not None:
        sizes.append(f"batch={cfg.batch}")
    return sizes


def _stated_rate(runs: PolicyRuns) -> float:
    """Return the rate that was typed (1/s), else the mean of the requests that were drawn."""
    rate = runs.option.cfg.workload.get("rate")
    if rate is not None:
        return float(rate)
    return mean_rate(runs.plan.load.requests)


def _more_replicas(trial: Trial, context: RunContext) -> Remedy | None:
    """Look for the fewest replicas that meet the objective at the stated rate, or of users; there
    are none where no rate meets it. Raises UserError where there can't be any.
    """
    plan = trial.runs.plan
    arrives = plan.load.has_times or plan.load.waits_for_answers
    has_none = trial.capacity is not None and not trial.rate
    if has_none or not arrives:
        return None
    present = plan.engine.cluster.num_instances
    configs = _in_more_replicas(trial)
    if not configs:
        return None
    rows: dict[int, Row | None] = {}

    def is_met(step: int) -> bool:
        plan_of_step = make_plan(configs[-step])
        row_of_step = _met_by(plan_of_step, trial.slo)
        rows[step] = row_of_step
        return row_of_step is not None

    num_tried = len(configs)
    if trial.rate:
        # Were the load split evenly, as many replicas would have the highest rate each.
        stated = _stated_rate(trial.runs)
        suggested = math.ceil(present * stated / trial.rate)
        num_tried = min(num_tried, suggested - present + BEYOND_SUGGESTED)
    # Steps count downwards, as the fewest replicas are searched and the highest step.
    step = bisected(is_met, -num_tried, 1)
    row = rows.get(step)
    if row is None:
        return None
    cfg = configs[-step]
    number = cfg.cluster.num
    settings = [f"cluster.num={number}", "baselines=[]", *_size_settings(cfg)]
    if present == 1:
        settings.insert(0, "cluster=replicas")
    num_devices = number * plan.backend.num_devices
    quantities = quantities_of(row, trial.slo)
    text = (
        f"more replicas: {number} ({num_devices} devices) of {trial.name} "
        f"meet it in {row['num_requests']:,} requests ({quantities})"
    )
    command = trial.command(context, *settings)
    return Remedy(text, command)


def _in_more_replicas(trial: Trial) -> list[DictConfig]:
    """Return the configurations of the numbers of replicas that there can be, ascending. Raises
    UserError where each is refused.
    """
    configs = []
    refusal = None
    present = trial.runs.plan.engine.cluster.num_instances
    for number in range(present + 1, MOST_REPLICAS + 1):
        try:
            configs.append(trial.in_replicas(number))
        except UserError as error:  # as of a part of a mixture's experts for each
            refusal = error
    if refusal is not None and not configs:
        raise refusal
    return configs


def _met_by(plan: Plan, slo: Slo) -> Row | None:
    """Return the outcome of a run that meets the objective; None of one that misses it, which ends
    as soon as that is sure.
    """
    _, executor = plan.build()
    ledger = LateTokens(slo, plan.load.requests)
    try:
        serve(plan.load.arrivals(), plan.engine, executor, ledger)
    except ObjectiveMissed:
        return None
    requests = ledger.requests()
    row = {"num_requests": len(requests), **outcome(requests, slo)}
    # As a rate is judged, but for waits that surely grow: few requests of each do not tell.
    if is_overloaded(row) or not is_sustained(requests, slo):
        return None
    return row


def _looser_bound(nearest: Trial, context: RunContext) -> Remedy | None:
    """State the bounds that the run that comes nearest is within; None where its waits grow."""
    row = nearest.row
    slo = nearest.slo
    missed = missed_bounds(row, slo)
    # A wait of the whole queue is no property of a server.
    waits_for_queue = nearest.runs.plan.load.all_wait and not WAITS.isdisjoint(missed)
    if waits_for_queue or not row["is_steady"]:
        return None
    looser = []
    stated = []
    factor = nearest.cfg.slo.tbt_factor
    for name in missed:
        setting = f"slo.{name}"
        quantity = slo.quantity_of(name)
        value = row[quantity]
        bound = slo.bounds[name]
        if name == "tbt" and factor is not None:
            # Stated in decode iterations, it is loosened in these.
            setting = "slo.tbt_factor"
            value *= factor / bound
            bound = factor
        new_bound = _rounded_up(value)
        looser.append(f"{setting}={new_bound:g}")
        stated.append(f"{bound:g}")
    command = nearest.command(context, *nearest.alone, *looser)
    bounds = f"{' '.join(looser)} in place of {' and '.join(stated)}"
    return Remedy(f"a looser bound: {bounds}, with {nearest.name}", command)


def _rounded_up(value: float) -> float:
    exponent = math.floor(math.log10(value))
    last_exponent = exponent - DIGITS + 1
    unit = 10.0**last_exponent  # of the last digit
    num_units = math.ceil(value / unit)
    return num_units * unit


def quantities_of(row: Row, slo: Slo) -> str:
    """Return the bounded quantities, such as "TTFT P99 734 ms, TBT P99 48.2 ms"."""
    shown = []
    for name in slo.bounds:
        percent = 100 * slo.quantile_of(name)
        milliseconds = 1e3 * row[slo.quantity_of(name)]
        shown.append(f"{NAMES[name]} P{percent:g} {amount(milliseconds)} ms")
    return ", ".join(shown)
