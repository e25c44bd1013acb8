"""W&B from outside: the environment that it reads, the agent that started us, its own command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AGENT_VARIABLES = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, or remove those that are None, for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def of_agent(*, is_baseline: bool) -> dict[str, Any]:
    """What makes a run that of the `wandb agent` which started this process, or, of a baseline,
    puts it beside the agent's; nothing if none did.
    """
    sweep_id, run_id = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    if not sweep_id or not run_id:
        return {}
    found = {"group": sweep_id, "project": os.environ.get("WANDB_PROJECT")}
    if entity := os.environ.get("WANDB_ENTITY"):
        found["entity"] = entity
    return found if is_baseline else {**found, "sweep_id": sweep_id, "run_id": run_id}


def send(folder: Path, timeout: float) -> None:
    """Upload the run in `folder` by W&B's own command, which is ended after `timeout` seconds.

    Raises TimeoutError or ConnectionError if the server did not take all of it.
    """
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    with tempfile.TemporaryFile("w+") as output:  # a pipe would be waited for after a timeout, too
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                env={**os.environ, "WANDB_SILENT": "false"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the server did not take the run within {timeout:g} s") from None
        output.seek(0)
        lines = output.read().splitlines()
    if not list(folder.glob("*.wandb.synced")):  # the exit code is 0 whatever happened
        errors = [line.partition("ERROR")[2].strip() for line in lines if "ERROR" in line]
        raise ConnectionError(
            f"the server did not take the run ({next(iter(errors), 'no reason given')})"
        )
