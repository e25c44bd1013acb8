"""What the system is asked for: large pages, and to take back what the C library keeps though it
was freed.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

HUGE_PAGE = 2 << 20
# Of Linux's mman.h.
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # from 6.1 on


def give_back_freed() -> bool:
    """Give freed memory back to the system now; returns whether there is a way to (glibc's)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to back `tensor` by large pages. May do nothing."""
    first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_PAGE * HUGE_PAGE
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if length > 0 and madvise is not None:
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)
