"""The task `crossover`: where chunked prefill gains, is neutral or loses on a device, as a table
and a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from omegaconf import DictConfig

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_int, require_number, require_one_of
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.simulated.hardware import kv_capacity
from sarathi_lab.experiment.advisor import BASELINES
from sarathi_lab.experiment.crossover import crossover, loads_that_fit
from sarathi_lab.results import report
from sarathi_lab.results.plots.tasks import crossover_map
from sarathi_lab.results.result import Result
from sarathi_lab.tasks import advise
from sarathi_lab.tasks.tuning import cost_of, policy_of_chunk


@dataclass(frozen=True)
class Crossover:
    """Maps the policy's gain over P:D (`pd_ratios`), P + D (`seq_lens`, tokens), batch and chunk
    (tokens).

    `baseline` is the one of the picture; the table has all. Raises UserError for empty lists and
    impossible entries.
    """

    reads: ClassVar[tuple[str, ...]] = ("policy", "executor", "model", "hardware", "dtype")
    has_runs: ClassVar[bool] = False
    pd_ratios: Sequence[float]
    seq_lens: Sequence[int]
    batches: Sequence[int]
    chunks: Sequence[int]
    baseline: str

    def __post_init__(self) -> None:
        for name, example in (
            ("pd_ratios", 10),
            ("seq_lens", 1024),
            ("batches", 8),
            ("chunks", 256),
        ):
            values, fix = getattr(self, name), f"use a list such as [{example},{2 * example}]"
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise UserError(f"task.{name}={values} names nothing to map; {fix}")
            if len(set(values)) < len(values):
                raise UserError(f"task.{name}={values} names a value twice; {fix}")
            for value in values:
                if name == "pd_ratios":
                    require_number(f"task.{name}", value, above=0, fix=fix)
                else:
                    require_int(f"task.{name}", value, 2 if name == "seq_lens" else 1, fix)
        require_one_of("task.baseline", self.baseline, BASELINES)

    def check(self, cfg: DictConfig) -> None:
        """Check that some cell can run, and that the policy takes every cell that does."""
        policy_of = policy_of_chunk(cfg)
        loads = loads_that_fit(self.pd_ratios, self.seq_lens, self.batches, self._kv_tokens(cfg))
        if not loads:
            raise UserError(
                f"task.batches={self.batches} of task.seq_lens={self.seq_lens} tokens exceed "
                "the cache of "
                f"{self._kv_tokens(cfg)} tokens beside the weights; name smaller ones, or take "
                "another hardware"
            )
        cells = [
            (length, batch, chunk)
            for _, length, batch in loads
            for chunk in self.chunks
            if chunk >= batch
        ]
        if not cells:
            raise UserError(
                f"task.chunks={self.chunks} are all below the batches that fit, "
                f"{sorted({load[2] for load in loads})}; "
                "name a chunk of at least the batch"
            )
        for length, batch, chunk in cells:
            policy_of(chunk).validate(batch, length)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Compute the map and print its outcomes."""
        backend, spec, predictor = cost_of(cfg)
        grid, kv_tokens = (self.pd_ratios, self.seq_lens, self.batches), self._kv_tokens(cfg)
        report.print_device(context, spec, backend, build(cfg.policy).name)
        with console.progress_of(
            "mapping", len(loads_that_fit(*grid, kv_tokens)), "loads"
        ) as advance:
            table = crossover(
                *grid,
                self.chunks,
                predictor.operation_times,
                policy=policy_of_chunk(cfg),
                kv_tokens=kv_tokens,
                on_load=advance,
            )
        advise.print_outcomes(table, kv_tokens)
        summary = {
            f"{outcome}_vs_{name}": float(
                ((table.baseline == name) & (table.outcome == outcome)).sum()
            )
            for name in BASELINES
            for outcome in table.outcome.cat.categories
        }
        title = f"{spec.name} on {backend.device_name}"
        return Result(
            tables={"crossover": table},
            figures={"crossover": crossover_map(table, title, baseline=self.baseline)},
            summary=summary,
            labels={"device": backend.hardware.name},
            tags=["crossover", backend.hardware.name],
        )

    def _kv_tokens(self, cfg: DictConfig) -> int:
        backend, spec, _ = cost_of(cfg)
        return kv_capacity(spec, backend.hardware, backend.dtype_bytes, backend.parallel)
