"""Memory that the C library keeps though it was freed."""

from __future__ import annotations

import ctypes


def give_back_freed() -> bool:
    """Give freed memory back to the system now; returns whether there is a way to (glibc's)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
