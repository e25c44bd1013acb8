"""The task `advise`: the chunk to take, the cost of cutting alone, and the flags of servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import listed, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment.advisor import BASELINES
from sarathi_lab.experiment.chunking_loss import chunking_loss
from sarathi_lab.experiment.server_flags import ServerFlag, flags
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import AUTO, Plan, make_plan
from sarathi_lab.tasks.serve import print_advice, print_plan
from sarathi_lab.tasks.subjects import cost_of, policy_of_chunk

CHUNKS = "use a list such as [256,512], or null for those that the device's tile suggests"
CHUNK = partial(require_int, minimum=1, fix=CHUNKS)
LOSS_COLUMNS = {
    "total": "more than whole [ms]",
    "attention": "attention, KV read again [ms]",
    "matmul": "smaller matrix products [ms]",
    "fixed": "fixed per iteration [ms]",
}


@dataclass(frozen=True)
class Advise(Task):
    """Predicts every candidate chunk for the workload, model, batch and policy.

    `chunks` are the candidates (tokens), None those of `advisor.advise`; `page_size` is the cache
    page (tokens) of servers that let one choose it.
    """

    reads = (
        *("policy", "workload", "executor", "model", "hardware", "batch", "pd_ratio", "seq_len"),
        *("seed", "dtype", "baselines", "max_model_len", "cache"),
    )
    chunks: Sequence[int] | None = listed(
        None,
        each=partial(require_int, minimum=1, fix=CHUNKS),
        complaint=f"names no chunk; {CHUNKS}",
    )
    page_size: int = whole(64, minimum=1, fix="use a number of tokens such as 64")

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
        advice, servers = plan.advice, self._flags(plan)
        print_plan(plan, context)
        print_advice(advice)
        prompt_len = max(request.prompt_len for request in plan.load.requests)
        times = cost_of(cfg)[2].operation_times
        splits = {c: chunking_loss(prompt_len, c, times) for c in advice.table.chunk.tolist()}
        loss = pd.DataFrame(
            {
                "prompt_len": prompt_len,
                "chunk": c,
                **asdict(split),
                "loss": split.total / split.whole,
            }
            for c, split in splits.items()
        )
        formats = dict.fromkeys(LOSS_COLUMNS.values(), ".1f") | {"loss": "+.1%"}
        rows = [
            {
                "chunk": chunk,
                **{text: 1e3 * getattr(split, name) for name, text in LOSS_COLUMNS.items()},
                "loss": split.total / split.whole,
            }
            for chunk, split in splits.items()
        ]
        uncut = f"a prompt of {prompt_len} tokens takes {1e3 * loss.whole[0]:.1f} ms whole"
        title = f"  cutting alone: {uncut}; in chunks"
        chosen = advice.table.set_index("chunk", drop=False).loc[advice.chunk]
        numbers = chosen.drop(["is_as_good", "is_best"]).to_dict()
        hardware = plan.config["executor"]["hardware"]["name"]
        return Result(
            tables={"advice": advice.table, "loss": loss, "flags": flags_table(servers)},
            summary={str(name): float(value) for name, value in numbers.items()},
            shown=[title, Shown(rows, formats=formats), *_shown_flags(servers)],
            labels={"device": hardware},
            tags=["advice", hardware],
            config=plan.config,
        )

    def _flags(self, plan: Plan) -> list[ServerFlag]:
        assert plan.advice is not None
        sizes = {"batch_size": plan.batch_size, "max_model_len": plan.max_model_len}
        return flags(plan.advice.chunk, **sizes, page_size=self.page_size)


def flags_table(rows: Sequence[ServerFlag]) -> pd.DataFrame:
    """A row per server, its flags as one line to type."""
    return pd.DataFrame([{**asdict(row), "flags": " ".join(row.flags)} for row in rows])


def _shown_flags(rows: Sequence[ServerFlag]) -> list[str]:
    """The flags of each server on a line of their own, so that they can be copied."""
    lines = ["  as settings of servers"]
    for row in rows:
        lines.append(f"  {row.server}, {row.effective_budget} tokens: {row.note}")
        lines.append(f"    {' '.join(row.flags)}")
    return lines
