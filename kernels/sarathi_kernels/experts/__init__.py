"""Mixtures of experts: which expert a token goes to, and what the experts make of all of them."""
