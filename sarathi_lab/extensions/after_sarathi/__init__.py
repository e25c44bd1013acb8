"""Policies proposed after SARATHI that no server ships, and their experiments."""

from sarathi_lab.extensions.after_sarathi.budgets import Lprs, Niyama, PPas, SlidingServe, SloBudget
from sarathi_lab.extensions.after_sarathi.prompts import DynamicChunks, Ranked

__all__ = ["DynamicChunks", "Lprs", "Niyama", "PPas", "Ranked", "SlidingServe", "SloBudget"]
