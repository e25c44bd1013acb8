"""Configuration: command lines, sweeps, fields and files."""

import sys
from itertools import chain
from pathlib import Path

# Hydra looks for sweepers in packages of the name hydra_plugins alone; extensions may bring some.
_PACKAGE = Path(__file__).parents[1]
_PLUGINS = chain(_PACKAGE.glob("config/plugins"), _PACKAGE.glob("extensions/*/plugins"))
sys.path += map(str, _PLUGINS)
