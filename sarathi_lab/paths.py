"""Where the repository keeps what the code reads: the configuration and the experiments."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONF = REPOSITORY / "conf"
EXPERIMENTS = REPOSITORY / "experiments"
