"""What a result must carry of its device: names, versions, and the clocks seen while it was
measured.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from sarathi_lab.executor.torch.device import device_description
from sarathi_lab.results.provenance import provenance

QUERY = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
EVERY_MS = 500


def device_record(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions (CUDA's included), commit and time."""
    record: dict[str, Any] = {"device": device_description(device), **provenance()}
    record["versions"]["cuda"] = torch.version.cuda if device.type == "cuda" else None
    record["driver"] = _query(device, "driver_version") if device.type == "cuda" else None
    return record


@contextmanager
def clocks_seen(device: torch.device) -> Iterator[dict[str, Any]]:
    """Watch the GPU through nvidia-smi, which only reads; at the end the yielded dict has least,
    median and most.

    It stays empty on a CPU, and where nvidia-smi is missing or says nothing.
    """
    seen: dict[str, Any] = {}
    if device.type != "cuda":
        yield seen
        return
    try:
        watcher = subprocess.Popen(
            [*_smi(device), f"--query-gpu={','.join(QUERY.values())}", "-lms", str(EVERY_MS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        yield seen
        return
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(watcher.stdout or ()), daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        watcher.terminate()
        watcher.wait()
        reader.join(timeout=5)
        seen.update(parse_clocks(lines))


def parse_clocks(lines: list[str]) -> dict[str, Any]:
    """Least, median and most of every column of nvidia-smi's output; lines that are not all numbers
    are left out.
    """
    rows = []
    for line in lines:
        try:
            row = [float(cell) for cell in line.split(",")]
        except ValueError:
            continue
        if len(row) == len(QUERY):
            rows.append(row)
    if not rows:
        return {}
    columns = zip(QUERY, zip(*rows, strict=True), strict=True)
    return {
        name: {"min": min(values), "median": median(values), "max": max(values)}
        for name, values in columns
    } | {"samples": len(rows)}


def _smi(device: torch.device) -> list[str]:
    """nvidia-smi for this GPU alone: its numbers need not be torch's."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = f"GPU-{uuid}" if uuid is not None else str(device.index or 0)
    return ["nvidia-smi", "-i", which, "--format=csv,noheader,nounits"]


def _query(device: torch.device, what: str) -> str | None:
    try:
        command = [*_smi(device), f"--query-gpu={what}"]
        return (
            subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=20
            ).stdout.strip()
            or None
        )
    except (OSError, subprocess.SubprocessError):
        return None
