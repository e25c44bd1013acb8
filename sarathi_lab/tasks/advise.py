"""The task `advise`: the chunk to take, the cost of cutting alone, and the flags of servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.experiment.advisor import BASELINES, chunking_loss
from sarathi_lab.experiment.server_flags import ServerFlag, flags
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks import announce
from sarathi_lab.tasks.plan import AUTO, Plan, make_plan
from sarathi_lab.tasks.subjects import cost_of, policy_of_chunk, require_list

LOSS_COLUMNS = {
    "total": "more than whole [ms]",
    "attention": "attention, KV read again [ms]",
    "matmul": "smaller matrix products [ms]",
    "fixed": "fixed per iteration [ms]",
}


@dataclass(frozen=True)
class Advise:
    """Predicts every candidate chunk for the workload, model, batch and policy.

    `chunks` are the candidates (tokens), None those of `advisor.advise`; `page_size` is the cache
    page (tokens) of servers that let one choose it. Raises UserError for lists that name no chunk.
    """

    reads: ClassVar[tuple[str, ...]] = (
        *("policy", "workload", "executor", "model", "hardware", "batch", "pd_ratio", "seq_len"),
        *("seed", "dtype", "baselines", "max_model_len", "cache"),
    )
    has_runs: ClassVar[bool] = False
    chunks: Sequence[int] | None = None
    page_size: int = 64

    def __post_init__(self) -> None:
        require_int("task.page_size", self.page_size, 1, "use a number of tokens such as 64")
        if self.chunks is not None:
            fix = "use a list such as [256,512], or null for those that the device's tile suggests"
            is_chunk = partial(require_int, minimum=1, fix=fix)
            require_list("task.chunks", self.chunks, "names no chunk", fix, is_chunk)

    def check(self, cfg: DictConfig) -> Plan:
        """The plan with its advice."""
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
        """The predictions, the cost of cutting the longest prompt and the flags."""
        plan: Plan = context.prepared or self.check(cfg)
        assert plan.advice is not None
        advice, rows = plan.advice, self._flags(plan)
        announce.print_plan(plan, context)
        announce.print_advice(advice)
        longest = max(request.prompt_len for request in plan.load.requests)
        loss = loss_table(longest, advice.table.chunk.tolist(), cost_of(cfg)[2])
        chosen = advice.table.set_index("chunk", drop=False).loc[advice.chunk]
        numbers: dict[Any, Any] = chosen.drop(["is_as_good", "is_best"]).to_dict()
        hardware = plan.config["executor"]["hardware"]["name"]
        return Result(
            tables={"advice": advice.table, "loss": loss, "flags": flags_table(rows)},
            summary={str(name): float(value) for name, value in numbers.items()},
            shown=[*_loss_shown(loss), *_flags_shown(rows)],
            labels={"device": hardware},
            tags=["advice", hardware],
            config=plan.config,
        )

    def _flags(self, plan: Plan) -> list[ServerFlag]:
        assert plan.advice is not None
        return flags(
            plan.advice.chunk,
            batch_size=plan.batch_size,
            max_model_len=plan.max_model_len,
            page_size=self.page_size,
        )


def loss_table(prompt_len: int, chunks: Sequence[int], predictor: Predictor) -> pd.DataFrame:
    """The cost of cutting a prompt of `prompt_len` tokens, a row per chunk.

    Columns: prompt_len, chunk (tokens), the parts of `LossSplit` (seconds) and loss, their sum's
    share of `whole`.
    """
    splits = {
        chunk: chunking_loss(prompt_len, chunk, predictor.operation_times) for chunk in chunks
    }
    rows = [
        {"prompt_len": prompt_len, "chunk": chunk, **asdict(s), "loss": s.total / s.whole}
        for chunk, s in splits.items()
    ]
    return pd.DataFrame(rows)


def flags_table(rows: Sequence[ServerFlag]) -> pd.DataFrame:
    """A row per server, its flags as one line to type."""
    return pd.DataFrame([{**asdict(row), "flags": " ".join(row.flags)} for row in rows])


def _loss_shown(loss: pd.DataFrame) -> list[str | Shown]:
    prompt_len, whole = int(loss.prompt_len.iloc[0]), float(loss.whole.iloc[0])
    loss = loss.assign(total=loss[["attention", "matmul", "fixed"]].sum(axis=1))
    rows = [
        {
            "chunk": str(row["chunk"]),
            **{heading: f"{1e3 * row[name]:.1f}" for name, heading in LOSS_COLUMNS.items()},
            "loss": f"{row['loss']:+.1%}",
        }
        for row in loss.to_dict("records")
    ]
    title = f"  cutting alone: a prompt of {prompt_len} tokens takes {1e3 * whole:.1f} ms whole; "
    return [f"{title}in chunks", Shown(rows)]


def _flags_shown(rows: Sequence[ServerFlag]) -> list[str]:
    """The flags of each server on a line of their own, so that they can be copied."""
    lines = ["  as settings of servers"]
    for row in rows:
        lines.append(f"  {row.server}, {row.effective_budget} tokens: {row.note}")
        lines.append(f"    {' '.join(row.flags)}")
    return lines
