"""Weights & Biases behind a small interface, and the null tracker.

A run is left in its folder when it has ended, and `wandb_writer` writes it, offline, in another
process: while later runs are simulated, but not while one is measured. `wandb sync` uploads it
afterwards.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sarathi_lab.config.checked import check_fields, number, text
from sarathi_lab.config.errors import UserError, require_bool
from sarathi_lab.config.paths import make_folder, write_json
from sarathi_lab.results import wandb_writer
from sarathi_lab.results.table import (
    MILLISECONDS,
    Quantities,
    Summary,
    factor,
)
from sarathi_lab.results.wandb_writer import (
    LOST,
    PENDING,
    WANDB,
    Destination,
    PendingRun,
    TrackedRun,
)

AUTO = "auto"
OPTION = "option"  # name of a group's option in a tree where the group has settings, too


class Tracker:
    """Null tracker, and the interface of the others (`conf/tracking/*.yaml`)."""

    def check(self) -> None:
        """Raise UserError if runs cannot be tracked."""

    def hint(self) -> str:
        """Return the command that shows the tracked runs, "" if there are none."""
        return ""

    def keeps_tables(self, *, is_measured: bool) -> bool:
        """Return whether iterations and tables of such runs are tracked, too."""
        return False

    def start(self) -> None:
        """Prepare for runs beside which tracking may work."""

    def leave(self, run: TrackedRun) -> None:
        """Leave `run` in its folder, in any process; nothing is tracked yet."""

    def keep(self, folder: Path, *, waits: bool = False) -> None:
        """Track the run that was left in `folder`; if it `waits`, until it is tracked.

        Never raises for the tracker's failures.
        """

    def finish(self, folder: Path) -> None:
        """Track what is still left in the sweep or run `folder`, and wait for all."""


@dataclass(frozen=True)
class WandbTracker(Tracker):
    """Writes W&B runs below `dir`/wandb; "offline" needs no account and sends nothing.

    Online runs are written the same way and then uploaded, for at most `timeout` seconds. A failure
    of W&B or of its server costs one line of warning.
    """

    mode: str
    project: str = text(fix="use a project's name such as sarathi-lab")
    dir: str = text(fix="use a folder such as outputs")
    timeout: float = number(60.0, above=0, fix="use a number of seconds such as 60")
    # Whether runs have histories of iterations, and tables; auto: if their times are measured.
    iterations: bool | str = AUTO

    def __post_init__(self) -> None:
        check_fields(self, "tracking.")
        if self.mode not in ("offline", "online"):
            advice = "use offline or online, or tracking=none"
            raise UserError(f"tracking.mode={self.mode} is unknown; {advice}")
        if self.iterations != AUTO:
            require_bool("tracking.iterations", self.iterations, f"use true, false or {AUTO}")

    def check(self) -> None:
        """Raise UserError if `dir` cannot be written, or online without a login."""
        make_folder(Path(self.dir), "tracking.dir")
        if self.mode == "online":
            with environment({"WANDB_SILENT": "true"}):
                require_login("tracking.mode=online", "or use tracking.mode=offline")

    def hint(self) -> str:
        folder = Path(self.dir) / "wandb"
        return shlex.join([*WANDB, "leet", str(folder)])

    def keeps_tables(self, *, is_measured: bool) -> bool:
        return is_measured if self.iterations == AUTO else bool(self.iterations)

    def start(self) -> None:
        _writer_process()

    def leave(self, run: TrackedRun) -> None:
        folder = Path(self.dir).absolute()
        # By default beside the runs, which `wandb sync` sends with their artifacts.
        data = os.environ.get("WANDB_DATA_DIR") or folder / "wandb" / "data"
        destination = Destination(
            project=self.project,
            mode=self.mode,
            folder=str(folder),
            data=str(data),
            timeout=self.timeout,
        )
        pending = PendingRun(run, destination)
        path = Path(run.folder) / PENDING
        write_json(path, asdict(pending))

    def keep(self, folder: Path, *, waits: bool = False) -> None:
        if (folder / PENDING).is_file():
            _writer_process().write(folder)
            if waits:
                _writer_process().wait()

    def finish(self, folder: Path) -> None:
        # Of a job that failed, and of an earlier command that was killed.
        for pattern in ("", "*/", "baselines/*/"):
            pending_runs = folder.glob(f"{pattern}{PENDING}")
            for path in sorted(pending_runs):
                self.keep(path.parent)
        _end_writer()


class _WriterProcess:
    """`wandb_writer` in a process beside this one, which ends with this one's pipe."""

    def __init__(self) -> None:
        # The service of other W&B runs, of a notebook's, would outlive the writer.
        variables = dict(os.environ)
        variables.pop("WANDB_SERVICE", None)
        # In a new session: Ctrl-C stops the sweep, and what has ended is still written.
        self._process = subprocess.Popen(
            [sys.executable, "-P", wandb_writer.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables,
            start_new_session=True,
        )
        self._is_lost = False

    def write(self, folder: Path) -> None:
        """Let it write the run in `folder`; returns at once."""
        self._send(str(folder.absolute()))

    def wait(self) -> None:
        """Wait until all is written, and print what failed."""
        self._send("")
        assert self._process.stdout is not None
        answer = "" if self._is_lost else self._process.stdout.readline()
        if answer:
            for warning in json.loads(answer):
                print(f"warning: W&B: {warning}", file=sys.stderr)
        else:
            self._lose()

    def end(self) -> None:
        self.wait()
        self._process.terminate()  # all is written, and leaving by itself takes it 0.2 s
        self._process.communicate()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """Warn, once, that the process has ended."""
        if not self._is_lost:
            self._is_lost = True
            code = self._process.wait()
            reason = f"the process that writes runs has ended ({code})"
            print(f"warning: W&B: {reason}; {LOST}", file=sys.stderr)


_writers: list[_WriterProcess] = []  # none or one, of this process


def _writer_process() -> _WriterProcess:
    """Return the process, begun if there is none."""
    if not _writers:
        _writers.append(_WriterProcess())
    return _writers[0]


def _end_writer() -> None:
    while _writers:
        _writers.pop().end()


def summary_columns(summary: Summary, baselines: Mapping[str, Summary]) -> Quantities:
    """Return a run's summary with its baselines' quantities as NAME_BASELINE.

    Times that are displayed in milliseconds are there as ms/NAME, too.
    """
    columns = _with_milliseconds(summary)
    for baseline, quantities in baselines.items():
        of_baseline = _with_milliseconds(quantities)
        for name, value in of_baseline.items():
            columns[f"{name}_{baseline}"] = value
    return columns


def _with_milliseconds(summary: Summary) -> Quantities:
    times = [name for name in summary if factor(name) == MILLISECONDS]
    columns = dict(summary)
    for name in times:
        columns[f"ms/{name}"] = summary[name] * MILLISECONDS
    return columns


def as_tree(values: Mapping[str, object]) -> dict[str, Any]:
    """Return settings by dotted names as a tree: W&B filters and groups by the leaves of one."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, leaf = name.split(".")
        node = tree
        for group in groups:
            inner = node.setdefault(group, {})
            if not isinstance(inner, dict):
                # `policy=sarathi` was stated before `policy.window=2`.
                inner = {OPTION: inner}
                node[group] = inner
            node = inner
        if isinstance(node.get(leaf), dict):
            node[leaf][OPTION] = value
        else:
            node[leaf] = value
    return tree


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def require_login(what: str, mend: str) -> None:
    """Raise UserError that names `what` without W&B or a well-formed key for its server."""
    advice = f"run `{shlex.join(WANDB)} login`, {mend}"
    try:
        import wandb

        is_known = wandb.login(prompt=False, verify=False)
    except ModuleNotFoundError:
        raise UserError(f"{what}, but wandb is not installed; pip install wandb, {mend}") from None
    except wandb.Error as error:
        raise UserError(f"{what}, but the login is unusable ({error}); {advice}") from None
    if not is_known:
        raise UserError(f"{what}, but no user is logged in to W&B; {advice}")
