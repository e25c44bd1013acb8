"""Experiments on what came after SARATHI."""
