"""Degrees of parallelism of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sarathi_lab.config.checked import check_fields, whole
from sarathi_lab.config.errors import UserError


def _degree(kind: str) -> Any:
    return whole(
        1,
        name=f"executor.{kind}_parallel",
        minimum=1,
        fix="use the number of devices that share a layer, or of stages, such as 2",
    )


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


def kv_heads_of_device(num_kv_heads: int, tensor: int) -> int:
    """Return the KV heads of one of `tensor` devices: its share, or one where there are fewer heads
    than devices, so that several devices hold the same one.
    """
    return max(1, num_kv_heads // tensor)


def refuse_kv_heads(
    tensor: int, num_heads: int, num_kv_heads: int, of_model: str
) -> UserError | None:
    """Return the error of a degree by which KV heads are neither shared nor copied evenly."""

    def is_even(degree: int) -> bool:
        return num_kv_heads % degree == 0 or degree % num_kv_heads == 0

    if is_even(tensor):
        return None
    degrees = range(1, num_heads + 1)
    valid = [str(degree) for degree in degrees if num_heads % degree == 0 and is_even(degree)]
    return UserError(
        f"executor.tensor_parallel={tensor} neither divides the {num_kv_heads} KV heads {of_model} "
        f"nor is a multiple of them; use one of {', '.join(valid)}"
    )


def uneven(kind: str, degree: int, number: int, what: str, limit: int = 64) -> UserError:
    """Make the error of a degree that does not divide `number`; valid ones are named to `limit`."""
    divisors = [n for n in range(1, min(number, limit) + 1) if number % n == 0]
    valid = ", ".join(map(str, divisors))
    return UserError(
        f"executor.{kind}_parallel={degree} does not divide the {number} {what}; use one of {valid}"
    )
