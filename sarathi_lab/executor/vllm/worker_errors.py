"""What vLLM's worker processes raise, which its executor reports without type or message.

Workers configure their logging before anything else, and log what ends them. A handler of that
configuration writes the last line of a traceback to a file of this process, which reads it there.
"""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

CONFIG_PATH = "VLLM_LOGGING_CONFIG_PATH"
LEVEL = "VLLM_LOGGING_LEVEL"
DEFAULT_LEVEL = "ERROR"
CONFIG_NAME = "sarathi_lab_logging.json"
ERRORS_NAME = "worker_errors.txt"
LONGEST_LINE = 300  # characters of a line


class ExceptionLines(logging.FileHandler):
    """Writes a line for each exception that is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        assert record.exc_info
        error = record.exc_info[1]
        return last_line(error) if error is not None else record.getMessage()


def last_line(error: BaseException) -> str:
    """Return an exception's type and the line of its message that has the reason, with those of
    the exception that it was raised from.
    """
    line = _type_and_reason(error)
    cause = _root_cause(error)
    if cause is None or _reason(cause) in line:
        return line
    return f"{line}, by {_type_and_reason(cause)}"


def _root_cause(error: BaseException) -> BaseException | None:
    """Return the first exception of a chain of `raise ... from`."""
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause


def _type_and_reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {_reason(error)}"


def _reason(error: BaseException) -> str:
    """Return the line of a message that has the reason: of a ValidationError the second."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line and "validation error" not in line]
    if not reasons:
        return "no message"
    # Pydantic ends a line with the type of its error, the input and an address.
    reason, _, _ = reasons[0].partition(" [type=")
    if reason.endswith(":"):  # what follows is a list
        reason = " ".join([reason, *reasons[1:]])
    if len(reason) > LONGEST_LINE:
        return f"{reason[:LONGEST_LINE]}..."
    return reason


def log_errors() -> None:
    """Have vLLM log errors to this process's stderr, and its workers leave them for `first_error`.

    Does nothing where the user has configured vLLM's logging. To be called before vLLM is imported.
    """
    config_path = os.environ.get(CONFIG_PATH)
    # That of a process of the lab which has started this one, whose folder goes with it.
    is_inherited = config_path is not None and Path(config_path).name == CONFIG_NAME
    if config_path is not None and not is_inherited:
        return
    path = Path(_folder().name) / CONFIG_NAME
    path.write_text(json.dumps(_logging_config(os.environ.get(LEVEL, DEFAULT_LEVEL))))
    os.environ[CONFIG_PATH] = str(path)


def first_error() -> str | None:
    """Return the first exception that a worker has logged since `forget_errors`, if any: those
    after it are mostly of workers that lost the first.
    """
    try:
        lines = _errors_path().read_text().splitlines()
    except FileNotFoundError:
        return None
    return lines[0] if lines else None


def forget_errors() -> None:
    """Forget what the workers of an engine before have logged."""
    _errors_path().unlink(missing_ok=True)


def _errors_path() -> Path:
    return Path(_folder().name) / ERRORS_NAME


@cache
def _folder() -> TemporaryDirectory[str]:
    """The folder of this process, removed at its end."""
    return TemporaryDirectory(prefix="sarathi_lab_vllm_", ignore_cleanup_errors=True)


def _logging_config(level: str) -> dict[str, object]:
    """Return the configuration of Python's logging by which vLLM prints and workers write."""
    console = {
        "class": "logging.StreamHandler",
        "stream": "ext://sys.stderr",
        "formatter": "line",
        "level": level,
    }
    errors = {
        "class": f"{__name__}.{ExceptionLines.__name__}",
        "filename": str(_errors_path()),
        "delay": True,
        "level": "ERROR",
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(levelname)s %(asctime)s [%(name)s] %(message)s"}},
        "handlers": {"console": console, "errors": errors},
        "loggers": {
            "vllm": {"handlers": ["console", "errors"], "level": level, "propagate": False}
        },
    }
