"""Compiles the C++ of this folder for the CPU at hand, once: the result is kept in the user's cache
folder, with its hash beside it. A library that was damaged since is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread")
NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
TIMEOUT = 300  # seconds


class NotBuilt(RuntimeError):
    """Why there is no library: one line."""


def build() -> Path:
    """The compiled library. Raises NotBuilt where the CPU or the compiler do not suffice."""
    flags = cpu_flags()
    if missing := sorted(NEEDED - flags):
        raise NotBuilt(f"this CPU has no AVX512 ({missing[0]} is missing)")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NotBuilt("there is no C++ compiler (g++ 11 or newer, or set CXX)")
    library = cache_folder() / f"decoder-{_key(compiler, flags)}.so"
    if not _is_whole(library):
        _compile(compiler, library)
    return library


def cpu_flags() -> set[str]:
    """What instructions this CPU has, as Linux calls them; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next(
        (set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set()
    )


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sarathi_lab"


def _key(compiler: str, flags: set[str]) -> str:
    """Of all that the result depends on."""
    sources = [*sorted(SOURCE.parent.glob("*.h")), SOURCE]
    version = _run([compiler, "--version"])
    parts = [
        *(path.read_text() for path in sources),
        version,
        *FLAGS,
        *sorted(flags),
        platform.libc_ver()[1],
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    """Whether `library` is as it was compiled: a part of it would kill whoever loads it."""
    try:
        return _hash_file(library).read_text() == _hash(library)
    except (OSError, ValueError):
        return False


def _hash_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _hash(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _compile(compiler: str, library: Path) -> None:
    """Aside and moved when complete, so that processes that start together never load half a
    library.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            aside = Path(folder) / library.name
            _run([compiler, *FLAGS, str(SOURCE), "-o", str(aside)])
            _hash_file(aside).write_text(_hash(aside))
            aside.replace(library)
            _hash_file(aside).replace(_hash_file(library))
    except OSError as error:
        raise NotBuilt(f"the compiled library can't be kept: {error}") from None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if "error" in line] or [
            "it gave no reason"
        ]
        raise NotBuilt(f"{command[0]} does not compile the kernels: {reasons[0]}")
    return done.stdout
