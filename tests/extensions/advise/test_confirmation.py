"""Which chunks have longer runs before one is advised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pandas as pd
import pytest

from sarathi_lab.experiment.advise import Row
from sarathi_lab.extensions.advise.confirmation import confirmed, with_longer_runs
from sarathi_lab.extensions.advise.options import PolicyRuns


class RunsOfTwoChunks:
    """Short runs within all bounds, and longer ones of which 896 alone is within them."""

    def __init__(self) -> None:
        rows = [self._row(832, use=0.89), self._row(896, use=0.92)]
        self.table = pd.DataFrame(rows)

    def longer(self, row: Row) -> dict[str, Any]:
        return self._row(int(row["chunk"]), use=0.97 if row["chunk"] == 896 else 1.02)

    def _row(self, chunk: int, use: float) -> dict[str, Any]:
        is_missed = use > 1
        row: dict[str, Any] = {"chunk": chunk, "is_whole": False, "throughput": 6443.0}
        row |= {"bounds_missed": int(is_missed), "worst_use": use, "bound_use": use}
        return {**row, "slo_met": not is_missed, "is_steady": True}


def test_a_chunk_beside_one_that_misses_in_a_longer_run_may_still_meet_it() -> None:
    runs = cast(PolicyRuns, RunsOfTwoChunks())
    longer = confirmed(runs)
    assert longer["chunk"].tolist() == [832, 896]
    assert longer["slo_met"].tolist() == [False, True]


@dataclass(frozen=True)
class OverloadedRuns:
    """A policy that is overloaded with its one chunk, with which it stalls requests so long."""

    stall_class: int
    throughput: float = 6443.0
    confirmed: pd.DataFrame = field(default_factory=pd.DataFrame)
    has_longer: bool = True

    @property
    def table(self) -> pd.DataFrame:
        row = {"policy": id(self), "chunk": 512, "is_as_good": True, "throughput": self.throughput}
        row |= {"stall_class": self.stall_class, "gap_bounds_missed": 1}
        return pd.DataFrame([{**row, "slo_met": False, "is_steady": False}])

    def longer(self, row: Row) -> dict[str, Any]:
        return {**row, "num_requests": 512}


@pytest.mark.parametrize(
    ("policies", "repeated"),
    [
        ([OverloadedRuns(1), OverloadedRuns(2, 6000.0), OverloadedRuns(8)], [0, 1]),
        ([OverloadedRuns(1), OverloadedRuns(8)], []),  # nothing is to be decided
        ([OverloadedRuns(1), OverloadedRuns(1), OverloadedRuns(8)], []),  # nor between twins
        ([OverloadedRuns(8), OverloadedRuns(1, confirmed=pd.DataFrame([{"chunk": 512}]))], [0, 1]),
    ],
)
def test_overloaded_policies_have_longer_runs_only_where_these_decide(
    policies: list[OverloadedRuns], repeated: list[int]
) -> None:
    compared = cast(dict[str, PolicyRuns], {str(i): runs for i, runs in enumerate(policies)})
    with_longer = with_longer_runs(compared)
    labels = [label for label, runs in with_longer.items() if not runs.confirmed.empty]
    assert labels == [str(number) for number in repeated]
