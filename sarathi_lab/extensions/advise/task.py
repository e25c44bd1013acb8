"""The task `advise`: which policy to serve by, with which chunk, within the objective."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import listed
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import as_written, build, name_of
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Backend
from sarathi_lab.experiment.advise import AS_GOOD, Row, choose, is_overloaded, marked
from sarathi_lab.extensions.advise import answer
from sarathi_lab.extensions.advise.confirmation import with_longer_runs
from sarathi_lab.extensions.advise.limits import out_of_reach, too_many
from sarathi_lab.extensions.advise.options import (
    AN_OPTION,
    LONGER,
    Budget,
    Option,
    PolicyRuns,
    first_plan,
    options_of,
    try_chunks,
    with_chunk_of,
)
from sarathi_lab.extensions.advise.remedies import Remedies, remedies
from sarathi_lab.extensions.advise.server_flags import ServerFlags, server_flags, simulated
from sarathi_lab.extensions.advise.slow_end import (
    MET_AT_SLOW_END,
    SlowEnd,
    assumed_error,
    slow_row,
)
from sarathi_lab.policy import Policy
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import Plan
from sarathi_lab.tasks.serve import print_plan

CHUNKS = "use a list such as [256,512], or null for those that the device's tile suggests"
CHUNK = partial(require_int, minimum=1, fix=CHUNKS)
# Settings that decide how long requests are.
OF_LENGTHS = {"workload", "workload.prompt_len", "workload.output_len"}
OF_LENGTHS |= {"seq_len", "pd_ratio", "experiment"}
FEWEST_REQUESTS = 128  # of a run that is tried, where they arrive over time and none are stated
RARELY = 50_000  # objects made since Python last searched for cycles; 700 is its default


@dataclass(frozen=True)
class Advice:
    """What was simulated, and the row that is advised.

    Attributes:
        compared: The runs of each policy, by its label.
        left_out: Policies that can't run here, and why.
        judged: The rows of all policies that are chosen from, all of as many requests.
        best: The row of these that is advised.
        limits: Why no policy can meet the objective; empty where one may.
    """

    compared: dict[str, PolicyRuns]
    left_out: Sequence[str]
    judged: pd.DataFrame
    best: pd.Series
    limits: Sequence[str] = ()

    @property
    def table(self) -> pd.DataFrame:
        """The rows of all simulated runs."""
        tables = []
        for runs in self.compared.values():
            tables += [runs.table, runs.confirmed]
        return pd.concat(tables, ignore_index=True)

    @property
    def of_best(self) -> PolicyRuns:
        """The policy that is advised."""
        return self.compared[self.best["policy"]]

    @property
    def without_server(self) -> list[str]:
        """Lines on policies whose server does not run on the device."""
        lines = []
        for label, runs in self.compared.items():
            if runs.plan.unserved is not None:
                lines.append(f"  {label} has no flags: {runs.plan.unserved}")
        return lines

    @property
    def is_met(self) -> bool:
        """Whether the advised run is within the objective, or there is none."""
        return bool(self.best.get("slo_met", True))


@dataclass(frozen=True)
class Advise(Task):
    """Simulates the run's policy and other `policies` with every candidate chunk (None: those of a
    search), names the best within the objective, or what would meet it, and lists the flags of
    their servers.
    """

    reads = (
        *("policy", "workload", "executor", "model", "hardware", "host", "batch", "pd_ratio"),
        *("seq_len", "slo", "seed", "dtype", "max_model_len", "cache", "cluster"),
        *("speculation", "queue_order"),
    )
    chunks: Sequence[int] | None = listed(None, each=CHUNK, complaint=f"names no chunk; {CHUNKS}")
    policies: Sequence[Any] = listed(
        (),
        each=lambda name, value: None,
        complaint=f"is no list; {AN_OPTION}",
        may_be_empty=True,
    )

    def check(self, cfg: DictConfig) -> list[Option]:
        """Return the policies to compare, of which the first can run."""
        check_settings(cfg)
        # The first option is the policy that the user runs: it is planned now, so that an error in
        # its settings is told before anything is simulated.
        options = options_of(with_requests(cfg), self.policies)
        first_plan(options[0])
        for chunk in self.chunks or ():
            options[0].plan(Budget(chunk))
        return options

    def advise(self, options: Sequence[Option]) -> Advice:
        """Simulate the policies, and choose."""
        # The user's policy is tried first, and is what the others have to beat.
        first, *others = options
        left_out = []
        with progress_of("advising", len(options), "policies") as advance:
            of_first = self._runs_of(first, None, [])
            compared = {first.label: of_first}
            leader = better_of(None, of_first)
            advance(1)
            limits = limits_of(of_first, leader)
            if limits:
                for option in others:
                    left_out.append(f"{option.label} was not simulated, as no policy meets it")
                others = []
            for option in others:
                try:
                    require_served(option)
                    runs = self._runs_of(option, leader, list(compared.values()))
                except UserError as error:
                    left_out.append(f"{option.label} is left out: {error}")
                else:
                    compared[option.label] = runs
                    leader = better_of(leader, runs)
                advance(1)
            if leader is not None and leader is not of_first:
                compared |= self._beside_overtaking(leader, compared)
        tables = [runs.judged for runs in compared.values()]
        # Each was marked by its own best; `is_as_good` must be by the best of all.
        judged = marked(pd.concat(tables, ignore_index=True))
        best = advised(judged, of_first)
        return Advice(compared, left_out, judged, best, limits)

    def _beside_overtaking(
        self, leader: PolicyRuns, compared: Mapping[str, PolicyRuns]
    ) -> dict[str, PolicyRuns]:
        """Return the runs of a policy that is better than the first, and of the others with its
        best chunk, so that they do not differ by which chunks were tried.
        """
        # It was searched beside another one, and maybe not to a tenth.
        overtaking = self._runs_of(leader.option, None, [])
        beside = {overtaking.option.label: overtaking}
        if self.chunks is not None:
            return beside
        for label, runs in compared.items():
            if runs is not leader:
                beside[label] = with_longer_runs(with_chunk_of(runs, overtaking.best))
        return beside

    def _runs_of(
        self, option: Option, leader: PolicyRuns | None, before: Sequence[PolicyRuns]
    ) -> PolicyRuns:
        """Return the runs of a policy, with longer ones where there are such."""
        has_no_leader = leader is None
        rivals = before
        if leader is not None:
            rivals = [leader]
        runs = try_chunks(option, self.chunks, rivals, is_thorough=has_no_leader)
        return with_longer_runs(runs)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        with rare_collections():
            advice = self.advise(context.prepared or self.check(cfg))
            runs = advice.of_best
            best = advice.best
            remedied = Remedies()
            if not advice.is_met:
                with progress_of("looking for what would meet the objective"):
                    remedied = remedies(runs, best, context)
        plan = runs.plan_of(best)
        print_plan(plan, replace(context, policy=None))
        flags = flags_of(advice, remedied)
        has_server = remedied.server is not None
        slow_end = slow_end_of(advice)
        table = advice.table
        shown: list[DisplayTable | str] = [
            *answer.best_lines(best, runs, advice.judged, slow_end),
            *[f"  {line}" for line in (*advice.limits, *advice.left_out)],
            *assumed_workload(plan, context),
            *answer.policies_table(advice.judged, best, runs.slo, slow_end),
            *answer.remedy_lines(remedied.commands, remedied.notes),
            *graphs_gain(runs, best, self.chunks),
            answer.chunks_table(runs),
            *answer.longer_run_lines(best, runs),
            *advice.without_server,
            *answer.flag_lines(flags, is_met=advice.is_met, has_server=has_server),
        ]
        if flags:
            shown += answer.longest_line(plan)
        shown.append(answer.closing(table, runs, plan.config["seed"]))
        numbers = best.drop(["policy", "is_as_good"])
        summary = {str(name): float(value) for name, value in numbers.items()}
        if slow_end is not None:
            table = slow_end.marked(table)
            summary[MET_AT_SLOW_END] = float(bool(slow_end.is_met(best)))
        is_whole = answer.leaves_whole(best, runs)
        summary["chunking_pays"] = float(not is_whole)
        hardware = plan.config["executor"]["hardware"]["name"]
        return Result(
            tables={"advice": table, "flags": pd.DataFrame(flags)},
            summary=summary,
            shown=shown,
            labels={"device": hardware, "policy": str(best["policy"])},
            tags=["advice", hardware],
            config=plan.config,
        )


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python search for cycles rarely: simulations make objects for each chunk, none of them in
    a cycle, and the searches took a tenth of their time.
    """
    usual, *older = gc.get_threshold()
    gc.set_threshold(RARELY, *older)
    try:
        yield
    finally:
        gc.set_threshold(usual, *older)


def assumed_workload(plan: Plan, context: RunContext) -> list[str]:
    """Say which requests and sequences decide where no setting states their lengths."""
    stated = {name_of(setting) for setting in context.settings}
    if not stated.isdisjoint(OF_LENGTHS):
        return []
    return [
        f"  assumed unless stated: {plan.load.describe()}, batch {plan.engine.batch_size}; "
        "for requests as yours, state such as workload=openchat_sharegpt4 workload.rate=4"
    ]


def check_settings(cfg: DictConfig) -> None:
    """Raise UserError for settings that the advice can't follow."""
    backend: Backend = build(cfg.executor)
    if backend.computes_tokens:
        raise UserError(
            f"executor={backend.name} has no cost model to predict with; use executor=simulated"
        )
    policy: Policy = build(cfg.policy, Policy)
    field = policy.budget_field
    written = as_written(cfg.policy)
    is_stated = field is not None and isinstance(written.get(field), int)
    if is_stated:
        raise UserError(
            f"policy.{field}={policy.budget} has no effect; drop it, and name chunks by "
            "task.chunks=[256,512]"
        )
    cluster = build(cfg.cluster)
    if not cluster.is_single and "num" not in cfg.cluster:
        raise UserError(
            f"task=advise is for engines that are alike, not for {cluster.describe()}; use "
            "cluster=replicas, or task=capacity for this cluster"
        )


def with_requests(cfg: DictConfig) -> DictConfig:
    """Return `cfg` with its number of requests, the same for all policies and rates that are tried.

    Where requests arrive over time and their number is not stated, it is a run's over `LONGER`: the
    advice is chosen from runs of `LONGER` times as many.
    """
    workload = cfg.workload
    is_free = "num_requests" in workload and OmegaConf.is_interpolation(workload, "num_requests")
    # A stated number, and requests that are all there at once, are the user's to decide.
    if not is_free or workload.get("rate") is None:
        return cfg
    number = max(FEWEST_REQUESTS, math.ceil(workload.num_requests / LONGER))
    cfg = cfg.copy()
    cfg.workload.num_requests = number
    return cfg


def limits_of(runs: PolicyRuns, leader: PolicyRuns | None) -> list[str]:
    """Return why no other policy can meet an objective that a policy misses, a line each; empty
    where one may.
    """
    if runs.slo is None or leader is not None:
        return []
    limits = out_of_reach(runs.plan, runs.slo)
    limits += too_many(runs.plan)
    return limits


def better_of(leader: PolicyRuns | None, runs: PolicyRuns) -> PolicyRuns | None:
    """Return the better of the best policy so far and another one, if either is within the
    objective; of two that are tied the former.
    """
    if runs.slo is None or not runs.best["slo_met"]:
        return leader
    if leader is None:
        return runs
    both = pd.DataFrame([leader.best, runs.best])
    both = marked(both.reset_index(drop=True))
    if advised(both, leader)["policy"] == runs.option.label:
        return runs
    return leader


def advised(table: pd.DataFrame, first: PolicyRuns) -> pd.Series:
    """Return the row that is best, in doubt one of the `first` policy, which the user runs."""
    best = choose(table)
    if not best.get("slo_met", True):
        return best
    for row in answer.rows_alike(best, table, first.slo):
        if row["policy"] == first.option.label:
            return row
    return best


def slow_end_of(advice: Advice) -> SlowEnd | None:
    """Repeat the best run of each policy that meets the objective with kernels that take longer by
    the assumed error of the card; None where nothing is assumed, or nothing meets it.
    """
    error = assumed_error(advice.of_best)
    if error is None or advice.of_best.slo is None or not advice.is_met:
        return None
    rows: dict[str, Row] = {}
    for row in answer.best_of_policies(advice.judged, advice.best):
        if row["slo_met"]:
            label = row["policy"]
            rows[label] = slow_row(advice.compared[label], row, error)
    return SlowEnd(error, rows)


def graphs_gain(runs: PolicyRuns, best: pd.Series, chunks: Sequence[int] | None) -> list[str]:
    """Describe what CUDA graphs of all batches would gain; nothing where the host's launches are
    not simulated.
    """
    cfg = runs.option.cfg.copy()
    graphs = build(cfg.host).graphs
    if graphs is None or graphs.mode in (None, "none"):
        return []
    # The largest batch: a whole prompt with all other sequences decoding.
    longest = runs.plan.max_model_len + runs.plan.engine.batch_size - 1
    cfg.host.graphs.update(sizes=None, largest=longest)
    larger = try_chunks(replace(runs.option, cfg=cfg), chunks)
    row = larger.best
    present = runs.tried(best)
    gain = row.throughput / present.throughput
    gap = row.tbt_p99
    present_gap = present.tbt_p99
    captured = max(graphs.captured)
    size = int(row.chunk)
    is_faster = gain > 1 + AS_GOOD
    is_shorter = gap < (1 - AS_GOOD) * present_gap
    gains = is_faster or is_shorter
    # A chunk within the captured sizes replays a graph already.
    if size <= captured or not gains:
        return [f"  CUDA graphs captured beyond the {captured} tokens of now gain nothing"]
    return [
        f"  with CUDA graphs captured to {size} tokens, {captured} now, the best chunk is {size}: "
        f"{gain:.2f} times the tokens/s, {1e3 * gap:.1f} ms between tokens at P99 where "
        f"{present.chunk:.0f} has {1e3 * present_gap:.1f}; vLLM: --max-num-batched-tokens {size} "
        f"--max-cudagraph-capture-size {size}"
    ]


def flags_of(advice: Advice, remedied: Remedies) -> list[ServerFlags]:
    """Return the flags of each policy's server for its best chunk within the objective. Where
    nothing meets it, those of the one that a lower rate or replicas would let meet it, else of the
    one that comes nearest; none of one that is overloaded.
    """
    if remedied.server is not None:
        plans = [remedied.server]
    elif advice.is_met:
        plans = []
        for runs in advice.compared.values():
            row = runs.best
            if row.get("slo_met", True):
                plans.append(runs.plan_of(row))
    elif is_overloaded(advice.best):
        return []
    else:
        plans = [advice.of_best.plan_of(advice.best)]
    flags = []
    for plan in plans:
        of_server = server_flags(simulated(plan))
        if of_server is not None and plan.unserved is None:
            flags.append(of_server)
    return flags


def require_served(option: Option) -> None:
    """Raise UserError for a policy whose server does not run on the device."""
    unserved = first_plan(option).unserved
    if unserved is not None:
        raise UserError(unserved)
