"""How a model is spread over devices: tensor parallel within a layer, pipeline parallel across layers."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.errors import UserError, require_int
from sarathi_lab.model.spec import ModelSpec


@dataclass(frozen=True)
class Parallel:
    """Degrees of parallelism of one copy of a model; the paper's GPT-3 runs on 8 x 8 A100 (section 5.3).

    `tensor` devices share every layer, by heads and columns; `pipeline` stages hold equally many layers each.
    Raises UserError for a degree below 1.
    """

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        require_int(
            "executor.tensor_parallel", self.tensor, 1, "use the number of devices that share a layer, such as 8"
        )
        require_int("executor.pipeline_parallel", self.pipeline, 1, "use the number of stages, such as 8")

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    def layers_per_stage(self, spec: ModelSpec) -> int:
        """Layers of one stage; `check` tells whether the stages are equal."""
        return spec.num_layers // self.pipeline

    @property
    def description(self) -> str:
        """The devices in words, tensor by pipeline: "8 x 8 devices"."""
        return f"{self.tensor} x {self.pipeline} devices"

    def divides(self, spec: ModelSpec) -> bool:
        """Whether `spec` comes apart into equal stages and equal shares of heads."""
        return not any(number % degree for _, degree, _, number in self._parts(spec))

    def check(self, spec: ModelSpec) -> None:
        """Raise UserError unless `divides`."""
        for name, degree, what, number in self._parts(spec):
            if number % degree:
                valid = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
                raise UserError(
                    f"executor.{name}={degree} does not divide the {number} {what} of model {spec.name}; "
                    f"use one of {valid}"
                )

    def _parts(self, spec: ModelSpec) -> tuple[tuple[str, int, str, int], ...]:
        """Setting, degree, and the name and number of what it has to divide."""
        return (
            ("pipeline_parallel", self.pipeline, "layers", spec.num_layers),
            ("tensor_parallel", self.tensor, "heads", spec.num_heads),
            ("tensor_parallel", self.tensor, "KV heads", spec.num_kv_heads),
        )
