"""The task `advise`: which chunk to take, what cutting costs alone, and the flags of servers that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab import report, report_tuning
from sarathi_lab.advisor import BASELINES
from sarathi_lab.backend import Predictor
from sarathi_lab.chunking_loss import chunking_loss
from sarathi_lab.errors import UserError, require_int
from sarathi_lab.plan import AUTO, Plan, build, make_plan
from sarathi_lab.server_flags import ServerFlag, flags
from sarathi_lab.task import Place
from sarathi_lab.tuning import cost_of, policy_of_chunk, record


@dataclass(frozen=True)
class Advise:
    """Predicts every candidate chunk for the workload, model, batch and policy, and recommends one.

    `chunks` are the candidates (tokens), None those of `advisor.advise`; `page_size` is the cache page (tokens) of
    servers that let one choose it. Raises UserError for lists that name no chunk.
    """

    reads: ClassVar[tuple[str, ...]] = (
        *("policy", "workload", "executor", "model", "hardware", "batch", "pd_ratio", "seq_len", "seed", "dtype"),
        *("baselines", "max_model_len", "cache"),
    )
    has_runs: ClassVar[bool] = False
    chunks: Sequence[int] | None = None
    page_size: int = 64

    def __post_init__(self) -> None:
        require_int("task.page_size", self.page_size, 1, "use a number of tokens such as 64")
        if self.chunks is None:
            return
        fix = "use a list such as [256,512], or null for those that the device's tile suggests"
        if not isinstance(self.chunks, Sequence) or isinstance(self.chunks, str) or not self.chunks:
            raise UserError(f"task.chunks={self.chunks} names no chunk; {fix}")
        for chunk in self.chunks:
            require_int("task.chunks", chunk, 1, fix)

    def check(self, cfg: DictConfig) -> None:
        """Predict everything: it is kept for `run`."""
        for name in cfg.baselines:
            if name not in BASELINES:
                valid = ", ".join(BASELINES)
                raise UserError(f"baselines: {name} is not predicted by task=advise; use some of {valid}")
        plan = self._plan(cfg)
        self._flags(plan)

    def run(self, cfg: DictConfig, place: Place) -> None:
        """Print the predictions, the price of cutting the longest prompt and the flags, and record all three."""
        plan = self._plan(cfg)
        assert plan.advice is not None
        advice, rows = plan.advice, self._flags(plan)
        longest = max(request.prompt_len for request in plan.load.requests)
        loss = loss_table(longest, advice.table.chunk.tolist(), cost_of(cfg)[2])
        report.print_plan(plan, place)
        report.print_advice(advice)
        report_tuning.print_loss(loss)
        report_tuning.print_flags(rows)
        (chosen,) = advice.table[advice.table.chunk == advice.chunk].to_dict("records")
        summary = {str(name): float(value) for name, value in chosen.items() if name not in ("is_as_good", "is_best")}
        tables = {"advice": advice.table, "loss": loss, "flags": flags_table(rows)}
        record(plan.config, build(cfg.tracking), place, tables, {}, summary)

    def _plan(self, cfg: DictConfig) -> Plan:
        cost_of(cfg)
        policy_of_chunk(cfg)
        chosen = OmegaConf.merge(cfg, {"policy": {build(cfg.policy).budget_field: AUTO}})
        assert isinstance(chosen, DictConfig)
        return make_plan(chosen, self.chunks)

    def _flags(self, plan: Plan) -> list[ServerFlag]:
        assert plan.advice is not None
        load = {"batch_size": plan.batch_size, "max_model_len": plan.max_model_len, "page_size": self.page_size}
        return flags(plan.advice.chunk, **load)


def loss_table(prompt_len: int, chunks: Sequence[int], predictor: Predictor) -> pd.DataFrame:
    """What cutting a prompt of `prompt_len` tokens takes more than the whole, a row per chunk.

    Columns: prompt_len, chunk (tokens), the parts of `LossSplit` (seconds) and loss, their sum's share of `whole`.
    """
    splits = {chunk: chunking_loss(prompt_len, chunk, predictor.operation_times) for chunk in chunks}
    return pd.DataFrame(
        [
            {"prompt_len": prompt_len, "chunk": chunk, **asdict(split), "loss": split.total / split.whole}
            for chunk, split in splits.items()
        ]
    )


def flags_table(rows: Sequence[ServerFlag]) -> pd.DataFrame:
    """A row per server, its flags as one line to type."""
    return pd.DataFrame([{**asdict(row), "flags": " ".join(row.flags)} for row in rows])
