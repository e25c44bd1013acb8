"""The `analytic` cost model: an iteration from the shapes of the model and a few figures of the device."""

from __future__ import annotations

from collections.abc import Mapping

from sarathi_lab.model.spec import Linear, ModelSpec
from sarathi_lab.request import Batch
from sarathi_lab.simulator.attention import decode_attention_time, prefill_attention_time
from sarathi_lab.simulator.hardware import Hardware
from sarathi_lab.simulator.matmul import matmul_time


class AnalyticCostModel:
    """Seconds that `spec`, in elements of `dtype_bytes`, takes on `hardware`.

    Raises ValueError for elements of another size than `hardware.dtype_bytes`: its peaks are not theirs.
    """

    def __init__(self, spec: ModelSpec, hardware: Hardware, dtype_bytes: int) -> None:
        if dtype_bytes != hardware.dtype_bytes:
            raise ValueError(
                f"elements of {dtype_bytes} bytes have no peak in hardware {hardware.name}, which holds those of "
                f"{hardware.dtype_bytes} bytes"
            )
        self.spec = spec
        self.hardware = hardware
        self.dtype_bytes = dtype_bytes

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """Relative error of "matmul" and "attention" that the hardware file states."""
        return self.hardware.uncertainty

    def iteration_time(self, batch: Batch) -> float:
        """Seconds of one iteration: its operations one after the other."""
        return sum(self.operation_times(batch).values())

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Seconds by operation, summed over layers.

        Linear operations run once over the tokens of all sequences (they are what SARATHI fuses), attention apart
        for prefills and decodes (section 4.3.2).
        """
        return {
            **{linear.name: self._linear_time(linear, batch.num_tokens) for linear in self.spec.layer_linears},
            "prefill_attention": self._prefill_attention_time(batch),
            "decode_attention": self._decode_attention_time(batch),
            "norms": self._norms_time(batch.num_tokens),
            "activation": self._activation_time(batch.num_tokens),
            "kv_write": self._kv_write_time(batch.num_tokens),
            "lm_head": self._linear_time(self.spec.lm_head, batch.num_emits),
            "sampling": self._streaming_time(1, batch.num_emits * self.spec.vocab_size),
            "overhead": self.hardware.iteration_overhead,
        }

    def _linear_time(self, linear: Linear, num_tokens: int) -> float:
        time = matmul_time(num_tokens, linear.in_features, linear.out_features, self.hardware, self.dtype_bytes)
        return linear.count * time

    def _prefill_attention_time(self, batch: Batch) -> float:
        if batch.num_prefills == 0:
            return 0.0
        return self.spec.num_layers * prefill_attention_time(
            ((chunk.start, chunk.num_tokens) for chunk in batch.chunks if not chunk.is_decode),
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_size=self.spec.head_size,
            hardware=self.hardware,
            dtype_bytes=self.dtype_bytes,
        )

    def _decode_attention_time(self, batch: Batch) -> float:
        return self.spec.num_layers * decode_attention_time(
            batch.num_decode_tokens,
            batch.decode_kv_tokens,
            num_kv_heads=self.spec.num_kv_heads,
            head_size=self.spec.head_size,
            hardware=self.hardware,
            dtype_bytes=self.dtype_bytes,
        )

    def _norms_time(self, num_tokens: int) -> float:
        """Two a layer and a last one, each fused with the residual before it: two rows read, two written."""
        calls = 2 * self.spec.num_layers + 1
        return self._streaming_time(calls, calls * num_tokens * 4 * self.spec.hidden_size)

    def _activation_time(self, num_tokens: int) -> float:
        """Between the products of the FFN: one row read, or two with a gate, and one written."""
        rows = 3 if self.spec.gated_ffn else 2
        return self._streaming_time(self.spec.num_layers, self.spec.num_layers * num_tokens * rows * self.spec.ffn_size)

    def _kv_write_time(self, num_tokens: int) -> float:
        """New keys and values, read and written to the cache."""
        return self._streaming_time(self.spec.num_layers, self.spec.num_layers * num_tokens * 4 * self.spec.kv_size)

    def _streaming_time(self, calls: int, num_elements: int) -> float:
        """Seconds of `calls` kernels that do little but move `num_elements` in all; 0 if there are none to move."""
        if num_elements == 0:
            return 0.0
        return calls * self.hardware.kernel_launch + num_elements * self.dtype_bytes / self.hardware.memory_rate
