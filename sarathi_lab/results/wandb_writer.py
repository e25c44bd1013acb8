"""The process that writes W&B runs beside the one that simulates or measures them.

`tracking` starts this file. Its input names folders, a line each, in which runs were left to be
written; an empty line asks for the end of all that was named so far and is answered by a line of
JSON, the list of warnings. It ends with its input. Nothing of the lab is imported here, so that it
is ready before the first run has ended.
"""

from __future__ import annotations

import csv
import gc
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    import wandb

PENDING = "wandb.json"  # in the folder of a run until it is written
WANDB = ("python", "-m", "wandb")  # the command alone may not be on the path
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
class PendingRun:
    """A run as its folder holds it, in `PENDING`, until it is written."""

    run_id: str
    name: str
    group: str
    job_type: str
    notes: str | None
    tags: Sequence[str]
    config: dict[str, object]
    summary: dict[str, float]
    has_failed: bool
    has_history: bool  # iterations.parquet, if it is there, becomes the history
    has_tables: bool  # tables of the folder become an artifact, and with pictures are displayed
    artifact: str
    baselines: Sequence[str]  # folders of runs to be written before, relative to this one's
    # The tracker's
    project: str
    mode: str
    folder: str  # in which W&B makes its folder
    data: str  # where artifacts wait beside their runs for `wandb sync`
    timeout: float

    @property
    def wandb_dir(self) -> Path:
        return Path(self.folder) / "wandb"


@dataclass
class Writer:
    """Writes runs, and gives up what failed once."""

    warnings: list[str] = field(default_factory=list)  # since they were last reported
    _named: set[Path] = field(default_factory=set)
    _written: list[tuple[Path, PendingRun, Path]] = field(default_factory=list)  # not yet closed
    _gave_up: set[str] = field(default_factory=set)

    def write(self, folder: Path) -> None:
        """Write the run that was left in `folder`, if any, its baselines' first."""
        folder = folder.resolve()
        pending = folder / PENDING
        # Runs of a sweep share their baselines.
        if folder in self._named or not pending.is_file():
            return
        self._named.add(folder)
        run = self._try(LOST, read_pending, pending)
        if run is None:
            return
        for baseline in run.baselines:
            self.write(folder / baseline)
        written = self._try(LOST, write_run, run, folder)
        if written is None:
            return
        self._written.append((pending, run, written))
        if run.mode == "online":  # each is sent when it has ended
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
        for pending, run, written in closed:
            pending.unlink(missing_ok=True)
            if run.mode == "online":
                sync = shlex.join([*WANDB, "sync", str(run.wandb_dir)])
                consequence = f"it and later runs stay here, and {sync} sends them"
                self._try(consequence, send, written, run.timeout)

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
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self.warnings.append(f"{reason}; {consequence}")
            return None


def read_pending(path: Path) -> PendingRun:
    """Return the run that was left in a file. Raises what one of another version does."""
    return PendingRun(**json.loads(path.read_text()))


def write_run(run: PendingRun, folder: Path) -> Path:
    """Write a run offline with what `folder` holds; returns W&B's folder. Raises what W&B does."""
    import wandb

    run.wandb_dir.mkdir(parents=True, exist_ok=True)  # else W&B uses a temporary folder
    os.environ["WANDB_DATA_DIR"] = run.data  # no setting of `wandb.Settings`
    for earlier in run.wandb_dir.glob(f"offline-run-*-{run.run_id}"):
        shutil.rmtree(earlier, ignore_errors=True)  # of a command that was stopped, and resumed
    opened = wandb.init(
        id=run.run_id,
        name=run.name,
        group=run.group,
        job_type=run.job_type,
        notes=run.notes,
        tags=list(run.tags),
        config=run.config,
        project=run.project,
        mode="offline",
        dir=run.folder,
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


def _log(opened: wandb.Run, run: PendingRun, folder: Path) -> None:
    iterations = folder / "iterations.parquet"
    if run.has_history and iterations.is_file():
        _log_iterations(opened, iterations)
    opened.summary.update(run.summary)
    if run.has_tables:
        _log_artifact(opened, folder, run.artifact)
        # In the history their sizes would be curves.
        opened.summary.update(_displayed(folder))


def _log_iterations(opened: wandb.Run, path: Path) -> None:
    """Log at most 2,000 evenly spaced iterations with `iteration`, `time` [s] and `tokens` as x."""
    iterations = read_rows(path)
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
    import wandb

    shown: dict[str, object] = {}
    for path in sorted(folder.glob("*.csv")):
        shown[path.stem] = read_table(path)
    requests = folder / "requests.parquet"
    if requests.is_file():
        rows = read_rows(requests, without=LISTS)
        columns = list(rows[0]) if rows else []
        data = [list(row.values()) for row in rows]
        shown["requests"] = wandb.Table(columns=columns, data=data)
    for path in sorted(folder.glob("*.png")):
        shown[f"picture/{path.stem}"] = wandb.Image(str(path))
    return shown


def read_rows(path: Path, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a parquet file; None where a value is missing."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    names = [name for name in file.schema_arrow.names if name not in without]
    rows: list[dict[str, Any]] = file.read(columns=names).to_pylist()
    return rows


def read_table(path: Path) -> wandb.Table:
    """Return a CSV file as W&B's table."""
    import wandb

    with path.open(newline="") as file:
        headings, *rows = csv.reader(file)
    columns = [_typed(column) for column in zip(*rows, strict=True)]
    data = [list(row) for row in zip(*columns, strict=True)]
    return wandb.Table(columns=headings, data=data)


def _typed(column: Sequence[str]) -> Sequence[object]:
    """Return a column as numbers or booleans if all that it holds are such; "" is None."""
    present = [text for text in column if text]
    if all(text in ("True", "False") for text in present):
        return [text == "True" if text else None for text in column]
    with suppress(ValueError):
        return [_number(text) if text else None for text in column]
    return [text or None for text in column]


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def main() -> None:
    """Do what the input asks for."""
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    # Nothing else may be printed where the answers are.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
