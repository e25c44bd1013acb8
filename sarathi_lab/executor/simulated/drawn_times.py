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
from functools import cache, partial
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
        self._products = _Kind(of_products, LARGE_PRODUCTS, SMALL_PRODUCTS)
        self._attention = _Kind(of_attention, LARGE_ATTENTION, SMALL_ATTENTION)
        self._experts = _Kind(of_experts, LARGE_EXPERTS, SMALL_EXPERTS)
        # Streaming kernels and fixed costs are fitted with the products.
        self._others = _Kind(of_products, OTHERS, OTHERS)
        self._communication = _Kind(OF_COMMUNICATION, OTHERS, OTHERS)

    def operation_times(self, batch: Batch) -> dict[str, Values]:
        """Return the seconds by operation of a batch."""
        times = {}
        for name, seconds in self._cost.operation_times(batch).items():
            times[name] = seconds * self._factors(name, batch)
        return times

    def iteration_time(self, batch: Batch) -> Values:
        """Return the seconds of a batch."""
        return _total(self.operation_times(batch))

    def iteration_time_of(self, variant: CostVariant) -> IterationTime:
        """Return the function of a batch's seconds in a variant."""
        if variant.slower_shape is not None:
            return partial(self._slower_time, variant.slower_shape)
        return partial(self._drawn_time, variant.draw)

    def _drawn_time(self, draw: int, batch: Batch) -> float:
        """Return the seconds of a batch in one draw."""
        seconds = 0.0
        for name, undrawn in self._cost.operation_times(batch).items():
            seconds += undrawn * self._factor(draw, name, batch)
        return seconds

    def _slower_time(self, shape: BatchShape, batch: Batch) -> float:
        """Return the seconds of a batch where batches of one shape are slower."""
        seconds = sum(self._cost.operation_times(batch).values())
        return _own_factor(shape, batch, self.iteration_time) * seconds

    def _in_stages(self, batch: Batch) -> Values:
        """Return the seconds of a batch in all stages, without its way between them."""
        times = self.operation_times(batch)
        times.pop(BETWEEN_STAGES, None)
        return _total(times)

    def stage_times_of(self, variant: CostVariant, stage_times: StageTimes) -> StageTimes:
        """Return the function of a batch's seconds by stage in a variant, in which all stages err
        alike.
        """
        if variant.slower_shape is not None:
            return partial(self._slower_stages, variant.slower_shape, stage_times)
        return partial(self._drawn_stages, variant.draw, stage_times)

    def _drawn_stages(self, draw: int, stage_times: StageTimes, batch: Batch) -> list[float]:
        """Return the seconds of a batch by stage in one draw."""
        undrawn_seconds = 0.0
        drawn_seconds = 0.0
        for name, seconds in self._cost.operation_times(batch).items():
            if name == BETWEEN_STAGES:
                continue
            undrawn_seconds += seconds
            drawn_seconds += seconds * self._factor(draw, name, batch)
        factor = drawn_seconds / undrawn_seconds
        return [factor * seconds for seconds in stage_times(batch)]

    def _slower_stages(
        self, shape: BatchShape, stage_times: StageTimes, batch: Batch
    ) -> list[float]:
        """Return the seconds of a batch by stage where batches of one shape are slower."""
        factor = _own_factor(shape, batch, self._in_stages)
        return [factor * seconds for seconds in stage_times(batch)]

    def send_time_of(self, variant: CostVariant, send_time: IterationTime) -> IterationTime:
        """Return the function of a batch's seconds between two stages in a variant."""
        if variant.slower_shape is not None:  # a link has few shapes, and its error is shared
            return send_time
        return partial(self._drawn_send, variant.draw, send_time)

    def _drawn_send(self, draw: int, send_time: IterationTime, batch: Batch) -> float:
        """Return the seconds of a batch between two stages in one draw."""
        return send_time(batch) * self._factor(draw, BETWEEN_STAGES, batch)

    def _factor(self, draw: int, name: str, batch: Batch) -> float:
        """Return by what one draw multiplies the seconds of an operation of a batch."""
        factor = self._factors(name, batch)[draw]
        return float(factor)

    def _factors(self, name: str, batch: Batch) -> Values:
        """Return by what each draw multiplies the seconds of an operation of a batch."""
        if name == EXPERTS:
            return self._experts.factors(batch.num_tokens)
        if name in PRODUCTS:
            return self._products.factors(batch.num_tokens)
        if name == OF_DECODES:
            return self._attention.factors(1)
        if name in ATTENTION:
            return self._attention.factors(batch.num_prefill_tokens)
        if name in KINDS["communication"]:
            return self._communication.factors(1)
        return self._others.factors(1)


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


def _total(times: Mapping[str, Values]) -> Values:
    """Return the seconds of all operations."""
    return sum(times.values(), np.zeros(1 + NUM_DRAWS))


def _own_factor(shape: BatchShape, batch: Batch, values_of: Callable[[Batch], Values]) -> float:
    """Return by what the error of a shape multiplies the seconds of a batch: 1 for other shapes.

    Args:
        shape: Whose batches are slower.
        batch: A batch of any shape.
        values_of: Gives the seconds of a batch and of its draws, which tell the size of the error.
    """
    if shape != shape_of(batch):
        return 1.0
    return math.exp(own_deviation(values_of(batch)))


def shape_of(batch: Batch) -> BatchShape:
    """Return which of `SHAPES_OF_BATCHES` a batch has."""
    if not batch.num_prefill_tokens:
        return "decodes"
    if batch.num_tokens <= 512:
        return "to-512"
    if batch.num_tokens <= 2048:
        return "to-2048"
    return "larger"


class _Kind:
    """Factors of the operations of a kind, by tokens."""

    def __init__(self, error: float, large: Values, small: Values) -> None:
        deviation_of_all = DEVIATION * math.log1p(error)
        deviation = deviation_of_all * math.sqrt(SHARED)
        self._large = deviation * large
        self._small = deviation * small
        self.factors = cache(self._factors)  # a run has few numbers of tokens

    def _factors(self, num_tokens: int) -> Values:
        logarithms = self._large  # [NUM_DRAWS]
        if not np.array_equal(self._large, self._small):
            # Independent errors add their variances: with roots of the shares as weights the sum
            # has the variance of one of the two.
            share_of_large = num_tokens / (num_tokens + RIDGE)
            of_large = math.sqrt(share_of_large) * self._large
            of_small = math.sqrt(1 - share_of_large) * self._small
            logarithms = of_large + of_small
        undrawn = [1.0]
        return np.concatenate([undrawn, np.exp(logarithms)])


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
