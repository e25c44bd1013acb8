"""The task `iteration_time`: times one iteration by its tokens and the context before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.profiling import Shape, batch_of, blocks_needed, time_iterations
from sarathi_lab.model.roofline import roofline_time
from sarathi_lab.results import report
from sarathi_lab.results.plots.tasks import KINDS, iteration_times
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.subjects import BLOCK_SIZE, Subject, measured_subject, require_list, where_of


@dataclass(frozen=True)
class IterationTime:
    """Times iterations of one prompt's `tokens`, and of `decodes` sequences, behind `contexts`.

    Leaves iteration_time.csv, a row per size, and its picture. Raises UserError for a list that is
    empty, names a value twice, or has values below 1 (contexts, tokens: 0), and for less than one
    repetition.
    """

    reads: ClassVar[tuple[str, ...]] = ("executor", "model", "device", "dtype", "seed")
    has_runs: ClassVar[bool] = False
    tokens: Sequence[int] = (1, 16, 256)
    decodes: Sequence[int] = (1, 8)
    contexts: Sequence[int] = (0, 1024)
    repetitions: int = 9

    def __post_init__(self) -> None:
        for name, minimum in (("tokens", 1), ("decodes", 1), ("contexts", 0)):
            values, fix = getattr(self, name), f"use a list such as [{minimum},256]"
            check = partial(require_int, minimum=minimum, fix=fix)
            require_list(f"task.{name}", values, "is not a list of numbers", fix, check)
            if len(set(values)) < len(values):
                raise UserError(f"task.{name}={list(values)} names one twice; drop it")
        require_int("task.repetitions", self.repetitions, 1, "use a small number such as 9")

    def check(self, cfg: DictConfig) -> Subject:
        """Raise UserError for a device that is not real, or sizes that do not fit it."""
        subject = measured_subject(cfg, "iteration_time")
        subject[0].check(subject[1], BLOCK_SIZE * self._num_blocks())
        return subject

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """The times by size, and their rooflines."""
        subject: Subject = context.prepared or self.check(cfg)
        backend, spec, checkpoint = subject
        where, out = where_of(backend, spec), console.console()
        out.print(f"\niterations of {where}", style="bold")
        report.print_cautions(backend.cautions(spec), context)
        backend.peaks()  # once before and once after: a busy machine may be freer then
        sizes = Sizes(self._num_blocks(), BLOCK_SIZE, batch_size=max(self.decodes))
        executor = backend.build(spec, checkpoint, sizes)
        shapes = list(dict.fromkeys(shape for _, shape in self._shapes()))
        num_iterations = self.repetitions * len(shapes)
        with console.progress_of("measuring", num_iterations, "iterations") as progress:
            seconds = time_iterations(executor, shapes, self.repetitions, progress)
        peaks = backend.peaks()
        out.print(f"  medians of {self.repetitions} repetitions in turns; peaks {peaks.describe()}")
        rooflines = {
            shape: float(roofline_time(spec, batch_of(executor, shape), backend.dtype_bytes, peaks))
            for shape in shapes
        }
        table = _table(self._shapes(), seconds, rooflines)
        return Result(
            tables={
                "iteration_time": table.assign(
                    model=spec.name,
                    dtype=backend.dtype_name,
                    device=backend.device_name,
                    peak_flops_per_second=peaks.flops_per_second,
                    peak_bytes_per_second=peaks.bytes_per_second,
                    git_commit=provenance()["git_commit"],
                )
            },
            figures={"iteration_time": iteration_times(table, where)},
            summary=_summary(table),
            shown=[_shown(table[table.kind == kind], words) for kind, words in KINDS.items()],
            tags=["iteration_time", spec.name, backend.dtype_name],
            float_format="%.6g",
        )

    def _shapes(self) -> list[tuple[str, Shape]]:
        """The kind and shape of every iteration; one token is a prompt's and a decode's alike."""
        prompts = [("prefill", 1, tokens) for tokens in self.tokens]
        decodes = [("decode", count, 1) for count in self.decodes]
        return [
            (kind, Shape(count, tokens, start))
            for kind, count, tokens in prompts + decodes
            for start in self.contexts
        ]

    def _num_blocks(self) -> int:
        return blocks_needed([shape for _, shape in self._shapes()], BLOCK_SIZE)


def _table(
    shapes: Sequence[tuple[str, Shape]],
    seconds: Mapping[Shape, Sequence[float]],
    rooflines: Mapping[Shape, float],
) -> pd.DataFrame:
    """A row per kind and shape: tokens, context (tokens a sequence), seconds and roofline."""
    rows = []
    for kind, shape in shapes:
        low, middle, high = np.quantile(seconds[shape], (0.2, 0.5, 0.8))
        rows.append(
            {
                "kind": kind,
                "tokens": shape.total_tokens,
                "context": shape.start,
                "seconds": middle,
                "q20": low,
                "q80": high,
                "repetitions": len(seconds[shape]),
                "roofline": rooflines[shape],
                "time_over_roofline": middle / rooflines[shape],
            }
        )
    return pd.DataFrame(rows)


def _summary(table: pd.DataFrame) -> dict[str, float]:
    return {
        f"{column}/{row['kind']} {row['tokens']} behind {row['context']}": row[column]
        for column in ("seconds", "time_over_roofline")
        for row in table.to_dict("records")
    }


def _shown(table: pd.DataFrame, words: str) -> Shown:
    """Milliseconds and time/roofline, a line per number of tokens and a column per context."""
    rows: dict[int, dict[str, Any]] = {}
    for row in table.to_dict("records"):
        cell = f"{1e3 * row['seconds']:.2f} ({row['time_over_roofline']:.1f}x)"
        heading = f"context {row['context']}\n[ms] (/ roofline)"
        rows.setdefault(row["tokens"], {words: str(row["tokens"])})[heading] = cell
    return Shown(list(rows.values()))
