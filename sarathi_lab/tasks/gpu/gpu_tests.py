"""The tests that need a GPU, run by pytest; without one, that they are found and skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.tasks.gpu.context import Context

NONE_CHOSEN = 5  # pytest's code for having found no test to run
DRY_FILES = ("tests/kernels/test_kernels.py",)
MOST_WORKERS = 8  # each has a CUDA context of its own
SHOWN = 5  # names of failed tests in the error


class TestsFailed(Exception):
    """Some tests did not pass."""


def run(context: Context) -> None:
    """Write tests.csv, one row a test: its outcome and seconds. Raises TestsFailed if one
    failed.
    """
    report = context.work / "tests.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    command += DRY_FILES if context.is_dry else _workers()
    code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
    rows = read_report(report) if report.is_file() else []
    context.write("gpu_tests", "tests", rows)
    failed = [str(row["test"]) for row in rows if row["outcome"] == "failed"]
    if failed:
        more = f" and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
        raise TestsFailed(
            f"{len(failed)} of {len(rows)} tests failed: {', '.join(failed[:SHOWN])}{more}"
        )
    if code not in (0, NONE_CHOSEN) or (code == NONE_CHOSEN and not context.is_dry):
        raise TestsFailed(f"pytest ended with code {code} and no failed test")
    context.say(f"{len(rows)} tests, none failed")


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
        outcome = (
            "failed"
            if kinds & {"failure", "error"}
            else "skipped"
            if "skipped" in kinds
            else "passed"
        )
        name = f"{case.get('classname')}::{case.get('name')}"
        rows.append(
            {"test": name, "outcome": outcome, "value": float(case.get("time") or 0), "unit": "s"}
        )
    return rows
