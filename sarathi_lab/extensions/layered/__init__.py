"""Layered prefill: prompts advance by groups of layers."""

from sarathi_lab.extensions.layered.policy import LayeredPrefill

__all__ = ["LayeredPrefill"]
