"""Seconds by operation with a cost model's constants drawn anew, eight times within their errors.

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
from functools import cache, partial
from typing import Protocol

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
# The shapes of a run of requests: batches of decodes, and those with prompts by their most tokens.
# Chunks of two policies with one budget share a shape; chunks and whole prompts do not.
DECODES = "decodes"
MOST_TOKENS = {"to-512": 512, "to-2048": 2048, "larger": math.inf}
SHAPES_OF_BATCHES = (DECODES, *MOST_TOKENS)
# Requests are served anew in each draw, then with each of these shapes slower by its own error.
NUM_DRAWN_RUNS = NUM_DRAWS + len(SHAPES_OF_BATCHES)
OF_COMMUNICATION = 1.0  # which was compared with nothing: off by a factor of two in the mean
PAIR = np.array([[1, 1], [1, -1]])
# A row a draw, a column a constant; the first column of the Hadamard matrix is left out.
SIGNS = np.kron(np.kron(PAIR, PAIR), PAIR)[:, 1:]
LARGE_PRODUCTS, SMALL_PRODUCTS, LARGE_ATTENTION, SMALL_ATTENTION = SIGNS.T[:4]
LARGE_EXPERTS, SMALL_EXPERTS, OTHERS = SIGNS.T[4:]
PRODUCTS = frozenset((*KINDS["preproj"], *KINDS["postproj"], *KINDS["ffn"], "lm_head", WHOLE))
ATTENTION = frozenset(KINDS["attn"])
OF_DECODES = "decode_attention"
BETWEEN_STAGES = "send"  # which occupies no stage
IterationTime = Callable[[Batch], float]
StageTimes = Callable[[Batch], list[float]]
Values = NDArray[np.float64]  # the undrawn value, then those of the draws


class PredictedTimes(Protocol):
    """Seconds of a batch by operation, and the mean error of each kind."""

    @property
    def uncertainty(self) -> Mapping[str, float]: ...

    def operation_times(self, batch: Batch) -> dict[str, float]: ...


class DrawnTimes:
    """Seconds by operation of `cost` as it is and of its draws, as `Values`."""

    def __init__(self, cost: PredictedTimes) -> None:
        self._cost = cost
        errors = cost.uncertainty
        attention = [error for kind, error in errors.items() if "attention" in kind]
        of_products = errors.get("matmul", math.nan)
        if not attention:  # whole iterations have one error
            of_products = max(errors.values())
            attention = [of_products]
        self._products = _Kind(of_products, LARGE_PRODUCTS, SMALL_PRODUCTS)
        self._attention = _Kind(float(np.max(attention)), LARGE_ATTENTION, SMALL_ATTENTION)
        self._experts = _Kind(errors.get(EXPERTS, of_products), LARGE_EXPERTS, SMALL_EXPERTS)
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
        return sum(self.operation_times(batch).values(), np.zeros(1 + NUM_DRAWS))

    def iteration_time_of(self, draw: int) -> IterationTime:
        """Return the function of a batch's seconds in one draw, from 1, or after the
        draws with one of `SHAPES_OF_BATCHES` slower.
        """
        if draw > NUM_DRAWS:
            return partial(self._slower_time, _slower_shape(draw))

        def iteration_time(batch: Batch) -> float:
            seconds = 0.0
            for name, undrawn in self._cost.operation_times(batch).items():
                seconds += undrawn * float(self._factors(name, batch)[draw])
            return seconds

        return iteration_time

    def _slower_time(self, shape: str, batch: Batch) -> float:
        """Return the seconds of a batch where batches of one shape are slower."""
        seconds = sum(self._cost.operation_times(batch).values())
        return _own_factor(shape, batch, self.iteration_time) * seconds

    def _in_stages(self, batch: Batch) -> Values:
        """Return the seconds of a batch in all stages, without its way between them."""
        times = self.operation_times(batch)
        times.pop(BETWEEN_STAGES, None)
        return sum(times.values(), np.zeros(1 + NUM_DRAWS))

    def stage_times_of(self, draw: int, stage_times: StageTimes) -> StageTimes:
        """Return the function of a batch's seconds by stage in one draw, all of which err alike."""
        if draw > NUM_DRAWS:
            shape = _slower_shape(draw)

            def slower(batch: Batch) -> list[float]:
                factor = _own_factor(shape, batch, self._in_stages)
                return [factor * seconds for seconds in stage_times(batch)]

            return slower

        def drawn(batch: Batch) -> list[float]:
            undrawn_seconds = 0.0
            drawn_seconds = 0.0
            for name, seconds in self._cost.operation_times(batch).items():
                if name == BETWEEN_STAGES:
                    continue
                undrawn_seconds += seconds
                drawn_seconds += seconds * float(self._factors(name, batch)[draw])
            factor = drawn_seconds / undrawn_seconds
            return [factor * seconds for seconds in stage_times(batch)]

        return drawn

    def send_time_of(self, draw: int, send_time: IterationTime) -> IterationTime:
        """Return the function of a batch's seconds between two stages in one draw."""
        if draw > NUM_DRAWS:  # a link has few shapes, and its error is shared
            return send_time

        def drawn(batch: Batch) -> float:
            return send_time(batch) * float(self._factors(BETWEEN_STAGES, batch)[draw])

        return drawn

    def _factors(self, name: str, batch: Batch) -> Values:
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


def _own_factor(shape: str, batch: Batch, values_of: Callable[[Batch], Values]) -> float:
    """Return by what the error of a shape multiplies the seconds of a batch, of which `values_of`
    returns those that err.
    """
    if shape != shape_of(batch):
        return 1.0
    return math.exp(own_deviation(values_of(batch)))


def _slower_shape(draw: int) -> str:
    """Return which of `SHAPES_OF_BATCHES` is slower in a run after the draws."""
    return SHAPES_OF_BATCHES[draw - NUM_DRAWS - 1]


def shape_of(batch: Batch) -> str:
    """Return which of `SHAPES_OF_BATCHES` a batch has."""
    if not batch.num_prefill_tokens:
        return DECODES
    return next(
        shape for shape, max_tokens in MOST_TOKENS.items() if batch.num_tokens <= max_tokens
    )


class _Kind:
    """Factors of the operations of a kind, by tokens."""

    def __init__(self, error: float, large: Values, small: Values) -> None:
        deviation = DEVIATION * math.log1p(error) * math.sqrt(SHARED)
        self._large = deviation * large
        self._small = deviation * small
        self.factors = cache(self._factors)  # a run has few numbers of tokens

    def _factors(self, num_tokens: int) -> Values:
        share = num_tokens / (num_tokens + RIDGE)
        if np.array_equal(self._large, self._small):
            logarithms = self._large
        else:  # the two have the variance of one
            logarithms = math.sqrt(share) * self._large + math.sqrt(1 - share) * self._small
        return np.concatenate([[1.0], np.exp(logarithms)])


def own_deviation(values: Values, num_shapes: int = 1) -> float:
    """Return the standard deviation of the half of an error that no other shape shares, of a value
    followed by its draws: of the logarithm where all are above zero, else of the value itself. Over
    `num_shapes` that a value averages it is the smaller.
    """
    if len(values) == 1:  # it is exact
        return 0.0
    shared = values[1:] - values[0]
    if values.min() > 0:  # errors multiply
        shared = np.log(values[1:] / values[0])
    ratio_of_variances = (1 - SHARED) / SHARED / num_shapes
    return math.sqrt(float(np.mean(shared**2)) * ratio_of_variances)
