"""Time of one layer's experts, spread equally over devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import pandas as pd

from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.interpolation import RatioGrid, log_distance
from sarathi_lab.executor.simulated.kernel_times import overlapped
from sarathi_lab.executor.tables import EXPERT_SHAPE, MICROSECOND, TIME
from sarathi_lab.model.spec import ModelSpec

KERNELS = 2  # launched for a layer's experts: the products before and after the activation
GRAPH_STEP = 8  # tokens between the sizes of recorded CUDA graphs: vLLM's, up to 256


class Sharing(NamedTuple):
    """Replicas that share the experts equally. If all of them replay a recorded CUDA graph (of at
    most `graph_tokens`), they compute as many tokens as the fullest, in whole steps.
    """

    replicas: int = 1
    graph_tokens: int = 0

    def computed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Pad the `tokens` of each replica as the experts compute them."""
        largest = -(-max(tokens) // GRAPH_STEP) * GRAPH_STEP
        return [largest] * len(tokens) if largest <= self.graph_tokens else tokens


NOT_SHARED = Sharing()


class Shape(NamedTuple):
    """Sizes of `tables.EXPERT_SHAPE`; `expert_size` is the width of an expert on one device."""

    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int


class Experts:
    """Seconds of one layer's experts of `spec` by the tokens of each replica of the model.

    Each replica of `sharing` is `tensor` devices with its share of the experts, each split over
    them. Choices are random, so the number of experts read is the mean over such choices. The time
    is a roofline with three figures of the hardware (`expert_...`), times the ratio of measured
    `rows` to it (`moe` of `tables.FILES`, all experts on one device): by experts read and tokens of
    each, constant beyond, of the nearest shape if the rows have shapes.

    Replicas gather all tokens with the router's logits, and scatter the sums, in a ring over the
    links of `hardware`. Raises UserError for unknown links.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        dtype_bytes: int,
        sharing: Sharing = NOT_SHARED,
        rows: pd.DataFrame | None = None,
        tensor: int = 1,
    ) -> None:
        self.spec = spec
        self.hardware = hardware
        self.dtype_bytes = dtype_bytes
        self.sharing = sharing
        self.devices = sharing.replicas
        width = math.ceil(spec.ffn_size / tensor)
        self.shape = Shape(spec.hidden_size, width, spec.num_experts, spec.experts_per_token)
        self.base: Shape | None = None  # shape of the rows in use
        if rows is not None:
            self.base, self._ratios = self._measured(rows)
        self._link_rate = hardware.link_rate if self.devices > 1 else 1.0
        self._compute = cache(self._compute_time)

    @property
    def caution(self) -> str:
        """Source of the times."""
        if self.base is None:
            fitted = self.hardware.expert_traffic > 0
            source = "fitted to other models" if fitted else "without a fit"
            return f"the experts' times are a roofline {source}"
        of = self.base
        return (
            f"experts by {of.num_experts} of {of.hidden_size} x {of.expert_size} on a device, "
            f"{of.top_k} a token, each chosen at random"
        )

    def seconds(self, tokens: Sequence[int]) -> float:
        """Compute the seconds by the `tokens` of each replica, or of one if the others idle."""
        tokens = self.sharing.computed(tokens) if len(tokens) > 1 else tokens
        return self._compute(sum(tokens)) + self._exchange(sum(tokens))

    def _compute_time(self, num_tokens: int) -> float:
        if num_tokens == 0:
            return 0.0
        chosen = self.spec.share_of_experts(num_tokens) * self.spec.num_experts / self.devices
        pairs = num_tokens * self.shape.top_k / self.devices
        # vLLM's kernels write zeros for pairs whose experts are on other devices, and run
        # activation and sum over them.
        padding = (self.devices - 1) * pairs
        return self.time(pairs, chosen) + self._traffic(self.shape, padding, self.spec.gated_ffn)

    def time(self, pairs: float, chosen: float) -> float:
        """Compute one device's seconds of `pairs` (token, expert) over `chosen` experts."""
        time = self._formula(self.shape, pairs, chosen, self.spec.gated_ffn)
        return time if self.base is None else time * self._ratios.ratio(pairs / chosen, chosen)

    def _traffic(self, shape: Shape, pairs: float, gated: bool) -> float:
        """Compute the seconds of moving activations between and after the products."""
        moved = (5 if gated else 3) * shape.expert_size + 2 * shape.hidden_size
        return pairs * moved * self.dtype_bytes / self.hardware.memory_rate

    def _formula(self, shape: Shape, pairs: float, chosen: float, gated: bool) -> float:
        each = (3 if gated else 2) * shape.hidden_size * shape.expert_size
        hardware = self.hardware
        share = hardware.matmul_efficiency * hardware.expert_efficiency
        compute = 2 * pairs * each / (hardware.flops_per_second * share)
        memory = chosen * each * self.dtype_bytes / hardware.memory_rate
        between = hardware.expert_traffic * self._traffic(shape, pairs, gated)
        fixed = KERNELS * hardware.kernel_launch + hardware.expert_launch
        return fixed + overlapped(compute, memory) + between

    def _measured(self, rows: pd.DataFrame) -> tuple[Shape, RatioGrid]:
        """Choose the nearest shape of `rows`; return its ratios of measured to computed seconds."""
        base, gated = self.shape, self.spec.gated_ffn
        if EXPERT_SHAPE[0] in rows:
            shapes = [Shape(*map(int, row)) for row in rows[list(EXPERT_SHAPE)].to_numpy()]
            base = min(shapes, key=partial(log_distance, self.shape))
            rows, gated = rows[[shape == base for shape in shapes]], True
        pairs, chosen = rows.tokens * base.top_k, rows.activated_experts
        computed = [self._formula(base, *of, gated) for of in zip(pairs, chosen, strict=True)]
        ratios = rows.assign(load=pairs / chosen, ratio=MICROSECOND * rows[TIME] / computed)
        table = ratios.pivot_table(index="load", columns="activated_experts", values="ratio")
        return base, RatioGrid(table)

    def _exchange(self, num_tokens: int) -> float:
        if self.devices == 1:
            return 0.0
        entries = num_tokens * (2 * self.spec.hidden_size + self.spec.num_experts)
        sent = (self.devices - 1) / self.devices * entries * self.dtype_bytes
        return 2 * self.hardware.link_latency + sent / self._link_rate
