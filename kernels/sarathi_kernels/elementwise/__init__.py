"""Norms, rotary embedding, activations and greedy sampling."""
