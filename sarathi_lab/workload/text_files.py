"""Text of recorded files: packed or not, of JSON, JSON lines or others, and what a file is where a
reader expects another one.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import readable

# First bytes of files that are no text, and what they are.
MAGIC = {
    b"PAR1": "a Parquet file",
    b"SQLite format 3": "an SQLite database",
    b"PK\x03\x04": "a ZIP archive or a workbook",
    b"\x28\xb5\x2f\xfd": "a Zstandard archive",
    b"BZh": "a bzip2 archive",
    b"ARROW1": "an Arrow file",
}
GZIP = b"\x1f\x8b"
LOG_LINE = re.compile(r"^(\(\w+ pid=|\[\d{4}-\d\d-\d\d|(INFO|WARNING|ERROR|DEBUG)\b)", re.MULTILINE)
YAML_LINE = re.compile(r"^[\w.-]+:(\s|$)")
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def read_text(path: Path, what: str, remedy: str) -> str:
    """Read a text file in UTF-8, maybe packed by gzip, without a byte order mark.

    Args:
        path: The file.
        what: How messages name it, such as "workload.path=FILE".
        remedy: How messages end.

    Raises:
        UserError: For a file that can't be read, or is no text.
    """
    with readable(what, remedy):
        content = path.read_bytes()
    if content.startswith(GZIP):
        with readable(what, "pack the file again, or name it unpacked", EOFError):
            content = gzip.decompress(content)
    for first_bytes, kind in MAGIC.items():
        if content.startswith(first_bytes):
            raise UserError(f"{what} is {kind}, which is not read here; {remedy}")
    with readable(what, remedy):
        return content.decode("utf-8-sig")


@dataclass(frozen=True)
class JsonRows:
    """Objects of a file of JSON: one, a list of them, or one a line.

    Attributes:
        objects: The objects.
        lines: The line or, in a list, the number of each, from 1.
        damaged: Lines that are no object, with the reason.
        num_blank: Lines without anything.
    """

    objects: Sequence[dict[str, Any]]
    lines: Sequence[int]
    damaged: Sequence[str] = ()
    num_blank: int = 0


def json_rows(text: str) -> JsonRows | None:
    """Read the objects of JSON in `text`; None where it begins like no JSON."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return _rows_of_lines(text)
    entries = [content]
    if isinstance(content, list):
        entries = content
    objects = list[dict[str, Any]]()
    lines = list[int]()
    damaged = list[str]()
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, dict):
            objects.append(entry)
            lines.append(number)
        else:
            damaged.append(f"entry {number} is not a JSON object")
    return JsonRows(objects, lines, damaged)


def _rows_of_lines(text: str) -> JsonRows:
    """Read an object a line."""
    objects = list[dict[str, Any]]()
    lines = list[int]()
    damaged = list[str]()
    num_blank = 0
    # Not splitlines: JSON strings may contain other separators, such as U+2028.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        if not line.strip():
            num_blank += 1
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            damaged.append(f"line {number} is not JSON ({error})")
            continue
        if not isinstance(entry, dict):
            damaged.append(f"line {number} is not a JSON object")
            continue
        objects.append(entry)
        lines.append(number)
    return JsonRows(objects, lines, damaged, num_blank)


def kind_of_text(text: str) -> str:
    """Describe what `text` looks like, such as "a log" or "YAML"."""
    if not text.strip():
        return "empty"
    first = text.lstrip().splitlines()[0]
    if first[:1] in ("{", "["):
        return "JSON"
    if LOG_LINE.search(COLORS.sub("", text)):
        return "a log"
    if first.startswith("<"):
        return "HTML or XML"
    if YAML_LINE.match(first):
        return "YAML"
    if "," in first:
        return f"CSV with the columns {first.strip()[:80]}"
    return f"text that begins with {first.strip()[:40]!r}"
