"""Speculative decoding: drafts by prompt lookup, or assumed ones in a simulation."""

from sarathi_lab.extensions.speculation.drafters import (
    Assumed,
    AssumedDrafter,
    LookupDrafter,
    PromptLookup,
)

__all__ = ["Assumed", "AssumedDrafter", "LookupDrafter", "PromptLookup"]
