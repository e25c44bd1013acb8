"""Retired words stay out of the package, its settings and its documents (DESIGN.md, "Words")."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RETIRED = (
    *("lest", "somebody", "everybody", "nobody", "whoever", "whatever", "knows"),
    *("told", "tells", "telling", "said", "says?", "saying", "anew", "aside", "gives way"),
    *("in the name of", "apart_work", "own_time", "other_process", "take_in", "told_by", "books"),
    'own(?!")',  # but in the label of a recorded quantity
)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "conf/README.md", "kernels/README.md")
PACKAGE, SETTINGS = ROOT / "sarathi_lab", ROOT / "conf"
FILES = [*PACKAGE.rglob("*.py"), *PACKAGE.glob("*.md"), *SETTINGS.rglob("*.yaml")]
FILES += [ROOT / name for name in DOCUMENTS]


def test_retired_words_are_not_used():
    found = []
    pattern = re.compile(rf"\b(?:{'|'.join(RETIRED)})\b", re.IGNORECASE)
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
