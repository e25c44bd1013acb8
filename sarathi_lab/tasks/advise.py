"""The task `advise`: which chunk to take, what cutting costs alone, and the flags of servers that
say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from sarathi_lab.config.console import console
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.experiment.advisor import BASELINES
from sarathi_lab.experiment.chunking_loss import chunking_loss
from sarathi_lab.experiment.crossover import OUTCOMES, at_best_chunk
from sarathi_lab.experiment.server_flags import ServerFlag, flags
from sarathi_lab.tasks import announce
from sarathi_lab.tasks.plan import AUTO, Plan, make_plan
from sarathi_lab.tasks.tuning import cost_of, policy_of_chunk, record

LOSS_COLUMNS = {
    "total": "more than whole [ms]",
    "attention": "attention, KV read again [ms]",
    "matmul": "smaller matrix products [ms]",
    "fixed": "fixed per iteration [ms]",
}


def print_loss(loss: pd.DataFrame) -> None:
    """`advise_task.loss_table`: what cutting the longest prompt costs, by cause."""
    prompt_len, whole = int(loss.prompt_len.iloc[0]), float(loss.whole.iloc[0])
    out = console()
    out.print(
        f"  cutting alone: a prompt of {prompt_len} tokens takes {1e3 * whole:.1f} ms whole; in "
        "chunks"
    )
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    for heading in ("chunk", *LOSS_COLUMNS.values(), "loss"):
        table.add_column(heading, justify="right")
    loss = loss.assign(total=loss[["attention", "matmul", "fixed"]].sum(axis=1))
    for row in loss.to_dict("records"):
        table.add_row(
            str(row["chunk"]),
            *(f"{1e3 * row[name]:.1f}" for name in LOSS_COLUMNS),
            f"{row['loss']:+.1%}",
        )
    out.print(table)


def print_flags(rows: Sequence[ServerFlag]) -> None:
    """The settings of every server: the flags on a line of their own, unbroken, so that they can be
    copied.
    """
    out = console()
    out.print("  as settings of servers")
    for row in rows:
        out.print(f"  {row.server}, {row.effective_budget} tokens: {row.note}", soft_wrap=True)
        out.print(f"    {' '.join(row.flags)}", soft_wrap=True)


def print_outcomes(table: pd.DataFrame, kv_tokens: int) -> None:
    """`crossover`'s outcomes by baseline: how many cells gain, are neutral and lose, and the best
    and worst cell.
    """
    out = console()
    num_loads = len(table[["pd_ratio", "seq_len", "batch"]].drop_duplicates())
    for name, cells in table.groupby("baseline", sort=False):
        out.print(
            f"  over {name}: {len(cells)} cells of {num_loads} loads that fit a cache of "
            f"{kv_tokens} tokens: "
            f"{_counts(cells)}; with the best chunk of each load {_counts(at_best_chunk(cells))}",
            soft_wrap=True,
        )
        cells = cells.sort_values("gain")
        for which, place in (("best", -1), ("worst", 0)):
            cell = cells.iloc[place]
            out.print(
                f"    {which} {cell.gain:+.1%} at P:D {cell.pd_ratio:g}, P + D {cell.seq_len}, "
                f"batch {cell.batch}, "
                f"chunk {cell.chunk}"
            )


def _counts(cells: pd.DataFrame) -> str:
    counts = cells.outcome.value_counts()
    words = dict(zip(OUTCOMES, ("lose", "neutral", "gain"), strict=True))
    return ", ".join(f"{counts[outcome]} {words[outcome]}" for outcome in reversed(OUTCOMES))


@dataclass(frozen=True)
class Advise:
    """Predicts every candidate chunk for the workload, model, batch and policy, and recommends one.

    `chunks` are the candidates (tokens), None those of `advisor.advise`; `page_size` is the cache
    page (tokens) of servers that let one choose it. Raises UserError for lists that name no chunk.
    """

    reads: ClassVar[tuple[str, ...]] = (
        *(
            "policy",
            "workload",
            "executor",
            "model",
            "hardware",
            "batch",
            "pd_ratio",
            "seq_len",
            "seed",
            "dtype",
        ),
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
                raise UserError(
                    f"baselines: {name} is not predicted by task=advise; use some of {valid}"
                )
        plan = self._plan(cfg)
        self._flags(plan)

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Print the predictions, the price of cutting the longest prompt and the flags, and record
        all three.
        """
        plan = self._plan(cfg)
        assert plan.advice is not None
        advice, rows = plan.advice, self._flags(plan)
        longest = max(request.prompt_len for request in plan.load.requests)
        loss = loss_table(longest, advice.table.chunk.tolist(), cost_of(cfg)[2])
        announce.print_plan(plan, place)
        announce.print_advice(advice)
        print_loss(loss)
        print_flags(rows)
        (chosen,) = advice.table[advice.table.chunk == advice.chunk].to_dict("records")
        summary = {
            str(name): float(value)
            for name, value in chosen.items()
            if name not in ("is_as_good", "is_best")
        }
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
        load = {
            "batch_size": plan.batch_size,
            "max_model_len": plan.max_model_len,
            "page_size": self.page_size,
        }
        return flags(plan.advice.chunk, **load)


def loss_table(prompt_len: int, chunks: Sequence[int], predictor: Predictor) -> pd.DataFrame:
    """What cutting a prompt of `prompt_len` tokens takes more than the whole, a row per chunk.

    Columns: prompt_len, chunk (tokens), the parts of `LossSplit` (seconds) and loss, their sum's
    share of `whole`.
    """
    splits = {
        chunk: chunking_loss(prompt_len, chunk, predictor.operation_times) for chunk in chunks
    }
    return pd.DataFrame(
        [
            {
                "prompt_len": prompt_len,
                "chunk": chunk,
                **asdict(split),
                "loss": split.total / split.whole,
            }
            for chunk, split in splits.items()
        ]
    )


def flags_table(rows: Sequence[ServerFlag]) -> pd.DataFrame:
    """A row per server, its flags as one line to type."""
    return pd.DataFrame([{**asdict(row), "flags": " ".join(row.flags)} for row in rows])
