"""Speculative decoding of greedy tokens (config group `speculation`)."""

from sarathi_lab.extensions.speculation.drafts import Drafts, Drawn
from sarathi_lab.extensions.speculation.settings import Assumed, PromptLookup

__all__ = ["Assumed", "Drafts", "Drawn", "PromptLookup"]
