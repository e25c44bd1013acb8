"""Policies proposed after SARATHI that no server ships."""

from sarathi_lab.extensions.after_sarathi.adaptive import SloBudget
from sarathi_lab.extensions.after_sarathi.dynamic_chunks import DynamicChunks
from sarathi_lab.extensions.after_sarathi.lprs import Lprs
from sarathi_lab.extensions.after_sarathi.niyama import Niyama
from sarathi_lab.extensions.after_sarathi.p_pas import PPas
from sarathi_lab.extensions.after_sarathi.prefill_cost import PrefillCost, fit_prefill_cost
from sarathi_lab.extensions.after_sarathi.ranked import Ranked
from sarathi_lab.extensions.after_sarathi.sliding_serve import SlidingServe

__all__ = [
    "DynamicChunks",
    "Lprs",
    "Niyama",
    "PPas",
    "PrefillCost",
    "Ranked",
    "SlidingServe",
    "SloBudget",
    "fit_prefill_cost",
]
