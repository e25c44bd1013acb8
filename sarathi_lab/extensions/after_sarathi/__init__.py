"""Policies proposed after SARATHI that no server ships, and their experiments."""

from sarathi_lab.extensions.after_sarathi.budgets import Lprs, Niyama, SlidingServe, SloBudget
from sarathi_lab.extensions.after_sarathi.prompts import DynamicChunks, PPas, Ranked

__all__ = ["DynamicChunks", "Lprs", "Niyama", "PPas", "Ranked", "SlidingServe", "SloBudget"]
