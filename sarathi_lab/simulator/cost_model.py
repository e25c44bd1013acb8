"""Roofline cost of an iteration, operation by operation: max(FLOPs / rate, bytes / bandwidth), and a fixed cost.

Left out: norms, residuals and activations, which kernels can fuse into the products beside them.
"""

from __future__ import annotations

from sarathi_lab.model.spec import Linear, ModelSpec
from sarathi_lab.request import Batch
from sarathi_lab.simulator.hardware import PEAK_DTYPE_BYTES, Hardware


class CostModel:
    """Seconds that `spec`, in elements of `dtype_bytes`, takes on `hardware`.

    Raises ValueError for other than 16-bit elements: the peaks of `Hardware` are not those of wider products.
    """

    def __init__(self, spec: ModelSpec, hardware: Hardware, dtype_bytes: int) -> None:
        if dtype_bytes != PEAK_DTYPE_BYTES:
            raise ValueError(f"elements of {dtype_bytes} bytes have no peak in the hardware files, only 16-bit ones")
        self.spec = spec
        self.hardware = hardware
        self.dtype_bytes = dtype_bytes
        self._matmul_rate = hardware.flops_per_second * hardware.matmul_efficiency
        self._attention_rate = hardware.flops_per_second * hardware.attention_efficiency
        self._bandwidth = hardware.bytes_per_second * hardware.memory_efficiency

    def iteration_time(self, batch: Batch) -> float:
        """Seconds of one iteration: its operations one after the other."""
        return sum(self.operation_times(batch).values())

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Seconds by operation, summed over layers.

        Linear operations run once over the tokens of all sequences (they are what SARATHI fuses), attention apart
        for prefills and decodes (section 4.3.2).
        """
        times = {linear.name: self._linear_time(linear, batch.num_tokens) for linear in self.spec.layer_linears}
        times["prefill_attention"] = self._prefill_attention_time(batch)
        times["decode_attention"] = self._kv_move_time(batch.decode_kv_tokens)
        times["kv_write"] = self._kv_move_time(batch.num_tokens)
        times["lm_head"] = self._linear_time(self.spec.lm_head, batch.num_emits)
        times["overhead"] = self.hardware.iteration_overhead
        return times

    def _linear_time(self, linear: Linear, num_tokens: int) -> float:
        """A matrix product of `num_tokens` rows, computed in whole tiles: one token more can cost a tile (section 4.4).

        Its bytes are the weights, the rows read and the rows written.
        """
        if num_tokens == 0:
            return 0.0
        tile = self.hardware.tile
        rows = -(-num_tokens // tile) * tile
        activations = num_tokens * (linear.in_features + linear.out_features) * linear.count
        num_bytes = (linear.num_params + activations) * self.dtype_bytes
        return max(2.0 * linear.num_params * rows / self._matmul_rate, num_bytes / self._bandwidth)

    def _prefill_attention_time(self, batch: Batch) -> float:
        flops = 4.0 * self.spec.num_layers * self.spec.q_size * batch.prefill_query_key_pairs
        return max(flops / self._attention_rate, self._kv_move_time(batch.prefill_kv_tokens))

    def _kv_move_time(self, num_tokens: int) -> float:
        """Moving the keys and values of `num_tokens` tokens once; decodes do so little else that this is their time."""
        return num_tokens * self.spec.kv_bytes_per_token(self.dtype_bytes) / self._bandwidth
