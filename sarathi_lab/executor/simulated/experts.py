"""A layer's experts: by formula, and by measured rows where there are such."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from functools import cache, partial
from typing import NamedTuple

import pandas as pd

from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.interpolation import (
    Curve,
    RatioInterpolation,
    log_distance,
    nearest_shape,
)
from sarathi_lab.executor.simulated.kernel_times import overlapped
from sarathi_lab.executor.tables import EXPERT_SHAPE, MICROSECOND, TIME
from sarathi_lab.model.spec import ModelSpec

KERNELS = 2  # launched for a layer's experts: the products before and after the activation


class Shape(NamedTuple):
    """Sizes of `tables.EXPERT_SHAPE`; `expert_size` is the width of an expert on one device."""

    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int


def seconds_of_experts(spec: ModelSpec, time: Callable[[float, float], float]) -> Curve:
    """Make the function of the mean layer's seconds by tokens, of those of a layer with experts by
    pairs (token, expert) and experts that are read. Choices are random, so their number is the mean
    over such choices.
    """
    layer_share = spec.num_expert_layers / spec.num_layers

    @cache
    def seconds(num_tokens: int) -> float:
        if num_tokens == 0:
            return 0.0
        pairs = num_tokens * spec.experts_per_token
        chosen = spec.share_of_experts(num_tokens) * spec.num_experts
        return layer_share * time(pairs, chosen)

    return seconds


@dataclass(eq=False)
class Experts:
    """Seconds of one layer's experts of `spec`, each split over `tensor` devices; of the mean layer
    where not all have experts.

    Choices are random, so the number of experts read is the mean over such choices. The time is a
    roofline with three figures of the hardware (`expert_...`), times the ratio of measured `rows`
    to it (`moe` of `tables.FILES`, all experts on one device): by experts read and tokens of each,
    constant beyond, of the nearest shape if the rows have shapes.
    """

    spec: ModelSpec
    hardware: Hardware
    dtype_bytes: int
    rows: InitVar[pd.DataFrame | None] = None
    tensor: InitVar[int] = 1

    def __post_init__(self, rows: pd.DataFrame | None, tensor: int) -> None:
        spec = self.spec
        width = math.ceil(spec.ffn_size / tensor)
        self.shape = Shape(spec.hidden_size, width, spec.num_experts, spec.experts_per_token)
        self.base: Shape | None = None  # shape of the rows in use
        # Rows are of weights in the model's type.
        self._products = self.hardware
        self._weight_bytes: float = self.dtype_bytes
        if rows is not None:
            self.base, self._ratios = self._measured(rows)
        stored = spec.stored
        if stored is not None and stored.part("experts").share > 0:
            self._products = self.hardware.for_products(stored) or self.hardware
        self._weight_bytes = spec.expert_bytes(self.dtype_bytes)
        self.layer_share = spec.num_expert_layers / spec.num_layers
        self.seconds = seconds_of_experts(spec, self.time)

    @property
    def caution(self) -> str:
        """Source of the times."""
        shape = self.base
        if shape is not None:
            return (
                f"experts by {shape.num_experts} of {shape.hidden_size} x {shape.expert_size} on a "
                f"device, {shape.top_k} a token, each chosen at random"
            )
        caution = "the experts' times are a roofline without a fit"
        if self.hardware.expert_traffic > 0:
            caution = "the experts' times are a roofline fitted to other models"
        stored = self.spec.stored
        if stored is None:
            return caution
        return f"{caution}, none of it with weights in {stored.name}"

    def time(self, pairs: float, chosen: float) -> float:
        """Compute one device's seconds of `pairs` (token, expert) over `chosen` experts."""
        seconds = self._formula(self.shape, pairs, chosen, self.spec.gated_ffn)
        if self.base is not None:
            seconds *= self._ratios.ratio(pairs / chosen, chosen)
        return seconds

    def traffic(
        self,
        shape: Shape,
        pairs: float,
        gated: bool,
    ) -> float:
        """Compute the seconds of moving activations between and after the products."""
        # Rows as wide as an expert: one, or two with a gate, are written and read, and one written.
        num_rows = 5 if gated else 3
        moved = num_rows * shape.expert_size + 2 * shape.hidden_size
        num_bytes = pairs * moved * self.dtype_bytes
        return num_bytes / self.hardware.memory_rate

    def _formula(
        self,
        shape: Shape,
        pairs: float,
        chosen: float,
        gated: bool,
    ) -> float:
        hardware = self.hardware
        products = self._products
        num_matrices = 3 if gated else 2
        num_weights = num_matrices * shape.hidden_size * shape.expert_size  # of an expert
        efficiency = products.matmul_efficiency * hardware.expert_efficiency
        rate = products.flops_per_second * efficiency
        compute = 2 * pairs * num_weights / rate
        memory = chosen * num_weights * self._weight_bytes / hardware.memory_rate
        between = hardware.expert_traffic * self.traffic(shape, pairs, gated)
        fixed = KERNELS * hardware.kernel_launch + hardware.expert_launch
        return fixed + overlapped(compute, memory) + between

    def _measured(self, rows: pd.DataFrame) -> tuple[Shape, RatioInterpolation]:
        """Choose the nearest shape of `rows`; return its ratios of measured to computed seconds."""
        shape = self.shape
        gated = self.spec.gated_ffn
        calls = rows
        if EXPERT_SHAPE[0] in rows:
            nearest, calls = nearest_shape(rows, EXPERT_SHAPE, partial(log_distance, shape))
            shape = Shape(*nearest)
            gated = True  # as all rows that state their shape
        pairs = calls.tokens * shape.top_k  # of a token and an expert that it chooses
        chosen = calls.activated_experts
        computed_seconds = []
        for num_pairs, num_chosen in zip(pairs, chosen, strict=True):
            seconds = self._formula(shape, num_pairs, num_chosen, gated)
            computed_seconds.append(seconds)
        measured_seconds = MICROSECOND * calls[TIME]
        ratios = measured_seconds / computed_seconds
        pairs_per_expert = pairs / chosen
        return shape, RatioInterpolation(pairs_per_expert, chosen, ratios)
