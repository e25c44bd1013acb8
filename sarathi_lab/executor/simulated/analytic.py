"""One layer's operations by formula: from the model's shapes and a device's figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.attention import (
    decode_attention_time,
    hybrid_attention_time,
    prefill_attention_time,
)
from sarathi_lab.executor.simulated.communication import all_reduce_time
from sarathi_lab.executor.simulated.hardware import ONE_DEVICE, Hardware, Parallel
from sarathi_lab.executor.simulated.matmul import matmul_time
from sarathi_lab.model.spec import Linear, ModelSpec

# Products whose partial sums are added over the devices (Megatron-LM).
CUT_BY_ROWS = ("out_proj", "ffn_down", "shared_down")
WHOLE = ("router", "shared_gate")  # on every device, which chooses the same experts
ALL_REDUCES = 2  # a layer: a shared expert's sums are added to those of the others before
NORMS = 2  # a layer


class AnalyticOperations:
    """`Operations` of `spec`, in elements of `dtype_bytes`, on one device of `hardware`.

    The devices of `parallel` that share a layer split heads, columns and rows as in Megatron-LM:
    what follows is one device's share. Raises UserError for hardware of unknown links, or without
    the peak of 8-bit products where the weights are such.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        dtype_bytes: int,
        parallel: Parallel = ONE_DEVICE,
    ) -> None:
        self.spec = spec
        self.hardware = hardware
        self.dtype_bytes = dtype_bytes
        self.parallel = parallel
        self.iteration_overhead = hardware.iteration_overhead
        if parallel.tensor > 1:
            _ = hardware.link_rate  # unknown, it is refused at once
        self._in_fp8: Hardware | None = None  # as products in 8 bits see it
        if spec.weight_dtype == "fp8":
            self._in_fp8 = replace(
                hardware,
                flops_per_second=hardware.fp8_peak,
                matmul_efficiency=hardware.fp8_efficiency,
            )
        self._read: dict[str, Any] = {  # by attention
            "num_heads": spec.num_heads // parallel.tensor,
            "num_kv_heads": spec.num_kv_heads // parallel.tensor,
            "kv_head_bytes": spec.kv_head_bytes(dtype_bytes),
            "hardware": hardware,
        }

    @property
    def uncertainty(self) -> Mapping[str, float]:
        return self.hardware.held_out_errors

    def token_times(self, num_tokens: int) -> Mapping[str, float]:
        spec, tensor, dtype_bytes = self.spec, self.parallel.tensor, self.dtype_bytes
        times = {
            linear.name: self.layer_product_time(num_tokens, *self.share_of(linear))
            for linear in spec.layer_linears
        }
        times["norms"] = NORMS * self._norm_time(num_tokens)
        # Between the products of the FFN one row is read, or two with a gate, and one written.
        rows = 3 if spec.gated_ffn else 2
        width = spec.ffn_size
        if spec.num_experts:  # whose activation is a part of them; the router's choice is not
            times["router"] += self._moving_time(num_tokens * spec.num_experts * dtype_bytes)
            width = spec.shared_expert_size
        if width:
            ffn_share = math.ceil(width / tensor)
            times["activation"] = self._moving_time(num_tokens * rows * ffn_share * dtype_bytes)
        # New keys and values are read as computed, and written as the cache holds them.
        computed = 2 * spec.kv_size * dtype_bytes
        cached = 2 * spec.num_kv_heads * spec.kv_head_bytes(dtype_bytes)
        times["kv_write"] = self._moving_time(num_tokens * (computed + cached) // tensor)
        if tensor > 1:
            num_bytes = num_tokens * spec.hidden_size * dtype_bytes
            times["all_reduce"] = ALL_REDUCES * all_reduce_time(num_bytes, tensor, self.hardware)
        return times

    def once_times(self, num_tokens: int) -> Mapping[str, float]:
        """The norm before the output head."""
        return {"norms": self._norm_time(num_tokens)}

    def emit_times(self, num_emits: int) -> Mapping[str, float]:
        """Each device in its share of the vocabulary."""
        vocab = math.ceil(self.spec.vocab_size / self.parallel.tensor)
        return {
            "lm_head": self.product_time(num_emits, *self.share_of(self.spec.lm_head)),
            "sampling": self._moving_time(num_emits * vocab * self.dtype_bytes),
        }

    def attention_times(self, batch: Batch) -> tuple[float, float]:
        """In one call, what decodes add to the prefills' is theirs."""
        prefill, decode = self.separate_attention(batch)
        if self.hardware.hybrid_call and prefill and decode:
            return prefill, max(0.0, self.hybrid_attention(batch) - prefill)
        return prefill, decode

    def separate_attention(self, batch: Batch) -> tuple[float, float]:
        """Seconds of one layer's calls over prefills and over decodes."""
        prefill = 0.0
        if batch.num_prefills:
            prefill = prefill_attention_time(
                _prefills(batch), head_size=self.spec.head_size, **self._read
            )
        decodes, kv_tokens = batch.num_decodes, batch.decode_kv_tokens
        return prefill, decode_attention_time(decodes, kv_tokens, **self._read)

    def hybrid_attention(self, batch: Batch) -> float:
        """Seconds of one layer's call over all of `batch`, which has decodes."""
        return hybrid_attention_time(
            _prefills(batch),
            batch.num_decodes,
            batch.decode_kv_tokens,
            head_size=self.spec.head_size,
            **self._read,
        )

    def share_of(self, linear: Linear) -> tuple[int, int]:
        """Rows and columns of a weight on one device: cut by those that save sends."""
        rows, columns = linear.in_features, linear.out_features
        if linear.name in WHOLE:
            return rows, columns
        if linear.name in CUT_BY_ROWS:
            return math.ceil(rows / self.parallel.tensor), columns
        return rows, math.ceil(columns / self.parallel.tensor)

    def product_time(self, num_tokens: int, rows: int, columns: int) -> float:
        """Seconds of one product [num_tokens, rows] x [rows, columns]."""
        return matmul_time(num_tokens, rows, columns, self.hardware, self.dtype_bytes)

    def layer_product_time(self, num_tokens: int, rows: int, columns: int) -> float:
        """The same of a layer's weights: in 8 bits, after the activations are converted to these,
        where the weights are such.
        """
        if self._in_fp8 is None:
            return self.product_time(num_tokens, rows, columns)
        converted = num_tokens * rows * (self.dtype_bytes + 1)  # read, and written in 8 bits
        product = matmul_time(num_tokens, rows, columns, self._in_fp8, 1)
        return product + self._moving_time(converted)

    def _norm_time(self, num_tokens: int) -> float:
        """Fused with the residual before it: two rows read, two written, on every device."""
        return self._moving_time(num_tokens * 4 * self.spec.hidden_size * self.dtype_bytes)

    def _moving_time(self, num_bytes: int) -> float:
        """Seconds of a kernel that does little but move data; 0 if there is none to move."""
        if num_bytes == 0:
            return 0.0
        return self.hardware.kernel_launch + num_bytes / self.hardware.memory_rate


def _prefills(batch: Batch) -> Iterator[tuple[int, int]]:
    """Start and tokens of each chunk that is no decode."""
    return ((chunk.start, chunk.num_tokens) for chunk in batch.chunks if not chunk.is_decode)
