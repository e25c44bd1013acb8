"""Whether the C++ of a CPU is there: tests of it are skipped where it can't be built."""

from __future__ import annotations

import pytest

from sarathi_kernels.cpu import build, library


def is_missing() -> bool:
    try:
        library.load()
    except build.NotBuilt:
        return True
    return False


needs_library = pytest.mark.skipif(is_missing(), reason="no instruction set or no compiler for it")
