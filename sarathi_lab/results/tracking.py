"""Weights & Biases behind a small interface, and a null tracker with the same methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sarathi_lab.results.columns import MILLISECONDS, factor

if TYPE_CHECKING:
    import wandb
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from sarathi_lab.config.errors import UserError, require_number
from sarathi_lab.config.paths import make_folder
from sarathi_lab.results.wandb_guard import (
    AGENT_VARIABLES,
    Guard,
    SweepAgent,
    environment,
    read_agent,
    require_login,
    require_room,
    send,
)

MAX_HISTORY_ROWS = 2000
# What the columns of the history are drawn over: by default the iteration's number.
STEP_OF = {
    # the state of the server, which arrivals change, at a time [s]
    **dict.fromkeys(("num_running", "num_waiting", "num_blocks_used", "num_preemptions"), "time"),
    # efficiency at the same progress: policies reach the same number of tokens in different numbers
    # of iterations
    **dict.fromkeys(("mfu", "mbu", "time_over_roofline"), "tokens"),
}
UNSEEN = ["output_token_ids", "token_times"]  # lists, which no table shows


class WandbRun:
    """One open W&B run, as a `tracking.TrackedRun`."""

    def __init__(self, run: wandb.Run) -> None:
        self._run = run

    def log_iterations(self, iterations: pd.DataFrame) -> None:
        """Every iteration, or 2,000 evenly spaced ones of a longer run (the artifact has all)."""
        # Their last values would stand in the summary, some under the name of another quantity.
        for axis in ("iteration", "time", "tokens"):
            self._run.define_metric(axis, summary="none")
        for column in iterations.columns.drop("iteration"):
            step = STEP_OF.get(column, "iteration")
            self._run.define_metric(f"iterations/{column}", step_metric=step, summary="none")
        tokens = (iterations.num_prefill_tokens + iterations.num_decode_tokens).cumsum()
        chosen = np.unique(
            np.linspace(0, len(iterations) - 1, min(len(iterations), MAX_HISTORY_ROWS)).astype(int)
        )
        rows = iterations.iloc[chosen].to_dict("records")
        for row, num_tokens in zip(rows, tokens.iloc[chosen], strict=True):
            axes = {"iteration": row.pop("iteration"), "time": row["end"], "tokens": num_tokens}
            self._run.log(
                {**axes, **{f"iterations/{column}": value for column, value in row.items()}}
            )

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Write each name and number; times that people read in milliseconds also as
        `ms/<name>`.
        """
        shown = {
            f"ms/{name}": value * MILLISECONDS
            for name, value in summary.items()
            if factor(name) == MILLISECONDS
        }
        self._run.summary.update({**summary, **shown})

    def log_tables(self, directory: Path, artifact: str | None = None) -> None:
        """One artifact with all tables; pictures, CSV tables and the requests (without their lists)
        to look at, too.
        """
        import wandb

        self._run.log_artifact(_tables(directory, artifact or f"tables-{self._run.id}"))
        for path in sorted(directory.glob("*.csv")):
            self._run.log({path.stem: wandb.Table(dataframe=pd.read_csv(path))})
        if (requests := directory / "requests.parquet").is_file():
            self._run.log(
                {"requests": wandb.Table(dataframe=pd.read_parquet(requests).drop(columns=UNSEEN))}
            )
        for path in sorted(directory.glob("*.png")):
            self._run.log({path.stem: wandb.Image(str(path))})

    def use_tables(self, directory: Path, artifact: str) -> None:
        """Name the artifact as an input of this run."""
        # `use_artifact` refuses offline runs, as it would ask the server. The record that it writes
        # for an artifact not yet uploaded does as well there: equal contents under one name are one
        # version to the server.
        self._run._log_artifact(
            _tables(directory, artifact), is_user_created=True, use_after_commit=True
        )


def _tables(directory: Path, name: str) -> wandb.Artifact:
    import wandb

    artifact = wandb.Artifact(name, type="tables")
    for path in sorted(path for path in directory.iterdir() if path.suffix in (".parquet", ".csv")):
        artifact.add_file(str(path), skip_cache=True)
    return artifact


MODES = ("offline", "online")
MAX_TAG = 64  # characters
LOCAL_TIMEOUT = (
    60.0  # seconds for opening, writing or closing a run, which usually take a tenth of one
)


class TrackedRun(Protocol):
    """Takes the results of one run, after it was measured."""

    def log_iterations(self, iterations: pd.DataFrame) -> None:
        """The per-iteration history, with `iteration`, `time` (seconds) and `tokens` (computed so
        far) as x axes.
        """
        ...

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """The numbers of summary.json under the same names."""
        ...

    def log_tables(self, directory: Path, artifact: str | None = None) -> None:
        """All tables (parquet, CSV) in `directory` as one artifact, and its pictures (PNG).

        Artifacts of one name are versions of each other: name it by the work, or None for one of
        this run alone.
        """
        ...

    def use_tables(self, directory: Path, artifact: str) -> None:
        """Say that the run builds on the tables in `directory`, which another run logged under that
        name.
        """
        ...


class Tracker(Protocol):
    """Opens tracked runs; `conf/tracking/*.yaml` picks one."""

    def check(self) -> None:
        """Raise UserError if runs could not be opened."""
        ...

    def hint(self) -> str:
        """The command that shows the tracked runs, empty if there are none."""
        ...

    def run(
        self,
        *,
        name: str,
        group: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
    ) -> AbstractContextManager[TrackedRun]:
        """A run that is closed when the block ends: as failed if it raises, Ctrl-C included.

        `group` is the sweep, `job_type` the experiment; `config` has flat names that people filter
        by, and all settings below "settings".
        """
        ...


class NullTracker:
    """Tracks nothing; it is also its own run."""

    def check(self) -> None:
        """Nothing can go wrong."""

    def hint(self) -> str:
        """Nothing to show."""
        return ""

    @contextmanager
    def run(
        self,
        *,
        name: str,
        group: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
    ) -> Iterator[TrackedRun]:
        """A run that forgets everything."""
        yield self

    def log_iterations(self, iterations: pd.DataFrame) -> None:
        """Forget."""

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Forget."""

    def log_tables(self, directory: Path, artifact: str | None = None) -> None:
        """Forget."""

    def use_tables(self, directory: Path, artifact: str) -> None:
        """Forget."""


class GuardedRun:
    """A tracked run whose failures stay with its guard."""

    def __init__(self, run: TrackedRun, guard: Guard) -> None:
        self._run = run
        self._guard = guard

    def log_iterations(self, iterations: pd.DataFrame) -> None:
        """As the run does."""
        self._guard.call(lambda: self._run.log_iterations(iterations))

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """As the run does."""
        self._guard.call(lambda: self._run.log_summary(summary))

    def log_tables(self, directory: Path, artifact: str | None = None) -> None:
        """As the run does."""
        self._guard.call(lambda: self._run.log_tables(directory, artifact))

    def use_tables(self, directory: Path, artifact: str) -> None:
        """As the run does."""
        self._guard.call(lambda: self._run.use_tables(directory, artifact))


@dataclass(frozen=True)
class WandbTracker:
    """Writes W&B runs below `dir`/wandb. "offline" needs no account and sends nothing; `wandb sync`
    can later.

    Online runs are written the same way and sent when they have ended, so that no measurement
    shares its time with a network. `timeout` is how long (seconds) sending one may take. Whatever
    W&B fails at, or takes too long for, costs one line of warning.
    """

    project: str
    mode: str
    dir: str
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(
                f"tracking.mode={self.mode} is unknown; use {' or '.join(MODES)}, or tracking=none"
            )
        require_number(
            "tracking.timeout", self.timeout, above=0, fix="use a number of seconds such as 60"
        )

    def check(self) -> None:
        """Make the folder. Raises UserError if it can't be written, or for online runs without a
        login.

        Does not ask the server whether it takes the key.
        """
        make_folder(Path(self.dir), "tracking.dir")
        if self.mode == "online":
            with environment(self._variables()):
                require_login("tracking.mode=online", "or use tracking.mode=offline")

    def hint(self) -> str:
        """W&B's own viewer of local runs."""
        return shlex.join(["wandb", "leet", str(self._folder)])

    @contextmanager
    def run(
        self,
        *,
        name: str,
        group: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
    ) -> Iterator[TrackedRun]:
        """A W&B run with exit code 0, or 1 if the block raises; whatever W&B does, the block
        runs.
        """
        labels = {
            "name": name,
            "group": group,
            "job_type": job_type,
            "tags": shortened(tags),
            "config": dict(config),
        }
        agent = read_agent()
        if agent is not None and config.get("is_baseline"):
            agent = replace(agent, run_id=None)
        guard = Guard(
            ("write", self),
            LOCAL_TIMEOUT,
            "results are complete without it, and later runs are not tracked",
        )
        with environment(self._variables()):
            run = self._opened(guard, agent, labels)
            if run is None:
                yield NullTracker()
                return
            try:
                yield GuardedRun(WandbRun(run), guard)
            except BaseException as error:
                self._close(
                    run, guard, exit_code=1, sends=isinstance(error, Exception)
                )  # not after Ctrl-C
                raise
            self._close(run, guard, exit_code=0, sends=True)

    def _opened(
        self, guard: Guard, agent: SweepAgent | None, labels: Mapping[str, Any]
    ) -> wandb.Run | None:
        opened: list[wandb.Run] = []
        guard.call(lambda: opened.append(self._open(agent, labels)))
        return opened[0] if opened else None

    def _open(self, agent: SweepAgent | None, labels: Mapping[str, Any]) -> wandb.Run:
        import wandb  # takes half a second to import, which tracking=none need not wait for

        self._folder.mkdir(
            parents=True, exist_ok=True
        )  # else W&B would go to a temporary folder, where nobody looks
        own = agent.settings if agent else {}
        return wandb.init(
            **{**labels, "group": agent.sweep_id if agent else labels["group"]},
            project=(agent and agent.project) or self.project,
            mode="offline",
            dir=self.dir,
            reinit="create_new",
            # Our tables own the terminal, and measurements the machine: no captured output, no
            # sampling thread.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, **own),
        )

    def _close(self, run: wandb.Run, guard: Guard, *, exit_code: int, sends: bool) -> None:
        folder = Path(run.settings.sync_dir).absolute()
        guard.close(lambda: run.finish(exit_code=exit_code))
        guard.call(lambda: require_room(folder))
        if sends and self.mode == "online":
            kept = (
                "it and later runs stay here, and "
                f"{shlex.join(['wandb', 'sync', str(self._folder)])} sends them"
            )
            Guard(("send", self), self.timeout + 5, kept).call(lambda: send(folder, self.timeout))

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


def shortened(tags: Sequence[str]) -> list[str]:
    """The tags, each once and as long as W&B takes them."""
    return list(dict.fromkeys(tag[:MAX_TAG] for tag in tags if tag))
