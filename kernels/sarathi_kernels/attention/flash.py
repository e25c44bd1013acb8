"""Attention of prompts by FlashAttention 3 (arXiv 2407.08608), which plans on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sarathi_kernels.attention.kv_cache import Cache
from sarathi_kernels.attention.library import Library
from sarathi_kernels.attention.plan import AttentionPlan, Views, prompt_lens

FLASH = Library(
    "FlashAttention 3",
    "flash_attn_interface",
    "flash_attn_with_kvcache",
    "build the folder hopper of github.com/Dao-AILab/flash-attention",
    head_sizes=(64, 96, 128, 192, 256),
    capabilities=range(90, 91),
)


class FlashPrompts:
    """FlashAttention 3 of prompts. Rows of decodes, whose contexts count as empty, become zero."""

    why_not = staticmethod(FLASH.why_not)

    def __init__(self) -> None:
        self._attend = FLASH.load()

    def begin(self, views: Views, shape: Any, slot: int) -> None:
        if shape.num_tiles:
            query_lens = views["query_starts"][1:] - views["query_starts"][:-1]
            views["prompt_lens"][:] = prompt_lens(query_lens, views["kv_lens"])

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
        if plan.num_tiles == 0:
            return
        with FLASH.errors():
            result = self._attend(
                query,
                keys,
                values,
                cache_seqlens=plan.prompt_lens,
                page_table=plan.block_table,
                cu_seqlens_q=plan.query_starts,
                max_seqlen_q=plan.max_query_len,
                softmax_scale=scale,
                causal=True,
                window_size=(-1, -1) if window is None else (window - 1, 0),
            )
        out.copy_(result)  # the public function makes its output
