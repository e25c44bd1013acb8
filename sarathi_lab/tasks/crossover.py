"""The task `crossover`: where chunked prefill gains, is neutral or loses, as a table and a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_int, require_number, require_one_of
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.simulated.hardware import kv_capacity
from sarathi_lab.experiment.advisor import (
    BASELINES,
    OUTCOMES,
    at_best_chunk,
    crossover,
    loads_that_fit,
)
from sarathi_lab.results import report
from sarathi_lab.results.plots.tasks import crossover_map
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.subjects import cost_of, policy_of_chunk, require_list

EXAMPLES = {"pd_ratios": 10, "seq_lens": 1024, "batches": 8, "chunks": 256}


@dataclass(frozen=True)
class Crossover:
    """Maps the policy's gain over P:D, P + D (tokens), batch and chunk (tokens).

    `baseline` is the one of the picture; the table has all. Raises UserError for lists that are
    empty or name a value twice, and for impossible values.
    """

    reads: ClassVar[tuple[str, ...]] = ("policy", "executor", "model", "hardware", "dtype")
    has_runs: ClassVar[bool] = False
    pd_ratios: Sequence[float]
    seq_lens: Sequence[int]
    batches: Sequence[int]
    chunks: Sequence[int]
    baseline: str

    def __post_init__(self) -> None:
        for name, example in EXAMPLES.items():
            values, fix = getattr(self, name), f"use a list such as [{example},{2 * example}]"
            require_list(f"task.{name}", values, "names nothing to map", fix, lambda *_: None)
            if len(set(values)) < len(values):
                raise UserError(f"task.{name}={values} names a value twice; {fix}")
            whole = partial(require_int, minimum=2 if name == "seq_lens" else 1, fix=fix)
            positive = partial(require_number, above=0, fix=fix)
            for value in values:
                (positive if name == "pd_ratios" else whole)(f"task.{name}", value)
        require_one_of("task.baseline", self.baseline, BASELINES)

    def check(self, cfg: DictConfig) -> None:
        """Check that some cell can run, and that the policy takes every cell that does."""
        policy_of, kv_tokens = policy_of_chunk(cfg), _kv_tokens(cfg)
        loads = loads_that_fit(self.pd_ratios, self.seq_lens, self.batches, kv_tokens)
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
        """The map, and counts of its outcomes."""
        backend, spec, predictor = cost_of(cfg)
        grid, kv_tokens = (self.pd_ratios, self.seq_lens, self.batches), _kv_tokens(cfg)
        report.print_device(context, spec, backend, build(cfg.policy).name)
        num_loads = len(loads_that_fit(*grid, kv_tokens))
        with console.progress_of("mapping", num_loads, "loads") as progress:
            table = crossover(
                *grid,
                self.chunks,
                predictor.operation_times,
                policy=policy_of_chunk(cfg),
                kv_tokens=kv_tokens,
                on_load=progress,
            )
        counts = table.groupby(["outcome", "baseline"], observed=False).size()
        title = f"{spec.name} on {backend.device_name}"
        return Result(
            tables={"crossover": table},
            figures={"crossover": crossover_map(table, title, baseline=self.baseline)},
            summary={
                f"{outcome}_vs_{name}": float(counts[outcome, name])
                for name in BASELINES
                for outcome in OUTCOMES
            },
            shown=_outcomes(table, kv_tokens),
            labels={"device": backend.hardware.name},
            tags=["crossover", backend.hardware.name],
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
            f"{kv_tokens} tokens: {_counts(cells)}; with the best chunk of each load "
            f"{_counts(at_best_chunk(cells))}"
        )
        for which, index in (("best", cells.gain.argmax()), ("worst", cells.gain.argmin())):
            cell = cells.iloc[int(index)]
            lines.append(
                f"    {which} {cell.gain:+.1%} at P:D {cell.pd_ratio:g}, P + D {cell.seq_len}, "
                f"batch {cell.batch}, chunk {cell.chunk}"
            )
    return lines


def _counts(cells: pd.DataFrame) -> str:
    counts = cells.outcome.value_counts()
    words = {"gains": "gain", "neutral": "neutral", "loses": "lose"}
    return ", ".join(f"{counts[outcome]} {word}" for outcome, word in words.items())
