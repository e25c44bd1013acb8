"""Words that mislead stay out of the package, its settings and its documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Each has another meaning where a reader looks it up, or is a second name of one thing.
MISLEADING = {
    "gives way": "is evicted, is preempted, or waits: which of these?",
    "books": "the counts of a cache, the ledger of a run, or the bookkeeping of a scheduler",
    "in the name of": "for, or by the name of",
}
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
PACKAGE = ROOT / "sarathi_lab"
SETTINGS = ROOT / "conf"
FILES = [
    *PACKAGE.rglob("*.py"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / folder / "README.md" for folder in ("conf", "kernels", "sarathi_lab")),
    *SETTINGS.rglob("*.yaml"),
    *(ROOT / name for name in DOCUMENTS),
]


def test_no_word_misleads():
    pattern = re.compile(rf"\b(?:{'|'.join(MISLEADING)})\b", re.IGNORECASE)
    misleading = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word in pattern.findall(line):
                instead = MISLEADING[word.lower()]
                misleading.append(f"{path.relative_to(ROOT)}:{number}: {word!r}; say {instead}")
    assert misleading == []
