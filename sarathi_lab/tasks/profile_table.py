"""The task `profile_table`: the iteration times that policy=ascend_dynamic reads, predicted."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from sarathi_lab.config.console import console
from sarathi_lab.config.errors import require_int
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.policy.profile_table import make_profile_table
from sarathi_lab.results.report import print_cautions
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.subjects import cost_of


@dataclass(frozen=True)
class ProfileTableTask(Task):
    """Predicts iterations of up to `batch` decodes of up to `seq_len` tokens beside a prompt.

    Leaves profile_table.csv, in milliseconds. For a real device take the hardware file that
    task=calibrate measures on it, with executor.cost_model=profiled for the measured operations
    themselves.
    """

    reads = ("executor", "model", "hardware", "dtype", "batch", "seq_len")

    def check(self, cfg: DictConfig) -> None:
        cost_of(cfg)
        require_int("batch", cfg.batch, 1, "use the most sequences to serve at a time, such as 8")
        require_int("seq_len", cfg.seq_len, 2, "use the length of the longest sequence")

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        backend, spec, predictor = cost_of(cfg)
        table, path = make_profile_table(predictor, cfg.batch, cfg.seq_len), context.run_dir
        said = f"\niterations of {spec.name} on {backend.device_name}: {len(table.rows)} predicted"
        console().print(said)
        print_cautions(backend.cautions(spec), context)
        use = f"policy=ascend_dynamic policy.profile_table={path / 'profile_table.csv'}"
        return Result(
            tables={"profile_table": table.frame()},
            labels={"device": backend.hardware.name},
            tags=["profile_table", backend.hardware.name],
            places={"results": path, "use it by": use},
        )
