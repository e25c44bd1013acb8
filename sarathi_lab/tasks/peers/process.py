"""An engine's process, seen from the lab: asked in JSON lines, with a time limit for every
answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE = 5.0  # seconds to end by itself
ENDED = None  # in the queue of answers


class WorkerError(Exception):
    """What an engine did instead of answering, in one line."""


class Worker:
    """A running worker script (`workers/worker_protocol.py`); what it prints goes to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=dict(environment),
                start_new_session=True,  # so that it can be ended with all that it started
            )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to `message`. Raises WorkerError for an error, a death, or none in `timeout`
        seconds.
        """
        assert self._process.stdin is not None
        asked = message["op"]
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout)
        except OSError:
            line = ENDED
        except queue.Empty:
            raise WorkerError(f"no answer to {asked} in {timeout:g} s") from None
        if line is ENDED:
            raise WorkerError(f"ended while asked to {asked} ({self._how_it_ended()})")
        try:
            answer = json.loads(line)
        except ValueError:
            raise WorkerError(f"answered {asked} with {line[:60]!r}, which is not JSON") from None
        if not isinstance(answer, dict):
            raise WorkerError(f"answered {asked} with {line[:60].strip()}, which is no object")
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End it and all that it started: the end of its input is the sign, a while later it is
        killed.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE)
        self.kill()

    def kill(self) -> None:
        """End it and all that it started, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put(ENDED)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            return "its output is closed"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
