"""The task `iteration_time`: one iteration's time by its tokens and the context before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from sarathi_lab.config.checked import listed, whole
from sarathi_lab.config.console import print_words, progress_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.single_iteration import host_caution
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import OperationProbe
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

COLUMNS = [
    "kind",
    "tokens",
    "context",
    "seconds",
    "q20",
    "q80",
    "repetitions",
    "timing",
    "host_share",
    "roofline",
]
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
        where = where_of(backend, spec)
        print_words(f"\niterations of {where}", style="bold")
        print_cautions(backend.cautions(spec), context)
        backend.peaks()  # again afterwards: the best counts, as a machine may be busy
        sizes = Sizes(self._num_blocks(), BLOCK_SIZE, batch_size=max(self.decodes))
        executor = backend.build(spec, checkpoint, sizes)
        timings = self._timings(executor)
        peaks = backend.peaks()
        turns = f"medians of {self.repetitions} repetitions in turns"
        print_words(f"  {turns}; peaks {peaks.describe()}")
        rows = []
        for kind, shape in self._shapes():
            seconds, ways, host_shares = zip(*timings[shape], strict=True)
            quantiles, way = np.quantile(seconds, (0.5, 0.2, 0.8)), min(ways)  # calls, if any
            batch = batch_of(executor, shape)
            roofline = float(roofline_time(spec, batch, backend.dtype_bytes, peaks))
            size = (kind, shape.total_tokens, shape.start)
            host_share = float(np.median(host_shares))
            rows.append((*size, *quantiles, self.repetitions, way, host_share, roofline))
        table = pd.DataFrame(rows, columns=COLUMNS)
        table["time_over_roofline"] = table.seconds / table.roofline
        about = {
            "model": spec.name,
            "dtype": backend.dtype_name,
            "device": backend.device_name,
            "threads": backend.num_threads,
            "peak_flops_per_second": peaks.flops_per_second,
            "peak_bytes_per_second": peaks.bytes_per_second,
            "git_commit": provenance()["git_commit"],
        }
        return Result(
            tables={"iteration_time": table.assign(**about)},
            figures={"iteration_time": iteration_times(table, where)},
            summary={
                f"{column}/{row['kind']} {row['tokens']} behind {row['context']}": row[column]
                for column in ("seconds", "time_over_roofline")
                for row in table.to_dict("records")
            },
            shown=[
                *(_shown(table[table.kind == kind], words) for kind, words in KINDS.items()),
                *host_caution("some of these rows", table.host_share.max()),
            ],
            tags=["iteration_time", spec.name, backend.dtype_name],
            float_format="%.6g",
        )

    def _timings(self, executor: TorchExecutor) -> dict[Shape, list[tuple[float, str, float]]]:
        """Return the seconds of each shape's repetitions, in turn, how each was timed, and the
        host's share: behind one of the same shape, as iterations of an engine resemble each other.
        """
        probe = OperationProbe(executor)
        timings: dict[Shape, list[tuple[float, str, float]]]
        timings = {shape: [] for _, shape in self._shapes()}
        number = self.repetitions * len(timings)
        with progress_of("measuring", number, "iterations") as advance:
            for shape, found in self.repetitions * [*timings.items()]:
                probe.iteration(batch_of(executor, shape))
                iteration = probe.iteration(batch_of(executor, shape))
                found.append((iteration.seconds, probe.timing, iteration.host_share))
                advance(1)
        return timings

    def _shapes(self) -> list[tuple[str, Shape]]:
        """List kind and shape of every iteration; one token is both a prompt's and a decode's."""
        sizes = [("prefill", 1, tokens) for tokens in self.tokens]
        sizes += [("decode", count, 1) for count in self.decodes]
        both = product(sizes, self.contexts)
        return [(kind, Shape(count, tokens, start)) for (kind, count, tokens), start in both]

    def _num_blocks(self) -> int:
        return blocks_needed([shape for _, shape in self._shapes()], BLOCK_SIZE)


def _shown(table: pd.DataFrame, words: str) -> DisplayTable:
    """Tabulate milliseconds and time/roofline by number of tokens and context."""
    ratio = table.time_over_roofline.map(" ({:.1f}x)".format)
    cells = table.assign(cell=(1e3 * table.seconds).map("{:.2f}".format) + ratio)
    wide = cells.pivot_table("cell", "tokens", "context", aggfunc="first", sort=False)
    wide = wide.rename(columns="context {}\n[ms] (/ roofline)".format)
    return DisplayTable(wide.reset_index(names=words).to_dict("records"))


def iteration_times(table: pd.DataFrame, where: str) -> Figure:
    """Draw milliseconds over tokens, a line per context, the roofline dotted."""
    figure, axes = panels(1, 2, (WIDTH, 4.2), sharey=True)
    for ax, (kind, xlabel) in zip(axes, KINDS.items(), strict=True):
        rows = table[table.kind == kind].sort_values("tokens")
        for i, (context, line) in enumerate(rows.groupby("context")):
            look: dict[str, Any] = {"color": f"C{i}"}
            low, middle, high, roofline = (
                1e3 * line[name] for name in ("q20", "seconds", "q80", "roofline")
            )
            ax.plot(line.tokens, middle, marker="o", label=f"context {context}", **look)
            ax.fill_between(line.tokens, low, high, alpha=0.2, **look)
            ax.plot(line.tokens, roofline, linestyle=":", **look)
        ax.set(xscale="log", yscale="log", xlabel=xlabel)
        sizes = sorted(rows.tokens.unique())
        ax.set_xticks(sizes, list(map(str, sizes)))
        ax.minorticks_off()
    tick_in_steps(axes[0].yaxis)
    axes[0].set_ylabel("iteration time [ms]")
    axes[0].plot([], [], linestyle=":", color="0.4", label="roofline")
    axes[0].legend(fontsize="small")
    return finished(figure, where)
