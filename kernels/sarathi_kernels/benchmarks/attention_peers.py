"""What attention is compared with: torch's on unpaged data, and that of installed libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sarathi_kernels.benchmarks.attention_cases import AttentionCase, AttentionInputs

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Ways = dict[str, Callable[[], object]]  # by implementation
Library = Any  # the module of one that may not be installed
Make = Callable[[Library, AttentionCase, AttentionInputs], Callable[[], object]]
FLASHINFER_WORKSPACE = 256 * 2**20  # bytes


def works_here(work: Callable[[], object]) -> bool:
    """Whether `work` can be done here: a backend may lack the dtype, the mask or the chip."""
    try:
        work()
    except Exception:  # Triton's errors have no common class
        return False
    return True


def _contiguous(cache: Tensor, blocks: list[int], kv_len: int) -> Tensor:
    """One sequence's context, [1, num_kv_heads, kv_len, head_size]."""
    tokens = cache[blocks].flatten(0, 1)[:kv_len]
    return tokens.transpose(0, 1).contiguous()[None]


def torch_attention(case: AttentionCase, inputs: AttentionInputs) -> Ways:
    """Torch's attention of the case's only sequence by each backend that can do it; on a CPU, by
    its only one.
    """
    from torch.nn.attention.bias import causal_lower_right  # here, as it takes a second

    ((num_queries, kv_len),) = case.sequences
    query = inputs.query.transpose(0, 1).contiguous()[None]
    key = _contiguous(inputs.key_cache, inputs.blocks[0], kv_len)
    value = _contiguous(inputs.value_cache, inputs.blocks[0], kv_len)
    is_grouped = case.num_heads != case.num_kv_heads
    mask: Tensor = causal_lower_right(num_queries, kv_len)

    def attend(backend: SDPBackend | None) -> Tensor:
        bias = mask
        # cuDNN takes a mask that is not square as a tensor only.
        if backend == SDPBackend.CUDNN_ATTENTION and num_queries < kv_len:
            bias = mask_tensor
        in_use = nullcontext() if backend is None else sdpa_kernel([backend])
        with in_use:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, enable_gqa=is_grouped
            )

    if query.device.type != "cuda":
        return {"sdpa": partial(attend, None)}
    all_pairs = torch.ones(num_queries, kv_len, dtype=torch.bool, device=query.device)
    mask_tensor = all_pairs.tril(kv_len - num_queries)
    ways: Ways = {}
    for name, backend in BACKENDS.items():
        work = partial(attend, backend)
        if works_here(work):
            ways[name] = work
    return ways


def library_of(name: str, device: torch.device) -> Library | None:
    """The module of a library, if it is installed and `device` a GPU."""
    if device.type != "cuda" or find_spec(name) is None:
        return None
    return import_module(name)


def library_ways(
    module: str, makers: Mapping[str, Make], case: AttentionCase, inputs: AttentionInputs
) -> Ways:
    """What each of `makers` makes of a library, if that is installed. One that fails, as the
    library does not take the case, fails again when it is measured, and leaves a row that says so.
    """
    try:
        library = library_of(module, inputs.query.device)
    except Exception as error:  # of its libraries for CUDA
        return dict.fromkeys(makers, partial(_raise, error))
    if library is None:
        return {}
    ways: Ways = {}
    for name, make in makers.items():
        try:
            ways[name] = make(library, case, inputs)
        except Exception as error:
            ways[name] = partial(_raise, error)
    return ways


def _raise(error: Exception) -> None:
    raise error


def flash_attention(case: AttentionCase, inputs: AttentionInputs) -> Ways:
    """FlashAttention 3 of all rows, decodes too (the folder `hopper` of its repository)."""
    return library_ways("flash_attn_interface", {"flash": _flash}, case, inputs)


def _flash(library: Library, case: AttentionCase, inputs: AttentionInputs) -> Callable[[], object]:
    window = case.sliding_window
    return partial(
        library.flash_attn_with_kvcache,
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        cache_seqlens=inputs.plan.kv_lens,
        page_table=inputs.plan.block_table,
        cu_seqlens_q=inputs.plan.query_starts,
        max_seqlen_q=max(num_queries for num_queries, _ in case.sequences),
        softmax_scale=inputs.scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )


def flashinfer_decode(case: AttentionCase, inputs: AttentionInputs) -> Ways:
    """FlashInfer's kernel for decodes; its plan's time is left out, as in the other kernels."""
    return library_ways("flashinfer", {"flashinfer": _flashinfer_decode}, case, inputs)


def flashinfer_prefill(case: AttentionCase, inputs: AttentionInputs) -> Ways:
    """FlashInfer's kernel for prompts, of all rows."""
    return library_ways("flashinfer", {"flashinfer": _flashinfer_prefill}, case, inputs)


def flashinfer_hybrid(case: AttentionCase, inputs: AttentionInputs) -> Ways:
    """FlashInfer's kernel for prompts, of all rows, and its POD-Attention."""
    makers = {"flashinfer": _flashinfer_prefill, "flashinfer pod": _flashinfer_pod}
    return library_ways("flashinfer", makers, case, inputs)


def _flashinfer_decode(
    library: Library, case: AttentionCase, inputs: AttentionInputs
) -> Callable[[], object]:
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(inputs), "NHD", use_tensor_cores=case.num_heads > case.num_kv_heads
    )
    wrapper.plan(*_pages(case, inputs), *_shape(case), q_data_type=inputs.query.dtype)
    return partial(wrapper.run, inputs.query, (inputs.key_cache, inputs.value_cache))


def _flashinfer_prefill(
    library: Library, case: AttentionCase, inputs: AttentionInputs
) -> Callable[[], object]:
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(inputs), "NHD")
    wrapper.plan(
        inputs.plan.query_starts,
        *_pages(case, inputs),
        *_shape(case),
        causal=True,
        q_data_type=inputs.query.dtype,
    )
    return partial(wrapper.run, inputs.query, (inputs.key_cache, inputs.value_cache))


def _flashinfer_pod(
    library: Library, case: AttentionCase, inputs: AttentionInputs
) -> Callable[[], object]:
    """Its POD-Attention of a chunk, which must come first and unpaged, beside decodes on pages."""
    chunk, kv_len = case.sequences[0]
    caches = (inputs.key_cache, inputs.value_cache)
    blocks = inputs.blocks[0]
    key = inputs.key_cache[blocks].flatten(0, 1)[:kv_len].contiguous()
    value = inputs.value_cache[blocks].flatten(0, 1)[:kv_len].contiguous()
    wrapper = library.PODWithPagedKVCacheWrapper(_workspace(inputs), "NHD")
    wrapper.plan(*_pages(case, inputs, first=1), *_shape(case), q_data_type=inputs.query.dtype)
    prefill = inputs.query[:chunk]
    decodes = inputs.query[chunk:]
    return partial(wrapper.run, prefill, key, value, decodes, caches, causal_p=True)


def _shape(case: AttentionCase) -> tuple[int, int, int, int]:
    return case.num_heads, case.num_kv_heads, case.head_size, case.block_size


def _workspace(inputs: AttentionInputs) -> Tensor:
    return torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=inputs.query.device)


def _pages(
    case: AttentionCase, inputs: AttentionInputs, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table of the sequences from `first` on: starts, pages, tokens on the last
    page.
    """
    starts = [0]
    pages: list[int] = []
    tokens_on_last: list[int] = []
    for block_ids, (_, kv_len) in zip(inputs.blocks[first:], case.sequences[first:], strict=True):
        pages += block_ids
        starts.append(len(pages))
        tokens_on_last.append((kv_len - 1) % case.block_size + 1)

    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=inputs.query.device)

    return on_device(starts), on_device(pages), on_device(tokens_on_last)
