"""The task `advise`: the chunk to take by a device's cost model, and servers' flags for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.checked import listed, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.advisor import AS_GOOD, BASELINES, Advice, PolicyOfChunk
from sarathi_lab.experiment.clock import LossSplit, times_by
from sarathi_lab.extensions.advice.server_flags import server_flags
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.results.result import DisplayTable, Result
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
    return policy.with_budget


def capture_advice(
    cfg: DictConfig, present: Advice, longest: int, chunks: Sequence[int] | None
) -> str | None:
    """Predict again with CUDA graphs of all batches up to `longest` tokens, and compare the best
    chunk with that of the `present` sizes; None where the host's launches are not simulated.
    """
    graphs = cost_of(cfg)[0].host.graphs
    if graphs is None or graphs.mode in (None, "none"):
        return None
    cfg = cfg.copy()
    cfg.host.graphs.update(sizes=None, largest=longest)
    advice, now = make_plan(cfg, chunks).advice, max(graphs.captured)
    assert advice is not None
    old, new = (one.table.set_index("chunk").loc[one.chunk] for one in (present, advice))
    gain, size = new.throughput / old.throughput, advice.chunk
    if size <= now or (gain <= 1 + AS_GOOD and new.tbt_p99 >= (1 - AS_GOOD) * old.tbt_p99):
        return f"  CUDA graphs captured beyond the {now} tokens of now gain nothing"
    flags = f"; vLLM: --max-num-batched-tokens {size} --max-cudagraph-capture-size {size}"
    return (
        f"  with CUDA graphs captured to {size} tokens, {now} now, the best chunk is {size}: "
        f"{gain:.2f} times the tokens/s, {1e3 * new.tbt_p99:.1f} ms between tokens at P99 where "
        f"{old.name} has {1e3 * old.tbt_p99:.1f}{'' if advice.do_not_chunk else flags}"
    )


CHUNKS = "use a list such as [256,512], or null for those that the device's tile suggests"
CHUNK = partial(require_int, minimum=1, fix=CHUNKS)
LOSS_COLUMNS = {
    "total": "more than whole [ms]",
    "attention": "attention, KV read again [ms]",
    "matmul": "smaller matrix products [ms]",
    "fixed": "fixed per iteration [ms]",
    "experts": "of the products, experts [ms]",
}


@dataclass(frozen=True)
class Advise(Task):
    """Predicts every candidate chunk (None: those of `advisor.advise`) for the load and policy,
    prices the cutting by itself, and lists the flags of servers; where the host's CUDA graphs are
    known also with larger ones captured.
    """

    reads = (
        *("policy", "workload", "executor", "model", "hardware", "host", "batch", "pd_ratio"),
        *("seq_len", "slo", "seed", "dtype", "baselines", "max_model_len", "cache"),
    )
    chunks: Sequence[int] | None = listed(None, each=CHUNK, complaint=f"names no chunk; {CHUNKS}")
    page_size: int = whole(64, minimum=1, fix="use a number of tokens such as 64")

    def check(self, cfg: DictConfig) -> tuple[Plan, pd.DataFrame, str | None]:
        for name in cfg.baselines:
            if name not in BASELINES:
                raise UserError(
                    f"baselines: {name} is not predicted by task=advise; use some of "
                    f"{', '.join(BASELINES)}"
                )
        cost_of(cfg)
        policy_of_chunk(cfg)
        cfg = cfg.copy()
        cfg.policy[build(cfg.policy).budget_field] = AUTO
        plan = make_plan(cfg, self.chunks)
        assert plan.advice is not None
        is_whole = plan.advice.do_not_chunk is not None
        # Any prompt beside all decodes, as one that does not fit would wait for them.
        longest = plan.max_model_len + plan.engine.batch_size - 1
        sizes = {"batch_size": plan.engine.batch_size, "max_model_len": plan.max_model_len}
        sizes["page_size"] = self.page_size
        budget = longest if is_whole else plan.advice.chunk
        capture = capture_advice(cfg, plan.advice, longest, self.chunks)
        return plan, server_flags(budget, **sizes, is_whole=is_whole), capture

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        prepared: Any = context.prepared or self.check(cfg)
        plan, flags, capture = prepared
        advice: Advice = plan.advice
        print_plan(plan, context)
        print_advice(advice)
        prompt_len = max(request.prompt_len for request in plan.load.requests)
        _, spec, predictor = cost_of(cfg)
        chunks = advice.table.chunk.tolist()
        times = times_by(predictor.operation_times)
        splits = pd.DataFrame([LossSplit.of(times, prompt_len, chunk) for chunk in chunks])
        total = splits[["attention", "matmul", "fixed"]].sum(axis="columns")
        loss = splits.assign(loss=total / splits.whole)
        loss.insert(0, "prompt_len", prompt_len)
        loss.insert(1, "chunk", chunks)
        columns = dict(list(LOSS_COLUMNS.items())[: None if spec.num_experts else -1])
        by_cause = 1e3 * splits.assign(total=total)[[*columns]].rename(columns=columns)
        by_cause = pd.concat([loss.chunk, by_cause, loss.loss], axis="columns")
        formats = dict.fromkeys(columns.values(), ".1f") | {"loss": "+.1%"}
        uncut = f"a prompt of {prompt_len} tokens takes {1e3 * loss.whole[0]:.1f} ms whole"
        cut = " that leave prompts whole, where they have any" if advice.do_not_chunk else ""
        shown: list[DisplayTable | str] = [
            *([capture] if capture else []),
            f"  cutting alone: {uncut}; in chunks",
            DisplayTable(by_cause.to_dict("records"), formats=formats),
            f"  as settings of servers{cut}",
        ]
        row: Any
        for row in flags.itertuples():  # flags on a separate line, so that they can be copied
            shown += [f"  {row.server}, {row.effective_budget} tokens: {row.note}"]
            shown += [f"    {row.flags}"]
        chosen = advice.table.set_index("chunk", drop=False).loc[advice.chunk]
        numbers = chosen.drop(["is_as_good", "is_best"]).to_dict()
        numbers["chunking_pays"] = advice.do_not_chunk is None
        hardware = plan.config["executor"]["hardware"]["name"]
        return Result(
            tables={"advice": advice.table, "loss": loss, "flags": flags},
            summary={str(name): float(value) for name, value in numbers.items()},
            shown=shown,
            labels={"device": hardware},
            tags=["advice", hardware],
            config=plan.config,
        )
