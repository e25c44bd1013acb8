"""The part of the campaign that runs the tests which need a GPU, or sees that they are skipped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import REPOSITORY, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.tasks.gpu import streamed
from sarathi_lab.tasks.gpu.part import Part, Work

NONE_CHOSEN = 5  # pytest's code for having found no test to run
DRY_FILES = ("tests/kernels/test_kernels.py",)
MOST_WORKERS = 8  # each has a CUDA context of its own
MOST_ALONE = 3  # failed tests that are repeated, and named in the error
SECONDS_ALONE = 60.0  # for each
GRACE = 5.0  # seconds to end by itself
OPTIONS = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", streamed.__name__)


@dataclass(frozen=True)
class GpuTests(Part):
    """Leaves tests.csv, a row a test: its outcome, its seconds and, of one that failed, its outcome
    when repeated alone, which tells a fault of its own from one of what ran before it.

    Raises RunError if one failed, or if the time was over before all were done.
    """

    home = "gpu/gpu_tests"

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        folder = make_folder(context.run_dir, "the run's folder").absolute()
        chosen: list[str] = list(DRY_FILES) if work.is_dry else []
        if not work.is_dry and find_spec("xdist") is not None:  # most is Triton's compiler's time
            chosen += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]
        report, code = folder / "tests.jsonl", None
        try:
            code = run_tests(chosen, report, None if work.is_dry else self.seconds)
        finally:  # also where this process is told to end
            rows = read_rows(report)
            work.keep("tests", rows)
        failed = [row for row in rows if row["outcome"] == "failed"]
        for row in failed[:MOST_ALONE]:
            again = folder / "alone.jsonl"
            again.unlink(missing_ok=True)
            run_tests([str(row["test"])], again, SECONDS_ALONE)
            row["alone"] = next((one["outcome"] for one in read_rows(again)), "unfinished")
            work.keep("tests", rows)
        _judge(rows, failed, code, work)


def _judge(
    rows: Sequence[dict[str, object]],
    failed: Sequence[dict[str, object]],
    code: int | None,
    work: Work,
) -> None:
    """Say how the tests went; RunError if not all of them went well."""
    if failed:
        more = f" and {len(failed) - MOST_ALONE} more" if len(failed) > MOST_ALONE else ""
        names = ", ".join(f"{row['test']} (alone: {row['alone']})" for row in failed[:MOST_ALONE])
        raise RunError(f"{len(failed)} of {len(rows)} tests failed: {names}{more}")
    if code is None:
        raise RunError(
            f"the time was over after {len(rows)} tests, none of which failed; give more, such as "
            f"task.seconds={2 * work.seconds:g}"
        )
    if code not in (0, NONE_CHOSEN) or (code == NONE_CHOSEN and not work.is_dry):
        raise RunError(f"pytest ended with code {code} and no failed test; see its output")
    work.log(f"{len(rows)} tests, none failed")


def run_tests(chosen: Sequence[str], report: Path, seconds: float | None) -> int | None:
    """Run the tests `chosen` on pytest's command line, each kept in `report` once it has ended.

    Returns pytest's code, None if it was ended after `seconds`.
    """
    command = [sys.executable, *OPTIONS, *chosen]
    # It may itself be run by a worker of xdist's, as the tests are: its own tests are not.
    environment = {n: value for n, value in os.environ.items() if not n.startswith("PYTEST_XDIST")}
    environment[streamed.REPORT] = str(report)
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # on which it ends its workers, too
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            return None
        finally:
            process.kill()


def read_rows(report: Path) -> list[dict[str, object]]:
    """A row per test of a report, whose last line may be half written; [] if there is none.

    A test's phases are one row: failed if one of them was, unfinished if it has begun alone.
    """
    rows: dict[str, dict[str, Any]] = {}
    for line in report.read_text().splitlines() if report.is_file() else ():
        try:
            phase = json.loads(line)
        except ValueError:
            continue
        name, outcome = phase["test"], phase["outcome"]
        new = {"test": name, "outcome": "unfinished", "value": 0.0, "unit": "s", "alone": ""}
        row = rows.setdefault(name, new)
        row["value"] += phase["seconds"]
        if (phase["phase"] == "call" or outcome != "passed") and row["outcome"] != "failed":
            row["outcome"] = outcome
    return [*rows.values()]
