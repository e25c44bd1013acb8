"""Which experts each token goes to and what they make of it, in plain torch and without a loop over
them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_kernels.elementwise.activation import gated_activate_

ALIGNED_BYTES = 16  # of the rows of grouped products


def experts(
    hidden: Tensor,  # [num_tokens, hidden_size]
    router_logits: Tensor,  # [num_tokens, num_experts]
    gate_up: Tensor,  # [num_experts, 2 size, hidden_size], gates first
    down: Tensor,  # [num_experts, hidden_size, size]
    *,
    top_k: int,
    normalised: bool,
) -> Tensor:
    """The sum of what the `top_k` experts of each token, with SiLU, make of it, weighted by their
    shares (`route`); [num_tokens, hidden_size].

    Sizes follow from the number of tokens alone, whatever they chose, and nothing waits for the
    device where it has a grouped product of the dtype (bfloat16 on a GPU, all on a CPU).
    """
    shares, chosen = route(router_logits, top_k, normalised=normalised)
    # Pairs of a token and an expert, numbered token by token; those of one expert side by side.
    of_pairs, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(max(len(order), len(down)), device=hidden.device)
    ends = torch.searchsorted(of_pairs, numbers[: len(down)], right=True, out_int32=True)
    gate, up = _grouped(hidden[order // top_k], gate_up, ends).chunk(2, dim=-1)
    results = _grouped(gated_activate_(gate, up, "silu"), down, ends)
    places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
    by_token = results[places].unflatten(0, chosen.shape)  # [num_tokens, top_k, hidden_size]
    return by_token.mul_(shares[..., None].to(by_token.dtype)).sum(dim=1)


def route(logits: Tensor, top_k: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Shares and numbers [num_tokens, top_k] of the experts with the largest logits of each row
    [num_tokens, num_experts]: of the softmax over all in float32, over those chosen alone if
    `normalised`.
    """
    shares, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True) if normalised else shares, chosen


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [num_rows, in_features] up to each of `ends` by weights [num_experts, out_features,
    in_features] of one expert after the other; [num_rows, out_features].
    """
    multiple = ALIGNED_BYTES // rows.element_size()
    if missing := -rows.shape[1] % multiple:
        rows, weights = F.pad(rows, (0, missing)), F.pad(weights, (0, missing))
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
