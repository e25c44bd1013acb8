"""Whether an objective is also met where a card is slower than predicted.

None of the kernels of a card by its datasheet was measured: their error is assumed, and so large
that a run which is within an objective may be outside it on the card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.instantiate import build, copied
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.experiment.advise import Row
from sarathi_lab.extensions.advise.options import Option, PolicyRuns

MET_AT_SLOW_END = "slo_met_at_slow_end"  # a column of advice.csv, and a number of the summary


@dataclass(frozen=True)
class SlowEnd:
    """Runs again, with all kernels slower by the assumed error of a card by its datasheet.

    Attributes:
        error: The assumed mean relative error of kernels' times.
        rows: What the runs gave, by the policy.
    """

    error: float
    rows: Mapping[str, Row]

    def is_met(self, row: Row) -> bool | None:
        """Return whether the run of a row meets the objective there; None for one not repeated."""
        slow = self.rows.get(row["policy"])
        if slow is None:
            return None
        for name in ("chunk", "is_whole"):
            if slow[name] != row[name]:
                return None
        return bool(slow["slo_met"])

    def marked(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return a table of runs with the column `MET_AT_SLOW_END`; NaN for runs not repeated."""
        column = []
        longest = table["num_requests"].max()
        for row in table.to_dict("records"):
            is_repeated = row["num_requests"] == longest
            is_met = None
            if is_repeated:
                is_met = self.is_met(row)
            column.append(is_met)
        # Not of bool, which has no NaN.
        values = pd.array(column, dtype="Float64")
        return table.assign(**{MET_AT_SLOW_END: values})


def assumed_error(runs: PolicyRuns) -> float | None:
    """Return the assumed error of the card's kernels; None where they were measured."""
    hardware: Hardware = build(runs.option.cfg.hardware, Hardware)
    if not hardware.is_datasheet:
        return None
    return max(hardware.held_out_errors.values())


def slowed(cfg: DictConfig, error: float) -> DictConfig:
    """Return the configuration of a run with kernels that take `error` longer than in it."""
    slow = copied(cfg)
    stated = OmegaConf.select(cfg, "executor.slowdown") or 1.0
    OmegaConf.update(slow, "executor.slowdown", stated * (1 + error), force_add=True)
    return slow


def slow_row(runs: PolicyRuns, row: Row, error: float) -> Row:
    """Repeat the run of a row with kernels that take `error` longer."""
    cfg = slowed(runs.option.cfg, error)
    option: Option = replace(runs.option, cfg=cfg)
    if not runs.confirmed.empty:
        option = option.longer
    return option.repeat(row, runs.slo)
