"""Weights & Biases behind a small interface, and a null tracker with the same methods. The only file that knows W&B."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd

from sarathi_lab.errors import UserError
from sarathi_lab.paths import make_folder

if TYPE_CHECKING:
    import wandb

MODES = ("offline", "online")
MEND_LOGIN = "run `wandb login`, or use tracking.mode=offline"
MAX_HISTORY_ROWS = 2000


class TrackedRun(Protocol):
    """Takes the results of one run, after it was measured."""

    def log_iterations(self, iterations: pd.DataFrame) -> None:
        """The per-iteration history, with `iteration` as its x axis."""
        ...

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """The numbers of summary.json under the same names."""
        ...

    def log_tables(self, directory: Path) -> None:
        """The tables in `directory`, as one artifact."""
        ...

    def log_files(self, directory: Path) -> None:
        """All tables (parquet, CSV) in `directory` as one artifact, and its pictures (PNG)."""
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
        self, *, name: str, group: str, job_type: str, tags: Sequence[str], config: Mapping[str, Any]
    ) -> AbstractContextManager[TrackedRun]:
        """A run that is closed when the block ends: as failed if it raises, Ctrl-C included."""
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
        self, *, name: str, group: str, job_type: str, tags: Sequence[str], config: Mapping[str, Any]
    ) -> Iterator[TrackedRun]:
        """A run that forgets everything."""
        yield self

    def log_iterations(self, iterations: pd.DataFrame) -> None:
        """Forget."""

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Forget."""

    def log_tables(self, directory: Path) -> None:
        """Forget."""

    def log_files(self, directory: Path) -> None:
        """Forget."""


@dataclass(frozen=True)
class WandbTracker:
    """Writes W&B runs below `dir`/wandb. "offline" needs no account and sends nothing; `wandb sync` can later."""

    project: str
    mode: str
    dir: str

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"tracking.mode={self.mode} is unknown; use {' or '.join(MODES)}, or tracking=none")

    def check(self) -> None:
        """Make the folder. Raises UserError if it can't be written, or for online runs without a login.

        Does not ask the server whether it takes the key.
        """
        make_folder(Path(self.dir), "tracking.dir")
        if self.mode == "online":
            with _environment(self._variables()):
                _require_login()

    def hint(self) -> str:
        """W&B's own viewer of local runs."""
        return shlex.join(["wandb", "leet", str(Path(self.dir) / "wandb")])

    @contextmanager
    def run(
        self, *, name: str, group: str, job_type: str, tags: Sequence[str], config: Mapping[str, Any]
    ) -> Iterator[TrackedRun]:
        """A W&B run with exit code 0, or 1 if the block raises. UserError if an online one can't be opened."""
        with _environment(self._variables()):
            run = self._open(name=name, group=group, job_type=job_type, tags=list(tags), config=dict(config))
            try:
                yield _WandbRun(run)
            except BaseException:
                run.finish(exit_code=1)
                raise
            run.finish(exit_code=0)

    def _open(self, **labels: Any) -> wandb.Run:
        import wandb  # takes half a second to import, which tracking=none need not wait for

        try:
            return wandb.init(
                project=self.project,
                mode="online" if self.mode == "online" else "offline",
                dir=self.dir,
                reinit="create_new",
                # Our tables own the terminal, and measurements the machine: no captured output, no sampling thread.
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
                **labels,
            )
        except wandb.Error as error:
            if self.mode == "offline":
                raise
            reason = str(error).partition("\n")[0]
            raise UserError(f"tracking.mode=online, but W&B opened no run ({reason}); {MEND_LOGIN}") from None

    def _variables(self) -> dict[str, str]:
        """What W&B can be told by its environment only."""
        # Artifacts wait to be uploaded beside the runs that need them for a later `wandb sync`.
        data = os.environ.get("WANDB_DATA_DIR") or str(Path(self.dir).absolute() / "wandb" / "data")
        variables = {"WANDB_SILENT": "true", "WANDB_DATA_DIR": data}
        if self.mode == "offline":
            variables["WANDB_ERROR_REPORTING"] = "false"  # sends telemetry from offline runs too
        return variables


class _WandbRun:
    """One open W&B run."""

    def __init__(self, run: wandb.Run) -> None:
        self._run = run

    def log_iterations(self, iterations: pd.DataFrame) -> None:
        """Every iteration, or 2,000 evenly spaced ones of a longer run (the artifact has all)."""
        self._run.define_metric("iteration", summary="none")
        for column in iterations.columns.drop("iteration"):
            # Their last values would stand in the summary, some under the name of another quantity.
            self._run.define_metric(f"iterations/{column}", step_metric="iteration", summary="none")
        chosen = np.unique(np.linspace(0, len(iterations) - 1, min(len(iterations), MAX_HISTORY_ROWS)).astype(int))
        for row in iterations.iloc[chosen].to_dict("records"):
            number = row.pop("iteration")
            self._run.log({"iteration": number, **{f"iterations/{column}": value for column, value in row.items()}})

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Write each name and number."""
        self._run.summary.update(dict(summary))

    def log_tables(self, directory: Path) -> None:
        """One artifact with all tables, and the requests as a table to look at (without their lists of tokens)."""
        import wandb

        self._log_artifact(sorted(directory.glob("*.parquet")))
        requests = pd.read_parquet(directory / "requests.parquet").drop(columns=["output_token_ids", "token_times"])
        self._run.log({"requests": wandb.Table(dataframe=requests)})

    def log_files(self, directory: Path) -> None:
        """One artifact with all tables; each picture under its name."""
        import wandb

        self._log_artifact(sorted(path for path in directory.iterdir() if path.suffix in (".parquet", ".csv")))
        self._run.log({path.stem: wandb.Image(str(path)) for path in sorted(directory.glob("*.png"))})

    def _log_artifact(self, files: Sequence[Path]) -> None:
        import wandb

        artifact = wandb.Artifact(f"tables-{self._run.id}", type="tables")
        for path in files:
            artifact.add_file(str(path), skip_cache=True)
        self._run.log_artifact(artifact)


def _require_login() -> None:
    """Raise UserError unless W&B itself finds a well-formed key, or a token, for the server it is set to."""
    import wandb

    try:
        found = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise UserError(f"tracking.mode=online, but the login is unusable ({error}); {MEND_LOGIN}") from None
    if not found:
        raise UserError(f"tracking.mode=online, but nobody is logged in to W&B; {MEND_LOGIN}")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
