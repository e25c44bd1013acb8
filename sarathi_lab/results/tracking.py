"""Weights & Biases behind a small interface, and the null tracker.

A run is left in its folder when it has ended, and `wandb_writer` writes it, offline, in another
process: while later runs are simulated, but not while one is measured. `wandb sync` uploads it
afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sarathi_lab.config.checked import check_fields, number, text
from sarathi_lab.config.errors import UserError, require_bool
from sarathi_lab.config.paths import make_folder, write_json
from sarathi_lab.results import wandb_writer
from sarathi_lab.results.table import MILLISECONDS, factor
from sarathi_lab.results.wandb_writer import LOST, PENDING, WANDB, PendingRun

MAX_TAG = 64  # characters
MAX_NAME = 48  # characters of a run's name in its id, of which W&B allows 64
# Instead of characters that W&B refuses in ids or in names of artifacts, and of the hyphen, after
# which `wandb leet` looks for the id in a folder's name.
REFUSED = re.compile(r"[^A-Za-z0-9=._+]+")
AUTO = "auto"
OPTION = "option"  # name of a group's option in a tree where the group has settings, too


@dataclass(frozen=True)
class TrackedRun:
    """A run that has ended and left `folder`, as it is tracked.

    `group` is the sweep, `job_type` the experiment; `config` has flat names to filter by ("command"
    becomes the notes) and settings under "settings". Tables become an artifact: of equal `artifact`
    versions of one, else one of this run alone.
    """

    name: str
    group: str
    job_type: str
    folder: Path
    tags: Sequence[str] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    summary: Mapping[str, float] = field(default_factory=dict)
    has_history: bool = False  # whether the folder's iterations are the history
    has_tables: bool = False  # whether the folder's tables and pictures are displayed
    artifact: str | None = None
    baselines: Sequence[str] = ()  # their folders, relative to this run's
    has_failed: bool = False

    @property
    def run_id(self) -> str:
        """Return W&B's id, by which it names the run's folder, too.

        A run that is done again in its folder has it again, and replaces what it left before.
        """
        return f"{REFUSED.sub('_', self.name)[:MAX_NAME]}_{self.key}"

    @property
    def key(self) -> str:
        """Return what only this folder's run has: in its group, on whichever node it is done."""
        group_and_folder = f"{self.group} {self.folder.absolute()}"
        return hashlib.sha256(group_and_folder.encode()).hexdigest()[:8]


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
        return shlex.join([*WANDB, "leet", str(Path(self.dir) / "wandb")])

    def keeps_tables(self, *, is_measured: bool) -> bool:
        return is_measured if self.iterations == AUTO else bool(self.iterations)

    def start(self) -> None:
        _writer_process()

    def leave(self, run: TrackedRun) -> None:
        folder = Path(self.dir).absolute()
        command = run.config.get("command")
        pending = PendingRun(
            run_id=run.run_id,
            name=run.name,
            group=run.group,
            job_type=run.job_type,
            notes=None if command is None else str(command),
            tags=list(dict.fromkeys(tag[:MAX_TAG] for tag in run.tags if tag)),
            config=dict(run.config),
            summary=dict(run.summary),
            has_failed=run.has_failed,
            has_history=run.has_history,
            has_tables=run.has_tables,
            artifact=run.artifact or f"tables-{run.key}",
            baselines=list(run.baselines),
            project=self.project,
            mode=self.mode,
            folder=str(folder),
            data=os.environ.get("WANDB_DATA_DIR") or str(folder / "wandb" / "data"),
            timeout=self.timeout,
        )
        write_json(run.folder / PENDING, asdict(pending))

    def keep(self, folder: Path, *, waits: bool = False) -> None:
        if (folder / PENDING).is_file():
            _writer_process().write(folder)
            if waits:
                _writer_process().wait()

    def finish(self, folder: Path) -> None:
        # Of a job that failed, and of an earlier command that was killed.
        for pattern in ("", "*/", "baselines/*/"):
            for pending in sorted(folder.glob(f"{pattern}{PENDING}")):
                self.keep(pending.parent)
        _end_writer()


class _WriterProcess:
    """`wandb_writer` in a process beside this one, which ends with this one's pipe."""

    def __init__(self) -> None:
        # The service of other W&B runs, of a notebook's, would outlive the writer.
        variables = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
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


def summary_columns(
    summary: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return a run's summary with its baselines' quantities as NAME_BASELINE.

    Times that are displayed in milliseconds are there as ms/NAME, too.
    """
    columns = _with_milliseconds(summary)
    for baseline, quantities in baselines.items():
        of_baseline = _with_milliseconds(quantities)
        for name, value in of_baseline.items():
            columns[f"{name}_{baseline}"] = value
    return columns


def _with_milliseconds(summary: Mapping[str, float]) -> dict[str, float]:
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
            inner = node.get(group, {})
            node[group] = inner if isinstance(inner, dict) else {OPTION: inner}
            node = node[group]
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
