"""What attention is compared with: torch's on unpaged data, and that of installed libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sarathi_kernels.attention.cases import AttentionCase, AttentionInputs
from sarathi_kernels.attention.flash import FLASH, FlashPrompts
from sarathi_kernels.attention.flash_infer import FLASHINFER, FlashInferDecodes
from sarathi_kernels.attention.hybrid import HybridAttention
from sarathi_kernels.runtime.chip import chip_of

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Ways = dict[str, Callable[[], object]]  # by implementation
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
    return cache[blocks].flatten(0, 1)[:kv_len].transpose(0, 1).contiguous()[None]


def torch_attention(case: AttentionCase, inputs: AttentionInputs) -> Ways:
    """Torch's attention of the case's only sequence by each backend that can do it; on a CPU, by
    its only one.
    """
    from torch.nn.attention.bias import causal_lower_right  # here, as it takes a second

    ((num_queries, kv_len),) = case.sequences
    query = inputs.query.transpose(0, 1).contiguous()[None]
    key, value = (
        _contiguous(cache, inputs.blocks[0], kv_len)
        for cache in (inputs.key_cache, inputs.value_cache)
    )
    is_grouped = case.num_heads != case.num_kv_heads
    mask: Any = causal_lower_right(num_queries, kv_len)

    def attend(backend: SDPBackend | None) -> Tensor:
        # cuDNN takes a mask that is not square as a tensor only.
        bias = (
            mask_tensor if backend == SDPBackend.CUDNN_ATTENTION and num_queries < kv_len else mask
        )
        if backend is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, enable_gqa=is_grouped
            )
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, enable_gqa=is_grouped
            )

    if query.device.type != "cuda":
        return {"sdpa": lambda: attend(None)}
    mask_tensor = torch.ones(num_queries, kv_len, dtype=torch.bool, device=query.device).tril(
        kv_len - num_queries
    )
    works = {name: (lambda backend=backend: attend(backend)) for name, backend in BACKENDS.items()}
    return {name: work for name, work in works.items() if works_here(work)}


def library_attention(case: AttentionCase, inputs: AttentionInputs, out: Tensor) -> Ways:
    """Attention by FlashAttention 3 and FlashInfer as the engine has it, where they are installed
    and take the case, else by Triton; the plan's time is left out. Of a batch with decodes, "flash"
    attends for these, too.
    """
    plan, query = inputs.plan, inputs.query
    spec: Any = SimpleNamespace(**vars(case), kv_dtype="auto")
    place = spec, query.dtype, case.block_size
    refused = [one.why_not(*place, chip_of(query.device)) for one in (FLASH, FLASHINFER)]
    prompts = None if refused[0] else FlashPrompts()
    decodes = None if refused[1] else FlashInferDecodes(*place, query.device)
    attention = HybridAttention("series", prompts, decodes)
    fields = ("query_starts", "kv_lens", "block_table", "decodes", "prompt_lens")
    views = {name: getattr(plan, name).cpu().numpy() for name in fields}
    counts = {"num_tiles": plan.num_tiles, "num_decodes": plan.num_decodes}
    shape = SimpleNamespace(num_tokens=len(query), max_blocks=plan.block_table.shape[1], **counts)
    attention.begin(views, shape, plan.slot)
    tensors = query, inputs.key_cache, inputs.value_cache
    rest = inputs.scale, case.sliding_window, out
    names = ("flash" if prompts else "triton", "flashinfer" if decodes else "triton")
    there = [name for name, count in zip(names, counts.values(), strict=True) if count]
    works = {" + ".join(there): partial(attention.attend, *tensors, plan, *rest)}
    if prompts and len(there) == 2:
        whole = replace(plan, prompt_lens=plan.kv_lens)
        works["flash"] = partial(prompts.attend, *tensors, whole, *rest)
    return {name: work for name, work in works.items() if "flash" in name}


def _pages(
    case: AttentionCase, inputs: AttentionInputs, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table of the sequences from `first` on: starts, pages, tokens on the last
    page.
    """
    device = inputs.query.device
    blocks, sequences = inputs.blocks[first:], case.sequences[first:]
    counts = torch.tensor([0, *(len(ids) for ids in blocks)])
    last = [(kv_len - 1) % case.block_size + 1 for _, kv_len in sequences]
    pages = [block for ids in blocks for block in ids]
    starts = counts.cumsum(0).to(device, torch.int32)
    pages_table = torch.tensor(pages, dtype=torch.int32, device=device)
    return starts, pages_table, torch.tensor(last, dtype=torch.int32, device=device)


def _flashinfer(inputs: AttentionInputs) -> Any | None:
    """The module, if there is one and the tensors are on a GPU."""
    if inputs.query.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return None
    return importlib.import_module("flashinfer")


def _workspace(inputs: AttentionInputs) -> Tensor:
    return torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=inputs.query.device)


def flashinfer_prefill(case: AttentionCase, inputs: AttentionInputs) -> Ways:
    """FlashInfer's kernel for prompts, of all rows, if it is installed."""
    if (flashinfer := _flashinfer(inputs)) is None:
        return {}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(inputs), "NHD")
    shape = (case.num_heads, case.num_kv_heads, case.head_size, case.block_size)
    wrapper.plan(
        inputs.plan.query_starts,
        *_pages(case, inputs),
        *shape,
        causal=True,
        q_data_type=inputs.query.dtype,
    )
    caches = (inputs.key_cache, inputs.value_cache)
    return {"flashinfer": partial(wrapper.run, inputs.query, caches)}


def flashinfer_pod(case: AttentionCase, inputs: AttentionInputs) -> Ways:
    """Its POD-Attention of a chunk, which must come first and unpaged, beside decodes on pages."""
    flashinfer = _flashinfer(inputs)
    if flashinfer is None or not hasattr(flashinfer, "PODWithPagedKVCacheWrapper"):
        return {}
    chunk, kv_len = case.sequences[0]
    key, value = (
        cache[inputs.blocks[0]].flatten(0, 1)[:kv_len].contiguous()
        for cache in (inputs.key_cache, inputs.value_cache)
    )
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(_workspace(inputs), "NHD")
    shape = (case.num_heads, case.num_kv_heads, case.head_size, case.block_size)
    wrapper.plan(*_pages(case, inputs, first=1), *shape, q_data_type=inputs.query.dtype)
    caches = (inputs.key_cache, inputs.value_cache)
    prefill, decodes = inputs.query[:chunk], inputs.query[chunk:]
    attend = partial(wrapper.run, prefill, key, value, decodes, caches, causal_p=True)
    return {"flashinfer pod": attend}
