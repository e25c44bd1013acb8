"""Starts the process of a part, shows what it says, and ends it when it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.tasks.gpu.child import Job

HEARTBEAT = 10.0  # seconds between signs of life
GRACE = 5.0  # seconds from asking a process to end to ending it


def environment(*, is_dry: bool) -> dict[str, str]:
    """Of every part: offline; in a dry run without a GPU, in Triton's interpreter and on one
    thread.
    """
    env = {**os.environ, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    env.pop("TRITON_INTERPRET", None)
    if is_dry:
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return env


def run_job(
    job: Job, log: Path, limit: float, say: Callable[[str], None], beat: Callable[[float], None]
) -> str | None:
    """Run the part in a process of its own; returns None, or in a line why it failed.

    `say` gets what it prints, `beat` every `HEARTBEAT` seconds the seconds it has run. After
    `limit` seconds it and what it started are ended.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "sarathi_lab.tasks.gpu.child", job.as_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=REPOSITORY,
        env=environment(is_dry=job.is_dry),
        start_new_session=True,  # so that it can be ended with all that it started
    )
    reader = threading.Thread(target=_copy, args=(process, log, say), daemon=True)
    reader.start()
    try:
        in_time = _wait(process, limit, beat)
    finally:
        if process.poll() is None:
            _end(process)
    reader.join(timeout=GRACE)
    if not in_time:
        return f"it took more than {limit:.0f} s and was ended"
    return None if process.returncode == 0 else _reason(process.returncode)


def _copy(process: subprocess.Popen[str], log: Path, say: Callable[[str], None]) -> None:
    with log.open("w") as file:
        for line in process.stdout or ():
            file.write(line)
            file.flush()
            say(line.rstrip())


def _wait(process: subprocess.Popen[str], limit: float, beat: Callable[[float], None]) -> bool:
    """Whether it ended by itself within `limit` seconds."""
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < limit:
        try:
            process.wait(timeout=min(HEARTBEAT, limit - elapsed))
            return True
        except subprocess.TimeoutExpired:
            beat(time.monotonic() - start)
    return False


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(code: int) -> str:
    return (
        f"its process was killed by signal {-code}"
        if code < 0
        else f"its process ended with code {code}"
    )
