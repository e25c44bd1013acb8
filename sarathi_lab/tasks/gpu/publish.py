"""Copies what the parts measured to where it is kept: `<question>/results/<device>/` under one
root.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"


def slug_of(device_name: str) -> str:
    """A device's name as a folder's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def publish(work: Path, root: Path, slug: str) -> list[Path]:
    """Copy all tables of `work`; each folder gets a run.json with the record of every part that
    wrote to it.
    """
    records: dict[Path, dict[str, Any]] = {}
    for source in sorted((work / "tables").glob("*/*/*")):
        part, question = source.parts[-3:-1]
        folder = root / question / "results" / slug
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / source.name)
        records.setdefault(folder, {})[part] = _record(work / f"{part}.json")
    for folder, parts in records.items():
        (folder / RUN_FILE).write_text(json.dumps({"parts": parts}, indent=2) + "\n")
    return sorted(records)


def _record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
