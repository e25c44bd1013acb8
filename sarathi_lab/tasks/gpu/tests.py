"""The tests that need a GPU, run by pytest; without one, that they are found and skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

from omegaconf import DictConfig

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import REPOSITORY, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.tasks.gpu.part import Part, Work

NONE_CHOSEN = 5  # pytest's code for having found no test to run
DRY_FILES = ("tests/kernels/test_kernels.py",)
MOST_WORKERS = 8  # each has a CUDA context of its own
SHOWN = 5  # names of failed tests in the error
OPTIONS = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class GpuTests(Part):
    """Leaves tests.csv, a row a test: its outcome and seconds. Raises RunError if one failed."""

    home: ClassVar[str] = "gpu/gpu_tests"

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        """Run pytest in a process of its own."""
        make_folder(context.run_dir, "the run's folder")
        report = context.run_dir.absolute() / "tests.xml"
        command = [sys.executable, *OPTIONS, f"--junitxml={report}"]
        command += DRY_FILES if work.is_dry else _workers()
        code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
        rows = read_report(report) if report.is_file() else []
        work.keep("tests", rows)
        failed = [str(row["test"]) for row in rows if row["outcome"] == "failed"]
        if failed:
            more = f" and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
            names = ", ".join(failed[:SHOWN])
            raise RunError(f"{len(failed)} of {len(rows)} tests failed: {names}{more}")
        if code not in (0, NONE_CHOSEN) or (code == NONE_CHOSEN and not work.is_dry):
            raise RunError(f"pytest ended with code {code} and no failed test; see its output")
        work.log(f"{len(rows)} tests, none failed")


def _workers() -> list[str]:
    """Options that share the tests out, where pytest-xdist is there: most of their time is Triton's
    compiler's.
    """
    if find_spec("xdist") is None:
        return []
    return ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]


def read_report(path: Path) -> list[dict[str, object]]:
    """One row per test of a junit report; "skipped" and "failed" (errors included) are as pytest
    means them.
    """
    rows: list[dict[str, object]] = []
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds else outcome
        name = f"{case.get('classname')}::{case.get('name')}"
        seconds = float(case.get("time") or 0)
        rows.append({"test": name, "outcome": outcome, "value": seconds, "unit": "s"})
    return rows
