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
        return 0.0 if self.capacity is None else self.capacity.rate

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
        replaced = {name_of(setting) for setting in (*own, *added)}
        replaced.update(without)
        executor = "executor=simulated"  # which task=advise implies
        repeated = []
        for setting in context.settings:
            name = name_of(setting)
            group, _, _ = name.partition(".")
            if name == "executor":
                executor = setting
            elif name not in replaced and group not in not_repeated:
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
        notes.append(
            "these are of the predicted times; executor.slowdown="
            f"{1 + error:g} in a command shows the slow end of their assumed error"
        )
    if refused:
        notes.append(f"not tried: more sequences from {refused}")
    if larger is None:
        others = _of_as_many_sequences(best, row, context)
        return others._replace(notes=[*notes, *others.notes])
    batch_size = larger.plan.engine.batch_size
    settings = [setting for setting in context.settings if name_of(setting) != "batch"]
    context = replace(context, settings=[*settings, f"batch={batch_size}"])
    trial = Trial(larger, larger.best)
    outcome = "meets it" if trial.row["slo_met"] else "comes nearer, and misses it"
    remedy = Remedy(
        f"more sequences: batch={batch_size} (--max-num-seqs), as all "
        f"{best.plan_of(row).engine.batch_size} are in use and the KV cache has room: "
        f"{trial.name} {outcome} ({quantities_of(trial.row, trial.slo)})",
        trial.command(context, *trial.alone),
    )
    if trial.row["slo_met"]:
        return Remedies([remedy], larger.plan_of(trial.row), notes)
    others = _of_as_many_sequences(larger, trial.row, context)
    return others._replace(commands=[remedy, *others.commands], notes=[*notes, *others.notes])


def _of_as_many_sequences(best: PolicyRuns, row: Row, context: RunContext) -> Remedies:
    nearest = Trial(best, row)
    if out_of_reach(best.plan, nearest.slo):  # also at a lower rate, and in replicas
        looser_bound = _looser_bound(nearest, context)
        return Remedies([] if looser_bound is None else [looser_bound])
    trial = _with_rate(best, nearest.slo)
    lower_rate = _lower_rate(trial, context)
    notes = _notes_on_rate(trial)
    more_replicas = None
    try:
        more_replicas = _more_replicas(trial, context)
    except UserError as error:  # such as of a model in stages, which replicas can't have
        notes.append(f"not tried: more replicas ({error})")
    looser_bound = _looser_bound(nearest, context)
    tried = [lower_rate, more_replicas, looser_bound]
    server = None
    if lower_rate is not None:
        # Its sequences and lengths are those of the runs that found the rate, not of this load.
        server = FindCapacity().check(trial.at_a_rate)
    elif more_replicas is not None:
        server = trial.runs.plan_of(trial.row)
    return Remedies([remedy for remedy in tried if remedy is not None], server, notes)


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
    is_fast = [in_time_alone(best.plan, slo, int(chunk)) for chunk in rows.chunk]
    if any(is_fast):
        rows = rows[is_fast]
    # Chunks of whole prompts have few gaps with a stall, so that a P99 of all gaps hides them.
    calmest = rows
    for column in ("gap_bounds_missed", "stall_class"):
        calmest = calmest[calmest[column] == calmest[column].min()]
    searched = [calmest.iloc[-1]]
    for _, row in rows.iterrows():
        if row.chunk >= LARGER * searched[-1].chunk:
            searched.append(row)
    return searched[:MOST_SEARCHED]


def _searched(trial: Trial, task: FindCapacity, *, above: float = 0.0) -> Trial:
    """Return a trial with its search of a rate `above` another, where its requests may have one;
    from the rate on that it has.
    """
    if trial.runs.plan.load.waits_for_answers:
        return trial
    least = max(_least_rate(trial), (1 + task.precision) * above)
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
    return least if math.isfinite(least) else 0.0


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
    is_stated = math.isfinite(stated) and trial.runs.plan.load.has_times
    if not trial.rate or (is_stated and trial.rate >= stated):
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
        rows[step] = _met_by(make_plan(configs[-step]), trial.slo)
        return rows[step] is not None

    num_tried = len(configs)
    if trial.rate:
        suggested = math.ceil(present * _stated_rate(trial.runs) / trial.rate)
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
    return Remedy(
        f"more replicas: {number} ({number * plan.backend.num_devices} devices) of {trial.name} "
        f"meet it in {row['num_requests']:,} requests ({quantities_of(row, trial.slo)})",
        trial.command(context, *settings),
    )


def _in_more_replicas(trial: Trial) -> list[DictConfig]:
    """Return the configurations of the numbers of replicas that there can be, ascending. Raises
    UserError where each is refused.
    """
    configs = []
    refusal = None
    for number in range(trial.runs.plan.engine.cluster.num_instances + 1, MOST_REPLICAS + 1):
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
    for name in missed:
        setting = f"slo.{name}"
        value = row[slo.quantity_of(name)]
        bound = slo.bounds[name]
        factor = nearest.cfg.slo.tbt_factor
        if name == "tbt" and factor is not None:
            # Stated in decode iterations, it is loosened in these.
            setting = "slo.tbt_factor"
            value *= factor / bound
            bound = factor
        looser.append(f"{setting}={_rounded_up(value):g}")
        stated.append(f"{bound:g}")
    command = nearest.command(context, *nearest.alone, *looser)
    bounds = f"{' '.join(looser)} in place of {' and '.join(stated)}"
    return Remedy(f"a looser bound: {bounds}, with {nearest.name}", command)


def _rounded_up(value: float) -> float:
    exponent = math.floor(math.log10(value))
    scale = 10.0 ** (exponent - DIGITS + 1)
    return math.ceil(value / scale) * scale


def quantities_of(row: Row, slo: Slo) -> str:
    """Return the bounded quantities, such as "TTFT P99 734 ms, TBT P99 48.2 ms"."""
    shown = []
    for name in slo.bounds:
        quantity = slo.quantity_of(name)
        quantile = quantity.rpartition("_p")[2]
        shown.append(f"{NAMES[name]} P{quantile} {amount(1e3 * row[quantity])} ms")
    return ", ".join(shown)
