"""What a W&B run is made of: history with its x axes, summary, tables, pictures, and artifacts with their lineage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sarathi_lab.headings import MILLISECONDS, factor

if TYPE_CHECKING:
    import wandb

MAX_HISTORY_ROWS = 2000
# What the columns of the history are drawn over: by default the iteration's number.
STEP_OF = {
    # the state of the server, which arrivals change, at a time [s]
    **dict.fromkeys(("num_running", "num_waiting", "num_blocks_used", "num_preemptions"), "time"),
    # efficiency at the same progress: policies reach the same number of tokens in different numbers of iterations
    **dict.fromkeys(("mfu", "mbu", "time_over_floor"), "tokens"),
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
        chosen = np.unique(np.linspace(0, len(iterations) - 1, min(len(iterations), MAX_HISTORY_ROWS)).astype(int))
        rows = iterations.iloc[chosen].to_dict("records")
        for row, num_tokens in zip(rows, tokens.iloc[chosen], strict=True):
            axes = {"iteration": row.pop("iteration"), "time": row["end"], "tokens": num_tokens}
            self._run.log({**axes, **{f"iterations/{column}": value for column, value in row.items()}})

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Write each name and number; times that people read in milliseconds also as `ms/<name>`."""
        shown = {f"ms/{name}": value * MILLISECONDS for name, value in summary.items() if factor(name) == MILLISECONDS}
        self._run.summary.update({**summary, **shown})

    def log_tables(self, directory: Path, artifact: str | None = None) -> None:
        """One artifact with all tables; pictures, CSV tables and the requests (without their lists) to look at, too."""
        import wandb

        self._run.log_artifact(_tables(directory, artifact or f"tables-{self._run.id}"))
        for path in sorted(directory.glob("*.csv")):
            self._run.log({path.stem: wandb.Table(dataframe=pd.read_csv(path))})
        if (requests := directory / "requests.parquet").is_file():
            self._run.log({"requests": wandb.Table(dataframe=pd.read_parquet(requests).drop(columns=UNSEEN))})
        for path in sorted(directory.glob("*.png")):
            self._run.log({path.stem: wandb.Image(str(path))})

    def use_tables(self, directory: Path, artifact: str) -> None:
        """Name the artifact as an input of this run."""
        # `use_artifact` refuses offline runs, as it would ask the server. The record that it writes for an artifact
        # not yet uploaded does as well there: equal contents under one name are one version to the server.
        self._run._log_artifact(_tables(directory, artifact), is_user_created=True, use_after_commit=True)


def _tables(directory: Path, name: str) -> wandb.Artifact:
    import wandb

    artifact = wandb.Artifact(name, type="tables")
    for path in sorted(path for path in directory.iterdir() if path.suffix in (".parquet", ".csv")):
        artifact.add_file(str(path), skip_cache=True)
    return artifact
