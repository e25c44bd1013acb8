"""What a result must carry to be believed later: versions, commit, time, and of a GPU the driver
and the clocks seen while it was measured.
"""

from __future__ import annotations

import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.paths import IS_CHECKOUT, REPOSITORY

PACKAGES = ("sarathi-lab", "torch", "triton", "transformers", "hydra-core", "wandb")
CLOCKS = {  # as nvidia-smi calls them
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
EVERY_MS = 500


def provenance() -> dict[str, Any]:
    """Versions of what was used, the repository's commit (None outside git) and the time in UTC."""
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git_commit": _git_commit(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_record(description: str, gpu: str | None, cuda: str | None) -> dict[str, Any]:
    """`provenance` with device, driver and CUDA's version. `gpu` is what nvidia-smi calls the GPU
    by; None: it is a CPU.
    """
    record: dict[str, Any] = {"device": description, **provenance()}
    record["versions"]["cuda"] = cuda if gpu else None
    record["driver"] = _printed([*_smi(gpu), "--query-gpu=driver_version"]) if gpu else None
    return record


def slug_of(device_name: str) -> str:
    """A device's name as a folder's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def device_folder(kind: str, name: str) -> str:
    """What folders of a device's results are called; of a `kind` as torch has them."""
    return "cpu" if kind == "cpu" else slug_of(name)


@contextmanager
def clocks_seen(gpu: str | None) -> Iterator[dict[str, Any]]:
    """Watch the GPU through nvidia-smi, which only reads; at the end the yielded dict has least,
    median and most.

    It stays empty on a CPU, and where nvidia-smi is missing or says nothing.
    """
    seen: dict[str, Any] = {}
    if gpu is None:
        yield seen
        return
    command = [*_smi(gpu), f"--query-gpu={','.join(CLOCKS.values())}", "-lms", str(EVERY_MS)]
    with tempfile.TemporaryFile("w+") as output:
        try:
            watcher = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        except OSError:
            yield seen
            return
        try:
            yield seen
        finally:
            watcher.terminate()
            watcher.wait()
            output.seek(0)
            seen.update(parse_clocks(output.readlines()))


def parse_clocks(lines: Sequence[str]) -> dict[str, Any]:
    """Least, median and most of every column that nvidia-smi printed, of lines of numbers."""
    cells = pd.DataFrame([line.split(",") for line in lines]).reindex(columns=range(len(CLOCKS)))
    table = cells.apply(pd.to_numeric, errors="coerce").dropna().set_axis([*CLOCKS], axis="columns")
    if table.empty:
        return {}
    return {**table.agg(["min", "median", "max"]).to_dict(), "samples": len(table)}


@cache
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
    return _printed([*command, "--abbrev=12", "--exclude=*"])


def last_commit(path: Path) -> str | None:
    """The commit that changed `path` last and its day; None outside git."""
    command = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%h, %as", "--", str(path)]
    return _printed(command) if IS_CHECKOUT else None


def _smi(gpu: str) -> list[str]:
    return ["nvidia-smi", "-i", gpu, "--format=csv,noheader,nounits"]


def _printed(command: Sequence[str]) -> str | None:
    """What a command prints; None if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
