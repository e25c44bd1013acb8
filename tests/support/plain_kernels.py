"""The kernels' references launched in place of the kernels: the engine's path on a GPU, without the
time that Triton's interpreter takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from sarathi_kernels.attention import hybrid
from sarathi_kernels.attention.plan import PADDING, AttentionPlan
from sarathi_kernels.attention.reference import make_segment, paged_attention
from sarathi_kernels.elementwise.activation import activate_
from sarathi_kernels.elementwise.norm import add_norm_reference
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store_reference
from sarathi_kernels.elementwise.sampling import greedy_reference
from sarathi_kernels.runtime.launch import launch
from sarathi_lab.model import kernel_operations


class Kernel:
    """Plain torch that is launched like a kernel."""

    def __init__(self, work: Callable[..., object]) -> None:
        self._work = work

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return self._work


def launch_plain(work: Callable[..., object], *arguments: Any) -> None:
    launch(Kernel(work), (1,), *arguments)


def add_norm(
    hidden: Tensor,
    update: Tensor | None,
    *norm: Any,
    out: Tensor | None = None,
) -> Tensor:
    made = torch.empty_like(hidden) if out is None else out

    def work(out: Tensor, *inputs: Any) -> None:
        out.copy_(add_norm_reference(*inputs))

    launch_plain(work, made, hidden, update, *norm)
    return made


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
) -> Tensor:
    def work(qkv: Tensor, *inputs: Tensor) -> None:
        qkv[:, :num_heads] = rotate_and_store_reference(qkv, *inputs, num_heads)

    launch_plain(work, qkv, cos, sin, slots, key_cache, value_cache)
    return qkv[:, :num_heads]


def gated_activation(gate_up: Tensor, activation: Any) -> Tensor:
    out = torch.empty(
        len(gate_up), gate_up.shape[1] // 2, device=gate_up.device, dtype=gate_up.dtype
    )

    def work(out: Tensor, gate_up: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=1)
        out.copy_(activate_(gate.clone(), activation) * up)

    launch_plain(work, out, gate_up)
    return out


def greedy(logits: Tensor) -> Tensor:
    tokens = torch.empty(len(logits), device=logits.device, dtype=torch.int64)
    launch_plain(lambda out, logits: out.copy_(greedy_reference(logits)), tokens, logits)
    return tokens


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
    sequences: Tensor,
) -> None:
    """The rows of `sequences` of the plan."""

    def work(query: Tensor, out: Tensor, *given: Any) -> None:
        starts, lens, table, wanted, keys, values = given
        for sequence in sorted({number for number in wanted.tolist() if number != PADDING}):
            first, end, kv_len = (int(x) for x in (*starts[sequence:][:2], lens[sequence]))
            segment = make_segment(
                0,
                end - first,
                kv_len,
                table[sequence, : -(-kv_len // keys.shape[1])].long(),
                sliding_window=sliding_window,
                device=query.device,
                dtype=query.dtype,
            )
            out[first:end] = paged_attention(query[first:end], keys, values, [segment], scale)

    if len(sequences):
        places = plan.query_starts, plan.kv_lens, plan.block_table
        launch_plain(work, query, out, *places, sequences, key_cache, value_cache)


def prefill_attention(*inputs: Any, sliding_window: int | None, out: Tensor) -> None:
    attend(*inputs, sliding_window, out, inputs[3].tiles[:, 0])


def decode_attention(*inputs: Any, sliding_window: int | None, out: Tensor) -> None:
    attend(*inputs, sliding_window, out, inputs[3].decodes)


def fused_attention(*inputs: Any, **outputs: Any) -> None:
    prefill_attention(*inputs, **outputs)
    decode_attention(*inputs, **outputs)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Let `KernelOperations` launch plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        for stand_in in (add_norm, rotate_and_store, gated_activation, greedy):
            patch.setattr(kernel_operations, stand_in.__name__, stand_in)
        for stand_in in (prefill_attention, decode_attention, fused_attention):
            patch.setattr(hybrid, stand_in.__name__, stand_in)
        yield
