"""Attention of decodes by FlashInfer (arXiv 2501.01005), which plans every batch on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sarathi_kernels.attention.kv_cache import Cache
from sarathi_kernels.attention.library import Library
from sarathi_kernels.attention.plan import PADDING, AttentionPlan, Views

FLASHINFER = Library(
    "FlashInfer",
    "flashinfer",
    "BatchDecodeWithPagedKVCacheWrapper",
    "pip install flashinfer-python",
    head_sizes=(64, 128, 256),
    capabilities=range(80, 200),
)
# Bytes: of results of parts of contexts, as FlashInfer recommends, and of what a plan copies to the
# device, some 20 a decode.
WORKSPACE, PLAN_BYTES = 128 << 20, 1 << 20


class FlashInferDecodes:
    """FlashInfer's decode kernel, planned on the host before each batch and each replay."""

    why_not = staticmethod(FLASHINFER.why_not)

    def __init__(
        self, spec: Any, dtype: torch.dtype, block_size: int, device: torch.device
    ) -> None:
        self._make_wrapper = partial(
            FLASHINFER.load(),
            torch.zeros(WORKSPACE, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=spec.num_heads > spec.num_kv_heads,
        )
        window = spec.sliding_window
        self._sizes: dict[str, Any] = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_size,
            "page_size": block_size,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "sm_scale": 1.0,  # see `q_scale`
        }
        self._device = device
        self._wrappers: dict[tuple[bool, int, int], _Wrappers] = {}

    def begin(self, views: Views, shape: Any, slot: int) -> None:
        if shape.num_decodes == 0:
            return
        with FLASHINFER.errors():  # it compiles its kernels at the first plan
            wrappers = self._of(slot, shape.num_decodes, shape.max_blocks)
            wrappers.plan(views, shape, slot, self._sizes)

    def attend(
        self,
        query: Tensor,
        keys: Cache,
        values: Cache,
        plan: AttentionPlan,
        scale: float,
        window: int | None,  # that of the model, which is part of its plan
        out: Tensor,
    ) -> None:
        if plan.num_decodes == 0:
            return
        wrappers = self._of(plan.slot, plan.num_decodes, plan.block_table.shape[1])
        run = partial(wrappers.newest.run, paged_kv_cache=(keys, values), q_scale=scale)
        with FLASHINFER.errors():
            if plan.num_tiles == 0:  # a row for each decode, in their order
                run(query, out=out)
                return
            # Padding has distinct rows of prompts or padding, which stay as they are.
            rows, are_real = wrappers.on_device.rows, wrappers.on_device.are_real
            results = run(query.index_select(0, rows))
            rest = out.index_select(0, rows)
            out.index_copy_(0, rows, torch.where(are_real[:, None, None], results, rest))

    def _of(self, slot: int, num_decodes: int, max_blocks: int) -> _Wrappers:
        key = slot < 0, num_decodes, 1 << (max_blocks - 1).bit_length()
        if key not in self._wrappers:
            self._wrappers[key] = _Wrappers(self._make_wrapper, *key[1:], self._device)
        return self._wrappers[key]


class _Fields:
    """Tensors of `size` decodes with up to `max_blocks` blocks each."""

    def __init__(self, size: int, max_blocks: int, **where: Any) -> None:
        self.starts = torch.empty(size + 1, dtype=torch.int32, **where)  # in pages
        self.last_lens = torch.empty(size, dtype=torch.int32, **where)  # tokens of the last page
        self.pages = torch.empty(size * max_blocks, dtype=torch.int32, **where)
        self.rows = torch.empty(size, dtype=torch.int64, **where)  # of the queries
        self.are_real = torch.empty(size, dtype=torch.bool, **where)  # not padding

    def fill(self, views: Views, num_tokens: int, block_size: int) -> int:
        """Write the decodes of a batch, on the host; padding reads one token of block 0. Return the
        number of pages.
        """
        starts, last_lens, pages, rows, are_real = (
            one.numpy()
            for one in (self.starts, self.last_lens, self.pages, self.rows, self.are_real)
        )
        sequences = views["decodes"][views["decodes"] != PADDING]
        count, kv_lens = len(sequences), views["kv_lens"][sequences]
        num_blocks = -(-kv_lens // block_size)
        starts[0], starts[1 : count + 1], starts[count + 1 :] = 0, num_blocks, 1
        np.cumsum(starts, out=starts)
        last_lens[:count], last_lens[count:] = (kv_lens - 1) % block_size + 1, 1
        table = views["block_table"][sequences]
        pages[: starts[count]] = table[np.arange(table.shape[1]) < num_blocks[:, None]]
        pages[starts[count] : starts[-1]] = 0
        are_real[:count], are_real[count:] = True, False
        rows[:count] = views["query_starts"][sequences]
        is_free = np.ones(num_tokens, dtype=bool)
        is_free[rows[:count]] = False
        rows[count:] = is_free.nonzero()[0][: len(rows) - count]
        return int(starts[-1])


class _Wrappers:
    """FlashInfer's wrappers of batches of one size, one for each of the host's buffers: a plan is
    copied from its wrapper's memory, which the next batch's must not overwrite before. They share
    what is on the device, so a graph recorded with one replays what another has planned.
    """

    def __init__(
        self, make: partial[Any], size: int, max_blocks: int, device: torch.device
    ) -> None:
        self._make, self._sizes, self._is_pinned = make, (size, max_blocks), device.type == "cuda"
        self.on_device = _Fields(size, max_blocks, device=device)
        self._plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        self._by_slot: dict[int, tuple[_Fields, Any]] = {}
        self.newest: Any = None  # that planned last

    def plan(self, views: Views, shape: Any, slot: int, sizes: dict[str, Any]) -> None:
        """Plan a batch, and start to copy what its kernels read."""
        if slot not in self._by_slot:
            fields = _Fields(*self._sizes, pin_memory=self._is_pinned)
            self._by_slot[slot] = fields, self._new_wrapper()
        host, self.newest = self._by_slot[slot]
        num_pages = host.fill(views, shape.num_tokens, sizes["page_size"])
        pages = self.on_device.pages[:num_pages]
        pages.copy_(host.pages[:num_pages], non_blocking=True)
        self.on_device.rows.copy_(host.rows, non_blocking=True)
        self.on_device.are_real.copy_(host.are_real, non_blocking=True)
        self.newest.plan(host.starts, pages, host.last_lens, **sizes)

    def _new_wrapper(self) -> Any:
        on_device = self.on_device
        wrapper = self._make(
            paged_kv_indptr_buffer=on_device.starts,
            paged_kv_indices_buffer=on_device.pages,
            paged_kv_last_page_len_buffer=on_device.last_lens,
        )
        workspace = self._make.args[0]
        wrapper.reset_workspace_buffer(workspace, self._plan)
        return wrapper
