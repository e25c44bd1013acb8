"""The process that writes W&B runs beside the one that simulates or measures them.

`tracking` starts this file. Its input names folders, a line each, in which runs were left to be
written; an empty line asks for the end of all that was named so far and is answered by a line of
JSON, the list of warnings. It ends with its input. Nothing of the lab is imported here, so that it
is ready before the first run has ended.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    import pyarrow
    import wandb

PENDING = "wandb.json"  # in the folder of a run until it is written
WANDB = ("python", "-m", "wandb")  # the command alone may not be on the path
MAX_TAG = 64  # characters
MAX_NAME = 48  # characters of a run's name in its id, of which W&B allows 64
# Instead of characters that W&B refuses in ids or in names of artifacts, and of the hyphen, after
# which `wandb leet` looks for the id in a folder's name.
REFUSED = re.compile(r"[^A-Za-z0-9=._+]+")
MAX_HISTORY_ROWS = 2000
LOCAL_TIMEOUT = 60.0  # seconds for opening a run, which usually takes 0.01
# x axes of the history's columns; by default the iteration's number.
STEP_OF = {
    # state of the server, which arrivals change, by time [s]
    **dict.fromkeys(("num_running", "num_waiting", "num_blocks_used", "num_preemptions"), "time"),
    # efficiency by progress: policies compute the same tokens in different numbers of iterations
    **dict.fromkeys(("mfu", "mbu", "time_over_roofline"), "tokens"),
}
PREFIX = "iterations/"  # of the history's columns
LISTS = ["output_token_ids", "token_times"]  # columns that W&B's tables cannot show
LOST = "results are complete without it, and later runs are not tracked"
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


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
    folder: str
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
        name = REFUSED.sub("_", self.name)
        return f"{name[:MAX_NAME]}_{self.key}"

    @property
    def key(self) -> str:
        """Return what only this folder's run has: in its group, on whichever node it is done."""
        folder = Path(self.folder).absolute()
        group_and_folder = f"{self.group} {folder}"
        return hashlib.sha256(group_and_folder.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Destination:
    """Where runs are written, and whether they are sent."""

    project: str
    mode: str
    folder: str  # in which W&B makes its folder
    data: str  # where artifacts wait beside their runs for `wandb sync`
    timeout: float

    @property
    def wandb_dir(self) -> Path:
        return Path(self.folder) / "wandb"


@dataclass(frozen=True)
class PendingRun:
    """A run as its folder holds it, in `PENDING`, until it is written."""

    run: TrackedRun
    destination: Destination

    @classmethod
    def load(cls, path: Path) -> PendingRun:
        """Return the run that was left in a file. Raises what one of another version does."""
        stored = json.loads(path.read_text())
        return cls(TrackedRun(**stored["run"]), Destination(**stored["destination"]))


@dataclass
class Writer:
    """Writes runs, and gives up what failed once."""

    warnings: list[str] = field(default_factory=list)  # since they were last reported
    _named: set[Path] = field(default_factory=set)
    # Not yet closed, with the file and W&B's folder of each
    _written: list[tuple[PendingRun, Path, Path]] = field(default_factory=list)
    _gave_up: set[str] = field(default_factory=set)

    def write(self, folder: Path) -> None:
        """Write the run that was left in `folder`, if any, its baselines' first."""
        folder = folder.resolve()
        path = folder / PENDING
        # Runs of a sweep share their baselines.
        if folder in self._named or not path.is_file():
            return
        self._named.add(folder)
        pending = self._try(LOST, PendingRun.load, path)
        if pending is None:
            return
        for baseline in pending.run.baselines:
            self.write(folder / baseline)
        written = self._try(LOST, write_run, pending, folder)
        if written is None:
            return
        self._written.append((pending, path, written))
        if pending.destination.mode == "online":  # each is sent when it has ended
            self.close()

    def close(self) -> None:
        """Complete the runs' files, and send those of online runs."""
        if not self._written:
            return
        import wandb

        # `Run.finish` returns before the service has written a file's last block; it is complete
        # only when the service has ended, which the next run starts again.
        wandb.teardown()
        closed, self._written = self._written, []
        for pending, path, written in closed:
            path.unlink(missing_ok=True)
            destination = pending.destination
            if destination.mode == "online":
                sync = shlex.join([*WANDB, "sync", str(destination.wandb_dir)])
                consequence = f"it and later runs stay here, and {sync} sends them"
                self._try(consequence, send, written, destination.timeout)

    def _try(
        self, consequence: str, work: Callable[[*Arguments], T], *args: *Arguments
    ) -> T | None:
        """Do `work`; warn if it raises, and do not try again."""
        if consequence in self._gave_up:
            return None
        try:
            return work(*args)
        except (Exception, SystemExit) as error:  # a measurement must not end for it
            self._gave_up.add(consequence)
            first_line, _, _ = str(error).strip().partition("\n")
            reason = first_line or type(error).__name__
            self.warnings.append(f"{reason}; {consequence}")
            return None


def write_run(pending: PendingRun, folder: Path) -> Path:
    """Write a run offline with what `folder` holds; returns W&B's folder. Raises what W&B does."""
    import wandb

    run = pending.run
    destination = pending.destination
    destination.wandb_dir.mkdir(parents=True, exist_ok=True)  # else W&B uses a temporary folder
    os.environ["WANDB_DATA_DIR"] = destination.data  # no setting of `wandb.Settings`
    for earlier in destination.wandb_dir.glob(f"offline-run-*-{run.run_id}"):
        shutil.rmtree(earlier, ignore_errors=True)  # of a command that was stopped, and resumed
    tags = dict.fromkeys(tag[:MAX_TAG] for tag in run.tags if tag)
    opened = wandb.init(
        id=run.run_id,
        name=run.name,
        group=run.group,
        job_type=run.job_type,
        notes=str(run.config.get("command", "")),
        tags=list(tags),
        config=dict(run.config),
        project=destination.project,
        mode="offline",
        dir=destination.folder,
        reinit="create_new",
        settings=wandb.Settings(
            # No captured output, no sampling thread; versions are in the configuration.
            console="off",
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            init_timeout=LOCAL_TIMEOUT,
        ),
    )
    try:
        _log(opened, run, folder)
    finally:
        opened.finish(exit_code=int(run.has_failed))
    return Path(opened.settings.sync_dir).absolute()


def send(folder: Path, timeout: float) -> None:
    """Upload the run in `folder` by `wandb sync`, which is ended after `timeout` seconds.

    Raises TimeoutError or ConnectionError if the server did not take all of it.
    """
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    env = {**os.environ, "WANDB_SILENT": "false"}
    with tempfile.TemporaryFile("w+") as output:  # a pipe would block beyond the timeout
        try:
            subprocess.run(
                command,
                timeout=timeout,
                env=env,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the server did not take the run within {timeout:g} s") from None
        output.seek(0)
        errors = re.findall(r"ERROR\s*(.*\S)", output.read())
    if not list(folder.glob("*.wandb.synced")):  # the exit code is 0 in any case
        reason = errors[0] if errors else "no reason given"
        raise ConnectionError(f"the server did not take the run ({reason})")


def _log(opened: wandb.Run, run: TrackedRun, folder: Path) -> None:
    iterations = folder / "iterations.parquet"
    if run.has_history and iterations.is_file():
        _log_iterations(opened, iterations)
    opened.summary.update(run.summary)
    if run.has_tables:
        _log_artifact(opened, folder, run.artifact or f"tables-{run.key}")
        # In the history their sizes would be curves.
        opened.summary.update(_displayed(folder))


def _log_iterations(opened: wandb.Run, path: Path) -> None:
    """Log at most 2,000 evenly spaced iterations with `iteration`, `time` [s] and `tokens` as x."""
    iterations = read_parquet(path).to_pylist()
    if not iterations or "iteration" not in iterations[0]:  # those of a server's log
        return
    curves = [name for name in iterations[0] if name != "iteration"]
    # Their last values must not replace the summary's.
    for axis in ("iteration", "time", "tokens"):
        opened.define_metric(axis, summary="none")
    for name in curves:
        step = STEP_OF.get(name, "iteration")
        opened.define_metric(f"{PREFIX}{name}", step_metric=step, summary="none")
    chosen = set(evenly_spaced(len(iterations), MAX_HISTORY_ROWS))
    tokens = 0
    for number, row in enumerate(iterations):
        tokens += row["num_prefill_tokens"] + row["num_decode_tokens"]
        if number not in chosen:
            continue
        axes = {"iteration": row["iteration"], "time": row["end"], "tokens": tokens}
        values = {}
        for name in curves:
            if row[name] is not None:
                values[f"{PREFIX}{name}"] = row[name]
        opened.log(axes | values)


def evenly_spaced(length: int, limit: int) -> list[int]:
    """Return at most `limit` rows of a table of `length` rows, with the first and the last."""
    if length <= limit:
        return list(range(length))
    return [number * (length - 1) // (limit - 1) for number in range(limit)]


def _log_artifact(opened: wandb.Run, folder: Path, name: str) -> None:
    """Log all tables of the folder as one artifact."""
    import wandb

    artifact = wandb.Artifact(name, type="tables")
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("*.csv")]):
        artifact.add_file(str(path), skip_cache=True)
    opened.log_artifact(artifact)


def _displayed(folder: Path) -> dict[str, object]:
    """Return the folder's CSV tables, requests and pictures as W&B displays them."""
    import pyarrow.csv
    import wandb

    # Empty cells are missing in columns of text, too.
    options = pyarrow.csv.ConvertOptions(strings_can_be_null=True, null_values=[""])
    shown: dict[str, object] = {}
    for path in sorted(folder.glob("*.csv")):
        table = pyarrow.csv.read_csv(path, convert_options=options)
        shown[path.stem] = _as_displayed(table)
    requests = folder / "requests.parquet"
    if requests.is_file():
        shown["requests"] = _as_displayed(read_parquet(requests))
    for path in sorted(folder.glob("*.png")):
        shown[f"picture/{path.stem}"] = wandb.Image(str(path))
    return shown


def _as_displayed(table: pyarrow.Table) -> wandb.Table:
    """Return a table without the columns that W&B cannot show."""
    import wandb

    columns = [name for name in table.column_names if name not in LISTS]
    rows = table.select(columns).to_pylist()
    data = [list(row.values()) for row in rows]
    return wandb.Table(columns=columns, data=data)


def read_parquet(path: Path) -> pyarrow.Table:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path).read()


def main() -> None:
    """Do what the input asks for."""
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    # Nothing else may be printed where the answers are.
    output = sys.stdout.fileno()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    answers = os.fdopen(os.dup(output), "w")
    os.dup2(nowhere, output)
    gc.set_threshold(100_000)  # importing makes much that stays
    with suppress(Exception):  # raised, and reported, again by the first run
        import wandb  # noqa: F401
    writer = Writer()
    for line in sys.stdin:
        folder = line.rstrip("\n")
        if folder:
            writer.write(Path(folder))
            continue
        writer.close()
        print(json.dumps(writer.warnings), file=answers, flush=True)
        writer.warnings.clear()
    writer.close()


if __name__ == "__main__":
    main()
