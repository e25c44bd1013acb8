"""Recorded tables: NAME.csv, or NAME.csv.gz for one that is too long to be read as text."""

from __future__ import annotations

import gzip
from pathlib import Path

LONGEST_TEXT = 20_000  # characters; longer tables are of numbers for programs, and shrink sevenfold
GZIPPED = ".gz"


def write_csv(path: Path, text: str) -> Path:
    """Write a table as NAME.csv, or gzipped if it is long, replacing the other form.

    Args:
        path: The file of a short table, NAME.csv.
        text: The whole table.

    Returns:
        The path of the file.
    """
    gzipped = path.with_name(path.name + GZIPPED)
    if len(text) <= LONGEST_TEXT:
        path.write_text(text)
        gzipped.unlink(missing_ok=True)
        return path
    # Without a time, so that equal tables are equal files.
    gzipped.write_bytes(gzip.compress(text.encode(), mtime=0))
    path.unlink(missing_ok=True)
    return gzipped


def csv_file(path: Path) -> Path:
    """Return the file of the table NAME.csv: itself, or NAME.csv.gz where only that is there."""
    gzipped = path.with_name(path.name + GZIPPED)
    if gzipped.is_file() and not path.is_file():
        return gzipped
    return path


def csv_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files below `folder`, sorted, of the tables that match a pattern of NAME.csv."""
    paths = set(folder.glob(pattern))
    for gzipped in folder.glob(pattern + GZIPPED):
        table = gzipped.with_suffix("")
        paths.add(csv_file(table))
    return sorted(paths)


def csv_name(path: Path) -> str:
    """Return the name of a table without the endings of its file."""
    return path.name.removesuffix(GZIPPED).removesuffix(".csv")
