"""The power that a device draws, by how much of its peaks is in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sarathi_lab.config.errors import UserError, require_number


@dataclass(frozen=True)
class PowerModel:
    """P = idle + (limit - idle) min(1, (MBU + w MFU)^e) watts of a device at work.

    MBU and MFU are the shares of its peak bandwidth and compute that an iteration uses, `w`
    (`compute_weight`) tells them apart, and the exponent `e` bends the rise. A device without work
    draws `idle_watts`. Raises UserError for constants out of range.
    """

    idle_watts: float
    limit_watts: float  # the board's power limit
    compute_weight: float
    exponent: float

    def __post_init__(self) -> None:
        fix = "correct the hardware file"
        for name in ("idle_watts", "limit_watts", "compute_weight", "exponent"):
            require_number(f"hardware.power.{name}", getattr(self, name), above=0, fix=fix)
        if self.idle_watts >= self.limit_watts:
            raise UserError(
                f"hardware.power.idle_watts={self.idle_watts:g} is not below limit_watts="
                f"{self.limit_watts:g}; {fix}"
            )

    def watts(self, mfu: Any, mbu: Any) -> Any:
        """Watts of one device; elementwise."""
        share = np.minimum(1.0, (mbu + self.compute_weight * mfu) ** self.exponent)
        return self.idle_watts + (self.limit_watts - self.idle_watts) * share
