"""The task of timing one iteration by its tokens and the context before them: where it is flat, and
where it climbs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.profiling import Shape, batch_of, blocks_needed, time_iterations
from sarathi_lab.model.roofline import Peaks, roofline_time
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import report
from sarathi_lab.results.plots.tasks import KINDS, iteration_times
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.tasks.calibrate import BLOCK_SIZE, measured_subject


@dataclass(frozen=True)
class IterationTime:
    """Times iterations of one prompt's `tokens`, and of `decodes` sequences, each behind all
    `contexts` (tokens).

    Leaves iteration_time.csv, a row per size, and its picture. Raises UserError for a list that is
    empty, names a value twice, or has values below 1 (contexts: 0), and for less than one
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
            _require_numbers(f"task.{name}", getattr(self, name), minimum)
        require_int("task.repetitions", self.repetitions, 1, "use a small number such as 9")

    def check(self, cfg: DictConfig) -> None:
        """Raise UserError for a device that is not real, or a model and contexts that do not fit
        it.
        """
        backend, spec, _ = measured_subject(cfg, "iteration_time")
        backend.check(spec, BLOCK_SIZE * self._num_blocks())

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Measure, print, write and log."""
        backend, spec, checkpoint = measured_subject(cfg, "iteration_time")
        where = f"{spec.name} in {backend.dtype_name} on {backend.device_name}"
        out = console.console()
        out.print(f"\niterations of {where}", style="bold")
        report.print_cautions(backend.cautions(spec), place)
        backend.peaks()  # once before and once after: a busy machine may be freer then
        sizes = Sizes(self._num_blocks(), BLOCK_SIZE, batch_size=max(self.decodes))
        executor = backend.build(spec, checkpoint, sizes)
        shapes = list(dict.fromkeys(shape for _, shape in self._shapes()))
        with console.progress_of(
            "measuring", self.repetitions * len(shapes), "iterations"
        ) as advance:
            seconds = time_iterations(executor, shapes, self.repetitions, advance)
        peaks = backend.peaks()
        out.print(f"  medians of {self.repetitions} repetitions in turns; peaks {peaks.describe()}")
        rooflines = {
            shape: _roofline(spec, batch_of(executor, shape), backend, peaks) for shape in shapes
        }
        table = _table(self._shapes(), seconds, rooflines)
        for kind in KINDS:
            _print(table[table.kind == kind], KINDS[kind])
        _record(cfg, place, table.assign(**_provenance(spec, backend, peaks)), where)

    def _shapes(self) -> list[tuple[str, Shape]]:
        """The kind and shape of every iteration; one token is a prompt's and a decode's alike."""
        prefills = [
            ("prefill", Shape(1, tokens, context))
            for tokens in self.tokens
            for context in self.contexts
        ]
        return prefills + [
            ("decode", Shape(count, 1, context))
            for count in self.decodes
            for context in self.contexts
        ]

    def _num_blocks(self) -> int:
        return blocks_needed([shape for _, shape in self._shapes()], BLOCK_SIZE)


def _require_numbers(name: str, values: object, minimum: int) -> None:
    fix = f"use a list such as [{minimum},256]"
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"{name}={values} is not a list of numbers; {fix}")
    for value in values:
        require_int(name, value, minimum, fix)
    if len(set(values)) < len(values):
        raise UserError(f"{name}={list(values)} names one twice; drop it")


def _roofline(spec: ModelSpec, work: Any, backend: TorchBackend, peaks: Peaks) -> float:
    return float(roofline_time(spec, work, backend.dtype_bytes, peaks))


def _table(
    shapes: Sequence[tuple[str, Shape]],
    seconds: Mapping[Shape, Sequence[float]],
    rooflines: Mapping[Shape, float],
) -> pd.DataFrame:
    """A row per kind and shape: tokens of the iteration, context (tokens a sequence), seconds,
    roofline.
    """
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


def _provenance(spec: ModelSpec, backend: TorchBackend, peaks: Peaks) -> dict[str, Any]:
    return {
        "model": spec.name,
        "dtype": backend.dtype_name,
        "device": backend.device_name,
        "peak_flops_per_second": peaks.flops_per_second,
        "peak_bytes_per_second": peaks.bytes_per_second,
        "git_commit": provenance()["git_commit"],
    }


def _print(rows: pd.DataFrame, what: str) -> None:
    """Milliseconds and time/roofline, a line per number of tokens and a column per context."""
    shown = Table(box=None, padding=(0, 2), pad_edge=True)
    shown.add_column(what, justify="right")
    for context in rows.context.unique():
        shown.add_column(f"context {context}\n[ms] (/ roofline)", justify="right")
    for tokens, cells in rows.groupby("tokens", sort=False):
        times = zip(cells.seconds, cells.time_over_roofline, strict=True)
        shown.add_row(
            str(tokens), *(f"{1e3 * seconds:.2f} ({ratio:.1f}x)" for seconds, ratio in times)
        )
    console.console().print(shown)


def _record(cfg: DictConfig, place: RunContext, table: pd.DataFrame, where: str) -> None:
    """Write iteration_time.csv and .png and the configuration, and hand them to the tracker."""
    place.run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(resolved(cfg)), place.run_dir / "config.yaml")
    table.to_csv(place.run_dir / "iteration_time.csv", index=False, float_format="%.6g")
    iteration_times(table, where).savefig(place.run_dir / "iteration_time.png", dpi=150)
    tracker: Tracker = build(cfg.tracking)
    tags = ["iteration_time", *table.iloc[0][["model", "dtype"]]]
    with tracker.run(
        name=place.name,
        group=place.group,
        job_type="iteration_time",
        tags=tags,
        config=resolved(cfg),
    ) as tracked:
        names = (
            table.kind + " " + table.tokens.astype(str) + " behind " + table.context.astype(str)
        ).tolist()
        for column in ("seconds", "time_over_roofline"):
            tracked.log_summary(
                {
                    f"{column}/{name}": value
                    for name, value in zip(names, table[column], strict=True)
                }
            )
        tracked.log_tables(place.run_dir)
    console.print_place("results", place.run_dir)
