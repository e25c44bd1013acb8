"""Weights & Biases behind a small interface, and the null tracker.

A run is written offline in one go when it has ended, so that no measurement shares its time with
W&B, and sent afterwards by `wandb sync`, a process of its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from sarathi_lab.config.checked import check_fields, number, text
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import make_folder
from sarathi_lab.results.table import MILLISECONDS, factor
from sarathi_lab.results.wandb_process import AGENT_VARIABLES, environment, of_agent, send

if TYPE_CHECKING:
    import wandb

MAX_TAG = 64  # characters
MAX_HISTORY_ROWS = 2000
LOCAL_TIMEOUT = 60.0  # seconds for opening a run, which usually takes a tenth of one
LEAST_ROOM = 1 << 20  # bytes; W&B's process says nothing of a full disk, and its record ends early
# What the columns of the history are drawn over: by default the iteration's number.
STEP_OF = {
    # the state of the server, which arrivals change, at a time [s]
    **dict.fromkeys(("num_running", "num_waiting", "num_blocks_used", "num_preemptions"), "time"),
    # efficiency at the same progress: policies reach the same number of tokens in different numbers
    # of iterations
    **dict.fromkeys(("mfu", "mbu", "time_over_roofline"), "tokens"),
}
UNSEEN = ["output_token_ids", "token_times"]  # lists, which no table shows
T = TypeVar("T")
_gave_up: set[Hashable] = set()  # what has failed once is not tried again in this process


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of one run, when it has ended.

    `group` is the sweep, `job_type` the experiment; `config` has flat names that people filter by
    (its "command" is shown as the run's notes), and all settings below "settings". `iterations` is
    the history, `summary` that of summary.json; the tables (parquet, CSV) in `folder` become one
    artifact, its pictures (PNG) are shown. Artifacts of one name are versions of each other; None:
    one of this run alone.
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
    """Takes runs that have ended and keeps nothing of them; `conf/tracking/*.yaml` picks one."""

    def check(self) -> None:
        """Raise UserError if runs could not be taken."""

    def hint(self) -> str:
        """The command that shows the tracked runs, empty if there are none."""
        return ""

    def track(self, run: TrackedRun) -> None:
        """Keep `run`. Never raises for a tracker's own trouble."""


@dataclass(frozen=True)
class WandbTracker(Tracker):
    """Writes W&B runs below `dir`/wandb. "offline" needs no account and sends nothing; `wandb sync`
    can later.

    Online runs are written the same way and then sent. `timeout` is how long (seconds) sending one
    may take. Whatever W&B fails at, or its server takes too long for, costs one line of warning;
    only a process of W&B's on this machine that stops answering is waited for.
    """

    mode: str
    project: str = text(fix="use a project's name such as sarathi-lab")
    dir: str = text(fix="use a folder such as outputs")
    timeout: float = number(60.0, above=0, fix="use a number of seconds such as 60")

    def __post_init__(self) -> None:
        check_fields(self, "tracking.")
        if self.mode not in ("offline", "online"):
            raise UserError(
                f"tracking.mode={self.mode} is unknown; use offline or online, or tracking=none"
            )

    def check(self) -> None:
        """Refuses online runs without a login, too; the server is not asked whether it takes it."""
        make_folder(Path(self.dir), "tracking.dir")
        if self.mode == "online":
            with environment(self._variables()):
                require_login("tracking.mode=online", "or use tracking.mode=offline")

    def hint(self) -> str:
        return shlex.join(["wandb", "leet", str(self._folder)])

    def track(self, run: TrackedRun) -> None:
        """Write the run, and send it if online. W&B's trouble costs a warning, once a process."""
        lost = "results are complete without it, and later runs are not tracked"
        folder = self._tried(lost, self._write, run)
        if folder is not None and self.mode == "online":
            sync = shlex.join(["wandb", "sync", str(self._folder)])
            kept = f"it and later runs stay here, and {sync} sends them"
            self._tried(kept, send, folder, self.timeout)

    def _tried(self, consequence: str, work: Callable[..., T], *args: Any) -> T | None:
        """What `work` returns. What it raises is one line of warning, and it is not tried again."""
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
        """Returns the folder of the W&B run. Raises what W&B does."""
        # Else W&B would go to a temporary folder, where nobody looks.
        self._folder.mkdir(parents=True, exist_ok=True)
        agent = of_agent(is_baseline=bool(run.config.get("is_baseline")))
        with environment(self._variables()):
            import wandb  # takes half a second, which tracking=none need not wait for

            opened = wandb.init(
                name=run.name,
                group=agent.pop("group", run.group),
                job_type=run.job_type,
                notes=run.config.get("command"),
                tags=list(dict.fromkeys(tag[:MAX_TAG] for tag in run.tags if tag)),
                config=dict(run.config),
                project=agent.pop("project", None) or self.project,
                mode="offline",
                dir=self.dir,
                reinit="create_new",
                # Our tables own the terminal, and measurements the machine: no captured output, no
                # sampling thread; commit and versions are in the configuration.
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    x_disable_stats=True,
                    x_save_requirements=False,
                    disable_git=True,
                    disable_code=True,
                    init_timeout=LOCAL_TIMEOUT,
                    **agent,
                ),
            )
            try:
                _log(opened, run)
            finally:
                opened.finish(exit_code=int(run.has_failed))
        folder = Path(opened.settings.sync_dir).absolute()
        if shutil.disk_usage(folder).free < LEAST_ROOM:
            raise OSError(f"no space left for {folder}, whose record may be incomplete")
        return folder

    @property
    def _folder(self) -> Path:
        return Path(self.dir) / "wandb"

    def _variables(self) -> dict[str, str | None]:
        """What W&B can be told by its environment only; None: nothing."""
        # Artifacts wait to be uploaded beside the runs that need them for a later `wandb sync`.
        data = os.environ.get("WANDB_DATA_DIR") or str(self._folder.absolute() / "data")
        return {
            "WANDB_SILENT": "true",
            "WANDB_DATA_DIR": data,
            "WANDB_ERROR_REPORTING": "false",  # would send telemetry from offline runs, too
            **dict.fromkeys(AGENT_VARIABLES),  # W&B would give the agent's id to baselines, too
        }


def require_login(what: str, mend: str) -> None:
    """Raise UserError, saying `what` needs it, without W&B or a well-formed key for its server."""
    try:
        import wandb
    except ModuleNotFoundError:
        raise UserError(f"{what}, but wandb is not installed; pip install wandb, {mend}") from None

    fix = f"run `wandb login`, {mend}"
    try:
        found = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise UserError(f"{what}, but the login is unusable ({error}); {fix}") from None
    if not found:
        raise UserError(f"{what}, but nobody is logged in to W&B; {fix}")


def fetch_runs(where: str) -> list[Any]:
    """The server's runs of "entity/project", or the one of "entity/project/run".

    UserError if it does not give them.
    """
    import wandb

    try:
        api = wandb.Api()
        return [api.run(where)] if where.count("/") == 2 else list(api.runs(where))
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: of a project not there
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"W&B gives no runs of {where} ({reason}); check the path and `wandb login`"
        ) from None


# -- in terms of W&B -------------------------------------------------------------------------------


def _log(opened: wandb.Run, run: TrackedRun) -> None:
    if run.iterations is not None:
        _log_iterations(opened, run.iterations)
    # Times that people read in milliseconds stand there also as ms/NAME.
    shown = {
        f"ms/{name}": value * MILLISECONDS
        for name, value in run.summary.items()
        if factor(name) == MILLISECONDS
    }
    opened.summary.update({**run.summary, **shown})
    if run.folder is not None:
        _log_folder(opened, run.folder, run.artifact or f"tables-{opened.id}")


def _log_iterations(opened: wandb.Run, iterations: pd.DataFrame) -> None:
    """Every iteration, or 2,000 evenly spaced ones of a longer run (the artifact has all), with
    `iteration`, `time` (seconds) and `tokens` (computed so far) as x axes.
    """
    tokens = (iterations.num_prefill_tokens + iterations.num_decode_tokens).cumsum()
    axes = iterations[["iteration"]].assign(time=iterations.end, tokens=tokens)
    curves = iterations.drop(columns="iteration")
    # Their last values would stand in the summary, some under the name of another quantity.
    for axis in axes:
        opened.define_metric(axis, summary="none")
    for column in map(str, curves):
        step = STEP_OF.get(column, "iteration")
        opened.define_metric(f"iterations/{column}", step_metric=step, summary="none")
    num_rows = min(len(iterations), MAX_HISTORY_ROWS)
    chosen = np.linspace(0, len(iterations) - 1, num_rows, dtype=int)
    for row in axes.join(curves.add_prefix("iterations/")).iloc[chosen].to_dict("records"):
        opened.log(row)


def _log_folder(opened: wandb.Run, folder: Path, name: str) -> None:
    """All tables as one artifact; pictures, CSV tables and requests also to look at."""
    import wandb

    artifact = wandb.Artifact(name, type="tables")
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("*.csv")]):
        artifact.add_file(str(path), skip_cache=True)
    opened.log_artifact(artifact)
    tables = {path.stem: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    if (requests := folder / "requests.parquet").is_file():
        tables["requests"] = pd.read_parquet(requests).drop(columns=UNSEEN)
    shown: dict[str, Any] = {name: wandb.Table(dataframe=table) for name, table in tables.items()}
    # Under names of their own: a sweep's table and its picture are both called sweep.
    for path in sorted(folder.glob("*.png")):
        shown[f"picture/{path.stem}"] = wandb.Image(str(path))
    opened.summary.update(shown)  # in the history their sizes would be curves
