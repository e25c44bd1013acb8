"""Which chunks have longer runs before one is advised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pandas as pd

from sarathi_lab.experiment.advise import Row, choose
from sarathi_lab.extensions.advise.confirmation import with_longer_runs
from sarathi_lab.extensions.advise.options import PolicyRuns


def row_of(chunk: int, use: float, *, is_steady: bool = True) -> dict[str, Any]:
    """A run that serves the more, the larger its chunk."""
    is_missed = use > 1
    row: dict[str, Any] = {"chunk": chunk, "is_whole": False, "throughput": 6443.0 + chunk / 1e3}
    row |= {"bounds_missed": int(is_missed), "worst_use": use, "bound_use": use}
    row |= {"slo_met": is_steady and not is_missed, "is_steady": is_steady}
    return {**row, "is_too_short": False}


@dataclass(frozen=True)
class Runs:
    """Runs of chunks: how much of the bounds they use, in short runs and in longer ones."""

    short_uses: Mapping[int, float]
    longer_rows: Mapping[int, dict[str, Any]]
    confirmed: pd.DataFrame = field(default_factory=pd.DataFrame)
    has_longer: bool = True

    @property
    def table(self) -> pd.DataFrame:
        return pd.DataFrame([row_of(chunk, use) for chunk, use in self.short_uses.items()])

    def longer(self, row: Row) -> dict[str, Any]:
        return self.longer_rows[int(row["chunk"])]


def longer_of(runs: Runs) -> pd.DataFrame:
    return with_longer_runs(cast(PolicyRuns, runs)).confirmed


def test_a_chunk_beside_one_that_misses_in_a_longer_run_may_still_meet_it() -> None:
    longer_rows = {832: row_of(832, use=1.02), 896: row_of(896, use=0.97)}
    longer = longer_of(Runs({832: 0.89, 896: 0.92}, longer_rows))
    assert longer["chunk"].tolist() == [832, 896]
    assert longer["slo_met"].tolist() == [False, True]


def test_of_an_overloaded_chunk_those_that_serve_more_are_tried_until_one_keeps_up() -> None:
    """The one that came nearest in a short run is overloaded in its longer one."""
    steady = {chunk: row_of(chunk, use=3) for chunk in (128, 2048, 8192)}
    longer_rows = {**steady, 224: row_of(224, use=90, is_steady=False)}
    longer = longer_of(Runs({128: 1.2, 224: 1.1, 2048: 1.3, 8192: 1.4}, longer_rows))
    assert longer["chunk"].tolist() == [224, 2048]
    assert choose(longer)["chunk"] == 2048
