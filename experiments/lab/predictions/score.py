"""Check and score the ledger of blind predictions.

    python experiments/lab/predictions/score.py [NAME ...]

An entry `NAME.yaml` has the source, the settings and `predicted`, a value by setting, with the
`commit` that computed them and a `hash` of all that (of the commit from `version` 2 on; entries
without a version have 1). Its results are added to
`NAME.result.yaml` afterwards, in a later commit. Prints an entry's errors, or that it has no result
yet. Exits with 1 if a prediction is not what was hashed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

LEDGER = Path(__file__).parent
VERSION = 2  # of new entries
OF_FIRST = ("source", "asked", "settings", "predicted")
HASHED = {1: OF_FIRST, VERSION: (*OF_FIRST, "commit")}  # by version
COMPUTES = (":(top)*.py", ":(top)conf")  # what a prediction is computed by


def main(names: Sequence[str]) -> int:
    broken = []
    for path in sorted(LEDGER.glob("*.yaml")):
        is_result = ".result" in path.name
        is_chosen = not names or path.stem in names
        if is_chosen and not is_result and not score(path):
            broken.append(path.stem)
    for name in broken:
        print(f"{name}: its predictions are not those that were hashed")
    return 1 if broken else 0


def hash_of(entry: Mapping[str, Any]) -> str:
    """Return the hash of what an entry states before its result is known."""
    hashed = HASHED[entry.get("version", 1)]
    stated = {name: entry[name] for name in hashed}
    # Sorted, so that a file whose fields were put in another order keeps its hash.
    text = json.dumps(stated, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Write what is predicted to `name`.yaml, with the commit that is checked out and its hash.
    Exits where that commit is not what computed it.
    """
    changes = _git("status", "--porcelain", "--", *COMPUTES)
    if changes:
        sys.exit(f"an entry states the commit that computed it; commit first:\n{changes}")
    stated = {**entry, "version": VERSION, "commit": _git("rev-parse", "HEAD")}
    stated["hash"] = hash_of(stated)
    path = LEDGER / f"{name}.yaml"
    text = yaml.safe_dump(stated, sort_keys=False)
    path.write_text(text)
    print(f"{path.name}: {len(entry['predicted'])} predictions")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write_result(name: str, measured: Mapping[str, float]) -> None:
    """Write what was measured to `name`.result.yaml."""
    path = LEDGER / f"{name}.result.yaml"
    text = yaml.safe_dump({"measured": dict(measured)}, sort_keys=False)
    path.write_text(text)
    print(f"{path.name}: {len(measured)} values")


def score(path: Path) -> bool:
    """Print the errors of an entry; return whether it is as it was hashed."""
    entry = yaml.safe_load(path.read_text())
    if entry["hash"] != hash_of(entry):
        return False
    print(f"{path.stem}: {entry['asked']}")
    print(f"  {entry['source']}, predicted by {entry['commit']}")
    result = path.with_suffix(".result.yaml")
    if not result.is_file():
        print(f"  {len(entry['predicted'])} predictions, no result entered")
        return True
    measured = yaml.safe_load(result.read_text())["measured"]
    print_errors(entry["predicted"], measured)
    return True


def print_errors(predicted: Mapping[str, float], measured: Mapping[str, float]) -> None:
    """Print each measured value beside its prediction, and how far off they are."""
    errors = []
    for setting, value in measured.items():
        if setting not in predicted:
            print(f"  {setting}: measured {value:g}, not predicted")
            continue
        guess = predicted[setting]
        error = guess / value - 1
        errors.append(abs(error))
        print(f"  {setting}: predicted {guess:g}, measured {value:g} ({error:+.1%})")
    if errors:
        mean = np.mean(errors)
        median = np.median(errors)
        print(f"  {len(errors)} predictions: mean error {mean:.1%}, median {median:.1%}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
