"""Paged attention of a hybrid batch, the chunk and the decodes of one iteration, each phase by
Triton's kernel or another library's: first prompts, then decodes, in `series`; or by Triton alone,
its two kernels side by side on two CUDA `streams`, or both in one `fused` launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from sarathi_kernels.attention.decode import decode_attention
from sarathi_kernels.attention.fused import fused_attention
from sarathi_kernels.attention.kv_cache import Cache
from sarathi_kernels.attention.plan import AttentionPlan, Views
from sarathi_kernels.attention.prefill import prefill_attention
from sarathi_kernels.attention.support import why_not_triton
from sarathi_kernels.runtime.chip import Chip

Variant = Literal["series", "streams", "fused"]


class Attention(Protocol):
    """Attention of prompts, which have several new tokens, of decodes, or of both."""

    def why_not(self, spec: Any, dtype: torch.dtype, block_size: int, chip: Chip) -> str | None:
        """Return why it does not take a model (`head_size`, `kv_dtype`) here; None if it does."""

    def begin(self, views: Views, shape: Any, slot: int) -> None:
        """Prepare a batch of `shape` (`num_tokens`, `num_decodes`, `num_tiles`, `max_blocks`)
        before its `views` are copied to the device and before a graph of it is replayed.

        `slot` is the host's buffer that it is packed in, which is filled again when the batch is
        done. A batch with a negative slot may be computed layer by layer beside one without.
        """

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
        keys: Cache,  # [num_blocks, block_size, num_kv_heads, head_size]
        values: Cache,
        plan: AttentionPlan,
        scale: float,
        window: int | None,
        out: Tensor,  # [num_tokens, num_heads, head_size]
    ) -> None:
        """Write softmax(scale q k^T) v of the phase's rows of `plan` to `out`, without waiting for
        the device, so that graphs can record it.
        """


class TritonPhase:
    """One phase by its Triton `kernel`."""

    why_not = staticmethod(why_not_triton)

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel

    def begin(self, views: Views, shape: Any, slot: int) -> None:
        """Nothing: the kernel reads the plan on the device."""

    def attend(
        self,
        query: Tensor,
        keys: Cache,
        values: Cache,
        plan: AttentionPlan,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        self._kernel(query, keys, values, plan, scale, sliding_window=window, out=out)


class HybridAttention:
    """Attention of `prompts`, then of `decodes`. Raises ValueError for an unknown variant."""

    def __init__(
        self,
        variant: Variant = "series",
        prompts: Attention | None = None,
        decodes: Attention | None = None,
    ) -> None:
        if variant not in get_args(Variant):
            raise ValueError(f"unknown variant {variant!r}: choose one of {get_args(Variant)}")
        self._variant = variant
        self._phases = (
            prompts or TritonPhase(prefill_attention),
            decodes or TritonPhase(decode_attention),
        )

    def why_not(self, spec: Any, dtype: torch.dtype, block_size: int, chip: Chip) -> str | None:
        reasons = (phase.why_not(spec, dtype, block_size, chip) for phase in self._phases)
        return next(filter(None, reasons), None)

    def begin(self, views: Views, shape: Any, slot: int) -> None:
        for phase in self._phases:
            phase.begin(views, shape, slot)

    def attend(
        self,
        query: Tensor,
        keys: Cache,
        values: Cache,
        plan: AttentionPlan,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        prompts, decodes = self._phases
        inputs = (query, keys, values, plan, scale, window, out)
        is_hybrid = plan.num_tiles > 0 and plan.num_decodes > 0
        if is_hybrid and self._variant == "fused":
            fused_attention(query, keys, values, plan, scale, sliding_window=window, out=out)
        elif is_hybrid and self._variant == "streams" and query.device.type == "cuda":
            current = torch.cuda.current_stream(query.device)
            side = _side_stream(query.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                decodes.attend(*inputs)
            prompts.attend(*inputs)
            current.wait_stream(side)
        else:
            prompts.attend(*inputs)
            decodes.attend(*inputs)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # With priority, decodes take the places that the tiles leave instead of waiting behind all of
    # them.
    return torch.cuda.Stream(device, priority=-1)
