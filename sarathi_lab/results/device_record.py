"""What a result must carry of its device: names, versions, and the clocks seen while it was
measured.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd

from sarathi_lab.results.provenance import provenance

QUERY = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
EVERY_MS = 500


def slug_of(device_name: str) -> str:
    """A device's name as a folder's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def device_folder(kind: str, name: str) -> str:
    """What folders of a device's results are called; of a `kind` as torch has them."""
    return "cpu" if kind == "cpu" else slug_of(name)


def device_record(description: str, gpu: str | None, cuda: str | None) -> dict[str, Any]:
    """Device, driver, versions (CUDA's included), commit and time. `gpu` is what nvidia-smi calls
    the GPU by; None: it is a CPU.
    """
    record: dict[str, Any] = {"device": description, **provenance()}
    record["versions"]["cuda"] = cuda if gpu else None
    record["driver"] = _query(gpu, "driver_version") if gpu else None
    return record


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
    try:
        watcher = subprocess.Popen(
            [*_smi(gpu), f"--query-gpu={','.join(QUERY.values())}", "-lms", str(EVERY_MS)],
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
    cells = pd.DataFrame([line.split(",") for line in lines]).reindex(columns=range(len(QUERY)))
    table = cells.apply(pd.to_numeric, errors="coerce").dropna().set_axis([*QUERY], axis="columns")
    if table.empty:
        return {}
    return {**table.agg(["min", "median", "max"]).to_dict(), "samples": len(table)}


def _smi(gpu: str) -> list[str]:
    return ["nvidia-smi", "-i", gpu, "--format=csv,noheader,nounits"]


def _query(gpu: str, what: str) -> str | None:
    command = [*_smi(gpu), f"--query-gpu={what}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
