"""What stands between a measurement and W&B's own process and server, either of which may be down,
slow or full.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from sarathi_lab.config.errors import UserError

AGENT_VARIABLES = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")
LEAST_ROOM = 1 << 20  # bytes; W&B's process says nothing of a full disk, and its record ends early


class Guard:
    """Calls W&B's functions so that whatever goes wrong costs one line of warning and `timeout`
    seconds at most.

    What has failed once under a `key` is not tried again in this process; `consequence` ends the
    warning.
    """

    _failed: ClassVar[set[Hashable]] = set()

    def __init__(self, key: Hashable, timeout: float, consequence: str) -> None:
        self._key = key
        self._timeout = timeout
        self._consequence = consequence
        self._is_gone = False

    def call(self, function: Callable[[], object]) -> None:
        """Call `function`, unless something failed before."""
        if self._key not in self._failed:
            self._try(function)

    def close(self, function: Callable[[], object]) -> None:
        """Call `function` although something failed before, if W&B's process is still there to hear
        it.
        """
        if not self._is_gone and not self._try(function):
            self.let_go()

    def let_go(self) -> None:
        """End W&B's process, so that nobody waits for it, the end of this process included."""
        self._is_gone = True
        end_service()

    def _try(self, function: Callable[[], object]) -> bool:
        try:
            in_time(function, self._timeout)
        except (
            Exception,
            SystemExit,
        ) as error:  # of whatever kind: a measurement must not end for it
            if isinstance(error, TimeoutError):
                self.let_go()
            if self._key not in self._failed:
                self._failed.add(self._key)
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                print(f"warning: W&B: {reason}; {self._consequence}", file=sys.stderr)
            return False
        return True


def in_time(function: Callable[[], object], timeout: float) -> None:
    """Call `function` and raise what it raises, or TimeoutError after `timeout` seconds, leaving it
    behind.
    """
    errors: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {timeout:g} s")
    if errors:
        raise errors[0]


def end_service() -> None:
    """Kill this process's W&B service, if it has one, and make W&B forget it; a later run starts
    another.
    """
    import wandb

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name().startswith("wandb-core"):
                process.kill()
    with suppress(Exception, SystemExit):  # it exits with the code of the process that was killed
        in_time(wandb.teardown, 5.0)


def require_room(folder: Path) -> None:
    """Raise OSError if the disk of `folder` is full."""
    if shutil.disk_usage(folder).free < LEAST_ROOM:
        raise OSError(f"no space left for {folder}, whose record may be incomplete")


def send(folder: Path, timeout: float) -> None:
    """Upload the run in `folder` by W&B's own command, in a process of its own, which is ended
    after `timeout` seconds.

    Raises TimeoutError or ConnectionError if the server did not take all of it.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "wandb", "sync", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "WANDB_SILENT": "false"},
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the server did not take the run within {timeout:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not list(folder.glob("*.wandb.synced")):  # the exit code is 0 whatever happened
        errors = [
            line.partition("ERROR")[2].strip() for line in output.splitlines() if "ERROR" in line
        ]
        raise ConnectionError(
            f"the server did not take the run ({next(iter(errors), 'no reason given')})"
        )


def require_login(what: str, mend: str) -> None:
    """Raise UserError, saying `what` needs it, unless W&B finds a well-formed key, or a token, for
    its server.
    """
    import wandb

    fix = f"run `wandb login`, {mend}"
    try:
        found = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise UserError(f"{what}, but the login is unusable ({error}); {fix}") from None
    if not found:
        raise UserError(f"{what}, but nobody is logged in to W&B; {fix}")


def find_project(entity: str | None, project: str, timeout: float = 60.0) -> str:
    """The entity that owns `project`: the given one, else the user's own.

    Raises UserError if it has no such project, or if the server does not say so within `timeout`
    seconds.
    """
    found: list[str] = []
    try:
        in_time(lambda: found.append(_owner(entity, project)), timeout)
    except UserError:
        raise
    except Exception as error:  # whatever W&B's transport raises
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"W&B can't be asked for project {project} ({reason}); try again, or use --dry-run"
        ) from None
    return found[0]


def _owner(entity: str | None, project: str) -> str:
    import wandb

    api = wandb.Api()
    owner = entity or api.default_entity
    if not owner:
        raise UserError("this account has no default entity; name a user or team with --entity")
    if project not in {found.name for found in api.projects(owner)}:
        raise UserError(
            f"{owner} has no project {project}; name another with --project or --entity, or "
            "make it by sending a run: "
            "python -m sarathi_lab.run tracking.mode=online, or wandb sync"
        )
    return owner


@dataclass(frozen=True)
class SweepAgent:
    """What `wandb agent` tells the process that it starts: the sweep, and the run that it is to be,
    if any.
    """

    sweep_id: str
    run_id: str | None
    project: str | None
    entity: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a W&B run that make it the agent's, or put it beside the agent's."""
        entity = {"entity": self.entity} if self.entity else {}
        return (
            {"sweep_id": self.sweep_id, "run_id": self.run_id, **entity} if self.run_id else entity
        )


def read_agent() -> SweepAgent | None:
    """The agent that started this process, None if none did."""
    sweep_id, run_id = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    if not sweep_id or not run_id:
        return None
    return SweepAgent(
        sweep_id, run_id, os.environ.get("WANDB_PROJECT"), os.environ.get("WANDB_ENTITY")
    )


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, or remove those that are None, for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
