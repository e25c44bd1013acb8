"""The power that a device draws, by how much of its peaks is in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sarathi_lab.config.checked import check_fields, number
from sarathi_lab.config.errors import UserError

FIX = "correct the hardware file"


@dataclass(frozen=True)
class PowerModel:
    """P = idle + (limit - idle) min(1, (MBU + w MFU)^e) watts of a device at work.

    MBU and MFU are the shares of its peak bandwidth and compute that an iteration uses, `w`
    (`compute_weight`) tells them apart, and the exponent `e` bends the rise. A device without work
    draws `idle_watts`. Raises UserError for constants out of range.
    """

    idle_watts: float = number(above=0, fix=FIX)
    limit_watts: float = number(above=0, fix=FIX)  # the board's power limit
    compute_weight: float = number(above=0, fix=FIX)
    exponent: float = number(above=0, fix=FIX)

    def __post_init__(self) -> None:
        check_fields(self, "hardware.power.")
        if self.idle_watts >= self.limit_watts:
            raise UserError(
                f"hardware.power.idle_watts={self.idle_watts:g} is not below limit_watts="
                f"{self.limit_watts:g}; {FIX}"
            )

    def watts(self, mfu: Any, mbu: Any) -> Any:
        """Watts of one device; elementwise."""
        share = np.minimum(1.0, (mbu + self.compute_weight * mfu) ** self.exponent)
        return self.idle_watts + (self.limit_watts - self.idle_watts) * share
