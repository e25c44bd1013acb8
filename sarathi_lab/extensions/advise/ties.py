"""Which differences between two simulated runs are less than the simulator tells apart."""

from __future__ import annotations

import math

from sarathi_lab.experiment.advise import Row
from sarathi_lab.extensions.under_load.search import WAITS
from sarathi_lab.results.serving_metrics import Slo

# Median errors of 1,690 predicted ratios of two runs on the same arrivals, against real servers:
# of their mean times to first tokens, and per token (experiments/lab/rankings/score.py ratios). Of
# tails, which most objectives bound, none were recorded, and a tenth is off by 15 and 38 %.
ERROR_OF_WAITS = 0.04
ERROR_OF_GAPS = 0.07


def deciding_bound(row: Row, slo: Slo) -> str:
    """Return the name of the bound that a run comes nearest to, as a share of it."""
    if row["worst_use"] > row["bound_use"]:
        return "tbt"  # by the longest gaps of requests
    uses = {}
    for name, bound in slo.bounds.items():
        use = row[slo.quantity_of(name)] / bound
        if math.isnan(use):  # no request has such a time, as of one token each
            use = 0.0
        uses[name] = use
    return max(uses, key=uses.__getitem__)


def margin_of_tie(row: Row, slo: Slo | None) -> float:
    """Return the share to which another run's deciding quantity is tied with that of a run; without
    an objective that is the time between tokens.
    """
    if slo is not None and deciding_bound(row, slo) in WAITS:
        return ERROR_OF_WAITS
    return ERROR_OF_GAPS
