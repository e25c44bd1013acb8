"""What a result must carry to be believed later: versions, commit, time."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sarathi_lab.config.paths import IS_CHECKOUT, REPOSITORY

PACKAGES = ("sarathi-lab", "torch", "triton", "transformers", "hydra-core", "wandb")


def provenance() -> dict[str, Any]:
    """Versions of what was used, the repository's commit (None outside git) and the time in UTC."""
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git_commit": _git_commit(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git_commit() -> str | None:
    """The commit, with "-dirty" if tracked files differ from it."""
    if not IS_CHECKOUT:  # a wheel in somebody's repository would name their commit
        return None
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    command += ["--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
