"""A plugin of pytest, `-p sarathi_lab.tasks.gpu.streamed`: appends a line for each phase of a test
to a file once it has ended, so that these are left when the tests are cut short.
"""

from __future__ import annotations

import json
import os
from typing import Any

REPORT = "SARATHI_LAB_TEST_REPORT"  # names the file


def pytest_runtest_logreport(report: Any) -> None:
    """Called for set-up, call and tear-down; a worker of xdist's hands them to its controller."""
    path = os.environ.get(REPORT)
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    row = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome}
    with open(path, "a") as file:
        file.write(json.dumps({**row, "seconds": report.duration}) + "\n")
