"""A sweep's own table and picture, tracked beside its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from sarathi_lab.plan import build
from sarathi_lab.tracking import Tracker


def track_sweep(cfg: DictConfig, folder: Path, swept: Sequence[str]) -> None:
    """Log `sweep.csv` and `sweep.png` in `folder` as a run of the sweep's group; `cfg` is one of its jobs'."""
    if not (folder / "sweep.csv").is_file():
        return
    tracker: Tracker = build(cfg.tracking)
    varied = ", ".join(swept)
    config = {"task": "sweep", "swept": list(swept)}
    group = "/".join(folder.absolute().parts[-2:])
    with tracker.run(
        name=f"sweep of {varied}", group=group, job_type="sweep", tags=["sweep"], config=config
    ) as tracked:
        tracked.log_tables(folder)
