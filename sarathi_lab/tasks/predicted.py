"""The tasks that a device's cost model does: `advise` finds the chunk to take, `crossover` where
chunked prefill gains, `profile_table` the iteration times that policy=ascend_dynamic reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import listed, one_of, whole
from sarathi_lab.config.console import console, progress_of
from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.hardware import kv_capacity
from sarathi_lab.experiment import advisor
from sarathi_lab.experiment.advisor import BASELINES, OUTCOMES, PolicyOfChunk
from sarathi_lab.experiment.loss import chunking_loss, why_of_experts
from sarathi_lab.experiment.server_flags import ServerFlag, flags
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy, with_budget
from sarathi_lab.policy.profile_table import make_profile_table
from sarathi_lab.results.report import print_cautions, print_device
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import AUTO, Plan, make_plan
from sarathi_lab.tasks.serve import print_advice, print_plan


def cost_of(cfg: DictConfig) -> tuple[SimulatedBackend, ModelSpec, Predictor]:
    """The device, the model, and the device's cost model of it. Raises UserError without one."""
    backend = build(cfg.executor)
    if not isinstance(backend, SimulatedBackend):
        raise UserError(
            f"executor={backend.name} has no cost model to predict with; use executor=simulated"
        )
    if backend.num_stages > 1:
        raise UserError(
            f"executor.pipeline_parallel={backend.num_stages} is not predicted: this is for one "
            "batch at a time; use 1"
        )
    spec, _ = resolve_model(cfg, backend)
    return backend, spec, backend.predictor(spec)


def policy_of_chunk(cfg: DictConfig) -> PolicyOfChunk:
    """The policy by its chunk. Raises UserError for one that cuts no prompts, or names a chunk."""
    policy: Policy = build(cfg.policy)
    field = policy.budget_field
    if field is None:
        raise UserError(
            f"policy={policy.name} has no chunk to choose; use policy=sarathi or "
            "policy=sarathi_serve"
        )
    if policy.budget != cfg.chunk:  # `chunk` itself is refused, as the tasks don't read it
        raise UserError(
            f"policy.{field}={policy.budget} has no effect; drop it, and name chunks by "
            "task.chunks=[256,512]"
        )
    return partial(with_budget, policy)


# -- the chunk to take, the cost of cutting alone, and the flags of servers ------------------------

CHUNKS = "use a list such as [256,512], or null for those that the device's tile suggests"
CHUNK = partial(require_int, minimum=1, fix=CHUNKS)
LOSS_COLUMNS = {
    "total": "more than whole [ms]",
    "attention": "attention, KV read again [ms]",
    "matmul": "smaller matrix products [ms]",
    "fixed": "fixed per iteration [ms]",
}
OF_EXPERTS = "of the products, experts [ms]"


@dataclass(frozen=True)
class Advise(Task):
    """Predicts every candidate chunk (None: those of `advisor.advise`) for the load and policy."""

    reads = (
        *("policy", "workload", "executor", "model", "hardware", "batch", "pd_ratio", "seq_len"),
        *("slo", "seed", "dtype", "baselines", "max_model_len", "cache"),
    )
    chunks: Sequence[int] | None = listed(None, each=CHUNK, complaint=f"names no chunk; {CHUNKS}")
    page_size: int = whole(64, minimum=1, fix="use a number of tokens such as 64")

    def check(self, cfg: DictConfig) -> Plan:
        for name in cfg.baselines:
            if name not in BASELINES:
                raise UserError(
                    f"baselines: {name} is not predicted by task=advise; use some of "
                    f"{', '.join(BASELINES)}"
                )
        cost_of(cfg)
        policy_of_chunk(cfg)
        chosen = OmegaConf.merge(cfg, {"policy": {build(cfg.policy).budget_field: AUTO}})
        assert isinstance(chosen, DictConfig)
        plan = make_plan(chosen, self.chunks)
        self._flags(plan)
        return plan

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        plan: Plan = context.prepared or self.check(cfg)
        assert plan.advice is not None
        advice, servers = plan.advice, self._flags(plan)
        print_plan(plan, context)
        print_advice(advice)
        prompt_len = max(request.prompt_len for request in plan.load.requests)
        _, spec, predictor = cost_of(cfg)
        rows, why = [], []
        for chunk in advice.table.chunk.tolist():
            split = chunking_loss(prompt_len, chunk, predictor.operation_times)
            labels = {"prompt_len": prompt_len, "chunk": chunk}
            rows.append({**labels, **asdict(split), "loss": split.total / split.whole})
            is_told = chunk in (advice.table.chunk.min(), advice.chunk) and chunk < prompt_len
            if spec.num_experts and is_told:
                why.append(f"  {why_of_experts(spec, prompt_len, chunk, split)}")
        loss = pd.DataFrame(rows)
        columns = {**LOSS_COLUMNS, **({"experts": OF_EXPERTS} if spec.num_experts else {})}
        by_cause = loss.assign(total=loss[["attention", "matmul", "fixed"]].sum(axis="columns"))
        by_cause[[*columns]] *= 1e3
        by_cause = by_cause[["chunk", *columns, "loss"]].rename(columns=columns)
        formats = dict.fromkeys(columns.values(), ".1f") | {"loss": "+.1%"}
        table = Shown(by_cause.to_dict("records"), formats=formats)
        shown = ["  as settings of servers"]  # each on a line of its own, so that it can be copied
        for server in servers:
            shown.append(f"  {server.server}, {server.effective_budget} tokens: {server.note}")
            shown.append(f"    {' '.join(server.flags)}")
        uncut = f"a prompt of {prompt_len} tokens takes {1e3 * loss.whole[0]:.1f} ms whole"
        title = f"  cutting alone: {uncut}; in chunks"
        chosen = advice.table.set_index("chunk", drop=False).loc[advice.chunk]
        numbers = chosen.drop(["is_as_good", "is_best"]).to_dict()
        numbers["chunking_pays"] = advice.do_not_chunk is None
        hardware = plan.config["executor"]["hardware"]["name"]
        return Result(
            tables={"advice": advice.table, "loss": loss, "flags": flags_table(servers)},
            summary={str(name): float(value) for name, value in numbers.items()},
            shown=[title, table, *why, *shown],
            labels={"device": hardware},
            tags=["advice", hardware],
            config=plan.config,
        )

    def _flags(self, plan: Plan) -> list[ServerFlag]:
        assert plan.advice is not None
        sizes = {"batch_size": plan.batch_size, "max_model_len": plan.max_model_len}
        chunk = plan.advice.chunk
        if plan.advice.do_not_chunk:  # servers leave a prompt whole that fits their budget
            longest = max(request.prompt_len for request in plan.load.requests)
            chunk = max(chunk, longest + plan.batch_size - 1)
        return flags(chunk, **sizes, page_size=self.page_size)


def flags_table(rows: Sequence[ServerFlag]) -> pd.DataFrame:
    """A row per server, its flags as one line to type."""
    return pd.DataFrame([{**asdict(row), "flags": " ".join(row.flags)} for row in rows])


# -- where chunked prefill gains, is neutral or loses, as a table and a map ------------------------


def _axis(example: int, minimum: int | None = 1) -> Any:
    """A field that holds a list such as that of the `example`; without `minimum`, of fractions."""
    fix = f"use a list such as [{example},{2 * example}]"
    number = partial(require_number, above=0, fix=fix)
    each = number if minimum is None else partial(require_int, minimum=minimum, fix=fix)
    twice = f"names a value twice; {fix}"
    return listed(each=each, complaint=f"names nothing to map; {fix}", twice=twice)


@dataclass(frozen=True)
class Crossover(Task):
    """Maps the policy's gain over P:D, P + D (tokens), batch and chunk (tokens)."""

    reads = ("policy", "executor", "model", "hardware", "dtype")
    pd_ratios: Sequence[float] = _axis(10, minimum=None)
    seq_lens: Sequence[int] = _axis(1024, minimum=2)
    batches: Sequence[int] = _axis(8)
    chunks: Sequence[int] = _axis(256)
    baseline: str = one_of(valid=BASELINES)

    def check(self, cfg: DictConfig) -> None:
        policy_of, kv_tokens = policy_of_chunk(cfg), _kv_tokens(cfg)
        loads = advisor.loads_that_fit(self.pd_ratios, self.seq_lens, self.batches, kv_tokens)
        if not loads:
            raise UserError(
                f"task.batches={self.batches} of task.seq_lens={self.seq_lens} tokens exceed the "
                f"cache of {kv_tokens} tokens beside the weights; name smaller ones, or take "
                "another hardware"
            )
        sizes = {(length, batch) for _, length, batch in loads}
        cells = [(*size, chunk) for size in sizes for chunk in self.chunks if chunk >= size[1]]
        if not cells:
            raise UserError(
                f"task.chunks={self.chunks} are all below the batches that fit, "
                f"{sorted({load[2] for load in loads})}; name a chunk of at least the batch"
            )
        for length, batch, chunk in cells:
            policy_of(chunk).validate(batch, length)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        from sarathi_lab.results.plots.tasks import crossover_map  # matplotlib takes a second

        backend, spec, predictor = cost_of(cfg)
        grid, kv_tokens = (self.pd_ratios, self.seq_lens, self.batches), _kv_tokens(cfg)
        print_device(context, spec, backend, build(cfg.policy).name)
        num_loads = len(advisor.loads_that_fit(*grid, kv_tokens))
        with progress_of("mapping", num_loads, "loads") as progress:
            table = advisor.crossover(
                *grid,
                self.chunks,
                predictor.operation_times,
                policy=policy_of_chunk(cfg),
                kv_tokens=kv_tokens,
                on_load=progress,
            )
        counts = table.groupby(["outcome", "baseline"], observed=False).size()
        title, device = f"{spec.name} on {backend.device_name}", backend.hardware.name
        return Result(
            tables={"crossover": table},
            figures={"crossover": crossover_map(table, title, baseline=self.baseline)},
            summary={f"{o}_vs_{b}": float(counts[o, b]) for b in BASELINES for o in OUTCOMES},
            shown=_outcomes(table, kv_tokens),
            labels={"device": device},
            tags=["crossover", device],
        )


def _kv_tokens(cfg: DictConfig) -> int:
    backend, spec, _ = cost_of(cfg)
    return kv_capacity(spec, backend.hardware, backend.dtype_bytes, backend.parallel)


def _outcomes(table: pd.DataFrame, kv_tokens: int) -> list[str]:
    """By baseline how many cells gain, are neutral and lose, and the best and worst cell."""
    num_loads = len(table[["pd_ratio", "seq_len", "batch"]].drop_duplicates())
    lines = []
    for name, cells in table.groupby("baseline", sort=False):
        lines.append(
            f"  over {name}: {len(cells)} cells of {num_loads} loads that fit a cache of "
            f"{kv_tokens} tokens: {_in_words(cells)}; with the best chunk of each load "
            f"{_in_words(advisor.at_best_chunk(cells))}"
        )
        for which, index in (("best", cells.gain.argmax()), ("worst", cells.gain.argmin())):
            cell = cells.iloc[int(index)]
            lines.append(
                f"    {which} {cell.gain:+.1%} at P:D {cell.pd_ratio:g}, P + D {cell.seq_len}, "
                f"batch {cell.batch}, chunk {cell.chunk}"
            )
    return lines


def _in_words(cells: pd.DataFrame) -> str:
    counts = cells.outcome.value_counts()
    words = {"gains": "gain", "neutral": "neutral", "loses": "lose"}
    return ", ".join(f"{counts[outcome]} {word}" for outcome, word in words.items())


# -- iteration times -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfileTableTask(Task):
    """Predicts iterations of up to `batch` decodes of up to `seq_len` tokens beside a prompt.

    Leaves profile_table.csv, in milliseconds. For a real device take the hardware file that
    task=calibrate measures on it, with executor.cost_model=profiled for the measured operations
    themselves.
    """

    reads = ("executor", "model", "hardware", "dtype", "batch", "seq_len")

    def check(self, cfg: DictConfig) -> None:
        cost_of(cfg)
        require_int("batch", cfg.batch, 1, "use the most sequences to serve at a time, such as 8")
        require_int("seq_len", cfg.seq_len, 2, "use the length of the longest sequence")

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        backend, spec, predictor = cost_of(cfg)
        table, path = make_profile_table(predictor, cfg.batch, cfg.seq_len), context.run_dir
        said = f"\niterations of {spec.name} on {backend.device_name}: {len(table.rows)} predicted"
        console().print(said)
        print_cautions(backend.cautions(spec), context)
        use = f"policy=ascend_dynamic policy.profile_table={path / 'profile_table.csv'}"
        return Result(
            tables={"profile_table": table.frame()},
            labels={"device": backend.hardware.name},
            tags=["profile_table", backend.hardware.name],
            places={"results": path, "use it by": use},
        )
