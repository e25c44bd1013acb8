"""Policies proposed after SARATHI that no server ships, and their experiments."""

from sarathi_lab.extensions.after_sarathi.budgets import Lprs, Niyama, SlidingServe, SloBudget
from sarathi_lab.extensions.after_sarathi.fair_batching import FairBatching
from sarathi_lab.extensions.after_sarathi.prompts import DynamicChunks, PPas, Ranked
from sarathi_lab.extensions.after_sarathi.vllm_proposals import (
    CacheAware,
    InterPrefillBudget,
    MinPrefillChunk,
    PPasPlus,
)

__all__ = [
    "CacheAware",
    "DynamicChunks",
    "FairBatching",
    "InterPrefillBudget",
    "Lprs",
    "MinPrefillChunk",
    "Niyama",
    "PPas",
    "PPasPlus",
    "Ranked",
    "SlidingServe",
    "SloBudget",
]
