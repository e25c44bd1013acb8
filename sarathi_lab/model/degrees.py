"""Degrees of parallelism of a model."""

from __future__ import annotations

from collections.abc import Sequence
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
    if _is_even(tensor, num_kv_heads):
        return None
    return UserError(
        f"executor.tensor_parallel={tensor} neither divides the {num_kv_heads} KV heads {of_model} "
        f"nor is a multiple of them; use one of {_valid_degrees(num_heads, [num_kv_heads])}"
    )


def uneven(
    kind: str,
    degree: int,
    number: int,
    what: str,
    kv_heads: Sequence[int] = (),
) -> UserError:
    """Make the error of a degree that does not divide `number`; valid ones are named, of those that
    `refuse_kv_heads` accepts for each of the numbers `kv_heads`.
    """
    return UserError(
        f"executor.{kind}_parallel={degree} does not divide the {number} {what}; use one of "
        f"{_valid_degrees(number, kv_heads)}"
    )


def _valid_degrees(number: int, kv_heads: Sequence[int]) -> str:
    """List the degrees that divide `number`, and share or copy KV heads evenly."""
    degrees = []
    for degree in range(1, number + 1):
        are_even = [_is_even(degree, num_kv_heads) for num_kv_heads in kv_heads]
        if number % degree == 0 and all(are_even):
            degrees.append(str(degree))
    return ", ".join(degrees)


def _is_even(degree: int, num_kv_heads: int) -> bool:
    """Return whether devices share KV heads evenly, or hold evenly many copies of each."""
    return num_kv_heads % degree == 0 or degree % num_kv_heads == 0
