"""Weights & Biases behind a small interface, and the null tracker.

A run is written offline in one go when it has ended, so that no measurement shares its time with
W&B, and uploaded afterwards by `wandb sync` in another process.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from sarathi_lab.config.checked import check_fields, number, text
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import make_folder
from sarathi_lab.results.load import merge_settings, new_name
from sarathi_lab.results.table import MILLISECONDS, factor

if TYPE_CHECKING:
    import wandb

MAX_TAG = 64  # characters
WANDB = ("python", "-m", "wandb")  # the command alone may not be on the path
MAX_HISTORY_ROWS = 2000
LOCAL_TIMEOUT = 60.0  # seconds for opening a run, which usually takes 0.1
# x axes of the history's columns; by default the iteration's number.
STEP_OF = {
    # state of the server, which arrivals change, by time [s]
    **dict.fromkeys(("num_running", "num_waiting", "num_blocks_used", "num_preemptions"), "time"),
    # efficiency by progress: policies compute the same tokens in different numbers of iterations
    **dict.fromkeys(("mfu", "mbu", "time_over_roofline"), "tokens"),
}
PREFIX = "iterations/"  # of the history's columns
LISTS = ["output_token_ids", "token_times"]  # columns that W&B's tables cannot show
T = TypeVar("T")
_gave_up: set[Hashable] = set()  # failed once, so not tried again in this process


@dataclass(frozen=True)
class TrackedRun:
    """A run that has ended, as it is tracked.

    `group` is the sweep, `job_type` the experiment; `config` has flat names to filter by ("command"
    becomes the notes) and all settings under "settings". `iterations` is the history. Tables of
    `folder` (parquet, CSV) become one artifact, pictures (PNG) are displayed. Artifacts of one name
    are versions of each other; None: one of this run alone.
    """

    name: str
    group: str
    job_type: str
    tags: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    iterations: pd.DataFrame | None = None
    summary: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None
    artifact: str | None = None
    has_failed: bool = False


class Tracker:
    """Null tracker, and the interface of the others (`conf/tracking/*.yaml`)."""

    def check(self) -> None:
        """Raise UserError if runs cannot be tracked."""

    def hint(self) -> str:
        """Return the command that shows the tracked runs, "" if there are none."""
        return ""

    def track(self, run: TrackedRun) -> None:
        """Keep `run`. Never raises for the tracker's failures."""


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

    def __post_init__(self) -> None:
        check_fields(self, "tracking.")
        if self.mode not in ("offline", "online"):
            fix = "use offline or online, or tracking=none"
            raise UserError(f"tracking.mode={self.mode} is unknown; {fix}")

    def check(self) -> None:
        """Raise UserError if `dir` cannot be written, or online without a login."""
        make_folder(Path(self.dir), "tracking.dir")
        if self.mode == "online":
            with environment(self._variables()):
                require_login("tracking.mode=online", "or use tracking.mode=offline")

    def hint(self) -> str:
        return shlex.join([*WANDB, "leet", str(self._folder)])

    def track(self, run: TrackedRun) -> None:
        lost = "results are complete without it, and later runs are not tracked"
        folder = self._try(lost, self._write, run)
        if folder is not None and self.mode == "online":
            sync = shlex.join([*WANDB, "sync", str(self._folder)])
            kept = f"it and later runs stay here, and {sync} sends them"
            self._try(kept, send, folder, self.timeout)

    def _try(self, consequence: str, work: Callable[..., T], *args: Any) -> T | None:
        """Do `work`; print a warning if it raises, and do not try again."""
        if (self, consequence) in _gave_up:
            return None
        try:
            return work(*args)
        except (Exception, SystemExit) as error:  # a measurement must not end for it
            _gave_up.add((self, consequence))
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            print(f"warning: W&B: {reason}; {consequence}", file=sys.stderr)
            return None

    def _write(self, run: TrackedRun) -> Path:
        """Write the run offline; returns its folder. Raises what W&B does."""
        self._folder.mkdir(parents=True, exist_ok=True)  # else W&B uses a temporary folder
        with environment(self._variables()):
            import wandb  # takes half a second

            opened = wandb.init(
                name=run.name,
                group=run.group,
                job_type=run.job_type,
                notes=run.config.get("command"),
                tags=list(dict.fromkeys(tag[:MAX_TAG] for tag in run.tags if tag)),
                config=dict(run.config),
                project=self.project,
                mode="offline",
                dir=self.dir,
                reinit="create_new",
                settings=wandb.Settings(
                    # No captured output, no sampling thread; versions are in the configuration.
                    console="off",
                    silent=True,
                    x_disable_stats=True,
                    x_save_requirements=False,
                    disable_git=True,
                    disable_code=True,
                    init_timeout=LOCAL_TIMEOUT,
                ),
            )
            try:
                _log(opened, run)
            finally:
                opened.finish(exit_code=int(run.has_failed))
        return Path(opened.settings.sync_dir).absolute()

    @property
    def _folder(self) -> Path:
        return Path(self.dir) / "wandb"

    def _variables(self) -> dict[str, str]:
        """Return W&B's settings that only its environment has."""
        # Artifacts wait beside their runs for `wandb sync`.
        data = os.environ.get("WANDB_DATA_DIR") or str(self._folder.absolute() / "data")
        return {
            "WANDB_SILENT": "true",
            "WANDB_DATA_DIR": data,
            "WANDB_ERROR_REPORTING": "false",  # would send telemetry from offline runs, too
        }


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


def send(folder: Path, timeout: float) -> None:
    """Upload the run in `folder` by `wandb sync`, which is ended after `timeout` seconds.

    Raises TimeoutError or ConnectionError if the server did not take all of it.
    """
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    env = {**os.environ, "WANDB_SILENT": "false"}
    with tempfile.TemporaryFile("w+") as output:  # a pipe would block beyond the timeout
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        try:
            subprocess.run(command, timeout=timeout, env=env, check=False, **streams)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the server did not take the run within {timeout:g} s") from None
        output.seek(0)
        errors = re.findall(r"ERROR\s*(.*\S)", output.read())
    if not list(folder.glob("*.wandb.synced")):  # the exit code is 0 in any case
        reason = errors[0] if errors else "no reason given"
        raise ConnectionError(f"the server did not take the run ({reason})")


def require_login(what: str, mend: str) -> None:
    """Raise UserError that names `what` without W&B or a well-formed key for its server."""
    fix = f"run `{shlex.join(WANDB)} login`, {mend}"
    try:
        import wandb

        is_known = wandb.login(prompt=False, verify=False)
    except ModuleNotFoundError:
        raise UserError(f"{what}, but wandb is not installed; pip install wandb, {mend}") from None
    except wandb.Error as error:
        raise UserError(f"{what}, but the login is unusable ({error}); {fix}") from None
    if not is_known:
        raise UserError(f"{what}, but no user is logged in to W&B; {fix}")


def fetch_runs(project: str) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Return settings and summary of each run that served on W&B's server; UserError if none."""
    import wandb

    try:
        runs = [run for run in wandb.Api().runs(project) if "throughput" in run.summary]
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: of a project not there
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"W&B gives no runs of {project} ({reason}); check the name (it is no folder either) "
            f"and `{shlex.join(WANDB)} login`"
        ) from None
    if not runs:
        raise UserError(f"{project} holds no run that served requests; name another")
    found = []
    for run in runs:
        labels = {key: value for key, value in run.config.items() if not key.startswith("_")}
        config = labels.pop("settings", {})
        summary = {
            new_name(key): float(value)
            for key, value in run.summary.items()
            if isinstance(value, int | float) and not key.startswith("_")
        }
        found.append((merge_settings({"name": run.name, **labels}, config), summary))
    return found


def _log(opened: wandb.Run, run: TrackedRun) -> None:
    if run.iterations is not None and "iteration" in run.iterations:  # not those of a server's log
        _log_iterations(opened, run.iterations)
    # Times displayed in milliseconds are there as ms/NAME, too.
    times = [name for name in run.summary if factor(name) == MILLISECONDS]
    shown = {f"ms/{name}": run.summary[name] * MILLISECONDS for name in times}
    opened.summary.update({**run.summary, **shown})
    if run.folder is not None:
        _log_folder(opened, run.folder, run.artifact or f"tables-{opened.id}")


def _log_iterations(opened: wandb.Run, iterations: pd.DataFrame) -> None:
    """Log at most 2,000 evenly spaced iterations with `iteration`, `time` [s] and `tokens` as x."""
    tokens = (iterations.num_prefill_tokens + iterations.num_decode_tokens).cumsum()
    axes = iterations[["iteration"]].assign(time=iterations.end, tokens=tokens)
    curves = iterations.drop(columns="iteration")
    # Their last values must not replace the summary's.
    for axis in axes:
        opened.define_metric(axis, summary="none")
    for column in map(str, curves):
        step = STEP_OF.get(column, "iteration")
        opened.define_metric(f"{PREFIX}{column}", step_metric=step, summary="none")
    num_rows = min(len(iterations), MAX_HISTORY_ROWS)
    chosen = np.linspace(0, len(iterations) - 1, num_rows, dtype=int)
    for row in axes.join(curves.add_prefix(PREFIX)).iloc[chosen].to_dict("records"):
        opened.log(row)


def _log_folder(opened: wandb.Run, folder: Path, name: str) -> None:
    """Log all tables as one artifact; display pictures, CSV tables and requests, too."""
    import wandb

    artifact = wandb.Artifact(name, type="tables")
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("*.csv")]):
        artifact.add_file(str(path), skip_cache=True)
    opened.log_artifact(artifact)
    tables = {path.stem: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    if (requests := folder / "requests.parquet").is_file():
        tables["requests"] = pd.read_parquet(requests).drop(columns=LISTS, errors="ignore")
    shown: dict[str, Any] = {name: wandb.Table(dataframe=table) for name, table in tables.items()}
    for path in sorted(folder.glob("*.png")):
        shown[f"picture/{path.stem}"] = wandb.Image(str(path))
    opened.summary.update(shown)  # in the history their sizes would be curves
