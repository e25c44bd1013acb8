"""The task `iteration_time`: one iteration's time by its tokens and the context before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from sarathi_lab.config.checked import listed, whole
from sarathi_lab.config.console import console, progress_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import OperationProbe, Timing
from sarathi_lab.executor.torch.profiling import Shape, batch_of, blocks_needed
from sarathi_lab.extensions.calibration.subjects import (
    BLOCK_SIZE,
    Subject,
    measured_subject,
    where_of,
)
from sarathi_lab.model.roofline import roofline_time
from sarathi_lab.results.plots.style import WIDTH, finished, panels, tick_in_steps
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import print_cautions
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.tasks.base import Task

KINDS = {"prefill": "tokens of one prompt", "decode": "decodes, one a sequence"}


def _sizes(default: Sequence[int], minimum: int) -> Any:
    fix = f"use a list such as [{minimum},256]"
    return listed(
        default,
        each=partial(require_int, minimum=minimum, fix=fix),
        complaint=f"is not a list of numbers; {fix}",
        twice="names one twice; drop it",
    )


@dataclass(frozen=True)
class IterationTime(Task):
    """Times of iterations of one prompt's `tokens` and of `decodes` sequences behind `contexts`."""

    reads = ("executor", "model", "device", "dtype", "seed")
    tokens: Sequence[int] = _sizes((1, 16, 256), 1)
    decodes: Sequence[int] = _sizes((1, 8), 1)
    contexts: Sequence[int] = _sizes((0, 1024), 0)
    repetitions: int = whole(9, minimum=1, fix="use a small number such as 9")

    def check(self, cfg: DictConfig) -> Subject:
        subject = measured_subject(cfg, "iteration_time")
        if subject[0].name != "torch":
            raise UserError(
                f"task=iteration_time times the lab's model, not executor={subject[0].name}; use "
                "task=calibrate, whose iterations.csv has times of whole iterations"
            )
        subject[0].check(subject[1], BLOCK_SIZE * self._num_blocks())
        return subject

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        subject: Subject = context.prepared or self.check(cfg)
        backend, spec, checkpoint = subject
        where, out = where_of(backend, spec), console()
        out.print(f"\niterations of {where}", style="bold")
        print_cautions(backend.cautions(spec), context)
        backend.peaks()  # again afterwards: the best counts, as a machine may be busy
        sizes = Sizes(self._num_blocks(), BLOCK_SIZE, batch_size=max(self.decodes))
        executor = backend.build(spec, checkpoint, sizes)
        shapes = list(dict.fromkeys(shape for _, shape in self._shapes()))
        num_iterations = self.repetitions * len(shapes)
        with progress_of("measuring", num_iterations, "iterations") as progress:
            timings = time_iterations(executor, shapes, self.repetitions, progress)
        peaks = backend.peaks()
        out.print(f"  medians of {self.repetitions} repetitions in turns; peaks {peaks.describe()}")
        rows = []
        for kind, shape in self._shapes():
            seconds, ways = zip(*timings[shape], strict=True)
            low, middle, high = np.quantile(seconds, (0.2, 0.5, 0.8))
            batch = batch_of(executor, shape)
            roofline = float(roofline_time(spec, batch, backend.dtype_bytes, peaks))
            rows.append(
                {
                    "kind": kind,
                    "tokens": shape.total_tokens,
                    "context": shape.start,
                    "seconds": middle,
                    "q20": low,
                    "q80": high,
                    "repetitions": self.repetitions,
                    "timing": min(ways),  # calls, if any
                    "roofline": roofline,
                    "time_over_roofline": middle / roofline,
                }
            )
        table = pd.DataFrame(rows)
        return Result(
            tables={
                "iteration_time": table.assign(
                    model=spec.name,
                    dtype=backend.dtype_name,
                    device=backend.device_name,
                    threads=backend.num_threads,
                    peak_flops_per_second=peaks.flops_per_second,
                    peak_bytes_per_second=peaks.bytes_per_second,
                    git_commit=provenance()["git_commit"],
                )
            },
            figures={"iteration_time": iteration_times(table, where)},
            summary={
                f"{column}/{row['kind']} {row['tokens']} behind {row['context']}": row[column]
                for column in ("seconds", "time_over_roofline")
                for row in table.to_dict("records")
            },
            shown=[_shown(table[table.kind == kind], words) for kind, words in KINDS.items()],
            tags=["iteration_time", spec.name, backend.dtype_name],
            float_format="%.6g",
        )

    def _shapes(self) -> list[tuple[str, Shape]]:
        """List kind and shape of every iteration; one token is both a prompt's and a decode's."""
        prompts = [("prefill", 1, tokens) for tokens in self.tokens]
        sizes = [*prompts, *(("decode", count, 1) for count in self.decodes)]
        both = product(sizes, self.contexts)
        return [(kind, Shape(count, tokens, start)) for (kind, count, tokens), start in both]

    def _num_blocks(self) -> int:
        return blocks_needed([shape for _, shape in self._shapes()], BLOCK_SIZE)


def _shown(table: pd.DataFrame, words: str) -> DisplayTable:
    """Tabulate milliseconds and time/roofline by number of tokens and context."""
    rows: dict[int, dict[str, Any]] = {}
    for row in table.to_dict("records"):
        cell = f"{1e3 * row['seconds']:.2f} ({row['time_over_roofline']:.1f}x)"
        heading = f"context {row['context']}\n[ms] (/ roofline)"
        rows.setdefault(row["tokens"], {words: str(row["tokens"])})[heading] = cell
    return DisplayTable(list(rows.values()))


def iteration_times(table: pd.DataFrame, where: str) -> Figure:
    """Draw milliseconds over tokens, a line per context, the roofline dotted."""
    figure, axes = panels(1, 2, (WIDTH, 4.2), sharey=True)
    for ax, (kind, xlabel) in zip(axes, KINDS.items(), strict=True):
        rows = table[table.kind == kind].sort_values("tokens")
        for i, (context, line) in enumerate(rows.groupby("context")):
            colour, label = f"C{i}", f"context {context}"
            ax.plot(line.tokens, 1e3 * line.seconds, marker="o", color=colour, label=label)
            ax.fill_between(line.tokens, 1e3 * line.q20, 1e3 * line.q80, color=colour, alpha=0.2)
            ax.plot(line.tokens, 1e3 * line.roofline, linestyle=":", color=colour)
        ax.set(xscale="log", yscale="log", xlabel=xlabel)
        sizes = sorted(rows.tokens.unique())
        ax.set_xticks(sizes, list(map(str, sizes)))
        ax.minorticks_off()
    tick_in_steps(axes[0].yaxis)
    axes[0].set_ylabel("iteration time [ms]")
    axes[0].plot([], [], linestyle=":", color="0.4", label="roofline")
    axes[0].legend(fontsize="small")
    return finished(figure, where)


def time_iterations(
    executor: TorchExecutor,
    shapes: Sequence[Shape],
    repetitions: int,
    advance: Callable[[int], None],
) -> dict[Shape, list[tuple[float, Timing]]]:
    """Return the seconds of `repetitions` iterations of every shape, in turn, and how each was
    timed. Each follows one of the same shape, as iterations of an engine resemble each other.
    """
    probe = OperationProbe(executor)
    timings: dict[Shape, list[tuple[float, Timing]]] = {shape: [] for shape in shapes}
    for _ in range(repetitions):
        for shape, found in timings.items():
            probe.iteration(batch_of(executor, shape))
            found.append((probe.iteration(batch_of(executor, shape)), probe.timing))
            advance(1)
    return timings
