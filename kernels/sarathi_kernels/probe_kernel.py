"""The smallest kernel, for `support.probe`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def double(value: Any) -> None:
    tl.store(value, 2 * tl.load(value))
