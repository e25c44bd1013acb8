"""The `analytic` cost model: an iteration from the model's shapes and a device's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.profile import ATTENTION
from sarathi_lab.executor.simulated.attention import decode_attention_time, prefill_attention_time
from sarathi_lab.executor.simulated.communication import all_reduce_time
from sarathi_lab.executor.simulated.hardware import ONE_DEVICE, Hardware, Parallel
from sarathi_lab.executor.simulated.matmul import matmul_time, overlapped
from sarathi_lab.model.spec import Linear, ModelSpec

# Products whose partial sums are added over the devices (Megatron-LM).
CUT_BY_ROWS = ("out_proj", "ffn_down")
ALL_REDUCES = len(CUT_BY_ROWS)  # a layer
NORMS = 2  # a layer


class AnalyticCostModel:
    """Seconds of `spec`, in elements of `dtype_bytes`, on devices of `hardware`.

    The devices of `parallel` that share a layer split heads, columns and rows as in Megatron-LM:
    what follows is one device's share. Raises UserError for a model that does not come apart so, or
    hardware of unknown links; ValueError for elements of another size than the peaks are for.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        dtype_bytes: int,
        parallel: Parallel = ONE_DEVICE,
    ) -> None:
        if dtype_bytes != hardware.dtype_bytes:
            raise ValueError(
                f"elements of {dtype_bytes} bytes have no peak in hardware {hardware.name}, which "
                f"holds those of {hardware.dtype_bytes} bytes"
            )
        parallel.check(spec)
        self.parallel = parallel
        self.spec = spec
        self.hardware = hardware
        self.dtype_bytes = dtype_bytes
        self._link_rate = hardware.link_rate if parallel.tensor > 1 else math.inf
        self._network_rate = hardware.network_rate if parallel.pipeline > 1 else math.inf
        # Each device copies its share of a block over its own link.
        self._swapped_token_bytes = spec.kv_bytes_per_token(dtype_bytes) / parallel.num_devices
        self._read: dict[str, Any] = {  # by attention
            "num_kv_heads": spec.num_kv_heads // parallel.tensor,
            "kv_head_bytes": spec.kv_head_bytes(dtype_bytes),
            "hardware": hardware,
        }
        # Computed once for each number of tokens: a run meets few different ones.
        self._tokens = cache(self._layer_times)
        self._emits = cache(self._emit_times)

    @property
    def uncertainty(self) -> Mapping[str, float]:
        return self.hardware.uncertainty

    def iteration_time(self, batch: Batch) -> float:
        """Seconds of one iteration alone: its stages, one after the other, and the sends."""
        return sum(self.stage_times(batch)) + (self.parallel.pipeline - 1) * self.send_time(batch)

    def stage_times(self, batch: Batch) -> list[float]:
        """Seconds of each pipeline stage, which hold equally many layers; sends apart.

        The last one adds the output head, sampling and the iteration's overhead. What is swapped is
        copied before a stage computes.
        """
        layers = self.parallel.layers_per_stage(self.spec)
        times = [layers * self.layer_time(batch)] * self.parallel.pipeline
        times[-1] += self._norm_time(batch.num_tokens) + self._emits(batch.num_emits)[1]
        times[-1] += self.hardware.iteration_overhead
        if batch.num_swapped_tokens:
            times = [time + self.swap_time(batch) for time in times]
        return times

    def layer_time(self, batch: Batch) -> float:
        """Seconds of one layer, on the device and its host at the same time."""
        device, host = self._layer_device_time(batch), self.hardware.layer_host_time
        return overlapped(device, host) if host else device

    def _layer_device_time(self, batch: Batch) -> float:
        return self._tokens(batch.num_tokens)[1] + sum(self._attention_times(batch))

    def send_time(self, batch: Batch) -> float:
        """Seconds from the end of a stage to the start of the next, on another node; 0 without one.
        Each device sends its share of the hidden states, and gathers the others over its node.
        """
        if self.parallel.pipeline == 1:
            return 0.0
        num_bytes = batch.num_tokens * self.spec.hidden_size * self.dtype_bytes
        share = 1 / self.parallel.tensor
        seconds = self.hardware.link_latency + share * num_bytes / self._network_rate
        if self.parallel.tensor > 1:
            seconds += self.hardware.link_latency + (1 - share) * num_bytes / self._link_rate
        return seconds

    def swap_time(self, batch: Batch) -> float:
        """Seconds that a stage copies its part of the swapped blocks over the host's link."""
        return batch.num_swapped_tokens * self._swapped_token_bytes / self.hardware.host_rate

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Seconds by operation, summed over layers and stages; they add up to `iteration_time`.

        Linear operations run once over the tokens of all sequences (they are what SARATHI fuses),
        attention apart for prefills and decodes (section 4.3.2). "all_reduce" and "send" are there
        if the model is spread so, "swap" if blocks are copied.
        """
        num_layers, num_stages = self.spec.num_layers, self.parallel.pipeline
        by_token, _ = self._tokens(batch.num_tokens)
        times = {name: num_layers * time for name, time in by_token.items()}
        times["norms"] += self._norm_time(batch.num_tokens)
        for name, time in zip(ATTENTION, self._attention_times(batch), strict=True):
            times[name] = num_layers * time
        times |= self._emits(batch.num_emits)[0]
        waiting = num_layers * (self.layer_time(batch) - self._layer_device_time(batch))
        times["overhead"] = waiting + self.hardware.iteration_overhead
        if num_stages > 1:
            times["send"] = (num_stages - 1) * self.send_time(batch)
        if batch.num_swapped_tokens:
            times["swap"] = num_stages * self.swap_time(batch)
        return times

    # -- by number of tokens: seconds by operation, and their sum ----------------------------------

    def _layer_times(self, num_tokens: int) -> tuple[dict[str, float], float]:
        """Of what depends on nothing but the number of tokens, in one layer."""
        spec, tensor, dtype_bytes = self.spec, self.parallel.tensor, self.dtype_bytes
        linears = spec.layer_linears
        times = {linear.name: self._linear_time(linear, num_tokens) for linear in linears}
        times["norms"] = NORMS * self._norm_time(num_tokens)
        # Between the products of the FFN one row is read, or two with a gate, and one written.
        rows = 3 if spec.gated_ffn else 2
        ffn_share = math.ceil(spec.ffn_size / tensor)
        times["activation"] = self._moving_time(num_tokens * rows * ffn_share * dtype_bytes)
        # New keys and values are read as computed, and written as the cache holds them.
        computed = 2 * spec.kv_size * dtype_bytes
        cached = 2 * spec.num_kv_heads * spec.kv_head_bytes(dtype_bytes)
        times["kv_write"] = self._moving_time(num_tokens * (computed + cached) // tensor)
        if tensor > 1:
            num_bytes = num_tokens * spec.hidden_size * dtype_bytes
            times["all_reduce"] = ALL_REDUCES * all_reduce_time(num_bytes, tensor, self.hardware)
        return times, sum(times.values())

    def _emit_times(self, num_emits: int) -> tuple[dict[str, float], float]:
        """Of the output head and of sampling, each device in its share of the vocabulary."""
        vocab = math.ceil(self.spec.vocab_size / self.parallel.tensor)
        times = {
            "lm_head": self._linear_time(self.spec.lm_head, num_emits),
            "sampling": self._moving_time(num_emits * vocab * self.dtype_bytes),
        }
        return times, sum(times.values())

    def _linear_time(self, linear: Linear, num_tokens: int) -> float:
        """One device's share of a product: some of its rows or columns, whichever saves sends."""
        rows, columns = linear.in_features, linear.out_features
        if linear.name in CUT_BY_ROWS:
            rows = math.ceil(rows / self.parallel.tensor)
        else:
            columns = math.ceil(columns / self.parallel.tensor)
        return matmul_time(num_tokens, rows, columns, self.hardware, self.dtype_bytes)

    def _norm_time(self, num_tokens: int) -> float:
        """Fused with the residual before it: two rows read, two written, on every device."""
        return self._moving_time(num_tokens * 4 * self.spec.hidden_size * self.dtype_bytes)

    def _moving_time(self, num_bytes: int) -> float:
        """Seconds of a kernel that does little but move data; 0 if there is none to move."""
        if num_bytes == 0:
            return 0.0
        return self.hardware.kernel_launch + num_bytes / self.hardware.memory_rate

    # -- attention, one layer ----------------------------------------------------------------------

    def _attention_times(self, batch: Batch) -> tuple[float, float]:
        """Of prefills and of decodes."""
        prefill = 0.0
        if batch.num_prefills:
            prefill = prefill_attention_time(
                ((chunk.start, chunk.num_tokens) for chunk in batch.chunks if not chunk.is_decode),
                num_heads=self.spec.num_heads // self.parallel.tensor,
                head_size=self.spec.head_size,
                **self._read,
            )
        decodes, kv_tokens = batch.num_decode_tokens, batch.decode_kv_tokens
        return prefill, decode_attention_time(decodes, kv_tokens, **self._read)
