"""Which chunks have longer runs before one is advised."""

from __future__ import annotations

from typing import Any, cast

import pandas as pd

from sarathi_lab.experiment.advise import Row
from sarathi_lab.extensions.advise.confirmation import confirmed
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
