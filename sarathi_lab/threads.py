"""How many threads of a CPU a setting may ask for. Imports no torch."""

from __future__ import annotations

import os

from sarathi_lab.errors import UserError, require_int


def require_threads(name: str, value: object) -> int | None:
    """Return `value` if it is None or a number of threads that this process has cores for, else raise `UserError`."""
    if value is None:
        return None
    num_cores = count_cores()
    fix = f"use a number from 1 to {num_cores}, or null for as many as torch takes"
    threads = require_int(name, value, 1, fix)
    if threads > num_cores:
        raise UserError(f"{name}={threads} is more than the {num_cores} cores that are there; {fix}")
    return threads


def count_cores() -> int:
    """The cores that this process may use; all of them on a system that does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
