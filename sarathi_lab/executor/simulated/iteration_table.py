"""Seconds of whole iterations by a table of measured ones (`iterations.csv`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.interpolation import (
    Costs,
    GridInterpolation,
    RatioInterpolation,
    grid_of,
)
from sarathi_lab.executor.tables import MICROSECOND, TIME

NEAR = 64  # tokens added to contexts, so that short ones differ little from none in logarithms
# Axes of the decodes' share: logarithms of sizes of the prompts, then of the decodes.
AXES = ("tokens", "before", "decodes", "context")


class Row(NamedTuple):
    """A row of `iterations.csv`."""

    prefill_chunk: int
    kv_prefill: int
    n_decode: int
    kv_decode: int
    num_prefills: int
    seconds: float


class Side(NamedTuple):
    """Prompts or decodes of a batch: tokens, context of each, and what costs are counted by."""

    tokens: float
    context: float
    features: tuple[float, ...]

    @classmethod
    def of_prompts(cls, tokens: float, pairs: float, kv_tokens: float, num_prompts: float) -> Self:
        """Make the side of prompts with `pairs` of queries and keys that see `kv_tokens`."""
        # As many pairs as equal prompts have: a token sees the context, and half of its own prompt.
        seen_by_each = pairs / tokens
        context = max(0.0, seen_by_each - (tokens + 1) / 2)
        features = (1.0, tokens, pairs, kv_tokens, num_prompts)
        return cls(tokens, context, features)

    @classmethod
    def of_decodes(cls, num_decodes: float, kv_tokens: float) -> Self:
        """Make the side of decodes that see `kv_tokens` together."""
        context = kv_tokens / num_decodes
        return cls(num_decodes, context, features=(1.0, num_decodes, kv_tokens))

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


class Iteration(NamedTuple):
    """A measured iteration: its prompts and decodes, None for those that it has none of."""

    prompts: Side | None
    decodes: Side | None
    seconds: float


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
        iterations = [_iteration(row) for row in _rows_of(rows)]
        only_prompts: list[tuple[Side, float]] = []
        only_decodes: list[tuple[Side, float]] = []
        for prompts, decodes, seconds in iterations:
            if prompts is not None and decodes is None:
                only_prompts.append((prompts, seconds))
            elif decodes is not None and prompts is None:
                only_decodes.append((decodes, seconds))
        self._prompts = _Alone("prompts", only_prompts)
        self._decodes = _Alone("decodes", only_decodes)
        self._shares = self._grid_of_shares(iterations)
        # The largest that were measured: tokens of prompts, decodes, and contexts of either.
        all_prompts = [each.prompts for each in iterations if each.prompts is not None]
        all_decodes = [each.decodes for each in iterations if each.decodes is not None]
        self.most_tokens = max(side.tokens for side in all_prompts)
        self.most_decodes = max(side.tokens for side in all_decodes)
        self.longest = max(side.context for side in all_prompts + all_decodes)

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of `batch`."""
        prompts = decodes = None
        if batch.num_prefill_tokens:
            prompts = Side.of_prompts(
                batch.num_prefill_tokens,
                batch.prefill_query_key_pairs,
                batch.prefill_kv_tokens,
                batch.num_prefills,
            )
        if batch.num_decode_tokens:
            decodes = Side.of_decodes(batch.num_decode_tokens, batch.decode_kv_tokens)
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

    def _grid_of_shares(self, iterations: Iterable[Iteration]) -> GridInterpolation | None:
        """Make the grid of what decodes add to prompts, in shares of their time alone; None without
        iterations of both.
        """
        shares = []
        for prompts, decodes, seconds in iterations:
            if prompts is None or decodes is None:
                continue
            products = self._prompts.seconds(prompts.with_tokens(decodes.tokens))
            added = seconds - products
            share = added / self._decodes.seconds(decodes)
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
        # Ratios are by two sizes here, so costs leave one mean ratio: that of the only size 1.
        sizes = np.ones(len(sides))
        self._costs = Costs(features, sizes, seconds)
        fitted = [self._fitted(side) for side in sides]
        tokens = [side.tokens for side in sides]
        contexts = [side.context + NEAR for side in sides]
        self._ratios = RatioInterpolation(tokens, contexts, seconds / fitted)

    def _fitted(self, side: Side) -> float:
        return self._costs.time(1.0, *side.features)

    def seconds(self, side: Side) -> float:
        ratio = self._ratios.ratio(side.tokens, side.context + NEAR)
        return ratio * self._fitted(side)


def _rows_of(table: pd.DataFrame) -> list[Row]:
    if "num_prefills" not in table:
        table = table.assign(num_prefills=1)
    rows = table.assign(seconds=table[TIME] * MICROSECOND)
    columns = list(Row._fields)
    return [Row(*row) for row in rows[columns].itertuples(index=False)]


def _iteration(row: Row) -> Iteration:
    prompts = decodes = None
    if row.prefill_chunk:
        num_prompts = row.num_prefills
        chunk = row.prefill_chunk
        before = row.kv_prefill
        pairs_of_each = chunk * before + chunk * (chunk + 1) / 2
        kv_tokens = num_prompts * (before + chunk)
        tokens = num_prompts * chunk
        prompts = Side.of_prompts(tokens, num_prompts * pairs_of_each, kv_tokens, num_prompts)
    if row.n_decode:
        decodes = Side.of_decodes(row.n_decode, row.n_decode * row.kv_decode)
    return Iteration(prompts, decodes, row.seconds)
