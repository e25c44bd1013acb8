"""What SARATHI and the manuals of vendors claim, and what the recorded results say of it."""

from sarathi_lab.claims.verdicts import verdicts

__all__ = ["verdicts"]
