"""`python -m sarathi_lab report`: what was run and its results, as a page or in Markdown."""

from sarathi_lab.extensions.report.command import main

__all__ = ["main"]
