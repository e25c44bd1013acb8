"""Where what the code reads is kept, and how JSON is read and files are written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import yaml

from sarathi_lab.config.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
IS_CHECKOUT = not (_PACKAGE / "conf").is_dir()
# The folder with conf/ and experiments/: beside the package in a checkout, in it in a wheel. Only a
# checkout's may be written to.
REPOSITORY = _PACKAGE.parent if IS_CHECKOUT else _PACKAGE
CONF = REPOSITORY / "conf"
EXPERIMENTS = REPOSITORY / "experiments"
OUTPUTS = Path("outputs")  # of the current folder


def of_lab(path: Path) -> Path:
    """Return the file or folder, or if the current folder does not have it the lab's own."""
    recorded = REPOSITORY / path
    if recorded.exists() and not path.exists():
        return recorded
    return path


def make_folder(folder: Path, setting: str) -> Path:
    """Make `folder`, which `setting` names. Raises UserError if it can't be written to."""
    reason = "it is read-only, or another user's"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError as error:
        reason = str(error.strerror)
    raise UserError(f"{setting}={folder} can't be written ({reason}); choose another folder")


@contextmanager
def readable(what: object, fix: str, *others: type[Exception]) -> Iterator[None]:
    """Raise UserError for what keeps a file from being read in the block: the reason of
    it, its contents, and `others`. `what` is its path, maybe with the setting that names it.
    """
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, *others)
    try:
        yield
    except kinds as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror  # without the path, which `what` names
        if isinstance(error, UnicodeDecodeError):
            reason = "not UTF-8 text"
        first_line = reason.splitlines()[0]
        raise UserError(f"{what} can't be read ({first_line}); {fix}") from None


def read_object(path: Path, fix: str) -> dict[str, Any]:
    """The object in a file of JSON. Raises UserError, which ends in the `fix`."""
    with readable(path, fix):
        text = path.read_text(encoding="utf-8")
    return json_object(text, str(path), fix)


def json_object(text: str, source: str, fix: str = "write one object a line") -> dict[str, object]:
    """The object in a line of JSONL or a file of JSON. Raises UserError, naming the place."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON ({error}); {fix}") from None
    if not isinstance(row, dict):
        raise UserError(f"{source} is not a JSON object; {fix}")
    return row


@cache
def stated_beside(module: str, name: str) -> dict[str, Any]:
    """Return the facts of a YAML file that is named `name` and stands beside a module's file."""
    path = Path(module).with_name(name)
    text = path.read_text("utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write `path` in one step, so that no process reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def lock(path: Path, *, shared: bool = False, waits: bool = False) -> TextIO | None:
    """An open file that holds a lock on `path` until it is closed, or its process ends. None if
    another holds it, unless it `waits` for that; a `shared` lock is refused by exclusive ones only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    operation = fcntl.LOCK_EX
    if shared:
        operation = fcntl.LOCK_SH
    if not waits:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        # On a network's file system without locks, all hold it.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            file.close()
            return None
    return file
