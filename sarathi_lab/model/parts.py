"""One rank's part of a model: a stage of its layers, and of these a share of the heads, of the FFN
and of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.config.checked import check_fields, whole
from sarathi_lab.config.errors import UserError


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism of one copy of a model. UserError for one below 1."""

    tensor: int = whole(  # devices that share every layer, by heads and columns
        1,
        name="executor.tensor_parallel",
        minimum=1,
        fix="use the number of devices that share a layer, such as 2",
    )
    pipeline: int = whole(  # stages that share the layers
        1, name="executor.pipeline_parallel", minimum=1, fix="use the number of stages, such as 2"
    )

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
    """That a degree does not divide `number`; what does is named up to `most`."""
    valid = ", ".join(str(n) for n in range(1, min(number, most) + 1) if number % n == 0)
    return UserError(
        f"executor.{kind}_parallel={degree} does not divide the {number} {what}; use one of {valid}"
    )
