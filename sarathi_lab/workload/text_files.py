"""Text of recorded files: packed or not, of JSON, JSON lines or others, and what a file is where a
reader expects another one.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LEVELS = "(?:INFO|WARNING|ERROR|DEBUG)"
# Servers' lines, and those of Python's logging.
LOG_LINE = re.compile(
    rf"^(\(\w+ pid=|\[\d{{4}}-\d\d-\d\d|{LEVELS}\b|\d{{4}}-\d\d-\d\d [\d:,.]+ .*\b{LEVELS}\b)",
    re.MULTILINE,
)
YAML_LINE = re.compile(r"^[\w.-]+:(\s|$)")
SEPARATOR = re.compile(r"[\s,]*(?=[^\s,\]])")  # before an entry of a list
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def read_text(path: Path, what: str, remedy: str) -> str:
    """Read a text file in UTF-8, or in UTF-16 with a byte order mark, maybe packed by gzip.

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
    encoding = "utf-8-sig"
    if content.startswith(UTF_16):
        encoding = "utf-16"  # as PowerShell writes what it redirects to a file
    with readable(what, remedy):
        return content.decode(encoding)


@dataclass(frozen=True)
class JsonRows:
    """Objects of a file of JSON: one, a list of them, or one a line.

    Attributes:
        objects: The objects.
        lines: The line or, in a list, the number of each, from 1.
        damaged: Lines that are no object, with the reason.
        num_blank: Lines without anything.
    """

    objects: Sequence[dict[str, object]]
    lines: Sequence[int]
    damaged: Sequence[str] = ()
    num_blank: int = 0


def json_rows(text: str) -> JsonRows | None:
    """Read the objects of JSON in `text`; None where it begins like no JSON."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        return _rows_of_damaged(text, error)
    except (ValueError, RecursionError):
        # A number of thousands of digits, or deep nesting, may spoil a single line only.
        return _rows_of_lines(text)
    entries = [content]
    if isinstance(content, list):
        entries = content
    return _rows_of_list(entries)


def _rows_of_list(entries: Sequence[object]) -> JsonRows:
    """Tell objects from other entries."""
    objects = []
    lines = []
    damaged = []
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, dict):
            objects.append(entry)
            lines.append(number)
        else:
            damaged.append(f"entry {number} is not a JSON object")
    return JsonRows(objects, lines, damaged)


def _rows_of_damaged(text: str, error: json.JSONDecodeError) -> JsonRows:
    """Read the entries of a list up to its damage, or an object a line."""
    if text.lstrip().startswith("["):
        rows = _rows_of_list(_entries_before_damage(text))
        return replace(rows, damaged=[*rows.damaged, _reason_of_damage(text, error)])
    rows = _rows_of_lines(text)
    if rows.objects:
        return rows
    # It is one object, which may have many lines.
    return JsonRows((), (), [_reason_of_damage(text, error)])


def _entries_before_damage(text: str) -> list[object]:
    """Read the entries of a list as far as they are whole."""
    decoder = json.JSONDecoder()
    entries = []
    start = text.index("[") + 1
    while separator := SEPARATOR.match(text, start):
        try:
            entry, start = decoder.raw_decode(text, separator.end())
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    return entries


def _reason_of_damage(text: str, error: json.JSONDecodeError) -> str:
    """Describe damaged JSON, such as "is cut off at line 12"."""
    content = text.rstrip()
    is_at_end = error.pos >= len(content)
    is_in_string = error.msg.startswith("Unterminated string")
    if is_at_end or is_in_string:
        last_line = content.count("\n") + 1
        return f"is cut off at line {last_line}, as by a copy or a client that was stopped"
    return f"line {error.lineno} is not JSON ({error.msg} at column {error.colno})"


def _rows_of_lines(text: str) -> JsonRows:
    """Read an object a line."""
    objects = []
    lines = []
    damaged = []
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


SECTION = re.compile(r"\[[A-Za-z][\w .:-]*\]")  # as systemd's and INI files begin
# An object or a list: not a log's line that begins with a name or a date in brackets.
JSON_BEGINNING = re.compile(r"\{|\[\s*($|[\[{\"\]]|-?\d[\d.e+-]*\s*[,\]]|true|false|null)")
SCRIPT = re.compile(r"#!|(?:import|from) [\w.]+")


def kind_of_text(text: str) -> str:
    """Describe what `text` looks like, such as "a log" or "YAML"."""
    if not text.strip():
        return "empty"
    first = text.lstrip().splitlines()[0]
    if SECTION.fullmatch(first.strip()):
        return "a file of settings in sections"
    if SCRIPT.match(first):
        return "a script"
    if JSON_BEGINNING.match(first):
        return "JSON"
    # Before CSV, as the lines of logs have commas.
    if LOG_LINE.search(COLORS.sub("", text)):
        return "a log"
    if first.startswith("<"):
        return "HTML or XML"
    if YAML_LINE.match(first):
        return "YAML"
    if "," in first:
        return f"CSV with the columns {first.strip()[:80]}"
    return f"text that begins with {first.strip()[:40]!r}"
