"""Time of one layer's experts, on devices that each hold equally many of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import pandas as pd

from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.interpolation import RatioGrid, apart
from sarathi_lab.executor.simulated.matmul import overlapped
from sarathi_lab.executor.tables import EXPERT_SHAPE, MICROSECOND, TIME
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


class Shape(NamedTuple):
    """What `tables.EXPERT_SHAPE` names: features of a token, features within an expert on one
    device, experts of a layer, and those that a token passes.
    """

    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int


class Experts:
    """Seconds of one layer's experts of `spec` by the tokens of each replica of the model.

    Each replica of `sharing` is `tensor` devices with its share of the experts; those of a replica
    split every expert. A token's choice is taken as random, so that as many experts are read as the
    mean of such choices. It is a roofline with three figures of the hardware (`expert_...`), times
    what `rows` measured over it (`moe` of `tables.FILES`, all experts on one device): by the
    experts that are read and the tokens of each, constant beyond, and of the nearest shape if the
    rows have such.

    Replicas gather the tokens of all with the router's logits, and scatter the sums: in a ring over
    the links of `hardware`, as no table has it. Raises UserError for unknown links.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        dtype_bytes: int,
        sharing: Sharing = ALONE,
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
        self.base: Shape | None = None  # whose rows are taken
        if rows is not None:
            self.base, self._ratios = self._measured(rows)
        self._link_rate = hardware.link_rate if self.devices > 1 else 1.0
        self._compute = cache(self._compute_time)

    @property
    def caution(self) -> str:
        """Where the times are from."""
        if self.base is None:
            fitted = self.hardware.expert_traffic > 0
            to = "fitted to other models" if fitted else "that nothing was fitted to"
            return f"the experts' times are a roofline {to}"
        of = self.base
        return (
            f"experts by {of.num_experts} of {of.hidden_size} x {of.expert_size} on a device, "
            f"{of.top_k} a token, each chosen at random"
        )

    def seconds(self, tokens: Sequence[int]) -> float:
        """Of replicas with so many `tokens`; alone of one, as if the others had none."""
        tokens = self.sharing.computed(tokens) if len(tokens) > 1 else tokens
        return self._compute(sum(tokens)) + self._exchange(sum(tokens))

    def _compute_time(self, num_tokens: int) -> float:
        if num_tokens == 0:
            return 0.0
        chosen = self.spec.share_of_experts(num_tokens) * self.spec.num_experts / self.devices
        pairs = num_tokens * self.shape.top_k / self.devices
        return self.time(pairs, chosen) + self._others_time(pairs)

    def time(self, pairs: float, chosen: float) -> float:
        """Of one device: so many pairs of a token and an expert, over so many experts."""
        time = self._formula(self.shape, pairs, chosen, self.spec.gated_ffn)
        return time if self.base is None else time * self._ratios.ratio(pairs / chosen, chosen)

    def _others_time(self, pairs: float) -> float:
        """Of the pairs whose experts are on other devices, if each has `pairs`: vLLM's kernels
        write zeros for their products, and run activation and sum over them, too.
        """
        return self._moving(self.shape, (self.devices - 1) * pairs, self.spec.gated_ffn)

    def _moving(self, shape: Shape, pairs: float, gated: bool) -> float:
        """Of what is between the products and after them: written by one, read by the next."""
        moved = (5 if gated else 3) * shape.expert_size + 2 * shape.hidden_size
        return pairs * moved * self.dtype_bytes / self.hardware.memory_rate

    def _formula(self, shape: Shape, pairs: float, chosen: float, gated: bool) -> float:
        each = (3 if gated else 2) * shape.hidden_size * shape.expert_size
        hardware = self.hardware
        share = hardware.matmul_efficiency * hardware.expert_efficiency
        compute = 2 * pairs * each / (hardware.flops_per_second * share)
        memory = chosen * each * self.dtype_bytes / hardware.memory_rate
        between = hardware.expert_traffic * self._moving(shape, pairs, gated)
        fixed = KERNELS * hardware.kernel_launch + hardware.expert_launch
        return fixed + overlapped(compute, memory) + between

    def _measured(self, rows: pd.DataFrame) -> tuple[Shape, RatioGrid]:
        """The shape of `rows` that is nearest, and its ratios of measured to computed seconds."""
        base, gated = self.shape, self.spec.gated_ffn
        if EXPERT_SHAPE[0] in rows:
            shapes = [Shape(*map(int, row)) for row in rows[list(EXPERT_SHAPE)].to_numpy()]
            base = min(shapes, key=partial(apart, self.shape))
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
