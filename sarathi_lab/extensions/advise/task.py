"""The task `advise`: which policy to serve by, with which chunk, within the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import listed
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.advise import AS_GOOD, Row, choose, marked
from sarathi_lab.extensions.advise import answer
from sarathi_lab.extensions.advise.options import (
    AN_OPTION,
    LONGER,
    Option,
    PolicyRuns,
    first_config,
    options_of,
    try_chunks,
)
from sarathi_lab.extensions.advise.remedies import Remedies, remedies
from sarathi_lab.extensions.advise.server_flags import ServerFlags, Simulated, server_flags
from sarathi_lab.policy import Policy
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import Plan, make_plan
from sarathi_lab.tasks.serve import print_plan

CHUNKS = "use a list such as [256,512], or null for those that the device's tile suggests"
CHUNK = partial(require_int, minimum=1, fix=CHUNKS)
BLOCK_SIZE = 16  # of servers, and of the lab's cache, by default
FEWEST_REQUESTS = 128  # of a run that is tried, where they arrive over time and none are stated


@dataclass(frozen=True)
class Advice:
    """What was simulated, and the row that is advised.

    Attributes:
        compared: The runs of each policy, by its label.
        left_out: Policies that can't run here, and why.
        table: The rows of all policies.
        best: The row that is advised.
    """

    compared: dict[str, PolicyRuns]
    left_out: Sequence[str]
    table: pd.DataFrame
    best: pd.Series

    @property
    def of_best(self) -> PolicyRuns:
        """The policy that is advised."""
        return self.compared[self.best["policy"]]

    def plan_of(self, row: Row) -> Plan:
        """Return the plan of the run of a row."""
        return make_plan(self.compared[row["policy"]].config_of(row))

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
        options = options_of(with_requests(cfg), self.policies)
        make_plan(first_config(options[0]))
        for chunk in self.chunks or ():
            make_plan(options[0].with_chunk(chunk))
        return options

    def advise(self, options: Sequence[Option]) -> Advice:
        """Simulate the policies, and choose."""
        first, *others = options
        compared = {}
        left_out = []
        with progress_of("advising"):
            compared[first.label] = try_chunks(first, self.chunks)
            for option in others:
                try:
                    compared[option.label] = try_chunks(option, self.chunks)
                except UserError as error:
                    left_out.append(f"{option.label} is left out: {error}")
            table = confirmed(compared)
            for label, runs in compared.items():
                compared[label] = replace(runs, table=rows_of(table, label))
        return Advice(compared, left_out, table, advised(table, first.label))

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        advice = self.advise(context.prepared or self.check(cfg))
        runs = advice.of_best
        remedied = Remedies()
        if not advice.is_met:
            with progress_of("looking for what would meet the objective"):
                remedied = remedies(runs, advice.best, context)
        plan = advice.plan_of(advice.best)
        print_plan(plan, replace(context, policy=None))
        flags = flags_of(advice, remedied)
        shown: list[DisplayTable | str] = [
            *answer.best_lines(advice.best, runs, advice.table, advice.left_out),
            answer.policies_table(advice.table, advice.best, runs.slo, len(plan.load.requests)),
            *answer.remedy_lines(remedied.found),
            *graphs_gain(runs, advice.best, self.chunks),
            answer.chunks_table(runs),
            *answer.flag_lines(flags, is_met=advice.is_met, has_server=remedied.server is not None),
            answer.closing(advice.table, plan),
        ]
        numbers = advice.best.drop(["policy", "is_as_good"]).to_dict()
        is_whole = answer.leaves_whole(advice.best, runs)
        hardware = plan.config["executor"]["hardware"]["name"]
        return Result(
            tables={"advice": advice.table, "flags": pd.DataFrame(flags)},
            summary={
                **{str(name): float(value) for name, value in numbers.items()},
                "chunking_pays": float(not is_whole),
            },
            shown=shown,
            labels={"device": hardware, "policy": str(advice.best["policy"])},
            tags=["advice", hardware],
            config=plan.config,
        )


def check_settings(cfg: DictConfig) -> None:
    """Raise UserError for settings that the advice can't follow."""
    backend = build(cfg.executor)
    if not isinstance(backend, SimulatedBackend):
        raise UserError(
            f"executor={backend.name} has no cost model to predict with; use executor=simulated"
        )
    policy: Policy = build(cfg.policy, Policy)
    field = policy.budget_field
    raw: Any = OmegaConf.to_container(cfg.policy, resolve=False)
    if field is not None and isinstance(raw.get(field), int):
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
    """Return `cfg` with its number of requests, the same for all policies and rates that are tried;
    where they arrive over time and it is not stated a share of a run's, as what is advised is
    confirmed by a run of `LONGER` times as many.
    """
    workload = cfg.workload
    is_free = "num_requests" in workload and OmegaConf.is_interpolation(workload, "num_requests")
    if not is_free or workload.get("rate") is None:
        return cfg
    number = max(FEWEST_REQUESTS, math.ceil(workload.num_requests / LONGER))
    cfg = cfg.copy()
    cfg.workload.num_requests = number
    return cfg


def advised(table: pd.DataFrame, label: str) -> pd.Series:
    """Return the row that is best, in doubt one of the policy `label`, which the user runs."""
    best = choose(table)
    if "slo_met" not in table or not best["slo_met"]:
        return best
    for row in answer.rows_alike(best, table):
        if row["policy"] == label and row["is_confirmed"] == best["is_confirmed"]:
            return row
    return best


def rows_of(table: pd.DataFrame, label: str) -> pd.DataFrame:
    """Return the rows of a policy, the best of them marked."""
    return marked(table[table["policy"] == label])


def confirmed(compared: dict[str, PolicyRuns]) -> pd.DataFrame:
    """Return the rows of all policies. The advised one, and the best of each policy within the
    objective, were confirmed by longer runs: what does not keep up there is overloaded, and so are
    the rows of its policy that serve no more.
    """
    table = pd.concat([runs.table for runs in compared.values()], ignore_index=True)
    table = marked(table).assign(is_confirmed=False)
    while (row := _to_confirm(table, compared)) is not None:
        runs = compared[row["policy"]]
        longer = runs.longer(row)
        for name, value in longer.items():
            table.loc[row.name, name] = value
        table.loc[row.name, "is_confirmed"] = True
        if not longer["is_steady"]:
            is_same_policy = table["policy"] == row["policy"]
            serves_no_more = table.throughput <= row.throughput
            is_overloaded = is_same_policy & serves_no_more
            table.loc[is_overloaded, ["is_steady", "slo_met"]] = False
        table = marked(table)
    return table


def _to_confirm(table: pd.DataFrame, compared: dict[str, PolicyRuns]) -> pd.Series | None:
    """Return a row that would be advised, or get flags, and was not confirmed; None if all were.

    Of a policy that does not meet the objective, a run within all bounds that did not look steady
    is tried longer, too: filling and draining are a large part of a short run.
    """
    best = choose(table)
    if "slo_met" not in table:
        return None
    chosen = [best] if best["is_steady"] else []
    for label in compared:
        rows = rows_of(table, label)
        row = choose(rows)
        chosen += [row] if row["slo_met"] else _within_bounds(rows)
    for row in chosen:
        if not row["is_confirmed"] and compared[row["policy"]].has_longer:
            return row
    return None


def _within_bounds(table: pd.DataFrame) -> list[pd.Series]:
    """Return the row of a policy that serves most within all bounds, unless one was confirmed."""
    is_within = (table["bounds_missed"] == 0) & ~table["is_steady"].astype(bool)
    if table["is_confirmed"].any() or not is_within.any():
        return []
    rows = table[is_within]
    serves_most = int(rows.throughput.to_numpy().argmax())
    return [rows.iloc[serves_most]]


def graphs_gain(runs: PolicyRuns, best: pd.Series, chunks: Sequence[int] | None) -> list[str]:
    """Describe what CUDA graphs of all batches would gain; nothing where the host's launches are
    not simulated.
    """
    cfg = runs.option.cfg.copy()
    graphs = build(cfg.host).graphs
    if graphs is None or graphs.mode in (None, "none"):
        return []
    longest = runs.plan.max_model_len + runs.plan.engine.batch_size - 1
    cfg.host.graphs.update(sizes=None, largest=longest)
    larger = try_chunks(replace(runs.option, cfg=cfg), chunks)
    row = choose(larger.table)
    gain = row.throughput / best.throughput
    is_shorter = row.tbt_p99 < (1 - AS_GOOD) * best.tbt_p99
    present = max(graphs.captured)
    size = int(row.chunk)
    if size <= present or (gain <= 1 + AS_GOOD and not is_shorter):
        return [f"  CUDA graphs captured beyond the {present} tokens of now gain nothing"]
    return [
        f"  with CUDA graphs captured to {size} tokens, {present} now, the best chunk is {size}: "
        f"{gain:.2f} times the tokens/s, {1e3 * row.tbt_p99:.1f} ms between tokens at P99 where "
        f"{best.chunk:.0f} has {1e3 * best.tbt_p99:.1f}; vLLM: --max-num-batched-tokens {size} "
        f"--max-cudagraph-capture-size {size}"
    ]


def flags_of(advice: Advice, remedied: Remedies) -> list[ServerFlags]:
    """Return the flags of each policy's server for its best chunk within the objective. Where
    nothing meets it, those of the one that a lower rate or replicas would let meet it, else of the
    one that comes nearest.
    """
    if remedied.server is not None:
        plans = [remedied.server]
    elif advice.is_met:
        best_rows = [choose(runs.table) for runs in advice.compared.values()]
        plans = [advice.plan_of(row) for row in best_rows if row.get("slo_met", True)]
    else:
        plans = [advice.plan_of(advice.best)]
    flags = [server_flags(simulated(plan)) for plan in plans]
    return [of_server for of_server in flags if of_server is not None]


def simulated(plan: Plan) -> Simulated:
    """Return what a server must repeat of a run."""
    engine = plan.engine
    return Simulated(
        plan.policy,
        engine.batch_size,
        plan.max_model_len,
        engine.num_blocks * engine.block_size,
        simulated_options(plan.config),
    )


def simulated_options(config: Mapping[str, Any]) -> dict[str, object]:
    """Return what was simulated beside policy and sizes, by the names of servers.yaml.

    Args:
        config: The configuration of the run, resolved.
    """
    executor = config["executor"]
    cache = config["cache"]
    options: dict[str, object] = {}
    for name in ("tensor_parallel", "pipeline_parallel"):
        if executor[name] > 1:
            options[name] = executor[name]
    if executor["weights"] != "auto":
        options[f"weights={executor['weights']}"] = True
    if config["dtype"] != "auto":
        options["dtype"] = config["dtype"]
    if cache["dtype"] != "auto":
        options[f"cache.dtype={cache['dtype']}"] = True
    # Servers differ in whether they share prefixes by default: it is always stated.
    options["cache.prefix=true" if cache["prefix"] else "cache.prefix=false"] = True
    if isinstance(cache["num_blocks"], int):
        options["cache.num_blocks"] = cache["num_blocks"]
    if cache["block_size"] != BLOCK_SIZE:
        options["cache.block_size"] = cache["block_size"]
    if cache["align_chunks"]:
        options["cache.align_chunks"] = True
    options[f"queue_order={config['queue_order']}"] = True
    if "num" in config["cluster"]:
        options["engines"] = config["cluster"]["num"]
    drafts = build(config["speculation"]).tokens
    if drafts:
        options["drafts"] = drafts
    return options
