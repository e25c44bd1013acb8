"""The command in a process of its own, which never outlives its test."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Three short requests on a CPU.
SMALL = (
    *("model=tiny", "tracking=none", "seq_len=48", "pd_ratio=5", "batch=2"),
    *("workload.num_requests=3", "device=cpu"),
)
_LIBC = ctypes.CDLL(None)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def _prepare() -> None:
    _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    # Ignored by tests that a shell runs in the background, it would be by the process as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def running(
    *args: str, module: Sequence[str] = ("sarathi_lab.run",), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """`python -m sarathi_lab.run`, or another `module` and its arguments, with `args`, in a process
    group that is killed in the end; the process itself also when the tests are.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *module, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        start_new_session=True,
        preexec_fn=_prepare,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def sweep_of(output: Path) -> Path:
    """The folder of the one sweep below `output`."""
    (record,) = output.rglob("sweep.json")
    return record.parent
