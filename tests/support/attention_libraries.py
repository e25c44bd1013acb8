"""FlashAttention 3 and FlashInfer in plain torch: their signatures, and when FlashInfer's memory is
read and written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from plain_kernels import launch_plain
from torch import Tensor

from sarathi_kernels.attention.reference import make_segment, paged_attention


def attend(
    query: Tensor, out: Tensor, keys: Tensor, values: Tensor, *places: Any, left: int, scale: float
) -> None:
    """Rows of one sequence, whose newest they are, to its first `kv_len` tokens in `blocks`."""
    first, end, kv_len, blocks = places
    window = None if left < 0 else left + 1
    where = {"device": query.device, "dtype": query.dtype}
    segment = make_segment(0, end - first, kv_len, blocks, sliding_window=window, **where)
    out[first:end] = paged_attention(query[first:end], keys, values, [segment], scale)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False
):  # fmt: skip
    """hopper/flash_attn_interface.py of Dao-AILab/flash-attention at 01afd16."""
    assert causal
    assert window_size[1] in (-1, 0)
    assert isinstance(max_seqlen_q, int)
    assert all(t.dtype == torch.int32 for t in (cache_seqlens, page_table, cu_seqlens_q))
    assert len(cu_seqlens_q) == len(cache_seqlens) + 1 == len(page_table) + 1
    assert q.stride(-1) == k_cache.stride(-1) == page_table.stride(-1) == 1

    def work(out, q, keys, values, starts, lens, table):
        for i, kv_len in enumerate(lens.tolist()):
            first, end = starts[i : i + 2].tolist()
            assert end - first <= max_seqlen_q
            if kv_len == 0:
                out[first:end] = 0
                continue
            blocks = table[i, : -(-kv_len // keys.shape[1])].long()
            places = first, end, kv_len, blocks
            attend(q, out, keys, values, *places, left=window_size[0], scale=softmax_scale)

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_plain(work, out, q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table)
    return out


class BatchDecodeWithPagedKVCacheWrapper:
    """FlashInfer 0.7.2: a plan is written to locked memory and copied from there when the stream
    comes to it, to the workspace that kernels read; here the starts of each decode's pages.
    """

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
        use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None, backend="auto", jit_args=None
    ):  # fmt: skip
        assert kv_layout == "NHD"
        assert use_cuda_graph
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self._tensor_cores = use_tensor_cores
        self._starts, self._pages = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._last_lens = paged_kv_last_page_len_buffer
        self._frozen = None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self._workspace = int_workspace_buffer.view(torch.int32)
        self._locked = torch.empty(
            self._workspace.shape,
            dtype=torch.int32,
            pin_memory=int_workspace_buffer.device.type == "cuda",
        )

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs
    ):  # fmt: skip
        assert not deprecated_positional_args
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._plan_impl(indptr, indices, last_page_len, *sizes, **kwargs)

    def _plan_impl(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None,
        q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None,
        rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None,
        fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, is_causal=None
    ):  # fmt: skip
        frozen = page_size, window_left, sm_scale, q_data_type  # what a graph goes on with
        assert self._frozen in (None, frozen)
        self._frozen = frozen
        assert (num_qo_heads != num_kv_heads) == self._tensor_cores
        assert len(last_page_len) == len(self._last_lens)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert (indptr[1:] > indptr[:-1]).all()
        assert len(indices) == indptr[-1] <= len(self._pages)
        self._starts.copy_(indptr, non_blocking=True)
        self._last_lens.copy_(last_page_len, non_blocking=True)
        self._pages[: len(indices)].copy_(indices, non_blocking=indices.device.type == "cuda")
        self._locked[: len(indptr)] = indptr
        self._workspace[: len(indptr)].copy_(self._locked[: len(indptr)], non_blocking=True)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None,
        q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None
    ):  # fmt: skip
        page_size, left, sm_scale, dtype = self._frozen
        assert q.dtype == dtype
        assert len(q) == len(self._last_lens)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        assert out.shape == q.shape
        assert out.is_contiguous()
        scale = sm_scale * q_scale

        def work(out, q, keys, values, plan, starts, pages, last_lens):
            assert keys.shape[1] == page_size
            for i, last in enumerate(last_lens.tolist()):
                begin, end = plan[i : i + 2].tolist()
                kv_len, blocks = (end - begin - 1) * page_size + last, pages[begin:end].long()
                attend(q, out, keys, values, i, i + 1, kv_len, blocks, left=left, scale=scale)

        on_device = self._workspace, self._starts, self._pages, self._last_lens
        launch_plain(work, out, q, *paged_kv_cache, *on_device)
        return out


FAKES = {
    "flash_attn_interface": flash_attn_with_kvcache,
    "flashinfer": BatchDecodeWithPagedKVCacheWrapper,
}


@contextmanager
def installed() -> Iterator[None]:
    """Let the fakes be imported as the libraries."""
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in FAKES.items():
            module: Any = ModuleType(name)
            setattr(module, fake.__name__, fake)
            patch.setitem(sys.modules, name, module)
        yield
