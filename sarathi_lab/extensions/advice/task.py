"""The task `advise`: which policy to serve by, with which chunk, within the objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from sarathi_lab.experiment.advisor import AS_GOOD, BASELINES, choose, marked
from sarathi_lab.experiment.clock import LossSplit, times_by
from sarathi_lab.extensions.advice import display
from sarathi_lab.extensions.advice.compared import (
    AN_OPTION,
    LONGER,
    Compared,
    Option,
    compare,
    options_of,
)
from sarathi_lab.extensions.advice.remedies import Commands, Remedies, remedies
from sarathi_lab.extensions.advice.server_flags import ServerFlags, Simulated, server_flags
from sarathi_lab.policy import Policy
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import Plan
from sarathi_lab.tasks.serve import print_plan

CHUNKS = "use a list such as [256,512], or null for those that the device's tile suggests"
CHUNK = partial(require_int, minimum=1, fix=CHUNKS)
BLOCK_SIZE = 16  # of servers, and of the lab's cache, by default
FEWEST_REQUESTS = 128  # of a run that is tried, where they arrive over time and none are stated


def check_backend(cfg: DictConfig) -> None:
    """Raise UserError for a device that has no cost model."""
    backend = build(cfg.executor)
    if not isinstance(backend, SimulatedBackend):
        raise UserError(
            f"executor={backend.name} has no cost model to predict with; use executor=simulated"
        )


def check_settings(cfg: DictConfig) -> None:
    """Raise UserError for settings that the advice can't follow."""
    for name in cfg.baselines:
        if name not in BASELINES:
            raise UserError(
                f"baselines: {name} is not predicted by task=advise; use some of "
                f"{', '.join(BASELINES)}"
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


@dataclass(frozen=True)
class Advice:
    """What was simulated, the row that is advised, and the runs with larger CUDA graphs."""

    compared: Sequence[Compared]
    left_out: Sequence[str]  # policies that can't run here, and why
    table: pd.DataFrame
    best: pd.Series
    with_graphs: Compared | None = None

    @property
    def of_best(self) -> Compared:
        """The policy that is advised."""
        return self.compared[int(self.best["place"])]

    @property
    def is_met(self) -> bool:
        """Whether the advised run is within the objective, or there is none."""
        return bool(self.best.get("slo_met", True))


@dataclass(frozen=True)
class Advise(Task):
    """Simulates the run's policy and other `policies` with every candidate chunk (None: those of
    `advisor.advise`), names the best within the objective, or what would meet it, and lists the
    flags of their servers; where the host's CUDA graphs are known also with larger ones captured.
    """

    reads = (
        *("policy", "workload", "executor", "model", "hardware", "host", "batch", "pd_ratio"),
        *("seq_len", "slo", "seed", "dtype", "baselines", "max_model_len", "cache", "cluster"),
        *("speculation", "queue_order"),
    )
    chunks: Sequence[int] | None = listed(None, each=CHUNK, complaint=f"names no chunk; {CHUNKS}")
    policies: Sequence[Any] = listed(
        (),
        each=lambda name, value: None,
        complaint=f"is no list; {AN_OPTION}",
        may_be_empty=True,
    )

    def check(self, cfg: DictConfig) -> Advice:
        check_backend(cfg)
        check_settings(cfg)
        cfg = _with_requests(cfg)
        first, *others = options_of(cfg, self.policies)
        with progress_of("advising"):
            compared = [compare(first, self.chunks)]
            left_out = []
            for option in others:
                try:
                    compared.append(compare(option, self.chunks))
                except UserError as error:
                    left_out.append(f"{option.label} is left out: {error}")
            table = confirmed(compared)
            compared = [
                replace(each, table=marked(table[table["place"] == place]))
                for place, each in enumerate(compared)
            ]
            advice = Advice(compared, left_out, table, choose(table))
            return replace(advice, with_graphs=self._with_graphs(advice))

    def _with_graphs(self, advice: Advice) -> Compared | None:
        """Simulate the best policy again with CUDA graphs of all batches; None where the host's
        launches are not simulated.
        """
        compared = advice.of_best
        graphs = build(compared.option.cfg.host).graphs
        if graphs is None or graphs.mode in (None, "none"):
            return None
        option = replace(compared.option, cfg=compared.option.cfg.copy())
        longest = compared.plan.max_model_len + compared.plan.engine.batch_size - 1
        option.cfg.host.graphs.update(sizes=None, largest=longest)
        return compare(option, self.chunks)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        advice: Advice = context.prepared or self.check(cfg)
        compared = advice.of_best
        plan, slo = compared.plan, compared.slo
        found = Remedies()
        if slo is not None and not advice.is_met:
            with progress_of("looking for what would meet the objective"):
                found = remedies(compared, advice.compared, slo, Commands.of_run(context))
        advised = compared.plan_of(advice.best)
        print_plan(advised, replace(context, policy=None))
        flags = flags_of(advice, found)
        loss = loss_of(compared)
        shown = [
            *display.answer(advice.best, compared, advice.table, advice.left_out),
            display.policies_table(advice.table, slo),
            *display.remedies(found.found),
            *graphs_gain(advice),
            display.chunks_table(compared, slo),
            *display.loss(loss, has_experts=plan.spec.num_experts > 0),
            *display.flags(flags, is_met=advice.is_met, has_lower_rate=found.has_lower_rate),
            display.closing(advice.table, plan),
        ]
        numbers = advice.best.drop(["policy", "place", "is_as_good", "is_best"]).to_dict()
        numbers["chunking_pays"] = not is_whole(advice.best, plan)
        hardware = plan.config["executor"]["hardware"]["name"]
        tables = {"advice": advice.table.drop(columns="place")}
        if loss is not None:
            tables["loss"] = loss
        tables["flags"] = pd.DataFrame(flags)
        return Result(
            tables=tables,
            summary={str(name): float(value) for name, value in numbers.items()},
            shown=shown,
            labels={"device": hardware, "policy": str(advice.best["policy"])},
            tags=["advice", hardware],
            config=advised.config,
        )


def confirmed(compared: Sequence[Compared]) -> pd.DataFrame:
    """Return the rows of all policies (by their `place`). The advised one, and the best of each
    policy within the objective, were confirmed by longer runs: what does not keep up there is
    overloaded, and so are the rows of its policy that serve no more.
    """
    rows = [each.table.assign(place=place) for place, each in enumerate(compared)]
    table = marked(pd.concat(rows, ignore_index=True)).assign(is_confirmed=False)
    while (row := _to_confirm(table, compared)) is not None:
        longer = compared[int(row["place"])].longer(row)
        assert longer is not None, "only rows that have a longer run are to be confirmed"
        table.loc[row.name, list(longer)] = list(longer.values())
        table.loc[row.name, "is_confirmed"] = True
        if not longer["is_steady"]:
            is_same_policy = table["place"] == row["place"]
            serves_no_more = is_same_policy & (table.throughput <= row.throughput)
            table.loc[serves_no_more, ["is_steady", "slo_met"]] = False
        table = marked(table)
    return table


def _to_confirm(table: pd.DataFrame, compared: Sequence[Compared]) -> pd.Series | None:
    """Return a row that would be advised, or get flags, and was not confirmed; None if all were."""
    chosen = [choose(table)]
    if chosen[0].get("slo_met", False):
        for _, rows in table.groupby("place"):
            best = choose(marked(rows))
            if best["slo_met"]:
                chosen.append(best)
    for row in chosen:
        is_open = bool(row.get("is_steady", False)) and not row["is_confirmed"]
        if is_open and compared[int(row["place"])].has_longer:
            return row
    return None


def _with_requests(cfg: DictConfig) -> DictConfig:
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


def is_whole(row: pd.Series, plan: Plan) -> bool:
    """Return whether the run of a row cut no prompt."""
    longest = max(request.prompt_len for request in plan.load.requests)
    return bool(row["is_whole"]) or row["chunk"] >= longest


def loss_of(compared: Compared) -> pd.DataFrame | None:
    """Return what cutting the longest prompt costs by itself, for each chunk; None on a pipeline,
    where no single iteration is timed.
    """
    plan = compared.plan
    predictor = plan.backend.predictor(plan.spec) if plan.backend.num_stages == 1 else None
    if predictor is None:
        return None
    prompt_len = max(request.prompt_len for request in plan.load.requests)
    chunks = compared.table.chunk[~compared.table.is_whole.astype(bool)].tolist()
    times = times_by(predictor.operation_times)
    splits = pd.DataFrame([LossSplit.of(times, prompt_len, chunk) for chunk in chunks])
    total = splits[["attention", "matmul", "fixed"]].sum(axis="columns")
    table = splits.assign(loss=total / splits.whole)
    table.insert(0, "prompt_len", prompt_len)
    table.insert(1, "chunk", chunks)
    return table


def graphs_gain(advice: Advice) -> list[str]:
    """Describe what larger CUDA graphs would gain, where launches are simulated."""
    larger = advice.with_graphs
    if larger is None:
        return []
    backend: Any = advice.of_best.plan.backend
    present = max(backend.host.graphs.captured)
    old, new = advice.best, choose(larger.table)
    gain = new.throughput / old.throughput
    is_shorter = new.tbt_p99 < (1 - AS_GOOD) * old.tbt_p99
    size = int(new["chunk"])
    if size <= present or (gain <= 1 + AS_GOOD and not is_shorter):
        return [f"  CUDA graphs captured beyond the {present} tokens of now gain nothing"]
    flags = ""
    if not is_whole(new, larger.plan):
        flags = f"; vLLM: --max-num-batched-tokens {size} --max-cudagraph-capture-size {size}"
    return [
        f"  with CUDA graphs captured to {size} tokens, {present} now, the best chunk is {size}: "
        f"{gain:.2f} times the tokens/s, {1e3 * new.tbt_p99:.1f} ms between tokens at P99 where "
        f"{int(old['chunk'])} has {1e3 * old.tbt_p99:.1f}{flags}"
    ]


def flags_of(advice: Advice, found: Remedies) -> list[ServerFlags]:
    """Return the flags of each policy's server for its best chunk within the objective. Where
    nothing meets it, those of the one that a lower rate or replicas would let meet it, else of the
    one that comes nearest.
    """
    if found.nearest is not None and found.capacity_plan is not None:
        # Its sequences and lengths are those of the runs that found the rate, not of this load.
        of_capacity = server_flags(_simulated(found.capacity_plan, found.nearest.compared.option))
        return [] if of_capacity is None else [of_capacity]
    rows: list[tuple[Compared, pd.Series]] = []
    if advice.is_met:
        for compared in advice.compared:
            row = choose(compared.table)
            if row.get("slo_met", True):
                rows.append((compared, row))
    elif found.nearest is not None and found.has_lower_rate:
        rows.append((found.nearest.compared, found.nearest.row))
    else:
        rows.append((advice.of_best, advice.best))
    flags = []
    for compared, row in rows:
        of_server = server_flags(_simulated(compared.plan_of(row), compared.option))
        if of_server is not None:
            flags.append(of_server)
    return flags


def _simulated(plan: Plan, option: Option) -> Simulated:
    engine = plan.engine
    return Simulated(
        plan.policy,
        engine.batch_size,
        plan.max_model_len,
        engine.num_blocks * engine.block_size,
        simulated_options(option),
    )


def simulated_options(option: Option) -> dict[str, object]:
    """Return what was simulated beside policy and sizes, by the names of servers.yaml."""
    cfg = option.cfg
    executor = cfg.executor
    cache = cfg.cache
    options: dict[str, object] = {}
    if executor.tensor_parallel > 1:
        options["tensor_parallel"] = executor.tensor_parallel
    if executor.pipeline_parallel > 1:
        options["pipeline_parallel"] = executor.pipeline_parallel
    if executor.weights != "auto":
        options[f"weights={executor.weights}"] = True
    if cfg.dtype != "auto":
        options["dtype"] = cfg.dtype
    if cache.dtype != "auto":
        options[f"cache.dtype={cache.dtype}"] = True
    # Servers differ in whether they share prefixes by default: it is always stated.
    options["cache.prefix=true" if cache.prefix else "cache.prefix=false"] = True
    if isinstance(cache.num_blocks, int):
        options["cache.num_blocks"] = cache.num_blocks
    if cache.block_size != BLOCK_SIZE:
        options["cache.block_size"] = cache.block_size
    if cache.align_chunks:
        options["cache.align_chunks"] = True
    options[f"queue_order={cfg.queue_order}"] = True
    if "num" in cfg.cluster:
        options["engines"] = cfg.cluster.num
    drafts = build(cfg.speculation).tokens
    if drafts:
        options["drafts"] = drafts
    return options
