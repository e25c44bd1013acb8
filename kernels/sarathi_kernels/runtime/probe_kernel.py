"""The smallest kernel, for `support.probe`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double(value: tl.tensor) -> None:
    tl.store(value, 2 * tl.load(value))
