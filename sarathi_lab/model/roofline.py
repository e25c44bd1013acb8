"""Roofline time of work on a device with known peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.console import amount
from sarathi_lab.model.layers import Linear, WindowSums, Work
from sarathi_lab.model.spec import ModelSpec

if TYPE_CHECKING:  # its import takes half a second
    import pandas as pd

TILE = 128  # tokens of a tile of a GPU's large matrix products (SARATHI, section 4.4)


@dataclass(frozen=True)
class Peaks:
    """Peak FLOP/s and bytes/s of a device, and their source."""

    flops_per_second: float
    bytes_per_second: float
    source: str
    # None: as 16 bits; not a number where products of 8 bits have another peak, which is unknown.
    fp8_flops_per_second: float | None = None

    def rate(self, spec: ModelSpec) -> float:
        """Return the FLOP/s of the products of `spec`: in 8 bits where its checkpoint has these."""
        stored, fp8 = spec.quantisation, self.fp8_flops_per_second
        if stored is None or not stored.has_fp8_products or fp8 is None:
            return self.flops_per_second
        return fp8

    def describe(self) -> str:
        """Format such as "measured: 1.2 TFLOP/s, 20 GB/s"."""
        return (
            f"{self.source}: {amount(self.flops_per_second / 1e12)} TFLOP/s, "
            f"{amount(self.bytes_per_second / 1e9)} GB/s"
        )


def roofline_time(spec: ModelSpec, work: Work, dtype_bytes: int, peaks: Peaks) -> Any:
    """Compute the least seconds of one iteration, all operations overlapping: max(FLOPs / peak,
    bytes / bandwidth). Elementwise if `work` holds arrays.
    """
    compute = spec.flops(work) / peaks.rate(spec)
    memory = spec.min_bytes(work, dtype_bytes) / peaks.bytes_per_second
    return np.maximum(compute, memory)


def operation_rooflines(
    spec: ModelSpec, work: Work, dtype_bytes: int, peaks: Peaks
) -> dict[str, float]:
    """Compute the least seconds of each operation of an iteration, over all layers: max(FLOPs /
    peak, bytes / bandwidth) of each. Their sum bounds operations that run one after another.

    Products read weights and inputs and write outputs; attention reads queries and the KV cache.
    `elementwise` is what fused kernels move: norms add to the residual stream, rotary embedding
    also fills the cache, and activation. Empty for a model without formulas.
    """
    if not spec.has_formulas:
        return {}
    num_tokens = work.num_prefill_tokens + work.num_decode_tokens
    token_bytes = num_tokens * spec.num_layers * dtype_bytes

    def seconds(flops: float, num_bytes: float, peak: float = peaks.flops_per_second) -> float:
        return max(flops / peak, num_bytes / peaks.bytes_per_second)

    def product(
        linear: Linear, rows: float, used: float = 1.0, weight: float = dtype_bytes
    ) -> float:
        moved = rows * (linear.in_features + linear.out_features) * linear.count * dtype_bytes
        read = used * linear.num_params * weight
        return seconds(2 * rows * linear.num_params, read + moved, peaks.rate(spec))

    def attention(rows: float, pairs: float, kv_tokens: float) -> float:
        moved = 2 * rows * spec.num_layers * spec.q_size * dtype_bytes
        kv_bytes = kv_tokens * spec.kv_bytes_per_token(dtype_bytes)
        return seconds(4 * spec.num_layers * spec.q_size * pairs, kv_bytes + moved)

    weight, of_expert = spec.linear_bytes(dtype_bytes), spec.expert_bytes(dtype_bytes)
    head = product(spec.lm_head, work.num_emits, weight=dtype_bytes)
    chosen = spec.experts_per_token / max(1, spec.num_experts)
    heads = spec.q_size + 2 * spec.kv_size
    width = spec.ffn_size * max(1, spec.experts_per_token) + spec.shared_expert_size
    ffn = width * (3 if spec.gated_ffn else 2)
    return {
        **{one.name: product(one, num_tokens, weight=weight) for one in spec.layer_linears},
        **{
            one.name: product(
                one, num_tokens * chosen, spec.share_of_experts(num_tokens), of_expert
            )
            for one in spec.expert_linears
        },
        "attention_prefill": attention(
            work.num_prefill_tokens, work.prefill_query_key_pairs, work.prefill_kv_tokens
        ),
        "attention_decode": attention(
            work.num_decode_tokens, work.decode_kv_tokens, work.decode_kv_tokens
        ),
        "elementwise": seconds(0, token_bytes * (2 * 4 * spec.hidden_size + 2 * heads + ffn)),
        **({"lm_head": head} if work.num_emits else {}),
    }


def request_roofline(
    spec: ModelSpec, requests: pd.DataFrame, dtype_bytes: int, peaks: Peaks
) -> NDArray[np.float64]:
    """Compute the least seconds of each request [R] alone: its whole prompt, then one token per
    iteration.

    Decodes are taken at their mean context, P + D/2: exact where memory bounds them, as it does
    single ones.
    """
    prompt, output = requests.prompt_len.astype(float), requests.output_len.astype(float)
    sums = (*Work.__annotations__, *WindowSums._fields)
    idle = requests[[]].assign(**dict.fromkeys(sums, 0.0))
    prefill = idle.assign(
        num_prefill_tokens=prompt,
        prefill_kv_tokens=prompt,
        prefill_query_key_pairs=prompt * (prompt + 1) / 2,
        num_emits=1.0,
    )
    decode = idle.assign(num_decode_tokens=1.0, decode_kv_tokens=prompt + output / 2, num_emits=1.0)
    if (window := spec.layers.window) is not None:
        lengths = requests.prompt_len.astype(int)
        prefill = prefill.assign(
            window_pairs=[float(window.pairs(0, length)) for length in lengths],
            window_prefill_kv_tokens=prompt,
        )
        seen = (prompt + output / 2).clip(upper=window.size)
        decode = decode.assign(window_decode_kv_tokens=seen)
    first = roofline_time(spec, prefill, dtype_bytes, peaks)
    each = roofline_time(spec, decode, dtype_bytes, peaks)
    return np.asarray(first + (output - 1) * each, dtype=float)
