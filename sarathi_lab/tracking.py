"""Weights & Biases behind a small interface, and a null tracker with the same methods. The only file that knows W&B."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlparse

import numpy as np
import pandas as pd

from sarathi_lab.errors import UserError

if TYPE_CHECKING:
    import wandb

MODES = ("offline", "online")
MAX_HISTORY_ROWS = 2000
TABLES = ("iterations.parquet", "requests.parquet")


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


class Tracker(Protocol):
    """Opens tracked runs; `conf/tracking/*.yaml` picks one."""

    def check(self) -> None:
        """Raise UserError if runs could not be opened."""
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
        """Raise UserError for online runs without a login."""
        if self.mode == "online" and not _is_logged_in():
            raise UserError("tracking.mode=online, but nobody is logged in to W&B; run `wandb login`, or leave it out")

    @contextmanager
    def run(
        self, *, name: str, group: str, job_type: str, tags: Sequence[str], config: Mapping[str, Any]
    ) -> Iterator[TrackedRun]:
        """A W&B run with exit code 0, or 1 if the block raises."""
        import wandb  # takes a second to import, which tracking=none need not wait for

        folder = Path(self.dir)
        folder.mkdir(parents=True, exist_ok=True)
        # Where artifacts wait to be uploaded: beside the runs that need them for a later `wandb sync`.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder.absolute() / "wandb" / "data"))
        run = wandb.init(
            project=self.project,
            mode="online" if self.mode == "online" else "offline",
            dir=folder,
            name=name,
            group=group,
            job_type=job_type,
            tags=list(tags),
            config=dict(config),
            reinit="create_new",
            # Our tables own the terminal, and measurements the machine: no captured output, no sampling thread.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        try:
            yield _WandbRun(run)
        except BaseException:
            run.finish(exit_code=1)
            raise
        run.finish(exit_code=0)


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

        artifact = wandb.Artifact(f"tables-{self._run.id}", type="tables")
        for table in TABLES:
            artifact.add_file(str(directory / table), skip_cache=True)
        self._run.log_artifact(artifact)
        requests = pd.read_parquet(directory / "requests.parquet").drop(columns=["output_token_ids", "token_times"])
        self._run.log({"requests": wandb.Table(dataframe=requests)})


def _is_logged_in() -> bool:
    """Whether a key is at hand, without asking a server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
