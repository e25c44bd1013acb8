"""Seconds of whole iterations by a table of measured ones (`iterations.csv`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.interpolation import (
    GridInterpolation,
    RatioInterpolation,
    fitted_costs,
    grid_of,
)
from sarathi_lab.executor.tables import MICROSECOND, TIME, RowSizes, sizes_of

NEAR = 64  # tokens added to contexts, so that short ones differ little from none in logarithms
# Axes of the decodes' share: logarithms of sizes of the prompts, then of the decodes.
AXES = ("tokens", "before", "decodes", "context")


class Side(NamedTuple):
    """Prompts or decodes of a batch: tokens, context of each, and what costs are counted by."""

    tokens: float
    context: float
    features: tuple[float, ...]

    def with_tokens(self, num_tokens: float) -> Side:
        """Return these prompts with further tokens, such as those of decodes, which products take
        as any others; their attention is not counted.
        """
        fixed, tokens, *attention = self.features
        all_tokens = tokens + num_tokens
        return Side(all_tokens, self.context, (fixed, all_tokens, *attention))

    @property
    def logs(self) -> tuple[float, float]:
        """Logarithms of tokens and context, by which shares are interpolated."""
        return math.log(self.tokens), math.log(self.context + NEAR)


def sides_of(sizes: Batch | RowSizes) -> tuple[Side | None, Side | None]:
    """Return the prompts and the decodes of an iteration; None where it has none."""
    prompts = decodes = None
    tokens = sizes.num_prefill_tokens
    if tokens:
        pairs = sizes.prefill_query_key_pairs
        # As many pairs as equal prompts have: a token sees the context, and half of its own prompt.
        context = max(0.0, pairs / tokens - (tokens + 1) / 2)
        kv_tokens = sizes.prefill_kv_tokens
        prompts = Side(tokens, context, (1.0, tokens, pairs, kv_tokens, sizes.num_prefills))
    number = sizes.num_decode_tokens
    if number:
        kv_tokens = sizes.decode_kv_tokens
        decodes = Side(number, kv_tokens / number, (1.0, number, kv_tokens))
    return prompts, decodes


class IterationTable:
    """Seconds of a batch by measured iterations of prompts, of decodes, and of both together.

    One kind alone takes fitted, non-negative costs (fixed, per token, per causal query-key pair,
    per cached token, per sequence) times the measured ratio to these, interpolated by tokens and
    context. Both together take what the prompts would with the decodes' tokens in addition, as
    products run once over all tokens, and a share of the decodes' time alone, mostly of their
    attention, interpolated by all four sizes. Past an edge the costs grow as fitted; ratios and
    shares are those of the edge. Several prompts, or decodes, count as equal ones. Raises UserError
    without rows of either kind alone.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        seconds_of_rows = (rows[TIME] * MICROSECOND).tolist()
        only_prompts: list[tuple[Side, float]] = []
        only_decodes: list[tuple[Side, float]] = []
        together: list[tuple[Side, Side, float]] = []
        for sizes, seconds in zip(sizes_of(rows), seconds_of_rows, strict=True):
            prompts, decodes = sides_of(sizes)
            if prompts is not None and decodes is not None:
                together.append((prompts, decodes, seconds))
            elif prompts is not None:
                only_prompts.append((prompts, seconds))
            elif decodes is not None:
                only_decodes.append((decodes, seconds))
        self._prompts = _Alone("prompts", only_prompts)
        self._decodes = _Alone("decodes", only_decodes)
        self._shares = self._grid_of_shares(together)
        # The largest that were measured: tokens of prompts, decodes, and contexts of either.
        all_prompts = [prompts for prompts, _ in only_prompts]
        all_prompts += [prompts for prompts, _, _ in together]
        all_decodes = [decodes for decodes, _ in only_decodes]
        all_decodes += [decodes for _, decodes, _ in together]
        self.most_tokens = max(side.tokens for side in all_prompts)
        self.most_decodes = max(side.tokens for side in all_decodes)
        self.longest = max(side.context for side in all_prompts + all_decodes)

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of `batch`."""
        prompts, decodes = sides_of(batch)
        if prompts is None:
            return 0.0 if decodes is None else self._decodes.seconds(decodes)
        if decodes is None:
            return self._prompts.seconds(prompts)
        decodes_alone = self._decodes.seconds(decodes)
        added = 0.0
        if self._shares is not None:
            share = self._shares.at([*prompts.logs, *decodes.logs])
            added = max(0.0, share) * decodes_alone
        products = self._prompts.seconds(prompts.with_tokens(decodes.tokens))
        return max(decodes_alone, products + added)

    def _grid_of_shares(
        self, iterations: Iterable[tuple[Side, Side, float]]
    ) -> GridInterpolation | None:
        """Make the grid of what decodes add to prompts, in shares of their time alone; None without
        iterations of both.
        """
        shares = []
        for prompts, decodes, seconds in iterations:
            products = self._prompts.seconds(prompts.with_tokens(decodes.tokens))
            share = (seconds - products) / self._decodes.seconds(decodes)
            shares.append([*prompts.logs, *decodes.logs, share])
        if not shares:
            return None
        table = pd.DataFrame(shares, columns=[*AXES, "share"])
        return grid_of(table, AXES, "share")


class _Alone:
    """Iterations of prompts alone, or of decodes alone."""

    def __init__(self, kind: str, measured: list[tuple[Side, float]]) -> None:
        if not measured:
            raise UserError(
                f"iterations.csv has no row of {kind} alone; measure it again with task=calibrate"
            )
        sides = [side for side, _ in measured]
        seconds = np.array([time for _, time in measured])
        features = np.array([side.features for side in sides])
        costs = fitted_costs(features, seconds)
        # The costs leave one mean ratio, by which they are the right ones in the mean.
        costs *= np.mean(seconds / (features @ costs))
        self._costs: list[float] = costs.tolist()
        tokens = [side.tokens for side in sides]
        contexts = [side.context + NEAR for side in sides]
        self._ratios = RatioInterpolation(tokens, contexts, seconds / (features @ costs))

    def seconds(self, side: Side) -> float:
        ratio = self._ratios.ratio(side.tokens, side.context + NEAR)
        return ratio * sum(map(mul, self._costs, side.features))
