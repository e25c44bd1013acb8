"""Policies proposed after SARATHI that no server ships, and their experiments."""

from sarathi_lab.extensions.after_sarathi.budgets import Lprs, Niyama, SloBudget
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
    "InterPrefillBudget",
    "Lprs",
    "MinPrefillChunk",
    "Niyama",
    "PPas",
    "PPasPlus",
    "Ranked",
    "SloBudget",
]
