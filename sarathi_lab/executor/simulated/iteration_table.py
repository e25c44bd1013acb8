"""Seconds of whole iterations by a table of measured ones (`iterations.csv`)."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from sarathi_lab.executor.tables import MICROSECOND, TIME, batches_of

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
        log_tokens = math.log(self.tokens)
        log_context = math.log(self.context + NEAR)
        return log_tokens, log_context


def prompts_of(batch: Batch) -> Side:
    """Return the prompts of an iteration that has some."""
    tokens = batch.num_prefill_tokens
    pairs = batch.prefill_query_key_pairs
    # As many pairs as equal prompts have: a token sees the context, and half of its own prompt.
    seen_by_each = pairs / tokens
    context = max(0.0, seen_by_each - (tokens + 1) / 2)
    features = (1.0, tokens, pairs, batch.prefill_kv_tokens, batch.num_prefills)
    return Side(tokens, context, features)


def decodes_of(batch: Batch) -> Side:
    """Return the decodes of an iteration that has some."""
    number = batch.num_decode_tokens
    kv_tokens = batch.decode_kv_tokens
    context = kv_tokens / number
    return Side(number, context, features=(1.0, number, kv_tokens))


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
        has_prompts = rows.prefill_chunk > 0
        has_decodes = rows.n_decode > 0
        self._prompts = _Alone("prompts", rows[has_prompts & ~has_decodes], prompts_of)
        self._decodes = _Alone("decodes", rows[has_decodes & ~has_prompts], decodes_of)
        self._shares = self._grid_of_shares(rows[has_prompts & has_decodes])
        # The largest that were measured: tokens of prompts, decodes, and contexts of either.
        all_prompts = [prompts_of(batch) for batch in batches_of(rows[has_prompts])]
        all_decodes = [decodes_of(batch) for batch in batches_of(rows[has_decodes])]
        self.most_tokens = max(side.tokens for side in all_prompts)
        self.most_decodes = max(side.tokens for side in all_decodes)
        self.longest = max(side.context for side in all_prompts + all_decodes)

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of `batch`."""
        decodes_alone = 0.0
        if batch.num_decode_tokens:
            decodes = decodes_of(batch)
            decodes_alone = self._decodes.seconds(decodes)
        if not batch.num_prefill_tokens:
            return decodes_alone
        prompts = prompts_of(batch)
        if not batch.num_decode_tokens:
            return self._prompts.seconds(prompts)
        added = 0.0
        if self._shares is not None:
            share = self._shares.at([*prompts.logs, *decodes.logs])
            added = max(0.0, share) * decodes_alone
        products = self._prompts.seconds(prompts.with_tokens(decodes.tokens))
        return max(decodes_alone, products + added)

    def _grid_of_shares(self, rows: pd.DataFrame) -> GridInterpolation | None:
        """Make the grid of what decodes add to prompts, in shares of their time alone; None without
        iterations of both.
        """
        if rows.empty:
            return None
        seconds_of_rows = rows[TIME] * MICROSECOND
        shares = []
        for batch, seconds in zip(batches_of(rows), seconds_of_rows, strict=True):
            prompts = prompts_of(batch)
            decodes = decodes_of(batch)
            products = self._prompts.seconds(prompts.with_tokens(decodes.tokens))
            added = seconds - products
            share = added / self._decodes.seconds(decodes)
            shares.append([*prompts.logs, *decodes.logs, share])
        table = pd.DataFrame(shares, columns=[*AXES, "share"])
        return grid_of(table, AXES, "share")


class _Alone:
    """Iterations of prompts alone, or of decodes alone."""

    def __init__(
        self,
        kind: str,
        rows: pd.DataFrame,
        side_of: Callable[[Batch], Side],
    ) -> None:
        if rows.empty:
            raise UserError(
                f"iterations.csv has no row of {kind} alone; measure it again with task=calibrate"
            )
        sides = [side_of(batch) for batch in batches_of(rows)]
        measured = rows[TIME] * MICROSECOND
        seconds = measured.to_numpy(float)
        features = np.array([side.features for side in sides])
        costs = fitted_costs(features, seconds)
        ratios = seconds / (features @ costs)
        mean_ratio = np.mean(ratios)
        self._costs: list[float] = (mean_ratio * costs).tolist()
        tokens = [side.tokens for side in sides]
        contexts = [side.context + NEAR for side in sides]
        self._ratios = RatioInterpolation(tokens, contexts, ratios / mean_ratio)

    def seconds(self, side: Side) -> float:
        fitted = sum(map(mul, self._costs, side.features))
        ratio = self._ratios.ratio(side.tokens, side.context + NEAR)
        return ratio * fitted
