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

import torch

SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden")
# Sets of instructions, the best first: what a CPU has to have, and what tells a compiler of it.
NEEDED: dict[str, set[str]] = {
    "avx512": {"avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"},
    "avx2": {"avx2", "fma3", "f16c"},
    "neon": {"neon"},
}
TARGETS = {"avx512": "-march=native", "avx2": "-march=x86-64-v3", "neon": "-mcpu=native"}
MORE = {"avx2": {"avx_vnni": "-mavxvnni"}}  # of a set, where the CPU has it
TIMEOUT = 300  # seconds


class NotBuilt(RuntimeError):
    """Why there is no library: one line."""


def instruction_set(isa: str = "auto") -> str:
    """`isa`, a key of NEEDED, or the best that this CPU has. Raises NotBuilt if it has it not."""
    flags = cpu_flags()
    available = [name for name, needed in NEEDED.items() if needed <= flags]
    none = f"none of {', '.join(NEEDED)}"
    if isa == "auto":
        if not available:
            raise NotBuilt(f"this CPU has {none}")
        return available[0]
    if isa not in available:
        missing = min(NEEDED[isa] - flags)
        has = ", ".join(available) or none
        raise NotBuilt(f"this CPU has no {isa} ({missing} is missing); it has {has}")
    return isa


def build(isa: str = "auto") -> Path:
    """The library compiled for `instruction_set(isa)`. Raises NotBuilt where the CPU or the
    compiler do not suffice.
    """
    isa = instruction_set(isa)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NotBuilt("there is no C++ compiler (g++ 11 or newer, or set CXX)")
    command = [compiler, *targets(isa), *FLAGS]
    library = cache_folder() / f"decoder-{isa}-{_key(command)}.so"
    if not _is_whole(library):
        _compile(command, library)
    return library


def targets(isa: str) -> list[str]:
    """What tells a compiler of this CPU's instructions in the set `isa`."""
    flags = cpu_flags()
    options = [TARGETS[isa]]
    for name, option in MORE.get(isa, {}).items():
        if name in flags:
            options.append(option)
    return options


def cpu_flags() -> set[str]:
    """What instructions this CPU has, as torch calls them; NEON is part of 64-bit ARM."""
    capabilities = torch.cpu.get_capabilities()
    flags = {name for name, value in capabilities.items() if value is True}
    if platform.machine().lower() in ("aarch64", "arm64"):
        flags.add("neon")
    return flags


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sarathi_lab"


def _key(command: list[str]) -> str:
    """Of all that the result depends on."""
    sources = [*sorted(SOURCE.parent.glob("*.h")), SOURCE]
    compiler, *options = command
    version = run_compiler([compiler, "--version"])
    _, libc_version = platform.libc_ver()
    # The CPU's flags too: -march=native compiles for what this one has.
    texts = [path.read_text() for path in sources]
    texts += [version, *options, *sorted(cpu_flags()), libc_version]
    content = "\0".join(texts).encode()
    return hashlib.sha256(content).hexdigest()[:16]


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


def _compile(command: list[str], library: Path) -> None:
    """Aside and moved when complete, so that processes that start together never load half a
    library.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            aside = Path(folder) / library.name
            run_compiler([*command, str(SOURCE), "-o", str(aside)])
            _hash_file(aside).write_text(_hash(aside))
            aside.replace(library)
            _hash_file(aside).replace(_hash_file(library))
    except OSError as error:
        raise NotBuilt(f"the compiled library can't be kept: {error}") from None


def run_compiler(command: list[str]) -> str:
    """What `command` prints; raises NotBuilt where it does not run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        reason = errors[0] if errors else "it gave no reason"
        raise NotBuilt(f"{command[0]} does not compile the kernels: {reason}")
    return done.stdout
