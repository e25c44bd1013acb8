"""The spec of a checkpoint for whose operations the lab has no formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from sarathi_lab.model.layers import AmountT, Work
from sarathi_lab.model.spec import ModelSpec


@dataclass(frozen=True)
class StoredSpec(ModelSpec):
    """Shapes that an engine reads from a checkpoint, for models that the lab does not compute.

    Sizes of weights and cache are known. FLOPs and bytes read are not numbers, and so are roofline,
    MFU and MBU, which tables leave blank.
    """

    stored_params: int = 0  # elements, of which packed ones have several parameters
    stored_bytes: int | None = None  # None: of the run's dtype
    cached_values: int = 0  # of one token, over all layers

    @property
    def has_formulas(self) -> bool:
        return False

    def of_part(self, num_parts: int) -> StoredSpec:
        num_bytes = None
        if self.stored_bytes is not None:
            num_bytes = math.ceil(self.stored_bytes / num_parts)
        return replace(
            self,
            stored_params=-(-self.stored_params // num_parts),
            stored_bytes=num_bytes,
            cached_values=-(-self.cached_values // num_parts),
        )

    @property
    def size(self) -> str:
        if self.stored_bytes is None:
            return super().size
        return f"{self.stored_bytes / 1e9:.1f} GB of quantised weights"

    @cached_property
    def num_params(self) -> int:
        return self.stored_params

    def weight_bytes(self, dtype_bytes: int) -> int:
        if self.stored_bytes is None:
            return self.stored_params * dtype_bytes
        return self.stored_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        value_bytes = dtype_bytes if self.kv_dtype == "auto" else 1
        return self.cached_values * value_bytes

    def state_bytes(self, dtype_bytes: int) -> int:
        return 0

    def weight_read_bytes(self, work: Work[AmountT], dtype_bytes: int) -> AmountT:
        return math.nan * work.num_emits

    def min_bytes(self, work: Work[AmountT], dtype_bytes: int) -> AmountT:
        return math.nan * work.num_emits

    def flops(self, work: Work[AmountT]) -> AmountT:
        return math.nan * work.num_emits
