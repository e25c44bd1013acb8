"""Which parts are finished on which commit, so that a campaign that was stopped goes on where it
was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sarathi_lab.config.errors import UserError


class State:
    """The file that remembers how each part ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts: dict[str, dict[str, Any]] = {}
        if path.is_file():
            try:
                self._parts = json.loads(path.read_text())
            except ValueError:
                raise UserError(
                    f"{path} can't be read as JSON; delete it, or use --fresh"
                ) from None

    def is_finished(self, part: str, commit: str | None, device: str) -> bool:
        """Whether the part finished on the same commit and device.

        Changes that are not committed do not count: published results are such, once others were
        committed.
        """
        entry = self._parts.get(part, {})
        found = (entry.get("status"), _clean(entry.get("commit")), entry.get("device"))
        return found == ("finished", _clean(commit), device)

    def save(self, part: str, entry: Mapping[str, Any]) -> None:
        """Remember how the part ended."""
        self._parts[part] = dict(entry)
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(self._parts, indent=2) + "\n")
        os.replace(aside, self.path)


def _clean(commit: str | None) -> str | None:
    return None if commit is None else commit.removesuffix("-dirty")
