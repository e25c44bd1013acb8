"""Degrees of parallelism of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sarathi_lab.config.checked import check_fields, whole
from sarathi_lab.config.errors import UserError


def _degree(kind: str) -> Any:
    fix = "use the number of devices that share a layer, or of stages, such as 2"
    return whole(1, name=f"executor.{kind}_parallel", minimum=1, fix=fix)


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism of one copy of a model. UserError for one below 1."""

    tensor: int = _degree("tensor")  # devices that share every layer, by heads and columns
    pipeline: int = _degree("pipeline")  # stages that share the layers

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def description(self) -> str:
        """The devices in words, tensor by pipeline: "8 x 8 devices"."""
        return f"{self.tensor} x {self.pipeline} devices"


def uneven(kind: str, degree: int, number: int, what: str, most: int = 64) -> UserError:
    """Make the error of a degree that does not divide `number`; valid ones are named to `most`."""
    valid = ", ".join(str(n) for n in range(1, min(number, most) + 1) if number % n == 0)
    return UserError(
        f"executor.{kind}_parallel={degree} does not divide the {number} {what}; use one of {valid}"
    )
