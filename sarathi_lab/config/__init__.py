"""Configuration: command lines, sweeps, fields and files."""

import sys
from pathlib import Path

# Hydra looks for sweepers in packages of the name hydra_plugins alone.
sys.path.append(str(Path(__file__).parent / "plugins"))
