"""Reads what W&B wrote, by the program behind `wandb leet inspect`, without the seconds that its
command takes to start.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path


def inspect(path: Path, *options: str) -> str:
    from wandb.util import get_core_path  # here, as it takes a second

    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", *options]
    command += ["--run-file", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@cache
def summary_of(path: Path) -> dict:
    """Name, state, exit code, configuration and summary of a run."""
    return json.loads(inspect(path, "--summary"))


@cache
def records_of(path: Path) -> dict[str, list[dict]]:
    """The records of a run by their kind."""
    found = defaultdict(list)
    for line in inspect(path).splitlines():
        record = json.loads(line)
        found[record["type"]].append(record[record["type"]])
    return found
