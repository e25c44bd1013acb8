"""Advice on a policy and its chunk within an objective, as the flags of servers."""
