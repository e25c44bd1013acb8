"""Which host the pinned runs speak for: errors of their replays by how a host is taken.

`python experiments/lab/real_servers/host.py`, from the repository; half a minute.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from sarathi_lab.config.instantiate import build
from sarathi_lab.config.sweeper import compose
from sarathi_lab.executor.simulated.hardware import Host
from sarathi_lab.extensions.replay.comparison import replay_errors, validation_table

HERE = Path(__file__).parent
SERIAL = (0.0, 0.25e-3, 0.5e-3, 1e-3)  # seconds an iteration
HOSTS = [
    Host("ahead of the device", iteration=0.0, overlaps=True),
    *(Host(f"{1e3 * seconds:g} ms between iterations", iteration=seconds) for seconds in SERIAL),
]


def errors(folder: Path, host: Host) -> dict[str, float]:
    """Relative errors of the replay of the run in `folder` with `host`."""
    settings = ["task=validate", f"task.run={folder / 'run'}", f"hardware.tables={folder / 'tp1'}"]
    cfg = compose(settings).jobs[0].cfg
    (case,) = build(cfg.task).check(cfg)
    replay = replace(case.as_run, backend=replace(case.as_run.backend, host=host))
    load = replay.load()
    table = validation_table(load.real, load.simulated)
    median = table[(table["quantile"] == "p50") & (table.metric == "ttft")].error
    errors_of_means = {name: replay_errors(table)[name] for name in ("ttft", "tpot", "latency")}
    return {**errors_of_means, "ttft_p50": float(median.iloc[0])}


if __name__ == "__main__":
    folders = [path.parent for path in sorted(HERE.glob("*/run"))]
    rows = [
        {"run": folder.name, "host": host.name, **errors(folder, host)}
        for folder in folders
        for host in HOSTS
    ]
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:+.1%}".format))
