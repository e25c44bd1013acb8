"""The best policy so far, which spares those after it runs that can't change the advice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.experiment.advise import AS_GOOD
from sarathi_lab.extensions.advise.options import PolicyRuns
from sarathi_lab.extensions.advise.ties import margin_of_tie


@dataclass(frozen=True)
class Leader:
    """A policy and chunk within the objective, in its longer runs where it has such.

    Attributes:
        runs: The policy.
        best: The run of its best chunk, a longer one where there is.
    """

    runs: PolicyRuns
    best: pd.Series

    @property
    def short(self) -> pd.Series:
        """The short run of its best chunk."""
        return self.runs.tried(self.best)

    def growth(self, chunk: int) -> float:
        """Return how many times as near its bounds a longer run came as the short one, at the
        chunk nearest to `chunk` of which there are both; at least 1. The arrivals are the same for
        all policies, and so are the rare bursts that only a longer run has.
        """
        longer_rows = self.runs.judged.to_dict("records")
        nearest = min(longer_rows, key=lambda row: abs(math.log(row["chunk"] / chunk)))
        short_use = self.runs.tried(nearest)["worst_use"]
        if not short_use:  # of requests that wait for nothing
            return 1.0
        return max(1.0, nearest["worst_use"] / short_use)

    def beats(self, table: pd.DataFrame) -> bool:
        """Return whether none of the short runs of another policy comes as near to this one as to
        be tied with it.
        """
        most_served = (1 + AS_GOOD) * self.short["throughput"]
        highest_use = (1 + margin_of_tie(self.best, self.runs.slo)) * self.best["worst_use"]
        in_bounds = table[table["bounds_missed"] == 0]
        is_rival = (in_bounds["throughput"] > most_served) | (in_bounds["worst_use"] <= highest_use)
        return not is_rival.any()
