"""Seconds by operation with eight draws of a cost model's constants within their errors.

A cost model states the mean absolute error of each kind of operation on shapes that no fit has
seen. Here these errors are normal in the logarithm. One half of their variance is shared by shapes,
the other half each shape has alone (`SHARED`).

Shared half: a kind has two constants, of large batches, bound by arithmetic, and of small ones,
bound by memory. A batch's error moves from one to the other with its tokens, so that shapes near to
each other err alike. In the eight draws each constant is one standard deviation above its value
four times and below it four times, and no two go together (Plackett and Burman, 1946): the variance
over the draws is that of independent normal errors.

Other half: the delta method. One shape at a time is one standard deviation slower (`own_deviation`)
and all else is as it was. To first order the variance of a value that is made of shapes is the sum
of the squares by which it moves, as errors of shapes are independent. A shape that two values share
moves both, so that it cancels in their ratio as far as it should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import KINDS, WHOLE
from sarathi_lab.executor.simulated.hardware import EXPERTS

NUM_DRAWS = 8
RIDGE = 256  # tokens from which a product is bound by arithmetic on these GPUs, roughly
# Standard deviation of a normal error over its mean absolute value.
DEVIATION = math.sqrt(math.pi / 2)
SHARED = 0.5  # of an error's variance: what shapes have in common, beside what each has alone
SHAPES_OF_RUN = 4  # that most of a run of requests consists of
# The shapes of a run of requests: batches of decodes alone, and batches with prompts by their most
# tokens. Chunks of two policies with one budget share a shape; chunks and whole prompts do not.
BatchShape = Literal["decodes", "to-512", "to-2048", "larger"]
SHAPES_OF_BATCHES: tuple[BatchShape, ...] = get_args(BatchShape)
OF_COMMUNICATION = 1.0  # which was compared with nothing: off by a factor of two in the mean
PAIR = np.array([[1, 1], [1, -1]])
HADAMARD = np.kron(np.kron(PAIR, PAIR), PAIR)
SIGNS = HADAMARD[:, 1:]  # a row a draw, a column a constant; the first column is 1 in all draws
(
    LARGE_PRODUCTS,
    SMALL_PRODUCTS,
    LARGE_ATTENTION,
    SMALL_ATTENTION,
    LARGE_EXPERTS,
    SMALL_EXPERTS,
    OTHERS,
) = SIGNS.T
PRODUCTS = frozenset(
    (
        *KINDS["preproj"],
        *KINDS["postproj"],
        *KINDS["ffn"],
        "lm_head",
        WHOLE,
    )
)
ATTENTION = frozenset(KINDS["attn"])
OF_DECODES = "decode_attention"
BETWEEN_STAGES = "send"  # which occupies no stage
IterationTime = Callable[[Batch], float]
StageTimes = Callable[[Batch], list[float]]
Values = NDArray[np.float64]  # the undrawn value, then those of the draws


@dataclass(frozen=True)
class CostVariant:
    """A cost model as it is stated, with one draw of its constants, or with one shape of batches
    slower.

    Attributes:
        draw: Which of the `NUM_DRAWS` draws of the constants, from 1; 0: none.
        slower_shape: The shape whose batches are slower by the error that this shape has alone.
    """

    draw: int = 0
    slower_shape: BatchShape | None = None


AS_STATED = CostVariant()
NUMBERS = range(1, 1 + NUM_DRAWS)
DRAWS = tuple(CostVariant(draw=number) for number in NUMBERS)
SLOWER_SHAPES = tuple(CostVariant(slower_shape=shape) for shape in SHAPES_OF_BATCHES)
# Requests are served again with each of them. Recorded tables have their values in this order.
VARIANTS = (*DRAWS, *SLOWER_SHAPES)


class PredictedTimes(Protocol):
    """Seconds of a batch by operation, and the mean error of each kind."""

    @property
    def uncertainty(self) -> Mapping[str, float]: ...

    def operation_times(self, batch: Batch) -> dict[str, float]: ...


class DrawnTimes:
    """Seconds by operation of `cost` as it is and of its draws, as `Values`."""

    def __init__(self, cost: PredictedTimes) -> None:
        self._cost = cost
        of_products, of_attention = _errors_of(cost)
        of_experts = cost.uncertainty.get(EXPERTS, of_products)
        self._products = _factors_by_tokens(of_products, LARGE_PRODUCTS, SMALL_PRODUCTS)
        self._attention = _factors_by_tokens(of_attention, LARGE_ATTENTION, SMALL_ATTENTION)
        self._experts = _factors_by_tokens(of_experts, LARGE_EXPERTS, SMALL_EXPERTS)
        # Streaming kernels and fixed costs are fitted with the products. They have one constant,
        # that of batches without tokens.
        self._others = _factors_by_tokens(of_products, OTHERS, OTHERS)(0)
        self._communication = _factors_by_tokens(OF_COMMUNICATION, OTHERS, OTHERS)(0)

    def operation_times(self, batch: Batch) -> dict[str, Values]:
        """Return the seconds by operation of a batch."""
        times = {}
        for name, seconds in self._cost.operation_times(batch).items():
            times[name] = seconds * self._factors(name, batch)
        return times

    def iteration_time(self, batch: Batch) -> Values:
        """Return the seconds of a batch."""
        return sum(self.operation_times(batch).values(), np.zeros(1 + NUM_DRAWS))

    def iteration_time_of(self, variant: CostVariant) -> IterationTime:
        """Return the function of a batch's seconds in a variant."""

        def seconds_of(batch: Batch) -> float:
            _, seconds = self._stated_and_varied(variant, batch, with_sends=True)
            return seconds

        return seconds_of

    def stage_times_of(self, variant: CostVariant, stage_times: StageTimes) -> StageTimes:
        """Return the function of a batch's seconds by stage in a variant, in which all stages err
        alike.
        """

        def times_of(batch: Batch) -> list[float]:
            stated, varied = self._stated_and_varied(variant, batch, with_sends=False)
            factor = varied / stated
            return [factor * seconds for seconds in stage_times(batch)]

        return times_of

    def send_time_of(self, variant: CostVariant, send_time: IterationTime) -> IterationTime:
        """Return the function of a batch's seconds between two stages in a variant."""
        if variant.slower_shape is not None:  # a link has few shapes, and its error is shared
            return send_time
        factor = float(self._communication[variant.draw])
        return lambda batch: send_time(batch) * factor

    def _stated_and_varied(
        self,
        variant: CostVariant,
        batch: Batch,
        *,
        with_sends: bool,
    ) -> tuple[float, float]:
        """Return the seconds of a batch in all stages, with or without its way between them, as
        they are stated and in a variant.
        """
        times = self._cost.operation_times(batch)
        if not with_sends:
            times.pop(BETWEEN_STAGES, None)
        stated = sum(times.values())
        if variant.slower_shape is None:
            varied = 0.0
            for name, seconds in times.items():
                varied += seconds * float(self._factors(name, batch)[variant.draw])
            return stated, varied
        if variant.slower_shape != shape_of(batch):
            return stated, stated
        values = np.zeros(1 + NUM_DRAWS)
        for name, seconds in times.items():
            values += seconds * self._factors(name, batch)
        return stated, stated * math.exp(own_deviation(values))

    def _factors(self, name: str, batch: Batch) -> Values:
        """Return by what each draw multiplies the seconds of an operation of a batch."""
        if name == EXPERTS:
            return self._experts(batch.num_tokens)
        if name in PRODUCTS:
            return self._products(batch.num_tokens)
        if name == OF_DECODES:
            return self._attention(1)
        if name in ATTENTION:
            return self._attention(batch.num_prefill_tokens)
        if name in KINDS["communication"]:
            return self._communication
        return self._others


def _errors_of(cost: PredictedTimes) -> tuple[float, float]:
    """Return the mean relative errors of products and, the largest of its kinds, of attention."""
    errors = cost.uncertainty
    of_attention = [error for kind, error in errors.items() if "attention" in kind]
    if not of_attention:  # whole iterations have one error
        of_all = max(errors.values())
        return of_all, of_all
    of_products = errors.get("matmul", math.nan)
    largest = np.max(of_attention)  # NaN, for unknown, if any is
    return of_products, float(largest)


def shape_of(batch: Batch) -> BatchShape:
    """Return which of `SHAPES_OF_BATCHES` a batch has."""
    if not batch.num_prefill_tokens:
        return "decodes"
    if batch.num_tokens <= 512:
        return "to-512"
    if batch.num_tokens <= 2048:
        return "to-2048"
    return "larger"


def _factors_by_tokens(error: float, large: Values, small: Values) -> Callable[[int], Values]:
    """Make the function of the factors on operations of a kind over so many tokens.

    Args:
        error: Mean relative error of the kind.
        large: The draws of its constant of large batches [NUM_DRAWS], in standard deviations.
        small: The same of small batches.
    """
    deviation = DEVIATION * math.log1p(error) * math.sqrt(SHARED)

    @cache  # a run has few numbers of tokens
    def factors(num_tokens: int) -> Values:
        # Independent errors add their variances: with roots of the shares as weights the sum has
        # the variance of one of the two.
        share_of_large = num_tokens / (num_tokens + RIDGE)
        of_large = math.sqrt(share_of_large) * (deviation * large)
        of_small = math.sqrt(1 - share_of_large) * (deviation * small)
        undrawn = [1.0]
        return np.concatenate([undrawn, np.exp(of_large + of_small)])

    return factors


def own_deviation(values: Values, num_shapes: int = 1) -> float:
    """Return the standard deviation of the half of an error that no other shape shares, of a value
    followed by its draws: of the logarithm where all are above zero, else of the value itself. Over
    `num_shapes` that a value averages it is the smaller.
    """
    if len(values) == 1:  # it is exact
        return 0.0
    undrawn = values[0]
    draws = values[1:]
    shared_errors = draws - undrawn
    if values.min() > 0:  # errors multiply
        shared_errors = np.log(draws / undrawn)
    shared_variance = float(np.mean(shared_errors**2))
    own_variance = shared_variance * (1 - SHARED) / SHARED
    return math.sqrt(own_variance / num_shapes)
