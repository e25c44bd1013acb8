"""How fast the lab itself is, a JSON file a release, and their picture: `make bench`.

Measures the host's time of an iteration, a simulation, the composition of a sweep and, with
`--tests`, the tests. Writes docs/benchmarks/VERSION.json and draws all files there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pandas as pd
import seaborn as sns

import sarathi_lab
from host_time import microseconds
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.results.plots.files import save_figure
from sarathi_lab.results.provenance import provenance
from sarathi_lab.run import main as run

FOLDER = REPOSITORY / "docs" / "benchmarks"
REPETITIONS = 3  # of which the fastest counts
NUM_JOBS = 96  # of the sweep that is composed
SIMULATED = [
    *("executor=simulated", "hardware=h100", "model=llama3.1-8b", "policy=vllm_v1"),
    *("workload=openchat_sharegpt4", "workload.rate=4", "workload.num_requests=256"),
    *("baselines=[]", "tracking=none"),
]
SWEPT = ["chunk=128,256,384,512", "batch=8,16,24,32", "pd_ratio=2,4,8,16,32,64"]
COMPOSED = [
    *SWEPT,
    *("executor=simulated", "hardware=h100", "model=7b", "baselines=[]", "--dry-run", "-m"),
]
MEANING = {
    "host_us_18": "host, 18 decodes [us an iteration]",
    "host_us_256": "host, 256 decodes [us an iteration]",
    "simulation_s": "simulation of 256 requests [s]",
    "composition_ms": "composition of a run of a sweep [ms]",
    "tests_s": "make test [s]",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="run the tests, too: minutes")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw what is there")
    options = parser.parse_args()
    if not options.draw:
        quantities = measured(with_tests=options.tests)
        path = write(quantities)
        print(f"{path}: {json.dumps(quantities)}")
    print(draw(FOLDER, FOLDER / "benchmarks.png"))


def measured(*, with_tests: bool) -> dict[str, float]:
    """Return the quantities of `MEANING`."""
    quantities = {}
    for batch_size, parts in microseconds().items():
        quantities[f"host_us_{batch_size}"] = round(sum(parts.values()), 1)
    output = REPOSITORY / "outputs" / "benchmark"
    simulation = fastest(lambda: run([*SIMULATED, f"output={output}"]))
    quantities["simulation_s"] = round(simulation, 2)
    composition = fastest(lambda: run(COMPOSED))
    quantities["composition_ms"] = round(1e3 * composition / NUM_JOBS, 1)
    if with_tests:
        start = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-n", "auto", "--maxprocesses", "8"]
        subprocess.run([*command, "--dist", "loadscope", "--no-loadscope-reorder"], check=True)
        quantities["tests_s"] = round(time.perf_counter() - start)
    return quantities


def fastest(command: Callable[[], int]) -> float:
    """Return the seconds of a command that prints nothing, of `REPETITIONS` the fewest."""
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        with contextlib.redirect_stdout(StringIO()):
            code = command()
        assert code == 0
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def write(quantities: dict[str, float]) -> Path:
    """Write the file of this release, with the machine and the commit that were measured."""
    about = {
        "version": sarathi_lab.__version__,
        "measured_at": datetime.now(UTC).date().isoformat(),
        "commit": str(provenance()["git_commit"]),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{sarathi_lab.__version__}.json"
    path.write_text(json.dumps({**about, "quantities": quantities}, indent=2) + "\n")
    return path


def draw(folder: Path, picture: Path) -> Path:
    """Draw the files of a folder, a panel a quantity, and return the picture."""
    rows = []
    for path in sorted(folder.glob("*.json"), key=release_of):
        record = json.loads(path.read_text())
        for name, value in record["quantities"].items():
            rows.append({"release": record["version"], "value": value, "panel": MEANING[name]})
    grid = sns.catplot(
        pd.DataFrame(rows),
        x="release",
        y="value",
        col="panel",
        col_wrap=3,
        kind="point",
        sharey=False,
        height=2.4,
        aspect=1.5,
    )
    grid.set_titles("{col_name}")
    grid.set(ylabel="", ylim=(0, None))
    save_figure(grid.figure, picture)
    return picture


def release_of(path: Path) -> list[int]:
    """Return the numbers of a file named by a release, by which releases are in order."""
    return [int(number) for number in path.stem.split(".")]


if __name__ == "__main__":
    main()
