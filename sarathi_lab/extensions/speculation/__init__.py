"""Speculative decoding: drafts by prompt lookup, or assumed ones in a simulation."""

from sarathi_lab.extensions.speculation.assumed import Assumed, AssumedDrafter
from sarathi_lab.extensions.speculation.prompt_lookup import LookupDrafter, PromptLookup

__all__ = ["Assumed", "AssumedDrafter", "LookupDrafter", "PromptLookup"]
