"""One layer's operations by formula: from the model's shapes and a device's figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.hardware import (
    ONE_DEVICE,
    OPERATIONS,
    REPLICATED,
    Hardware,
    Parallel,
)
from sarathi_lab.executor.simulated.kernel_times import (
    AttentionTimes,
    CallTimes,
    Chunks,
    Heads,
    all_reduce_time,
    matmul_time,
)
from sarathi_lab.executor.tables import Per
from sarathi_lab.model.layers import Linear
from sarathi_lab.model.quantisation import kind_of_product
from sarathi_lab.model.spec import ModelSpec

# Products whose partial sums are added over the devices.
CUT_BY_ROWS = frozenset(OPERATIONS["cut_by_rows"])
# Kernels before a layer's products, which may convert to 8 bits what they write.
BEFORE = {"qkv_proj": "norm", "out_proj": "attention", "ffn_up": "norm", "ffn_down": "activation"}
ALL_REDUCES = 2  # per layer: a shared expert's sums are added to those of the others before


@dataclass(eq=False)
class AnalyticOperations:
    """Operations of `spec`, in elements of `dtype_bytes`, on one device of `hardware`. Of layers
    that are not alike, a layer is their mean.

    The devices of `parallel` that share a layer split heads, columns and rows as in Megatron-LM;
    times are of one device's share. Raises UserError for unknown links, or an unknown peak of 8-bit
    products where the weights are such.
    """

    spec: ModelSpec
    hardware: Hardware
    dtype_bytes: int
    parallel: Parallel = ONE_DEVICE
    fused: Collection[str] = ()  # `Host.fused`

    @property
    def caution(self) -> str:
        """Source of the times, where it is not these formulas alone."""
        return ""

    def __post_init__(self) -> None:
        spec = self.spec
        hardware = self.hardware
        tensor = self.parallel.tensor
        if tensor > 1:
            _ = hardware.link_rate  # raises if unknown
        self.iteration_overhead = hardware.iteration_overhead
        self.uncertainty = dict(hardware.held_out_errors)
        mean_size = (spec.head_size + spec.heads.value_size) // 2  # of keys and values
        num_kv_heads = self.parallel.kv_heads(spec)
        self.heads = Heads(spec.num_heads // tensor, num_kv_heads, mean_size)
        kv_head_bytes = spec.kv_head_bytes(self.dtype_bytes)
        if mean_size != spec.head_size:
            layer_bytes = spec.kv_layer_bytes(self.dtype_bytes)
            kv_head_bytes = layer_bytes // (2 * spec.num_kv_heads)
        self.attention = AttentionTimes(hardware, *self.heads, kv_head_bytes)
        self._written_bytes = self._bytes_of_cache_writes()
        # An all-reduce may include the norm behind it, which then converts to 8 bits as well.
        self._has_norms = tensor == 1 or "all_reduce" not in self.fused
        self._converting = set(self.fused)
        if not self._has_norms:
            self._converting.add("norm")
        self._low_hardware: Hardware | None = None  # with the peak of products in 8 or 4 bits
        if spec.stored is not None and spec.stored.of != "experts":
            self._low_hardware = hardware.for_products(spec.stored)

    def times(self, per: Per, number: int) -> Mapping[str, float]:
        """Compute the seconds of operations `per` layer or iteration over `number` tokens, or per
        emitted token.
        """
        if per == "layer":
            return self._layer_times(number)
        if per == "iteration":
            before_head = self._norm_time(number)
            return {"norms": before_head}
        head_shape = self.shard_shape(self.spec.lm_head)
        vocab = math.ceil(self.spec.vocab_size / self.parallel.tensor)  # a device's share
        logits_bytes = number * vocab * self.dtype_bytes
        return {
            "lm_head": self.product_time(number, *head_shape),
            "sampling": self._streaming_time(logits_bytes),
        }

    def _layer_times(self, num_tokens: int) -> Mapping[str, float]:
        times = self._product_times(num_tokens)
        spec = self.spec
        # A norm before, and a sum over devices after each.
        sublayers = spec.num_sublayers / spec.num_layers
        times["norms"] = 0.0
        if self._has_norms:
            times["norms"] = sublayers * self._norm_time(num_tokens)
        if spec.num_experts:  # experts include their activation; the router adds its choice
            scores_bytes = num_tokens * spec.num_experts * self.dtype_bytes
            expert_layers = spec.num_expert_layers / spec.num_layers
            times["router"] += expert_layers * self._streaming_time(scores_bytes)
        if spec.activations:
            times["activation"] = self._activation_time(num_tokens)
        times["kv_write"] = self._cache_write_time(num_tokens)
        tensor = self.parallel.tensor
        if tensor > 1:
            hidden_bytes = num_tokens * spec.hidden_size * self.dtype_bytes
            seconds = all_reduce_time(hidden_bytes, tensor, self.hardware)
            times["all_reduce"] = sublayers * seconds
        return times

    def _product_times(self, num_tokens: int) -> dict[str, float]:
        """Compute the mean layer's products, without conversions that other kernels include."""
        times = {}
        for linear in self.spec.layer_linears:
            rows, columns = self.shard_shape(linear)
            product = self.layer_product_time(num_tokens, rows, columns, linear.name)
            seconds = product - self.fused_time(num_tokens, linear)
            share = linear.count / self.spec.num_layers
            times[linear.name] = share * seconds
        return times

    def _activation_time(self, num_tokens: int) -> float:
        """One row is read, or two with a gate, and one written."""
        num_rows = 3 if self.spec.gated_ffn else 2
        row_bytes = num_tokens * num_rows * self.dtype_bytes
        seconds = 0.0
        for width, count in self.spec.activations:
            on_device = math.ceil(width / self.parallel.tensor)
            share = count / self.spec.num_layers
            seconds += share * self._streaming_time(row_bytes * on_device)
        return seconds

    def _bytes_of_cache_writes(self) -> float:
        """Bytes that the mean layer's writing of one token moves on a device: keys and values are
        read as computed, and written in the cache's format.
        """
        on_device = self.parallel.with_heads_of_device(self.spec)
        latent = on_device.layers.latent
        width = latent.cached_size if latent else on_device.cached_values
        if on_device.layers.compressed:
            width = on_device.head_size  # keys and values are one vector
        read_bytes = width * self.dtype_bytes
        token_bytes = on_device.kv_bytes_per_token(self.dtype_bytes)  # of all layers
        return read_bytes + token_bytes / on_device.num_attention_layers

    def _cache_write_time(self, num_tokens: int) -> float:
        """Compute the mean layer's seconds of writing new keys and values."""
        num_bytes = int(num_tokens * self._written_bytes)
        share = self.spec.num_attention_layers / self.spec.num_layers
        return share * self._streaming_time(num_bytes)

    def attention_times(self, batch: Batch) -> CallTimes:
        """Compute the seconds of prefills and of decodes; in one call, decodes count as what they
        add to the prefills.
        """
        return self._attention_times(batch, self.hardware.hybrid_call)

    def separate_attention(self, batch: Batch) -> CallTimes:
        """Compute the seconds of one layer's calls over prefills and over decodes."""
        return self._attention_times(batch, in_one_call=False)

    def _attention_times(self, batch: Batch, in_one_call: bool | None) -> CallTimes:
        chunks = prefills(batch)
        return self.attention.times(chunks, batch.num_decodes, batch.decode_kv_tokens, in_one_call)

    def hybrid_attention(self, batch: Batch) -> float:
        """Compute the seconds of one layer's call over all of `batch`, which has decodes."""
        chunks = prefills(batch)
        return self.attention.hybrid(chunks, batch.num_decodes, batch.decode_kv_tokens)

    def shard_shape(self, linear: Linear) -> tuple[int, int]:
        """Rows and columns of a weight on one device, split along the axis that saves sends."""
        tensor = self.parallel.tensor
        rows = linear.in_features
        columns = linear.out_features
        if linear.name in REPLICATED:
            return rows, columns
        if linear.name in CUT_BY_ROWS:
            return math.ceil(rows / tensor), columns
        all_columns = columns + self.parallel.copied_columns(self.spec, linear.name)
        return rows, math.ceil(all_columns / tensor)

    def product_time(
        self,
        num_tokens: int,
        rows: int,
        columns: int,
    ) -> float:
        """Compute the seconds of one product [num_tokens, rows] x [rows, columns]."""
        return matmul_time(
            num_tokens,
            rows,
            columns,
            self.hardware,
            self.dtype_bytes,
        )

    def layer_product_time(
        self,
        num_tokens: int,
        rows: int,
        columns: int,
        name: str = "qkv_proj",
    ) -> float:
        """Compute a product of a layer, which has the weights of the one called `name`; in 8 bits,
        activations are converted first. Other quantised weights are read in fewer bytes, and their
        conversion takes no time here. Where a kind has weights of both, the mean.
        """
        stored = self.spec.stored
        if stored is None:
            return self.product_time(num_tokens, rows, columns)
        part = stored.part(kind_of_product(name))
        hardware = self._low_hardware
        if hardware is None:
            dtype_bytes = self.dtype_bytes
            conversion = 0.0
            hardware = self.hardware
        else:
            # Activations of 4 bits count as a byte: an upper bound of what is moved.
            dtype_bytes = 1
            conversion = self._conversion_time(num_tokens, rows)
        size = (num_tokens, rows, columns)
        quantised = 0.0
        if part.share > 0:
            quantised = conversion + matmul_time(*size, hardware, dtype_bytes, part.weight_bytes)
        plain = 0.0
        if part.share < 1:
            plain = self.product_time(*size)
        return (1 - part.share) * plain + part.share * quantised

    def fused_time(self, num_tokens: int, linear: Linear) -> float:
        """Compute the seconds of a product's conversion that the kernel before it includes."""
        kernel_before = BEFORE.get(linear.name)
        if self._low_hardware is None or kernel_before not in self._converting:
            return 0.0
        assert self.spec.stored is not None, "which products in 8 bits are of"
        part = self.spec.stored.part(kind_of_product(linear.name))
        rows, _ = self.shard_shape(linear)
        return part.share * self._conversion_time(num_tokens, rows)

    def _conversion_time(self, num_tokens: int, features: int) -> float:
        """Read activations, and write them in 8 bits."""
        bytes_of_each = self.dtype_bytes + 1
        return self._streaming_time(num_tokens * features * bytes_of_each)

    def _norm_time(self, num_tokens: int) -> float:
        """Fused with the residual before it: two rows read, two written, on every device."""
        row_bytes = self.spec.hidden_size * self.dtype_bytes
        return self._streaming_time(num_tokens * 4 * row_bytes)

    def _streaming_time(self, num_bytes: int) -> float:
        """Compute the seconds of a kernel bound by moving `num_bytes`; 0 for none."""
        if num_bytes == 0:
            return 0.0
        return self.hardware.kernel_launch + num_bytes / self.hardware.memory_rate


def prefills(batch: Batch) -> Chunks:
    """Start and tokens of each prefill chunk."""
    if not batch.num_prefills:  # most batches have decodes alone
        return []
    return [(chunk.start, chunk.num_tokens) for chunk in batch.chunks if not chunk.is_decode]
