"""Energy of a run by the power model of its hardware file (`power`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from sarathi_lab.config.checked import check_fields, number
from sarathi_lab.config.errors import UserError

FIX = "correct the hardware file"


@dataclass(frozen=True)
class PowerModel:
    """Watts of a device in an iteration: P = idle + (limit - idle) min(1, (MBU + w MFU)^e).

    MBU and MFU are the used shares of its peak bandwidth and compute, `w` is `compute_weight` and
    `e` the exponent. Between iterations it draws `idle_watts`. Raises UserError for constants out
    of range.
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

    def watts(self, mfu: ArrayLike, mbu: ArrayLike) -> NDArray[np.float64]:
        """Compute the watts of one device; elementwise."""
        used = np.asarray(mbu) + self.compute_weight * np.asarray(mfu)
        share = np.minimum(1.0, used**self.exponent)
        return self.idle_watts + (self.limit_watts - self.idle_watts) * share

    def add_energy(self, iterations: pd.DataFrame, num_devices: int) -> pd.DataFrame:
        """Add the watts of a device and the joules of the `num_devices` of each iteration."""
        watts = self.watts(iterations.mfu, iterations.mbu)
        return iterations.assign(watts=watts, energy=num_devices * watts * iterations.busy)

    def metrics(
        self,
        iterations: pd.DataFrame,
        summary: Mapping[str, float],
        num_devices: int,
        num_instances: int = 1,
    ) -> dict[str, float]:
        """Return the energy of a run [J, W]: that of its iterations (`add_energy`'s table) and the
        idle power of all `num_devices` between them.
        """
        whole = num_devices * summary["duration"]
        idle = max(0.0, whole - num_devices / num_instances * iterations.busy.sum())
        energy = float(iterations.energy.sum()) + self.idle_watts * idle
        num_tokens = summary["num_prompt_tokens"] + summary["num_output_tokens"]
        return {
            "energy": energy,
            "joules_per_token": energy / num_tokens,
            "joules_per_output_token": energy / summary["num_output_tokens"],
            "mean_watts": energy / whole,
        }
