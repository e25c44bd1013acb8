"""Time of one layer's experts, on devices that each hold equally many of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.matmul import overlapped
from sarathi_lab.executor.tables import MICROSECOND, TIME
from sarathi_lab.model.spec import ModelSpec

KERNELS = 2  # launched for a layer's experts: the products before and after the activation
GRAPH_STEP = 8  # tokens between the sizes of recorded CUDA graphs: vLLM's, up to 256


class Sharing(NamedTuple):
    """Replicas that share the experts, each with as many. Where all of them replay a recorded CUDA
    graph, of `graph_tokens` at most, they compute as many tokens as the fullest, in whole steps.
    """

    replicas: int = 1
    graph_tokens: int = 0

    def computed(self, tokens: Sequence[int]) -> Sequence[int]:
        """What the experts compute for replicas with so many `tokens`."""
        largest = -(-max(tokens) // GRAPH_STEP) * GRAPH_STEP
        return [largest] * len(tokens) if largest <= self.graph_tokens else tokens


ALONE = Sharing()


class Experts:
    """Seconds of one layer's experts of `spec` by the tokens of each replica of the model.

    Each replica of `sharing` is a device with its share of the experts. A token's choice is taken
    as random, so that as many experts are read as the mean of such choices. `rows` are measured
    (`moe` of `tables.FILES`), all experts on one device: a device that holds a share of them takes
    what one with all of them takes for that share of the tokens, as it has as many products
    of a token and an expert. Without rows it is a roofline, which nothing was fitted to.

    Several devices gather the tokens of all with the router's logits, and scatter the sums: in a
    ring over the links of `hardware`, as no table has it. Raises UserError for unknown links.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        dtype_bytes: int,
        sharing: Sharing = ALONE,
        rows: pd.DataFrame | None = None,
    ) -> None:
        self.spec = spec
        self.hardware = hardware
        self.dtype_bytes = dtype_bytes
        self.sharing = sharing
        self.devices = sharing.replicas
        self._curves = [] if rows is None else _by_experts(rows)
        self._link_rate = hardware.link_rate if self.devices > 1 else 1.0
        self._compute = cache(self._compute_time)

    def seconds(self, tokens: Sequence[int]) -> float:
        """Of replicas with so many `tokens`; alone of one, as if the others had none."""
        tokens = self.sharing.computed(tokens) if len(tokens) > 1 else tokens
        return self._compute(sum(tokens)) + self._exchange(sum(tokens))

    def _compute_time(self, num_tokens: int) -> float:
        if num_tokens == 0:
            return 0.0
        share = self.spec.share_of_experts(num_tokens)
        chosen = share * self.spec.num_experts / self.devices
        tokens = num_tokens / self.devices
        measured = self._curves and self._interpolated(tokens, chosen)
        return measured or self._formula(tokens, chosen)

    def _interpolated(self, tokens: float, chosen: float) -> float:
        """Linear between the numbers of experts, and of tokens; beyond in proportion to these."""
        numbers = [number for number, _, _ in self._curves]
        times = [
            float(np.interp(tokens, sizes, seconds)) * max(1.0, tokens / sizes[-1])
            for _, sizes, seconds in self._curves
        ]
        return float(np.interp(chosen, numbers, times))

    def _formula(self, tokens: float, chosen: float) -> float:
        each = self.spec.num_expert_params / (self.spec.num_layers * self.spec.num_experts)
        flops = 2 * tokens * self.spec.experts_per_token * each
        hardware = self.hardware
        compute = flops / (hardware.flops_per_second * hardware.matmul_efficiency)
        memory = chosen * each * self.dtype_bytes / hardware.memory_rate
        return KERNELS * hardware.kernel_launch + overlapped(compute, memory)

    def _exchange(self, num_tokens: int) -> float:
        if self.devices == 1:
            return 0.0
        entries = num_tokens * (2 * self.spec.hidden_size + self.spec.num_experts)
        sent = (self.devices - 1) / self.devices * entries * self.dtype_bytes
        return 2 * self.hardware.link_latency + sent / self._link_rate


def _by_experts(rows: pd.DataFrame) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """Tokens and seconds, ascending, for each number of activated experts."""
    groups = rows.sort_values("tokens").groupby(rows.activated_experts.astype(float))
    return [
        (float(str(number)), own.tokens.to_numpy(float), MICROSECOND * own[TIME].to_numpy(float))
        for number, own in groups
    ]
